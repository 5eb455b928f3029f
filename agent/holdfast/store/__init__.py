"""Where checkpoints live."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.store.base import CheckpointWriter, Leftover, Store, read_manifest
from holdfast.store.local import LocalStore
from holdfast.store.records import Attempt, Ending, Hold, Lineage, Pins, newest_attempt, newest_pins

__all__ = [
    "Attempt", "CheckpointWriter", "Ending", "Hold", "Leftover", "Lineage", "LocalStore", "Pins",
    "Store", "newest_attempt", "newest_pins", "open_store", "read_manifest",
]  # fmt: skip


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store in a directory, or at `s3://bucket/prefix`; ValueError for anything else, such as a file."""
    text = os.fspath(url)
    if text.startswith("s3:"):
        from holdfast.store.s3 import ObjectStore

        return ObjectStore(text)
    if "://" in text and not text.startswith("file://"):
        raise ValueError(f"store {text!r}: give a directory, or s3://bucket/prefix")
    if not (text := text.removeprefix("file://")):
        raise ValueError(f"store={os.fspath(url)!r} is empty: give a directory")
    path = Path(text).expanduser().absolute()
    if os.path.isfile(path):
        raise ValueError(f"store {path} is a file: give a directory")
    return LocalStore(path)
