"""Errors of Holdfast, and how errors of any kind get to another process (without pickle) and into messages.

Only RestoreFailed ends a training loop; the others occur at start-up and in tools.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")


class HoldfastError(Exception):
    """Base class of all Holdfast errors."""


class DamagedCheckpoint(HoldfastError):
    """A file of a checkpoint is missing, truncated, or differs from its digest."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


class StoreFull(OSError):
    """A store has too little room for a new checkpoint."""

    def __init__(self, reason: str, place: str, missing_bytes: int, free_bytes: int) -> None:
        super().__init__(errno.ENOSPC, reason, place)
        self.missing_bytes, self.free_bytes = missing_bytes, free_bytes


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that a store has no room, or that a quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class IncompleteParts(HoldfastError):
    """The parts that the ranks wrote do not form a complete checkpoint, so it is not committed."""


class UnknownFormat(HoldfastError):
    """A checkpoint written by another version of Holdfast, in a format that this one does not read."""


class IncompatibleCheckpoint(HoldfastError):
    """A sound checkpoint that does not fit an object of this session; `keyword` names the object."""

    def __init__(self, message: str, keyword: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword


def with_way_out(work: Callable[[], T]) -> T:
    """Call a function of a start; if a checkpoint does not fit an object, add the remedy to the error."""
    try:
        return work()
    except IncompatibleCheckpoint as error:
        if (keyword := error.keyword) is None:
            raise
        advice = (
            f'To start with the {keyword} of the script, call session.keep("{keyword}") before session.resume(), '
            f'or give an adapter keep_settings={{"{keyword}": None}}'
        )
        raise IncompatibleCheckpoint(f"{error}. {advice}", keyword) from error


class NoSuchCheckpoint(HoldfastError, LookupError):
    """No durable checkpoint at that iteration; `nearest` is the nearest earlier one, if any."""

    def __init__(self, message: str, nearest: str | None) -> None:
        super().__init__(message)
        self.nearest = nearest


class NoProbe(HoldfastError):
    """Data loading cannot be measured; the message is the reason."""


class Fenced(HoldfastError):
    """A newer attempt of the same job has started; this one may no longer commit or delete anything."""


class RestoreFailed(HoldfastError):
    """A restore failed and the previous state could not be put back; the state mixes two iterations."""


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
