"""What a session has to say to the server, in the protocol's words, from where training stands."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from holdfast.pacing import Controller, Plan, Profile
from holdfast.pacing.policy import duration, percent
from holdfast.protocol import messages
from holdfast.protocol.messages import OrderState, RestoreMode, StallKind, parse_checkpoint_id
from holdfast.server_link.connection import OfflineConnection, ServerConnection
from holdfast.store import Lineage
from holdfast.system import supervisor_channel
from holdfast.telemetry import fingerprint
from holdfast.telemetry.iteration_clock import DATA_STALLS, Iteration

logger = logging.getLogger("holdfast")

NOT_TOLD_ELSEWHERE = ("internal", "ranks")
"""Notices that are about one rank of several."""
TOLD_RATIO = 2.0
"""The factor by which an interval has to change for another line in the log at INFO."""
NEARLY = 1.1
"""A predicted overhead of at most so many budgets is rounding."""
DURABLE_EVERY_SECONDS = 60.0
"""The least time between two lines in the log, at INFO, that say that a checkpoint is durable."""
LOG_FORMAT = "%(asctime)s %(levelname)s holdfast: %(message)s"
PACED_EVERY_SECONDS = 5.0
"""How often the measured overhead is told while the plan does not change."""


@dataclass(slots=True)
class TrainingPosition:
    """Where training stands. The background threads read it to say when something happened."""

    iteration: int = 0
    lineage: int = 1


class Reporter:
    """Writes events to the link, and those that a person must not miss to the log as well.

    A `quiet` one logs what went wrong with it alone: the rest is told by another rank of the job.
    """

    def __init__(
        self,
        job: str,
        standing: TrainingPosition,
        *,
        quiet: bool = False,
        owner: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.job, self.standing, self._quiet = job, standing, quiet
        self._owner, self._labels = owner, dict(labels or {})
        self.link: ServerConnection | OfflineConnection = OfflineConnection()
        self._paced_at = 0.0
        self._told_interval: int | None = None
        self._durable_told_at = -math.inf

    @property
    def heard(self) -> bool:
        """There is a server to report to: what is told in every iteration need not be put together without one."""
        return self.link.heard

    def event(self, event: messages.Event) -> None:
        self.link.event(event)

    def _here(self) -> dict[str, Any]:
        """When and where in training an event happens."""
        return {"at": time.time(), "iteration": self.standing.iteration, "lineage": self.standing.lineage}

    def sample(self, measured: Iteration, metrics: dict[str, float]) -> None:
        self.link.sample(measured, metrics)

    def lineage_began(self, lineage: Lineage, *, at: float | None = None) -> None:
        self.event(
            messages.LineageStarted(
                at=time.time() if at is None else at,
                lineage=lineage.number,
                iteration=lineage.iteration,
                parent=lineage.parent,
                order=lineage.order,
                left=lineage.left,
                origin=lineage.origin,
            )
        )

    def attempt_began(
        self,
        resumed_from: str | None,
        versions: dict[str, str],
        committed: list[str],
        world_size: int,
        pinned: Iterable[str] = (),
    ) -> None:
        self.event(
            messages.AttemptStarted(
                **self._here() | {"at": supervisor_channel.attempt_began_at()},
                resumed_from=resumed_from,
                host=platform.node(),
                pid=os.getpid(),
                world_size=world_size,
                supervised="HOLDFAST_SUPERVISED" in os.environ,
                previous_exit=os.environ.get(supervisor_channel.PREVIOUS_EXIT) or None,
                versions=versions,
                owner=text(self._owner),
                labels={text(key): text(value) for key, value in self._labels.items()},
            )
        )
        self.inventory(committed, pinned)

    def inventory(self, checkpoints: list[str], pinned: Iterable[str]) -> None:
        self.event(messages.Inventory(at=time.time(), checkpoints=checkpoints, pinned=list(pinned)))

    def attempt_ended(self, reason: str) -> None:
        self.event(messages.AttemptFinished(**self._here(), reason=reason))

    def applied(self, version: int) -> None:
        self.event(
            messages.Applied(
                at=time.time(),
                version=version,
                iteration=self.standing.iteration,
                lineage=self.standing.lineage,
            )
        )

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
        """An order moved on; nothing to say of a restore that the script itself asked for.

        `began` is the lineage that it has begun, where that was not here and now.
        """
        if order is None:
            return
        standing = (
            self.standing if began is None else TrainingPosition(iteration=began.iteration, lineage=began.number)
        )
        self.event(
            messages.OrderMoved(
                at=time.time(),
                order=order,
                state=state,
                iteration=standing.iteration,
                lineage=standing.lineage,
                reason=text(reason) if reason else None,
                seconds=seconds,
                safety_checkpoint=safety,
            )
        )

    def restores(self, mode: RestoreMode, reason: str, start_seconds: float | None) -> None:
        self.event(
            messages.Restores(
                **self._here(),
                mode=mode,
                reason=text(reason),
                start_seconds=start_seconds,
            )
        )

    def stalls(self, measured: Iteration) -> None:
        for kind, seconds in measured.stalls.items():
            if seconds >= _worth_a_row_seconds(kind, measured.seconds):
                self.stall(kind, seconds, measured.iteration, measured.lineage)

    def stall(self, kind: StallKind, seconds: float, iteration: int, lineage: int) -> None:
        self.event(
            messages.Stall(at=time.time(), iteration=iteration, lineage=lineage, kind=kind, seconds=seconds)
        )

    def pace(self, controller: Controller, *, changed: bool) -> None:
        now = time.time()
        if not changed and now - self._paced_at < PACED_EVERY_SECONDS:
            return
        self._paced_at = now
        plan, profile = controller.plan, controller.profile
        if changed and plan is not None and not self._quiet:
            self._tell(plan, controller.settings.budget)
        self.event(
            messages.Paced(
                **self._here(),
                policy=plan.policy if plan else controller.settings.policy,
                interval=plan.interval if plan else None,
                budget=controller.settings.budget,
                predicted_overhead=plan.overhead if plan else None,
                measured_overhead=controller.measured_overhead,
                measured_window_iterations=controller.measured_window_iterations,
                reason=plan.reason if plan else "measuring the first iterations",
                profile=_measured(profile) if profile else {},
                spread=controller.spread,
                mtbf_seconds=controller.settings.mtbf_seconds,
            )
        )

    def _tell(self, plan: Plan, budget: float) -> None:
        """Log a new interval; why the policy chose it is on the dashboard, and here at DEBUG."""
        before, now = self._told_interval, plan.interval
        if before == now:
            return
        near = before is not None and now is not None and before / TOLD_RATIO <= now <= before * TOLD_RATIO
        if not near:
            self._told_interval = now
        every = "none for now" if now is None else f"every {now:,} iterations" if now > 1 else "every iteration"
        figures = f"policy {plan.policy}"
        if plan.overhead is not None:
            figures += f", predicted overhead {percent(plan.overhead)}, budget {percent(budget)}"
            if plan.policy != "fixed" and plan.overhead > NEARLY * budget:
                figures += ", until further checkpoints confirm their cost"
        level = logging.DEBUG if near else logging.INFO
        logger.log(level, "%s: checkpoint interval: %s (%s)", self.job, every, figures)
        logger.debug("%s: checkpoint interval: %s", self.job, plan.reason)

    def durable(self, checkpoint: str, seconds: float) -> None:
        """Log that a checkpoint is durable, at most every minute; the server hears of each."""
        if self._quiet:
            return
        level, now = logging.DEBUG, time.monotonic()
        if now - self._durable_told_at >= DURABLE_EVERY_SECONDS:
            level, self._durable_told_at = logging.INFO, now
        iteration, _ = parse_checkpoint_id(checkpoint)
        what = f"checkpoint of iteration {iteration:,} is durable, written in {duration(seconds)}"
        logger.log(level, "%s: %s", self.job, what)

    def damaged(self, checkpoint: str, error: Exception | str, what: str = "damaged and passed over") -> None:
        self.notice("warning", "damaged", f"checkpoint {checkpoint} is {what}: {error}")
        iteration, lineage = parse_checkpoint_id(checkpoint)
        self.event(
            messages.Checkpoint(
                at=time.time(),
                id=checkpoint,
                iteration=iteration,
                lineage=lineage,
                kind="scheduled",
                state="damaged",
                reason=text(str(error)),
            )
        )

    def trained_elsewhere(self, then: dict[str, str]) -> None:
        """Said where a checkpoint was taken under another `then` than training goes on under."""
        if (difference := fingerprint.difference(then, fingerprint.fingerprint())) is not None:
            self.notice("warning", "fingerprint", difference)

    def notice(self, level: Literal["info", "warning", "error"], code: str, message: str) -> None:
        message = text(message)
        if not self._quiet or code in NOT_TOLD_ELSEWHERE:
            logger.log(getattr(logging, level.upper()), "%s: %s", self.job, message)
        self.event(
            messages.Notice(
                **self._here(),
                level=level,
                code=code,
                message=message,
            )
        )


class ConsoleLog:
    """Shows the log on stderr while a session is open, unless the script sets up logging, before or meanwhile."""

    def __init__(self) -> None:
        self._sessions, self._level = 0, logging.NOTSET
        self._handler: logging.Handler | None = None

    def open(self) -> None:
        """A session begins."""
        self._sessions += 1
        if logger.hasHandlers():
            return
        self._handler, self._level = logging.StreamHandler(), logger.level
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT, supervisor_channel.LOG_TIME))
        self._handler.addFilter(lambda _: not logging.getLogger().handlers)  # which show it as well
        logger.addHandler(self._handler)
        logger.setLevel(self._level or logging.INFO)

    def close(self) -> None:
        """A session ends; after the last one the logger is as it was found."""
        self._sessions -= 1
        if self._handler is not None and not self._sessions:
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)
            self._handler = None


console_log = ConsoleLog()


def text(value: str) -> str:
    """As it can be sent: the path in an error of the operating system need not be text."""
    return value.encode(errors="replace").decode()


def _worth_a_row_seconds(kind: StallKind, iteration_seconds: float) -> float:
    """From when a wait is told by itself; the samples hold every wait anyway."""
    if kind in DATA_STALLS:
        return max(0.05, 0.2 * iteration_seconds)
    return max(0.005, 0.01 * iteration_seconds)


def _measured(profile: Profile) -> dict[str, float]:
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
