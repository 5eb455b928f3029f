"""The id of a store, in a file in its root: written once, so that all hosts know the store by the same name.

A directory may be mounted at different paths, and a path may be another disk on each host. A copy of a whole store
has the id of the original: remove the file from the copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Callable

import msgspec

from holdfast.store import LocalStore, Store
from holdfast.store.local_writer import create_durably, make_durably

logger = logging.getLogger("holdfast")

FILE = ".holdfast-store.json"
_ID = re.compile(r"[0-9a-f]{32}")


class Identity(msgspec.Struct, frozen=True):
    """The content of the file."""

    id: str


def identify(store: Store) -> str:
    """Return the id of a store, after writing one if it has none; empty where that is not possible. Never raises.

    Of several that write it at the same time one succeeds, and all return its id. A read-only store without a
    file, and a store of another kind, have none.
    """
    try:
        if (access := _access(store)) is None:
            return ""
        read, create = access
        with contextlib.suppress(FileNotFoundError):
            return _parsed(read())
        with contextlib.suppress(FileExistsError):  # another process was faster
            create(msgspec.json.encode(Identity(uuid.uuid4().hex)))
        return _parsed(read())
    except Exception as error:  # the store is known by its address then
        logger.debug("store %s has no id: %s", store.url, error)
        return ""


def _access(store: Store) -> tuple[Callable[[], bytes], Callable[[bytes], object]] | None:
    """Return how to read and create the file; None for a store of another kind."""
    if isinstance(store, LocalStore):
        return lambda: _read_file(store), lambda data: _create_file(store, data)
    bucket = getattr(store, "bucket", None)
    if bucket is None:
        return None
    return lambda: bucket.get(FILE), lambda data: bucket.put_new(FILE, data)


def _read_file(store: LocalStore) -> bytes:
    with os.fdopen(store.files.open(store.root / FILE), "rb") as file:
        return file.read(1024)


def _create_file(store: LocalStore, data: bytes) -> None:
    make_durably(store.files, store.root, store.root)
    create_durably(store.files, store.root / FILE, data)


def _parsed(data: bytes) -> str:
    found = msgspec.json.decode(data, type=Identity).id
    if not _ID.fullmatch(found):
        raise ValueError(f"{found!r} is no id of a store")
    return found
