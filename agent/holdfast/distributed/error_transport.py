"""An error, as far as it can be told to another process. Never pickle: it names a kind and fills in a text."""

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
"""Errors that are all text, the more special ones first."""


class RemoteError(Exception):
    """An error of a kind that is not expected; its text begins with its type."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    kind: Literal[
        "os", "damaged", "no such", "memory", "other",
        "fenced", "incompatible", "unknown format", "holdfast", "value", "type",
    ]  # fmt: skip
    text: str
    errno: int | None = None
    filename: str | None = None
    """Of the file that it is about; of the nearest checkpoint where there is none of a name."""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        if isinstance(error, OSError):
            place = sayable(str(error.filename)) if error.filename else None
            return cls(kind="os", text=sayable(error.strerror or str(error)), errno=error.errno, filename=place)
        if isinstance(error, DamagedCheckpoint):
            return cls(kind="damaged", text=sayable(error.reason), filename=sayable(error.file))
        if isinstance(error, NoSuchCheckpoint):
            return cls(kind="no such", text=str(error), filename=error.nearest)
        for kind, made in _PLAIN.items():
            if isinstance(made, type) and isinstance(error, made):
                return cls(kind=kind, text=sayable(str(error)))  # type: ignore[arg-type]
        trace = sayable("".join(traceback.format_exception(error)))
        if isinstance(error, MemoryError):
            return cls(kind="memory", text=str(error), trace=trace)
        return cls(kind="other", text=sayable(f"{type(error).__name__}: {error}"), trace=trace)

    def error(self, where: str = "") -> Exception:
        """As it was raised; `where` goes before its text."""
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


def told(error: BaseException) -> str:
    """An error in a sentence's place, for people."""
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        return sayable(f"{error.strerror or error}{place}")
    if isinstance(error, (HoldfastError, RemoteError)):
        return str(error)
    return sayable(f"{type(error).__name__}: {error}")


def sayable(text: str) -> str:
    """A file's name may hold bytes that are no text."""
    return text.encode(errors="replace").decode()
