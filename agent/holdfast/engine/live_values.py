"""Values that operators change while the script trains.

A change is recorded in the store with an iteration ahead of training, and is in force from the next one on, on all
ranks: the announcement of what to do at that boundary carries it. A start reads the records, and so repeats each
change at its iteration.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from holdfast.distributed.ranks import Ranks
from holdfast.engine.coordination import ValueSetting
from holdfast.engine.operator import Operator
from holdfast.engine.training import Training
from holdfast.errors import Fenced
from holdfast.protocol.field_types import MAX_ITERATION
from holdfast.protocol.value_rules import define, parsed
from holdfast.protocol.values import (
    MAX_VALUES,
    Scalar,
    ValueChange,
    ValueDefinition,
    ValueInForce,
    ValueReport,
)
from holdfast.save.history import History
from holdfast.store import Lineage, RecordedValue
from holdfast.store.records import ancestry
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

LEAST_AHEAD = 2
"""Fewest iterations from a change to the boundary at which it is applied: the next one is decided already."""
AHEAD_SECONDS = 0.5
"""How far ahead that boundary is, so that the record is durable by then; longer after one that was not."""
MOST_AHEAD_SECONDS = 30.0
RECORD_SECONDS = 10.0
"""How long training waits at that boundary for the record. An iteration that begins before it is known whether the
record is durable could differ from its repetition after a crash."""
RETRY_SECONDS = 5.0
RATE_ITERATIONS, RATE_SECONDS = 16, 1.0
"""Iterations or time over which the duration of an iteration is measured."""
SCRIPT, BOOLEAN, INTEGER, FLOAT, TEXT = range(5)
"""Kinds of a `ValueSetting`."""


@dataclass(frozen=True, slots=True)
class _Pending:
    record: RecordedValue
    written: Future[RecordedValue]
    """The record of the change that counts; an earlier one if there is one."""
    began_at: float
    missed: RecordedValue | None
    """An earlier record of the change, durable too late, that this one is to replace."""


class LiveValues:
    """Values of a session: what is in force, and, on rank 0, which change comes next.

    What is in force is part of the training state, `Training.values`. For the training thread only.
    """

    def __init__(
        self, training: Training, history: History, operator: Operator, reporter: Reporter, ranks: Ranks
    ) -> None:
        self._training, self._history, self._reporter, self._ranks = training, history, reporter, ranks
        self._operator = operator
        self._definitions: dict[str, ValueDefinition] = {}
        self._announced: dict[int, ValueSetting] = {}
        """Settings that this rank's script has not asked for yet, by name."""
        self._queue: deque[RecordedValue] = deque()
        """Durable changes that are not in force yet, oldest first."""
        self._pending: _Pending | None = None
        """The change that is being recorded."""
        self._closed: set[str] = set()
        """Changes that are in force, refused or discarded, as was reported."""
        self._recorded: dict[str, RecordedValue] | None = None
        """Last record of each change; read before the first one is added."""
        self._wanted: tuple[ValueChange, ...] = ()
        """The changes of operators among which none is open."""
        self._number = 0
        """The highest number of a record."""
        self._decided = 0
        """The last boundary that was decided on: a change comes later. 0: not known, and none is recorded."""
        self._has_failed, self._retry_at = False, 0.0
        self._ahead_seconds, self._iteration_seconds = AHEAD_SECONDS, 0.0
        self._measured = 0, 0.0
        """Iteration and time at which the last measurement of that began."""
        self.on_iteration_end: list[Callable[[], object]] = []
        """Called on each rank before anything of the iteration is saved."""

    # What the script uses

    def value(
        self, name: str, default: Scalar, low: float | None, high: float | None, choices: Iterable[Scalar]
    ) -> Scalar:
        """Return the value in force, which is `default` until an operator changes it.

        ValueError: the definition makes no sense.
        """
        if name not in self._definitions:
            self._define(define(name, default, low, high, tuple(choices)))
        found = self._training.values.get(name)
        return default if found is None or found.value is None else found.value

    def _define(self, definition: ValueDefinition) -> None:
        name = definition.name
        if len(self._definitions) == MAX_VALUES:
            raise ValueError(f"session.value: a job has at most {MAX_VALUES} values")
        self._definitions[name], self._wanted = definition, ()
        if (setting := self._announced.pop(_key(name), None)) is not None:
            self._training.values[name] = ValueInForce(_decoded(setting, definition))
        self._fit(definition)
        self._report(definition)

    def _fit(self, definition: ValueDefinition) -> None:
        """Go back to the script's own value where the script no longer allows the one in force."""
        found = self._training.values.get(definition.name)
        if found is None or found.value is None:
            return
        try:
            fitting: Scalar | None = parsed(definition, found.value)
        except ValueError as error:
            fitting = None
            self._reporter.notice("warning", "value", f"{error}: the script's {definition.default} applies")
        self._training.values[definition.name] = msgspec.structs.replace(found, value=fitting)

    # What the boundary calls

    def begin(self) -> None:
        """Read which changes are to be repeated, when training begins on rank 0."""
        history, applied = self._history, self._applied
        try:
            records = history.store.records(history.job, RecordedValue, applied + 1)
            lineages = history.store.records(history.job, Lineage) if records else []
        except OSError as error:
            what = f"the recorded changes of values cannot be read, and are not repeated: {error}"
            self._reporter.notice("error", "value", what)
            return
        self._number = max((each.number for each in records), default=applied)
        last = {each.change: each.number for each in records}
        lineage, here = history.lineage, history.position.iteration
        path = _path([*lineages, lineage], lineage.number)  # which the store may have been unable to record
        self._queue.extend(
            each
            for each in records
            if each.number == last[each.change]
            and each.iteration <= path.get(each.lineage, -1)
            # what came too late for an earlier lineage was discarded with it
            and (each.iteration > here or each.lineage == lineage.number)
        )
        if self._queue:
            logger.info("%s: repeating %d recorded changes of values", history.job, len(self._queue))

    def restored(self) -> None:
        """Go on with the values of a restored checkpoint, and discard what operators wanted before."""
        self._queue.clear()
        self._announced.clear()
        self._pending, self._wanted, self._decided = None, (), 0
        self._measured = 0, 0.0  # from here: the way to another iteration took no training
        for definition in self._definitions.values():
            self._fit(definition)
            self._report(definition)

    def end_iteration(self, *, may_change: bool) -> None:
        """End what lasts for one iteration, and, on rank 0, record the next change."""
        for call in self.on_iteration_end:
            call()
        if not (may_change and self._ranks.leads):
            return
        self._measure()
        self._settle()
        if self._pending is not None or not self._decided or time.monotonic() < self._retry_at:
            return
        if not self._queue:
            self._record_next()
        elif self._queue[0].iteration < self._reporter.position.iteration:  # it was durable too late
            self._ahead_seconds = min(2 * self._ahead_seconds, MOST_AHEAD_SECONDS)
            missed = self._queue.popleft()
            self._record(missed.change, missed.name, missed.value, missed)

    def due(self, boundary: int, *, may_wait: bool) -> ValueSetting | None:
        """Return what changes at a boundary, this one or a later one, on rank 0."""
        pending, self._decided = self._pending, boundary
        if pending is not None and pending.record.iteration == boundary:
            wait([pending.written], RECORD_SECONDS if may_wait else 0.0)
            self._settle()
        if not self._queue or self._queue[0].iteration != boundary:
            return None
        return _encoded(self._queue[0])

    def apply(self, setting: ValueSetting) -> None:
        """Put a change in force, on each rank at the same boundary."""
        definition = next((each for each in self._definitions.values() if _key(each.name) == setting.name), None)
        if self._ranks.leads:
            record = self._queue.popleft()
            self._training.values[record.name] = ValueInForce(
                record.value, change=record.change, number=record.number, iteration=record.iteration
            )
        elif definition is None:
            self._announced[setting.name] = setting
        else:
            self._training.values[definition.name] = ValueInForce(_decoded(setting, definition))
        if definition is not None:
            self._fit(definition)
            self._close(definition, self._training.values[definition.name].change)

    # Recording, on rank 0

    @property
    def _applied(self) -> int:
        """The highest number of a record in force; of a fork, that may be one of its source."""
        return max((each.number for each in self._training.values.values()), default=0)

    def _measure(self) -> None:
        iteration, now = self._reporter.position.iteration, time.monotonic()
        since, then = self._measured
        passed = iteration - since
        if not then or passed <= 0:
            self._measured = iteration, now
        elif passed >= RATE_ITERATIONS or now - then >= RATE_SECONDS:
            self._iteration_seconds, self._measured = (now - then) / passed, (iteration, now)

    def _record_next(self) -> None:
        """Record the oldest open change that an operator wants."""
        wanted, lineage = self._operator.value_changes, self._history.lineage
        if wanted is self._wanted:
            return
        for change in wanted:
            definition = self._definitions.get(change.name)
            if change.id in self._closed or definition is None:
                continue
            try:
                if lineage.is_restore and change.lineage < lineage.number:
                    raise ValueError("a restore came after it")
                value = None if change.value is None else parsed(definition, change.value)
            except ValueError as error:
                self._close(definition, change.id, refused=str(error))
            else:
                self._record(change.id, change.name, value)
                return
        self._wanted = wanted

    def _record(self, change: str, name: str, value: Scalar | None, missed: RecordedValue | None = None) -> None:
        """Begin to record a change with an iteration ahead of training; again if `missed` was durable too late."""
        history, each_seconds = self._history, self._iteration_seconds
        ahead = math.ceil(self._ahead_seconds / each_seconds) if each_seconds else RATE_ITERATIONS
        self._number = max(self._number, self._applied) + 1
        record = RecordedValue(
            number=self._number,
            lineage=history.lineage.number,
            iteration=max(history.position.iteration + max(LEAST_AHEAD, ahead), self._decided + 1),
            attempt=history.attempt,
            change=change,
            name=name,
            value=value,
            at=time.time(),
        )

        def write() -> RecordedValue:
            if not record.attempt:
                raise OSError("the store cannot be written to")
            if self._recorded is None:
                known = history.store.records(history.job, RecordedValue)
                self._recorded = {each.change: each for each in known}
            if change in self._recorded and missed is None:  # an attempt before this one could not report it
                return self._recorded[change]
            history.store.append(history.job, record)
            self._recorded[change] = record
            return record

        self._pending = _Pending(record, io_pool.submit(write), time.monotonic(), missed)

    def _settle(self) -> None:
        """Take note of whether the pending change is durable."""
        pending = self._pending
        if pending is None or not pending.written.done():
            return
        self._pending, error, record = None, pending.written.exception(), pending.record
        if error is None:
            self._has_failed = False
            took_seconds = time.monotonic() - pending.began_at
            self._ahead_seconds = min(max(self._ahead_seconds, 4 * took_seconds), MOST_AHEAD_SECONDS)
            if pending.written.result() is record:
                self._queue.append(record)
            else:
                self._close(self._definitions[record.name], record.change, at=pending.written.result().iteration)
            return
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if pending.missed is not None:
            self._queue.appendleft(pending.missed)  # it is not in force yet
        if not isinstance(error, Fenced) and not self._has_failed:
            self._has_failed = True
            what = f"a change of {record.name} waits until it can be recorded in the store: {error}"
            self._reporter.notice("warning", "value", what)

    def _close(
        self, definition: ValueDefinition, change: str, *, at: int | None = None, refused: str = ""
    ) -> None:
        """Report what became of a change."""
        self._closed.add(change)
        self._report(definition, change, at, refused)

    def _report(
        self, definition: ValueDefinition, change: str | None = None, at: int | None = None, refused: str = ""
    ) -> None:
        found, position = self._training.values.get(definition.name), self._reporter.position
        value = found.value if found is not None else None
        if at is None:
            at = position.iteration if found is None or refused else found.iteration
        self._reporter.event(
            ValueReport(
                at=time.time(),
                iteration=at,
                lineage=position.lineage,
                definition=definition,
                value=definition.default if value is None else value,
                is_default=value is None,
                change=change or (found.change or None if found is not None else None),
                refused=refused,
            )
        )


