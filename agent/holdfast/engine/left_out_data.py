"""Data that restores leave out: which it is, and how the loaders get past it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.data.cursor import Cursor, require_leaving_out
from holdfast.errors import IncompatibleCheckpoint
from holdfast.protocol.wire import DataSkip, LeftOutData

LEAVE_OUT = "leave_out"
"""Key in the position of a loader: how many batches to leave out when the loader gets there."""

Position = dict[str, Any]
"""State of a cursor."""


def of_skip(
    skip: DataSkip,
    iteration: int,
    session: Mapping[str, Any],
    cursors: Sequence[Cursor],
    since: Sequence[LeftOutData],
) -> LeftOutData:
    """Return the data that a restore to `iteration` leaves out.

    Args:
        session: the session's state in the checkpoint, decoded.
        cursors: those of the loaders that the script uses already.
        since: what was left out after that iteration on the way to the current state.

    Raises:
        IncompatibleCheckpoint: the data cannot be left out exactly.
    """
    try:
        number, batches = _resolved(skip, iteration, session)
        if skip.to_iteration is not None:  # which is one of the current state: data before it stays left out
            batches += sum(
                each.batches for each in since if each.loader == number and each.iteration < skip.to_iteration
            )
        position = session["loaders"][number]
        require_leaving_out(position)
        if number < len(cursors):
            _advanced(cursors[number], position, batches)
    except ValueError as error:
        raise IncompatibleCheckpoint(f"no data can be left out after iteration {iteration:,}: {error}") from error
    return LeftOutData(iteration=iteration, batches=batches, loader=number)


def _resolved(skip: DataSkip, iteration: int, session: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of the loader and the number of its batches."""
    loaders, each = len(session["loaders"]), session.get("batches_an_iteration")
    if not loaders:
        raise ValueError("this script does not draw its data from session.batches(...)")
    if skip.loader is None and loaders > 1:
        raise ValueError(f"it uses {loaders} loaders: give the number of one, from 0 in the order of first use")
    number = skip.loader or 0
    if number >= loaders:
        raise ValueError(f"it uses {loaders} loaders, numbered from 0")
    if skip.batches is not None:
        return number, skip.batches
    if not each or loaders > 1:
        raise ValueError("its iterations do not all take the same number of batches: give a number of batches")
    ahead = (skip.to_iteration or 0) - iteration
    if ahead <= 0:
        raise ValueError(f"iteration {skip.to_iteration:,} is not after it")
    return number, ahead * each


def describe(left_out: LeftOutData) -> str:
    """Describe data that a restore left out, for people."""
    loader = f" of loader {left_out.loader}" if left_out.loader else ""
    return f"{left_out.batches:,} batches{loader} after iteration {left_out.iteration:,} are left out of training"


def note(pending: list[LeftOutData], iteration: int, positions: Sequence[Position]) -> None:
    """Move what is to be left out at `iteration` from `pending` into the positions of the loaders.

    A position holds it until the script uses its loader, which may be several checkpoints later.
    """
    while pending and pending[0].iteration <= iteration:
        left_out = pending.pop(0)
        if left_out.loader < len(positions):
            position = positions[left_out.loader]
            position[LEAVE_OUT] = position.get(LEAVE_OUT, 0) + left_out.batches


def go_to(cursor: Cursor, position: Position | None) -> None:
    """Take a cursor to a position, and past what is to be left out there."""
    if position is not None and LEAVE_OUT in position:
        position = _advanced(cursor, position, 0)
    cursor.load_state_dict(position)


def _advanced(cursor: Cursor, position: Position, batches: int) -> Position:
    state = {key: value for key, value in position.items() if key != LEAVE_OUT}
    return cursor.leave_out(state, batches + position.get(LEAVE_OUT, 0))
