"""Data that restores leave out: which it is, and how the loaders get past it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.data.cursor import LEAVE_OUT, BatchesAnIteration, Cursor, require_leaving_out
from holdfast.distributed.ranks import Ranks
from holdfast.errors import HoldfastError, IncompatibleCheckpoint
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import DataSkip, LeftOutData
from holdfast.save.history import History
from holdfast.telemetry.reporter import Reporter

Position = dict[str, Any]
"""State of a cursor."""


def of_skip(
    skip: DataSkip,
    iteration: int,
    session: Mapping[str, Any],
    cursors: Sequence[Cursor],
    since: Sequence[LeftOutData],
    counted: BatchesAnIteration,
    world_size: int,
) -> LeftOutData:
    """Return the data that a restore to `iteration` leaves out.

    Args:
        session: the session's state in the checkpoint, decoded.
        cursors: those of the loaders that the script uses already.
        since: what was left out after that iteration on the way to the current state.
        counted: the batches of the iterations up to the current state.

    Raises:
        IncompatibleCheckpoint: the data cannot be left out exactly.
    """
    try:
        number, batches = _resolved(skip, iteration, len(session["loaders"]), counted)
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
    return LeftOutData(iteration=iteration, batches=batches, loader=number, world_size=world_size)


def _resolved(skip: DataSkip, iteration: int, loaders: int, counted: BatchesAnIteration) -> tuple[int, int]:
    """Return the number of the loader and the number of its batches."""
    if not loaders:
        raise ValueError("this script does not draw its data from session.batches(...)")
    if skip.loader is None and loaders > 1:
        raise ValueError(f"it uses {loaders} loaders: give the number of one, from 0 in the order of first use")
    number = skip.loader or 0
    if number >= loaders:
        raise ValueError(f"it uses {loaders} loaders, numbered from 0")
    if skip.batches is not None:
        return number, skip.batches
    if not counted.batches or loaders > 1 or counted.since > iteration:
        raise ValueError(
            "not all iterations after it have taken the same number of batches: give a number of batches"
        )
    ahead = (skip.to_iteration or 0) - iteration
    if ahead <= 0:
        raise ValueError(f"iteration {skip.to_iteration:,} is not after it")
    return number, ahead * counted.batches


class ToLeaveOut:
    """Data that training has yet to leave out: on all ranks, or on none.

    What cannot be left out after all is dropped, with a notice: training goes on with that data.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: list[LeftOutData] = []
        """Once training gets to its iteration; in order."""
        self._dropped: list[tuple[LeftOutData, str]] = []
        """What was not left out, and why, until `report`."""

    def begin(
        self, pending: Sequence[LeftOutData], iteration: int, positions: Sequence[Position], world_size: int
    ) -> None:
        """Go on from a checkpoint of so many ranks, with what is to be left out from there on.

        The batches of a rank are others on another number of ranks.
        """
        here = self._ranks.world_size
        self._dropped = []
        self._pending = [each for each in pending if each.world_size == here]
        for each in pending:
            if each.world_size != here:
                self._drop(each, f"they were counted on {each.world_size} ranks, and this job has {here}")
        for number, position in enumerate(positions):
            if world_size != here and (batches := position.pop(LEAVE_OUT, 0)):
                left_out = LeftOutData(iteration=iteration, batches=batches, loader=number)
                self._drop(left_out, f"they were counted on {world_size} ranks, and this job has {here}")
        _note(self._due(iteration), positions)

    def go_to(self, number: int, cursor: Cursor, position: Position | None, iteration: int) -> None:
        """Take a cursor to a position, and past what is to be left out there. Then collective over all ranks."""
        if position is not None and (batches := position.get(LEAVE_OUT)):
            there = position
            try:
                position = self._ranks.run_on_all(lambda: _advanced(cursor, there, 0))
            except Exception as error:  # training comes first
                position = _without_mark(there)
                self._drop(LeftOutData(iteration=iteration, batches=batches, loader=number), error)
        cursor.load_state_dict(position)

    def return_to(self, cursor: Cursor, position: Position | None) -> None:
        """Take a cursor to a position, and past what is to be left out there, on this rank alone."""
        if position is not None and LEAVE_OUT in position:
            position = _advanced(cursor, position, 0)
        cursor.load_state_dict(position)

    def reach(self, iteration: int, cursors: Sequence[Cursor], later: Sequence[Position]) -> bool:
        """Leave out what is due after an iteration; return whether a cursor has moved. Collective if any is due.

        Args:
            later: positions of the loaders that the script has not used yet.
        """
        if not (due := self._due(iteration)):
            return False

        def advanced() -> list[Position]:
            positions = [cursor.state_dict() for cursor in cursors]
            _note([each for each in due if each.loader < len(cursors)], positions)
            return [
                _advanced(cursor, position, 0) if LEAVE_OUT in position else {}
                for cursor, position in zip(cursors, positions, strict=True)
            ]

        try:
            positions = self._ranks.run_on_all(advanced)
        except Exception as error:  # training comes first
            for each in due:
                self._drop(each, error)
            return False
        _note(due, [*({} for _ in cursors), *later])
        for cursor, position in zip(cursors, positions, strict=True):
            if position:
                cursor.load_state_dict(position)
        return any(positions)

    def report(self, history: History, reporter: Reporter) -> None:
        """Begin a lineage that does not name what was dropped, if anything was. Collective over all ranks then."""
        dropped, self._dropped = self._dropped, []
        if not dropped:
            return
        left_out = history.lineage.left_out
        for each, reason in dropped:
            left_out = _without(left_out, each)
            reporter.notice(
                "error", "left_out", f"{_named(each)} cannot be left out, so training uses them: {reason}"
            )
        head = history.head
        try:
            history.begin_lineage(
                parse_checkpoint_id(head)[0] if head is not None else 0,
                head,
                inexact=history.lineage.inexact,
                left_out=left_out,
            )
        except (OSError, HoldfastError) as error:  # the checkpoints of this attempt are right all the same
            history.continue_lineage(msgspec.structs.replace(history.lineage, left_out=left_out), head)
            reporter.notice(
                "error", "left_out", f"the store still lists data as left out that training used: {error}"
            )
        else:
            reporter.lineage_began(history.lineage)

    def _due(self, iteration: int) -> list[LeftOutData]:
        """Take what is due at an iteration; what was due at an earlier one no longer applies."""
        due = [each for each in self._pending if each.iteration == iteration]
        self._pending = [each for each in self._pending if each.iteration > iteration]
        return due

    def _drop(self, left_out: LeftOutData, reason: object) -> None:
        self._dropped.append((left_out, str(reason)))


