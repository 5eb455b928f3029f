"""Reports of a session to the server and to the log."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import printable
from holdfast.pacing import Controller, IntervalPlan
from holdfast.pacing.policy import profile_to_json
from holdfast.protocol import wire
from holdfast.protocol.field_types import MAX_ANNOTATION
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import OrderState, RestoreMode, StallKind
from holdfast.server_link.connection import ServerConnection
from holdfast.store import Lineage
from holdfast.system import io_pool, supervisor_channel
from holdfast.system.masking import escaped
from holdfast.telemetry import configuration, fingerprint
from holdfast.telemetry.run_length import RunLength
from holdfast.units import duration, format_interval, percent

if TYPE_CHECKING:
    from holdfast.telemetry.iteration_metrics import Iteration

logger = logging.getLogger("holdfast")

MOST_MARKS = 2000
"""Marks that an attempt reports: a script may mark every iteration."""
PER_RANK_NOTICES = ("internal", "ranks", "repaired", "inexact", "peers")
"""Codes of notices that every rank logs; others are logged by rank 0 alone."""
LOGGED_RATIO = 1.2
"""Factor above which a change of the interval is logged at INFO; the first checkpoints may change it less."""
DURABLE_EVERY_SECONDS = 60.0
"""Least time between two INFO lines about durable checkpoints."""
LOG_FORMAT = "%(asctime)s %(levelname)s holdfast: %(message)s"
INTERVAL_REPORT_SECONDS = 5.0
"""Interval of reports of the measured overhead while the plan does not change."""


@dataclass(slots=True)
class TrainingPosition:
    """Position of training, which background threads read for their events."""

    iteration: int = 0
    lineage: int = 1


class Reporter:
    """Sends events to the server, and logs the important ones.

    A `quiet` reporter, of a rank other than 0, logs only problems of its own rank.
    """

    def __init__(
        self,
        job: str,
        position: TrainingPosition,
        *,
        quiet: bool = False,
        owner: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.job, self.position, self._quiet = job, position, quiet
        self._owner, self._labels = owner, dict(labels or {})
        self.length = RunLength()
        self.link: ServerConnection | None = None
        self.has_server = False
        """Reports are sent; those that cost time to build are not built without a server."""
        self._interval_reported_at, self._logs_intervals = 0.0, not quiet
        self._logged_interval: tuple[int | None, float | None] = None, None
        """In iterations, or in seconds."""
        self._pending_logged_at: tuple[int | None, float | None] = None, None
        """The interval for which a pending change was logged."""
        self._durable_logged_at = -math.inf
        self._marks = 0
        self._configuration: dict[str, str] = {}
        self._has_begun = False

    @property
    def page(self) -> str | None:
        """Address of the job's page on the server, without credentials."""
        return self.link.page if self.link is not None else None

    @property
    def is_fenced(self) -> bool:
        """Whether the server reported that a newer attempt of the job has begun."""
        return self.link is not None and self.link.is_fenced

    def connect(self, link: ServerConnection) -> None:
        """Send what is reported from now on over a connection."""
        self.link, self.has_server = link, True

    def stop(self) -> None:
        """Discard unsent reports; report and log no further intervals: a newer attempt has begun."""
        if self.link is not None:
            self.link.silence()
        self.link, self.has_server = None, False
        self._logs_intervals = False

    def close(self) -> None:
        """Send what is left."""
        if self.link is not None:
            self.link.close()

    def event(self, event: wire.Event) -> None:
        if (link := self.link) is not None:  # read once: another thread may stop reporting
            link.event(event)

    def _here(self) -> dict[str, Any]:
        """Return the time and position fields of an event."""
        return {"at": time.time(), "iteration": self.position.iteration, "lineage": self.position.lineage}

    def sample(self, measured: Iteration, metrics: dict[str, float]) -> None:
        if (link := self.link) is not None:
            link.sample(measured, metrics)

    def lineage_began(self, lineage: Lineage, *, at: float | None = None) -> None:
        self.event(
            wire.LineageStarted(
                at=time.time() if at is None else at,
                lineage=lineage.number,
                iteration=lineage.iteration,
                parent=lineage.parent,
                order=lineage.order,
                left=lineage.left,
                origin=lineage.origin,
                inexact=lineage.inexact,
                left_out=lineage.left_out,
                trouble=lineage.trouble,
            )
        )

    def attempt_began(
        self,
        resumed_from: str | None,
        versions: dict[str, str],
        committed: list[str],
        world_size: int,
        pinned: Iterable[str] = (),
        copies: Mapping[str, wire.CopyPlace] | None = None,
        stores: Iterable[str] = (),
    ) -> None:
        self.event(
            wire.AttemptStarted(
                **self._here() | {"at": supervisor_channel.attempt_start_time()},
                resumed_from=resumed_from,
                host=platform.node(),
                pid=os.getpid(),
                world_size=world_size,
                supervised="HOLDFAST_SUPERVISED" in os.environ,
                previous_exit=os.environ.get(supervisor_channel.PREVIOUS_EXIT) or None,
                versions=versions,
                owner=printable(self._owner),
                labels={printable(key): printable(value) for key, value in self._labels.items()},
                stores=list(map(printable, stores)),
            )
        )
        self.inventory(committed, pinned, copies=copies or {})
        self._has_begun = True
        if self.has_server:
            if self._configuration:
                self._report_configuration("configuration", self._configuration)
            self._report_environment()

    def configure(self, values: Mapping[str, str]) -> None:
        """Add values to the configuration of the attempt, and report it once the attempt has begun."""
        before = self._configuration
        self._configuration = dict(islice((before | dict(values)).items(), wire.MAX_CONFIGURATION_ENTRIES))
        if self._has_begun and self.has_server and self._configuration != before:
            self._report_configuration("configuration", self._configuration)

    def _report_configuration(self, section: wire.ConfigurationSection, values: Mapping[str, str]) -> None:
        self.event(wire.ConfigurationReport(at=time.time(), section=section, values=dict(values)))

    def _report_environment(self) -> None:
        """Report the environment, and once more when git has answered."""

        def report_changes() -> None:
            if changes := configuration.code_changes():
                self._report_configuration("environment", found | changes)

        try:
            found = configuration.environment()
            self._report_configuration("environment", found)
            if "code" in found:
                io_pool.submit(report_changes)
        except Exception:  # training goes on without this report
            logger.debug("%s: the environment cannot be reported", self.job, exc_info=True)

    def inventory(
        self,
        checkpoints: list[str],
        pinned: Iterable[str],
        deleted: Mapping[str, str] | None = None,
        *,
        copies: Mapping[str, wire.CopyPlace],
    ) -> None:
        """Report the committed checkpoints, those pinned, why retention deleted others, and where copies are."""
        event = wire.Inventory(
            at=time.time(), checkpoints=checkpoints, pinned=list(pinned), deleted=dict(deleted or {}),
            copies=dict(copies),
        )  # fmt: skip
        self.event(event)

    def attempt_ended(self, reason: str) -> None:
        self.event(wire.AttemptFinished(**self._here(), reason=reason))

    def applied(self, version: int) -> None:
        self.event(wire.DesiredStateApplied(**self._here(), version=version))

    def order(
        self,
        order: str | None,
        state: OrderState,
        *,
        reason: str | None = None,
        seconds: float | None = None,
        safety: str | None = None,
        began: Lineage | None = None,
    ) -> None:
        """Report the state of an order; does nothing for a restore that the script requested.

        `began` is the lineage that it began, if that was earlier.
        """
        if order is None:
            return
        there = {} if began is None else {"iteration": began.iteration, "lineage": began.number}
        self.event(
            wire.OrderStateChange(
                **self._here() | there,
                order=order,
                state=state,
                reason=printable(reason) if reason else None,
                seconds=seconds,
                safety_checkpoint=safety,
            )
        )

    def restore_mode(
        self, mode: RestoreMode, reason: str, start_seconds: float | None, on_trouble: str, batches: int
    ) -> None:
        self.event(
            wire.RestoreModeReport(
                **self._here(), mode=mode, reason=printable(reason), start_seconds=start_seconds,
                on_trouble=on_trouble, batches_an_iteration=batches,
            )
        )  # fmt: skip

    def stalls(self, measured: Iteration) -> None:
        for kind, seconds in measured.stalls.items():
            if seconds >= _reported_from_seconds(kind, measured.seconds):
                self.stall(kind, seconds, measured.iteration, measured.lineage)

    def stall(self, kind: StallKind, seconds: float, iteration: int, lineage: int) -> None:
        self.event(wire.Stall(at=time.time(), iteration=iteration, lineage=lineage, kind=kind, seconds=seconds))

    def report_interval(self, controller: Controller, *, changed: bool) -> None:
        now = time.time()
        if not changed and now - self._interval_reported_at < INTERVAL_REPORT_SECONDS:
            return
        self._interval_reported_at = now
        plan, profile = controller.plan, controller.profile
        if changed and plan is not None and self._logs_intervals:
            self._log_interval(plan, controller)
        self.event(
            wire.IntervalDecision(
                **self._here(),
                policy=plan.policy if plan else controller.settings.policy,
                interval=plan.interval if plan else None,
                interval_seconds=plan.interval_seconds if plan else None,
                budget=controller.settings.budget,
                predicted_overhead=plan.overhead if plan else None,
                measured_overhead=controller.measured_overhead,
                measured_window_iterations=controller.measured_window_iterations,
                reason=plan.reason if plan else "measuring the first iterations",
                pending=plan.pending if plan else "",
                profile=profile_to_json(profile) if profile else {},
                spread=controller.spread,
                mtbf_seconds=controller.settings.mtbf_seconds,
                write_bytes_per_second=controller.write_budget,
                max_unsaved_seconds=controller.settings.max_unsaved_seconds,
                total_iterations=controller.total_iterations
                or self.length.total_iterations(self.position.iteration),
                samples_per_iteration=self.length.samples_per_iteration(),
                epoch_iterations=self.length.epoch_iterations(),
            )
        )

    def _log_interval(self, plan: IntervalPlan, controller: Controller) -> None:
        """Log a new interval, and once for each why it stays although it is over the budget."""
        seconds, budget = plan.interval_seconds, controller.settings.budget
        before, now = self._logged_interval, (plan.interval if seconds is None else None, seconds)
        is_over = (controller.measured_overhead or 0.0) > budget
        explains = is_over and bool(plan.pending) and self._pending_logged_at != now
        if before == now and not explains:
            return
        if explains:
            self._pending_logged_at = now
        near = False
        if before[0] is not None and now[0] is not None:
            near = before[0] / LOGGED_RATIO <= now[0] <= before[0] * LOGGED_RATIO
        if not near:
            self._logged_interval = now
        every = "none for now"
        if seconds is not None:
            every = f"every {format_interval(timedelta(seconds=seconds))}"
        elif plan.interval is not None:
            every = f"every {plan.interval:,} iterations" if plan.interval > 1 else "every iteration"
        figures = f"policy {plan.policy}"
        if plan.overhead is not None:
            figures += f", predicted overhead {percent(plan.overhead)}, budget {percent(budget)}"
        if plan.pending:
            figures += f"; {plan.pending}"
        level = logging.INFO if explains or not near else logging.DEBUG
        logger.log(level, "%s: checkpoint interval: %s (%s)", self.job, every, figures)
        logger.debug("%s: checkpoint interval: %s", self.job, plan.reason)

    def durable(self, checkpoint: str, seconds: float) -> None:
        """Log a durable checkpoint, at INFO at most once a minute."""
        if self._quiet:
            return
        level, now = logging.DEBUG, time.monotonic()
        if now - self._durable_logged_at >= DURABLE_EVERY_SECONDS:
            level, self._durable_logged_at = logging.INFO, now
        iteration, _ = parse_checkpoint_id(checkpoint)
        what = f"checkpoint of iteration {iteration:,} is durable, written in {duration(seconds)}"
        logger.log(level, "%s: %s", self.job, what)

    def repaired(self, checkpoint: str, damage: Iterable[str], loss: str | None = None) -> None:
        """Report what was repaired in memory while a checkpoint was read, by file, and what was replaced."""
        if loss is not None:
            what = f"degraded restore of {checkpoint}: replaced {loss}. The lineage is inexact from here on"
            self.notice("warning", "inexact", what)
        for each in damage:
            self.notice(
                "warning",
                "repaired",
                f"checkpoint {checkpoint} is damaged and was repaired in memory from its parity: {each}. "
                "Repair it in the store with: holdfast store scrub --repair",
            )

    def damaged(self, checkpoint: str, error: Exception | str, what: str = "damaged and passed over") -> None:
        self.notice("warning", "damaged", f"checkpoint {checkpoint} is {what}: {error}")
        iteration, lineage = parse_checkpoint_id(checkpoint)
        self.event(
            wire.Checkpoint(
                at=time.time(),
                id=checkpoint,
                iteration=iteration,
                lineage=lineage,
                kind="scheduled",
                state="damaged",
                reason=printable(str(error)),
            )
        )

    def trained_elsewhere(self, then: dict[str, str]) -> None:
        """Warn if the checkpoint was taken in another environment, `then`."""
        if (difference := fingerprint.difference(then, fingerprint.fingerprint())) is not None:
            self.notice("warning", "fingerprint", difference)

    def mark(self, name: str, metrics: Mapping[str, Any], iteration: int | None = None) -> None:
        """Report an annotation. Metrics that are not numbers are left out.

        `iteration`: an earlier one; anything else counts as the current one.
        """
        if self._quiet or not self.has_server:
            return
        self._marks += 1
        if self._marks > MOST_MARKS:
            if self._marks == MOST_MARKS + 1:
                logger.warning("%s: the timeline shows the first %d marks of an attempt", self.job, MOST_MARKS)
            return
        shown = []
        for key, value in metrics.items():
            with contextlib.suppress(TypeError, ValueError, ArithmeticError, RuntimeError):  # no single number
                shown.append(f"{key} {float(value.detach() if hasattr(value, 'detach') else value):.4g}")
        text = printable(f"{name}: {', '.join(shown)}" if shown else str(name))[:MAX_ANNOTATION]
        here = self._here()
        with contextlib.suppress(TypeError):  # it is no integer
            here["iteration"] = min(max(operator.index(iteration), 0), here["iteration"])  # type: ignore[arg-type]
        self.event(wire.AnnotationReport(**here, text=text))

    def notice(self, level: Literal["info", "warning", "error"], code: str, message: str) -> None:
        message = printable(message)
        if not self._quiet or code in PER_RANK_NOTICES:
            logger.log(getattr(logging, level.upper()), "%s: %s", self.job, message)
        self.event(wire.Notice(**self._here(), level=level, code=code, message=message))