def _path(lineages: list[Lineage], current: int) -> dict[int, int]:
    """Return the lineages that training repeats, with the last iteration that counts of each.

    A start at iteration 0 repeats the training before it, of which no checkpoint is left, and as much of it as
    counts of its own.
    """
    path: dict[int, int] = {}
    most = MAX_ITERATION
    while current:
        ancestors = list(ancestry(lineages, current))
        path |= {number: min(last, most) for number, last, _ in ancestors}
        oldest, _, parent = ancestors[-1]
        most = path[oldest]
        earlier = (each.number for each in lineages if each.number < oldest)
        current = max(earlier, default=0) if parent is None else 0
    return path


def _key(text: str) -> int:
    """Return 63 bits that stand for a name or a choice in an announcement."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _encoded(record: RecordedValue) -> ValueSetting:
    name, value = _key(record.name), record.value
    if value is None:
        return ValueSetting(name, SCRIPT, 0)
    if isinstance(value, str):
        return ValueSetting(name, TEXT, _key(value))
    if isinstance(value, float):
        return ValueSetting(name, FLOAT, *struct.unpack("<q", struct.pack("<d", value)))
    return ValueSetting(name, BOOLEAN if isinstance(value, bool) else INTEGER, int(value))


def _decoded(setting: ValueSetting, definition: ValueDefinition) -> Scalar | None:
    if setting.kind == BOOLEAN:
        return bool(setting.bits)
    if setting.kind == INTEGER:
        return setting.bits
    if setting.kind == FLOAT:
        return float(struct.unpack("<d", struct.pack("<q", setting.bits))[0])
    return next(
        (each for each in definition.choices if isinstance(each, str) and _key(each) == setting.bits), None
    )
