"""Where payloads are kept: on their device, in host memory, or in a file that ends with the process."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.units import format_bytes
from holdfast_series.codecs import Payload


class SeriesStoreFull(HoldfastError):
    """The memory budget is used up, and there is no directory for the rest, or no space in it."""


@dataclass(eq=False, slots=True)
class StoredPayload:
    """A payload, wherever it is. On the disk it has an offset in place of its content."""

    content: Payload | None
    size_bytes: int
    tier: str = "host"
    offset: int = 0


class Tiers:
    """Keeps payloads within budgets. The oldest ones on the host go to the disk first: they are read last."""

    def __init__(self, memory_bytes: int, device_bytes: int, directory: str | os.PathLike[str] | None) -> None:
        self._limits = {"device": device_bytes, "host": memory_bytes}
        self._on_host: dict[StoredPayload, None] = {}
        self.used_bytes = {"device": 0, "host": 0, "disk": 0}
        self._file = None if directory is None else SpillFile(directory)

    def add(self, content: Payload) -> StoredPayload:
        """Keep a payload. Raises SeriesStoreFull without keeping it."""
        payload = StoredPayload(content, content.nbytes if isinstance(content, Tensor) else len(content))
        if isinstance(content, Tensor) and content.device.type != "cpu":
            if self.used_bytes["device"] + payload.size_bytes <= self._limits["device"]:
                payload.tier = "device"
            else:
                payload.content = content.cpu()
        if payload.tier == "host":
            self._on_host[payload] = None
        self.used_bytes[payload.tier] += payload.size_bytes
        try:
            while self.used_bytes["host"] > self._limits["host"]:
                self._write(next(iter(self._on_host)))
        except (SeriesStoreFull, OSError):
            self.remove(payload)
            raise
        return payload

    def read(self, payload: StoredPayload) -> Payload:
        """Return the content of a payload."""
        if payload.content is not None:
            return payload.content
        assert self._file is not None
        return self._file.read(payload.offset, payload.size_bytes)

    def remove(self, payload: StoredPayload) -> None:
        """Forget a payload."""
        self.used_bytes[payload.tier] -= payload.size_bytes
        if payload.tier == "disk":
            assert self._file is not None
            self._file.free(payload.offset, payload.size_bytes)
        self._on_host.pop(payload, None)

    def close(self) -> None:
        self._on_host.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, payload: StoredPayload) -> None:
        if self._file is None:
            limit = format_bytes(self._limits["host"])
            raise SeriesStoreFull(
                f"memory={limit} of the series store is full: raise it, or give store= a directory"
            )
        assert payload.content is not None
        payload.offset = self._file.append(_bytes_of(payload.content))
        payload.content, payload.tier = None, "disk"
        del self._on_host[payload]
        self.used_bytes["host"] -= payload.size_bytes
        self.used_bytes["disk"] += payload.size_bytes


class SpillFile:
    """A file without a name in a directory: the system removes it however the process ends."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"store={self._directory!r} is not a writable directory: {error}") from None
        self._end = 0

    def append(self, data: memoryview) -> int:
        """Write at the end, and return the offset."""
        offset, view = self._end, data
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, self._end)
                self._end, view = self._end + written, view[written:]
        except OSError as error:
            self._end = offset
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise SeriesStoreFull(f"no space left for the series store in store={self._directory!r}") from error
        return offset

    def read(self, offset: int, size_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < size_bytes:
            part = os.pread(self._file.fileno(), size_bytes - len(found), offset + len(found))
            if not part:
                raise OSError(errno.EIO, "the file of a series store ends early", self._directory)
            found += part
        return bytes(found)

    def free(self, offset: int, size_bytes: int) -> None:
        """Reuse the space if it is at the end, as when an adjoint removes the newest state first."""
        if offset + size_bytes == self._end:
            self._end = offset

    def close(self) -> None:
        self._file.close()


def _bytes_of(content: Payload) -> memoryview:
    if isinstance(content, bytes):
        return memoryview(content)
    return content.contiguous().reshape(-1).view(torch.uint8).numpy().data