class ConsoleLog:
    """Logs to stderr while a session is open, unless the script configures logging."""

    def __init__(self) -> None:
        self._sessions, self._level = 0, logging.NOTSET
        self._handler: logging.Handler | None = None

    def open(self) -> None:
        """Open for one more session."""
        self._sessions += 1
        logger.addFilter(_escape_message)
        if logger.hasHandlers():
            return
        self._handler, self._level = logging.StreamHandler(), logger.level
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT, supervisor_channel.LOG_TIME))
        self._handler.addFilter(lambda _: not logging.getLogger().handlers)  # which show it as well
        logger.addHandler(self._handler)
        logger.setLevel(self._level or logging.INFO)

    def close(self) -> None:
        """Close for one session; after the last, restore the logger."""
        self._sessions -= 1
        if not self._sessions:
            logger.removeFilter(_escape_message)
        if self._handler is not None and not self._sessions:
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)
            self._handler = None


console_log = ConsoleLog()


def _escape_message(record: logging.LogRecord) -> bool:
    """Escape control characters in a message: it may have a name or value from a store."""
    if not (message := record.getMessage()).isprintable():
        record.msg, record.args = escaped(message), None
    return True


def _reported_from_seconds(kind: StallKind, iteration_seconds: float) -> float:
    """Return the length from which a stall is reported as an event; samples hold all stalls."""
    if kind == "data_fetch":
        return max(0.05, 0.2 * iteration_seconds)
    return max(0.005, 0.01 * iteration_seconds)
