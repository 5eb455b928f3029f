"""Checks of a store, by the operations that a checkpoint needs there, in a folder that is removed again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path

from holdfast.checkpoint import reading
from holdfast.checkpoint.reading import FileRange
from holdfast.commands.doctor.findings import Finding, Hosts
from holdfast.errors import Fenced
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import checkpoint_id
from holdfast.store import CheckpointWriter, LocalStore, Store, open_store
from holdfast.system.host_memory import fresh_memory
from holdfast.units import format_bytes

PROBE = ".holdfast-doctor-"
"""Prefix of the folder: no job can have such a name."""
JOB, FIRST, SECOND = "doctor", checkpoint_id(1, 1), checkpoint_id(2, 1)
PATTERN_BYTES = 16 << 20
"""Length of the random bytes that repeat in the payload: longer than what file systems compress together."""


class StoreProbe:
    """A job in a store of its own below `url`, with one payload file of each rank.

    All ranks call the same methods in the same order. Those that check something return the finding of this rank.
    """

    def __init__(self, hosts: Hosts, url: str, size_bytes: int, name: str = "store") -> None:
        self._hosts, self._ranks, self._name = hosts, hosts.ranks, name
        self._url, self._size_bytes = url, size_bytes
        self._store: Store | None = None
        self._writer: CheckpointWriter | None = None
        self._attempt = 0
        self._file = fmt.File(
            name=f"rank-{hosts.ranks.rank}.safetensors", size_bytes=size_bytes, header_bytes=0, header_digest=""
        )
        self._digests: list[fmt.DigestRange] = []
        self._is_new = False
        """Whether the directory of the store did not exist before."""

    def open(self) -> None:
        """Begin a checkpoint on rank 0, and join it on the others."""
        probe = self._ranks.decide(lambda: PROBE + secrets.token_hex(4), str)
        self._is_new = "://" not in self._url and not os.path.isdir(self._url)
        store = self._store = open_store(f"{self._url.rstrip('/')}/{probe}")
        self._attempt, folder = self._ranks.decide(lambda: self._begin(store), tuple[int, str])
        if self._writer is None:
            self._writer = store.join(JOB, FIRST, self._attempt, folder, self._size_bytes)

    def _begin(self, store: Store) -> tuple[int, str]:
        attempt = store.acquire_attempt(JOB, "first").number
        self._writer = store.begin(JOB, FIRST, attempt, self._size_bytes * self._ranks.world_size)
        return attempt, self._writer.folder

    def write(self) -> Finding:
        """Write the file of this rank until it is durable."""
        assert self._writer is not None
        payload = self._payload()
        started = time.perf_counter()
        self._writer.write(self._file.name, [payload])
        self._writer.make_durable()
        return self._speed("write", time.perf_counter() - started)

    def read(self) -> Finding:
        """Commit the checkpoint, and read the file of this rank from its storage device."""
        self._ranks.decide(self._commit, bool)
        started = time.perf_counter()
        pieces = [FileRange(self._file, [digest]) for digest in self._digests]
        reading.read(self._opened, JOB, FIRST, pieces, keep=False)
        return self._speed("read", time.perf_counter() - started)

    def _commit(self) -> bool:
        assert self._writer is not None
        self._writer.commit(b"{}")
        return True

    def links(self) -> Finding | None:
        """Add a file of one checkpoint to another one without its bytes."""
        if not self._ranks.leads:
            return None
        writer = self._opened.begin(JOB, SECOND, self._attempt, 0)
        how = "hard links" if isinstance(self._opened, LocalStore) else "copies by the server"
        try:
            writer.copy_file(JOB, FIRST, self._file.name, only_link=True)
        except OSError as error:
            return Finding(
                check=f"{self._name} links",
                state="warning",
                measured=f"no {how}: {error.strerror or error}",
                remedy="use a file system with hard links; otherwise unchanged tensors are written again each "
                "time",
            )
        finally:
            writer.abort()
        return Finding(check=f"{self._name} links", measured=how)

    def locks(self) -> Finding | None:
        """Try a lock on all ranks while rank 0 holds it."""
        check, store = f"{self._name} locks", self._opened
        if not isinstance(store, LocalStore):
            return Finding(check=check, state="skipped", measured="not needed") if self._ranks.leads else None
        path = store.root / "lock"
        with contextlib.ExitStack() as held:
            self._ranks.decide(lambda: held.enter_context(store.files.lock(path)) is None, bool)
            seen = _is_locked(path)
            self._ranks.gather(b"")  # rank 0 holds it until all have tried
        if seen is True:
            return Finding(check=check, measured="seen by all ranks" if self._ranks.world_size > 1 else "work")
        where = "on this host" if self._hosts.name == self._hosts.by_rank[0] else f"of {self._hosts.by_rank[0]}"
        return Finding(
            check=check,
            state="problem",
            measured=f"the lock {where} is not seen" if seen is False else str(seen),
            remedy="mount the file system with locks between hosts (NFS 4, or Lustre with `flock`, without "
            "`local_lock` and `nolock`): locks keep a superseded attempt from committing",
        )

    def fencing(self) -> Finding | None:
        """Begin another attempt, after which the first one must not write."""
        if not self._ranks.leads:
            return None
        check, store = f"{self._name} fencing", self._opened
        second = store.acquire_attempt(JOB, "second").number
        try:
            with store.fenced(JOB, self._attempt):
                pass
        except Fenced:
            return Finding(check=check, measured="a superseded attempt is refused")
        return Finding(
            check=check,
            state="problem",
            measured=f"attempt {self._attempt} may still commit after attempt {second} has begun",
            remedy="use a store that shows new files immediately; otherwise a superseded attempt could mix its "
            "checkpoints with those of the newer one",
        )

    def remove(self) -> None:
        """Remove what was written, on rank 0. Never raises."""
        store = self._store
        if store is None or not self._ranks.leads:
            return
        with contextlib.suppress(OSError):
            if isinstance(store, LocalStore):
                shutil.rmtree(store.root, ignore_errors=True)
                if self._is_new:
                    os.rmdir(self._url)
            else:
                from holdfast.store.objects import ObjectStore

                assert isinstance(store, ObjectStore)
                store.bucket.delete(store.bucket.sizes(""))

    @property
    def _opened(self) -> Store:
        assert self._store is not None
        return self._store

    def _payload(self) -> memoryview:
        """Return page-aligned random bytes, and note their digests."""
        payload = memoryview(fresh_memory(self._size_bytes))[: self._size_bytes]
        pattern = os.urandom(min(PATTERN_BYTES, self._size_bytes))
        for start in range(0, self._size_bytes, PATTERN_BYTES):
            end = min(start + PATTERN_BYTES, self._size_bytes)
            payload[start:end] = pattern[: end - start]
            digest = fmt.digest(payload[start:end])
            self._digests.append(fmt.DigestRange(tensor=None, start=start, end=end, digest=digest))
        return payload

    def _speed(self, what: str, seconds: float) -> Finding:
        speed = self._size_bytes / seconds
        measured = f"{format_bytes(round(speed))}/s"
        return Finding(check=f"{self._name} {what}", measured=measured, bytes_per_second=speed)


def _is_locked(path: Path) -> bool | OSError:
    """Return whether the lock is held, as another process would find out, or the error that prevents it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    except BlockingIOError:
        return True
    except OSError as error:
        return error
    return False