def describe(left_out: LeftOutData) -> str:
    """Describe data that a restore left out, for people."""
    return f"{_named(left_out)} are left out of training"


def _named(left_out: LeftOutData) -> str:
    loader = f" of loader {left_out.loader}" if left_out.loader else ""
    return f"{left_out.batches:,} batches{loader} after iteration {left_out.iteration:,}"


def _note(due: Sequence[LeftOutData], positions: Sequence[Position]) -> None:
    """Add what is due to the positions of the loaders.

    A position holds it until the script uses its loader, which may be several checkpoints later.
    """
    for each in due:
        if each.loader < len(positions):
            position = positions[each.loader]
            position[LEAVE_OUT] = position.get(LEAVE_OUT, 0) + each.batches


def _without(left_out: tuple[LeftOutData, ...], dropped: LeftOutData) -> tuple[LeftOutData, ...]:
    """Return what is left of a list without the newest entries that make up the dropped data."""
    kept, batches = [], dropped.batches
    for each in reversed(left_out):
        if each.loader == dropped.loader and each.iteration <= dropped.iteration and 0 < each.batches <= batches:
            batches -= each.batches
        else:
            kept.append(each)
    return tuple(reversed(kept))


def _advanced(cursor: Cursor, position: Position, batches: int) -> Position:
    return cursor.leave_out(_without_mark(position), batches + position.get(LEAVE_OUT, 0))


def _without_mark(position: Position) -> Position:
    return {key: value for key, value in position.items() if key != LEAVE_OUT}
