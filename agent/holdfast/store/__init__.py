"""Where checkpoints live.

Each kind of store has a scheme, and a factory that gets the address and returns a `Store`, or raises ValueError
for an address that makes no sense. Other packages add kinds as entry points of the group `holdfast.stores`:

    [project.entry-points."holdfast.stores"]
    tape = "my_package.tape:TapeStore"

They are loaded when an address with that scheme is opened. A store must pass the tests of `holdfast.testing`.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import EntryPoint, entry_points

from holdfast.store.base import CheckpointWriter, Leftover, Store, read_manifest
from holdfast.store.local import LocalStore
from holdfast.store.records import Attempt, Ending, Hold, Lineage, Pins, RecordedValue, newest_attempt, newest_pins

__all__ = [
    "Attempt", "CheckpointWriter", "Ending", "Hold", "Leftover", "Lineage", "LocalStore", "Pins",
    "RecordedValue", "Store", "is_directory", "newest_attempt", "newest_pins", "open_store", "open_tiers",
    "read_manifest",
]  # fmt: skip

GROUP = "holdfast.stores"
DIRECTORY = "file"
_BUILT_IN = {
    DIRECTORY: "holdfast.store.local:open_directory", "s3": "holdfast.store.s3:open_s3",
    "gs": "holdfast.store.gcs_and_azure:open_gcs", "az": "holdfast.store.gcs_and_azure:open_azure",
}  # fmt: skip
_SCHEME = re.compile(r"([^/]*?)://|(s3|gs|az):")
_TIERS = re.compile(r"((?:file://)?/.*?)\+((?:[^/+]*://|(?:s3|gs|az):).+)")
"""A directory, and the store that its checkpoints are copied to."""


def open_store(url: str | os.PathLike[str]) -> Store:
    """Open the store in a directory, or at an address such as `s3://bucket/prefix`.

    ValueError for anything else, such as a file, or an address of a kind that is not installed.
    """
    text = os.fspath(url)
    if tiers := _TIERS.fullmatch(text):
        return open_tiers(open_store(tiers[1]), tiers[2])
    entry = _find(_scheme(text), text)
    try:
        store = entry.load()(text)
    except ValueError:
        raise
    except Exception as error:  # another package's code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"store {text!r}: {entry.value} cannot open it: {cause}") from error
    if not isinstance(store, Store):
        raise ValueError(f"store {text!r}: {entry.value} returned {type(store).__name__}, which is not a Store")
    return store


def open_tiers(near: Store, far: str | os.PathLike[str]) -> Store:
    """Return the store of a directory, `near`, whose checkpoints are copied to another store, `far`.

    ValueError where that makes no sense.
    """
    from holdfast.store.tiers import TieredStore

    if not isinstance(near, LocalStore):
        raise ValueError(f"drain={far!r}: only a directory is drained, and store is {near.url!r}")
    behind = open_store(far)
    if behind.url == near.url:
        raise ValueError(f"drain={far!r} is the store itself: give another place")
    return TieredStore(near, behind)


def is_directory(url: str | os.PathLike[str]) -> bool:
    """Return whether an address is that of a directory, drained or not."""
    text = os.fspath(url)
    return _TIERS.fullmatch(text) is not None or _scheme(text) == DIRECTORY


def _scheme(text: str) -> str:
    match = _SCHEME.match(text)
    return match[match.lastindex or 1] if match else DIRECTORY


def _find(scheme: str, text: str) -> EntryPoint:
    """Return the entry point of a kind of store; those of other packages are read only where none is built in."""
    if scheme in _BUILT_IN:
        return EntryPoint(scheme, _BUILT_IN[scheme], GROUP)
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in installed:
        schemes = sorted({*_BUILT_IN, *installed} - {DIRECTORY})
        known = ", ".join(["a directory", *(f"{name}://" for name in schemes)])
        raise ValueError(
            f"store {text!r}: no installed package has stores with the scheme {scheme}://. Give one of: {known}; "
            f"or pip install the package that adds {scheme}:// (entry point group {GROUP})"
        )
    return installed[scheme]
