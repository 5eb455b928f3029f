"""Where checkpoints live."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.store.base import Attempt, CheckpointWriter, Lineage, Store
from holdfast.store.local import LocalStore

__all__ = ["Attempt", "CheckpointWriter", "Lineage", "LocalStore", "Store", "open_store"]


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a directory; ValueError for a kind of address that this version does not know."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file://"):
        raise ValueError(f"store {text!r}: this version keeps checkpoints in a directory; give a path")
    return LocalStore(Path(text.removeprefix("file://")).expanduser().absolute())
