"""Errors that are sent to another process: their kind and text. Does not use pickle."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable
from typing import Literal

import msgspec

from holdfast.errors import (
    DamagedCheckpoint,
    Fenced,
    HoldfastError,
    IncompatibleCheckpoint,
    NoSuchCheckpoint,
    UnknownFormat,
)

_PLAIN: dict[str, Callable[[str], Exception]] = {
    "fenced": Fenced,
    "incompatible": IncompatibleCheckpoint,
    "unknown format": UnknownFormat,
    "holdfast": HoldfastError,
    "value": ValueError,
    "type": TypeError,
}
"""Error types that have only a message; subclasses come before their base classes."""


class RemoteError(Exception):
    """An unexpected error in another process; its message begins with the original type."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    kind: Literal[
        "os", "damaged", "no such", "memory", "other",
        "fenced", "incompatible", "unknown format", "holdfast", "value", "type",
    ]  # fmt: skip
    text: str
    errno: int | None = None
    filename: str | None = None
    """The file that the error is about, or the nearest checkpoint for `NoSuchCheckpoint`."""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        if isinstance(error, OSError):
            place = printable(str(error.filename)) if error.filename else None
            return cls(kind="os", text=printable(error.strerror or str(error)), errno=error.errno, filename=place)
        if isinstance(error, DamagedCheckpoint):
            return cls(kind="damaged", text=printable(error.reason), filename=printable(error.file))
        if isinstance(error, NoSuchCheckpoint):
            return cls(kind="no such", text=str(error), filename=error.nearest)
        for kind, made in _PLAIN.items():
            if isinstance(made, type) and isinstance(error, made):
                return cls(kind=kind, text=printable(str(error)))  # type: ignore[arg-type]
        trace = printable("".join(traceback.format_exception(error)))
        if isinstance(error, MemoryError):
            return cls(kind="memory", text=str(error), trace=trace)
        return cls(kind="other", text=printable(f"{type(error).__name__}: {error}"), trace=trace)

    def error(self, where: str = "") -> Exception:
        """Return the error as it was raised, with `where` before its text."""
        text = where + self.text
        if self.kind == "os":
            return OSError(self.errno or errno.EIO, text, self.filename)
        if self.kind == "damaged":
            return DamagedCheckpoint(self.filename or "", text)
        if self.kind == "no such":
            return NoSuchCheckpoint(text, self.filename)
        if self.kind in _PLAIN:
            return _PLAIN[self.kind](text)
        error = MemoryError(text) if self.kind == "memory" else RemoteError(text)
        error.add_note(self.trace)
        return error


def describe_error(error: BaseException) -> str:
    """Return a message for logs and notices: the type is included only for unexpected errors."""
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        return printable(f"{error.strerror or error}{place}")
    if isinstance(error, (HoldfastError, RemoteError)):
        return str(error)
    return printable(f"{type(error).__name__}: {error}")


def printable(text: str) -> str:
    """Replace what cannot be encoded: a file name may contain bytes that are not text."""
    return text.encode(errors="replace").decode()
