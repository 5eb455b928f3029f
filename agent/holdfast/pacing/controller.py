"""Decides at each iteration boundary whether a checkpoint starts, and keeps measured overhead in the budget."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from .estimate import Measurement, Observation
from .gap import Gap
from .hysteresis import Hysteresis
from .ledger import WINDOW_ITERATIONS, Ledger
from .planning import plan
from .policy import History, plural
from .profile import Plan, Profile
from .saved import from_json, to_json
from .settings import MAX_BUDGET, Settings

SETTLING_CHECKPOINTS = 3
"""The first checkpoints pay for memory and files they are first to touch: until so many were measured, the plan
follows each new figure freely."""
DECIDING_SPANS = 2


class Controller:
    """The job's pace. Its methods take microseconds and never raise on odd measurements.

    `measured` may be called by another thread; all else belongs to the training thread.
    """

    def __init__(self, settings: Settings, *, warmup_iterations: int = 5, profile_iterations: int = 15) -> None:
        self._settings = settings
        self._warmup_left = warmup_iterations
        self._profile_iterations = profile_iterations
        self._profiled = 0
        self._ledger = Ledger()
        self._gap = Gap(self._ledger)
        self._hysteresis = Hysteresis()
        self._updates: deque[float] = deque(maxlen=31)
        self._checkpoints: tuple[Profile, ...] = ()
        """Of the last checkpoints, newest last; replaced as a whole, so that no lock is needed."""
        self._measured_total = 0
        self._settled_total = 0
        self._cost_seconds: float | None = None
        self._saved: Profile | None = None
        self._plan: Plan | None = None
        self._announce = False
        self._iteration = 0
        self._last_started: int | None = None
        self._judged_at: int | None = None
        self._first_retry = 0
        self._in_flight = False
        self._measurement: Measurement | None = None
        self._replan()

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def plan(self) -> Plan | None:
        """None while iterations and the first checkpoint are being measured."""
        return self._plan

    @property
    def profile(self) -> Profile | None:
        """What was measured or, in a resumed job that has not measured yet, what it knew when it was saved."""
        if not self._checkpoints or not self._profile_complete:
            return self._saved
        seconds = self._ledger.iteration_seconds
        if seconds is None:
            return self._saved
        newest, recent = self._checkpoints[-1], self._checkpoints[-3:]
        return replace(
            newest,
            iteration_seconds=seconds,
            update_seconds=min(median(self._updates), seconds) if self._updates else 0.0,
            snapshot_seconds=median(each.snapshot_seconds for each in recent),
            persist_seconds=median(each.persist_seconds for each in recent),
            cost_seconds=self._cost_seconds,
        )

    @property
    def interval_seconds(self) -> float:
        """What an interval takes; 0 while that is not known."""
        profile = self.profile
        if profile is None or self._plan is None or self._plan.interval is None:
            return 0.0
        return self._plan.interval * profile.iteration_seconds

    @property
    def measured_overhead(self) -> float | None:
        """Stalls and interference over the time without them; None until one interval has passed."""
        return self._measurement.overhead if self._measurement else None

    @property
    def measured_window_iterations(self) -> int:
        return self._measurement.iterations if self._measurement else 0

    def change(self, settings: Settings) -> None:
        """An operator's new settings: in force at the next `due`, announced by the next `observe`."""
        if settings == self._settings:
            return
        self._settings = settings
        self._gap.abandon()
        self._new_interval()
        self._replan()
        self._announce = True

    def observe(self, seen: Observation) -> Plan | None:
        """Account for a finished iteration. The new plan, where this changed it."""
        self._iteration = seen.iteration
        self._in_flight = seen.in_flight
        if self._last_started is None:
            self._last_started = seen.iteration - 1
        if self._warmup_left > 0:
            self._warmup_left -= 1
        else:
            self._account(seen)
        if self._announce:
            self._announce = False
            return self._plan
        return None

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint should start at the end of `iteration`."""
        if self._plan is None:
            return self._profile_complete and not self._in_flight and iteration >= self._first_retry
        if self._plan.interval is None or self._gap.open or self._last_started is None:
            return False
        return iteration - self._last_started >= self._plan.interval

    def started(self, iteration: int) -> None:
        """A checkpoint was started at the end of `iteration`, whoever asked for it."""
        # A first checkpoint that never becomes durable (a full disk) is tried again, ever more rarely.
        self._first_retry = iteration + max(self._profile_iterations, 2 * (iteration - (self._last_started or 0)))
        self._last_started = iteration
        self._judged_at = None
        self._ledger.started()

    def measured(
        self,
        snapshot_seconds: float,
        persist_seconds: float,
        checkpoint_bytes: int,
        device_copy_seconds: float = math.inf,
        memory_used_bytes: int = 0,
        memory_total_bytes: int = 0,
    ) -> None:
        """A checkpoint has become durable, and this is what it took."""
        if not (_is_duration(snapshot_seconds) and _is_duration(persist_seconds)):
            return
        one = Profile(
            iteration_seconds=math.nan,
            snapshot_seconds=snapshot_seconds,
            persist_seconds=persist_seconds,
            checkpoint_bytes=checkpoint_bytes,
            device_copy_seconds=device_copy_seconds if device_copy_seconds >= 0 else math.inf,
            memory_used_bytes=memory_used_bytes,
            memory_total_bytes=memory_total_bytes,
        )
        self._checkpoints = (*self._checkpoints[-2:], one)
        self._measured_total += 1

    def rewound(self, iteration: int) -> None:
        """Training was taken back in place to the checkpoint of `iteration`, and goes on from there."""
        self._iteration = self._last_started = iteration
        self._first_retry = 0
        self._judged_at = None
        self._gap.abandon()
        self._ledger.restart()
        # The first iteration after a restore finds cold caches and a restarted loader.
        self._warmup_left = max(self._warmup_left, 1)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed job should know, fit for JSON."""
        profile = self.profile
        return {
            "version": 1,
            "settings": asdict(self._settings),
            "interval": self._plan.interval if self._plan else None,
            "profile": None if profile is None else to_json(profile),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved interval until this machine was measured. A state that says nothing is ignored."""
        saved = from_json(state.get("profile"))
        if saved is None:
            return
        self._saved, self._cost_seconds = saved, saved.cost_seconds
        self._replan()
        interval = state.get("interval")
        if state.get("settings") == asdict(self._settings) and isinstance(interval, int) and interval > 0:
            self._set_interval(interval, f"every {plural(interval)}, as before the restart, until measured again")
        self._announce = True

    @property
    def _profile_complete(self) -> bool:
        idle = self._ledger.idle_iterations
        return idle >= self._profile_iterations or self._profiled >= 4 * self._profile_iterations

    @property
    def _history(self) -> History:
        return History(iterations=self._iteration)

    def _account(self, seen: Observation) -> None:
        self._profiled += 1
        self._ledger.add(seen)
        if seen.update_seconds is not None and _is_duration(seen.update_seconds):
            self._updates.append(seen.update_seconds)
        self._gap.passed()
        if self._measured_total != self._settled_total and self._profile_complete:
            self._settle()
        if self._plan is not None:
            self._judge_when_complete()

    def _settle(self) -> None:
        """A checkpoint was measured: the first few set the plan outright."""
        if not self._ledger.shows_cost:
            return  # its iterations were undone by a restore: without them it would look free
        settling = self._settled_total < SETTLING_CHECKPOINTS
        self._settled_total = self._measured_total
        if settling:
            # What it seems to cost, not only what is proven: the budget is a ceiling, also while little is known.
            # A resumed job learnt its cost from more checkpoints than these, and may learn of a lower one later.
            known = self._saved.cost_seconds if self._saved is not None else None
            self._cost_seconds = max(self._ledger.recent(self._ledger.slowdown()).cost_seconds, known or 0.0)
            self._replan()

    def _judge_when_complete(self) -> None:
        assert self._plan is not None
        interval = self._plan.interval
        since = self._iteration - (self._judged_at if self._judged_at is not None else self._last_started or 0)
        if since < (interval or WINDOW_ITERATIONS) or not self._ledger.complete:
            return
        self._judged_at = self._iteration
        slowdown = self._ledger.slowdown()
        recent = self._measurement = self._ledger.recent(slowdown)
        if self._ledger.spans == 0:
            return
        self._cost_seconds = recent.cost_seconds
        # An ordered interval is kept whatever it costs; paused needs no judging.
        if interval is None or self._settings.every is not None or self._ledger.spans < DECIDING_SPANS:
            return
        if recent.iterations < WINDOW_ITERATIONS:
            return
        if not self._gap.open_if_needed(interval, self._settings.budget):
            self._decide(interval, recent, self._ledger.settled(slowdown))

    def _decide(self, interval: int, recent: Measurement, settled: Measurement) -> None:
        unlimited = self._planned(recent.cautious_cost_seconds, budget=MAX_BUDGET)
        decided = self._hysteresis.decide(
            interval,
            self._settings.budget,
            recent,
            settled,
            self._wanted,
            pipeline=(unlimited and unlimited.interval) or 1,
        )
        if decided == interval:
            return
        better = self._planned(recent.cost_seconds)
        if better is not None:
            self._cost_seconds = better.cost_seconds
        if decided > interval:
            self._ledger.forget()
        self._judged_at = None
        self._set_interval(decided, "")
        self._announce = True

    def _wanted(self, cost_seconds: float) -> int:
        made = self._planned(cost_seconds)
        return made.interval if made is not None and made.interval is not None else 1

    def _planned(self, cost_seconds: float | None, *, budget: float | None = None) -> Plan | None:
        """The policy's own plan for this cost of a checkpoint."""
        profile = self.profile
        if profile is None:
            return None
        settings = self._settings if budget is None else replace(self._settings, budget=budget)
        return plan(replace(profile, cost_seconds=cost_seconds), settings, self._history)

    def _replan(self) -> None:
        """Ask the policy anew, without regard to the interval so far."""
        made = plan(self.profile, self._settings, self._history)
        settled = self.profile is not None or self._settings.paused or self._settings.every is not None
        before, self._plan = self._plan, made if settled else None
        if before is None or self._plan is None or before.interval != self._plan.interval:
            self._new_interval()
            self._announce = self._plan is not None

    def _set_interval(self, interval: int, reason: str) -> None:
        """Keep to `interval` where hysteresis or the past says so, with the policy's figures for it."""
        held = plan(self.profile, replace(self._settings, every=interval))
        wanted = self._planned(self._cost_seconds)
        policy = wanted.policy if wanted is not None else self._settings.policy
        if not reason and wanted is not None:
            step = "" if wanted.interval == interval else f"; on the way there, every {plural(interval)} now"
            reason = wanted.reason + step
        self._plan = replace(held, policy=policy, reason=reason)

    def _new_interval(self) -> None:
        self._ledger.forget()
        self._hysteresis.reset()
        self._judged_at = None


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
