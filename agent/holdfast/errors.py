"""Errors of Holdfast. Only RestoreFailed ends a training loop; the others occur at start-up and in tools."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

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
