"""Decides at each iteration boundary whether a checkpoint starts, and keeps measured overhead in the budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from holdfast.pacing.estimator import Measurement, Observation
from holdfast.pacing.failures import History, JobHistory
from holdfast.pacing.interval_cost import pipeline_interval, predicted_stall
from holdfast.pacing.overhead_samples import CLEAR_ERRORS, WINDOW_ITERATIONS, Gap, Ledger, Measured
from holdfast.pacing.planner import plan
from holdfast.pacing.policy import plural
from holdfast.pacing.profile import Plan, Profile, from_json, to_json
from holdfast.pacing.settings import Settings, settings_from_json

SETTLING_CHECKPOINTS = 3
"""The first checkpoints pay for memory and files they are first to touch: until so many were measured, the plan
follows each new figure freely."""
FIRST_SECONDS = 60.0
"""Training time after which the first checkpoint no longer waits for its memory, and within which a profile of
long iterations is complete."""
FEWEST_IDLE = 3
"""Idle iterations that a profile needs, however long they take."""
DECIDING_SPANS = 2
BLIND_TO_LIFE = frozenset({"checkfreq", "fixed"})
"""Policies that look at costs alone."""
WORTH_FOLLOWING = 0.2
"""By which share another failure rate must change the interval: near the optimum it matters little."""
WORTH_CHANGING = 0.1
MUCH_DEARER = 1.5
"""Factor by which two checkpoints in a row must call for a longer interval to have it at once."""
LOW_WINDOWS, OVER_WINDOWS = 3, 3
"""Verdicts in a row below half the budget, or over it within their noise: together they are more than noise."""
LONG_RUN_WINDOWS = 6
"""Verdicts over the budget in the long run before the average, a rare expensive checkpoint included, decides."""


class Controller:
    """The job's pace. Its methods take microseconds and never raise on odd measurements."""

    def __init__(
        self,
        settings: Settings,
        *,
        world_size: int = 1,
        slots: int = 1,
        warmup_iterations: int = 5,
        profile_iterations: int = 15,
    ) -> None:
        """`slots`: how many checkpoints may be under way at the same time."""
        self._settings = settings
        self.life = JobHistory(world_size)
        self._planned_with = self.life.history
        """What was known of the job when its interval was chosen."""
        self._warmup_left = warmup_iterations
        self._profile_iterations = profile_iterations
        self._profiled, self._profiled_seconds = 0, 0.0
        self.trained_seconds = 0.0
        """By this attempt, in finished iterations."""
        self._ledger = Ledger()
        self._known = Measured(self._ledger, max(1, slots))
        self.in_flight = max(1, slots)
        """How many checkpoints may be under way at the same time."""
        self._gap = Gap(self._ledger)
        self._over_windows = self._low_windows = self._long_run_windows = 0
        self._settled = 0
        """Checkpoints that the plan takes into account."""
        self._plan: Plan | None = None
        self._announce = False
        self._iteration = 0
        self._last_started: int | None = None
        self._judged_at: int | None = None
        self._first_retry = 0
        self._has_started = False
        """A checkpoint was started by this attempt."""
        self._busy = False
        """A checkpoint overlapped the newest iteration."""
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
        return self._known.profile if self._profile_complete else self._known.saved

    @property
    def spread(self) -> dict[str, float]:
        """By how much what was measured scatters, by field of the profile: median deviations from the median."""
        return self._known.spread

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
        self._busy = seen.in_flight
        self.life.trained(seen.seconds)
        if self._last_started is None:
            self._last_started = seen.iteration - 1
        if math.isfinite(seen.seconds) and seen.seconds > 0:
            self.trained_seconds += seen.seconds
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
            if not self._has_started:
                return True  # without a profile: until there is a checkpoint a crash loses everything
            return self._profile_complete and not self._busy and iteration >= self._first_retry
        if self._plan.interval is None or self._gap.open or self._last_started is None:
            return False
        return iteration - self._last_started >= self._plan.interval

    def started(self, iteration: int) -> None:
        """A checkpoint was started at the end of `iteration`, whoever asked for it."""
        # A first checkpoint that never becomes durable (a full disk) is tried again, ever more rarely.
        self._first_retry = iteration + max(self._profile_iterations, 2 * (iteration - (self._last_started or 0)))
        self._last_started = iteration
        self._has_started = True
        self._judged_at = None
        if self._warmup_left == 0:  # during warm-up there is no baseline to compare its cost with
            self._ledger.started()

    def measured(self, taken: Profile) -> None:
        """A checkpoint has become durable: the fields of `taken` that concern it count."""
        self._first_retry = 0
        if self._plan is None and self._ledger.spans == 0:
            return  # started during warm-up: the next one is measured
        self._known.checkpoint(taken)

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
            "settings": {name: getattr(self._settings, name) for name in Settings.__dataclass_fields__},
            "interval": self._plan.interval if self._plan else None,
            "profile": None if profile is None else to_json(profile),
            "life": self.life.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved interval until this machine was measured. A state that says nothing is ignored."""
        self.life.load_state_dict(state.get("life"))
        saved = from_json(state.get("profile"))
        if saved is None:
            return
        self._known.saved, self._known.cost_seconds = saved, saved.cost_seconds
        self._replan()
        interval = state.get("interval")
        same = settings_from_json(state.get("settings")) == self._settings
        if same and isinstance(interval, int) and interval > 0:
            self._set_interval(interval, f"every {plural(interval)}, as before the restart, until measured again")
        self._announce = True

    @property
    def _profile_complete(self) -> bool:
        idle = self._ledger.idle_iterations
        if idle >= self._profile_iterations or self._profiled >= 4 * self._profile_iterations:
            return True
        return idle >= FEWEST_IDLE and self._profiled_seconds >= FIRST_SECONDS

    def _account(self, seen: Observation) -> None:
        self._profiled += 1
        self._profiled_seconds += seen.seconds
        self._ledger.add(seen)
        self._known.update(seen.update_seconds)
        self._gap.passed()
        if self._known.checkpoints != self._settled and self._profile_complete:
            self._settle()
        if self._plan is not None:
            self._judge_when_complete()

    def _settle(self) -> None:
        """A checkpoint was measured: the first few set the plan outright, two that are much dearer raise it."""
        if not self._ledger.shows_cost:
            return  # its iterations were undone by a restore: without them it would look free
        settling = self._settled < SETTLING_CHECKPOINTS
        self._settled = self._known.checkpoints
        self._choose_mode()
        recent = self._ledger.recent(self._ledger.slowdown())
        if settling:
            # What it seems to cost, not only what is proven: the budget is a ceiling, also while little is known.
            # A resumed job learnt its cost from more checkpoints than these, and may learn of a lower one later.
            known = self._known.saved.cost_seconds if self._known.saved is not None else None
            self._known.cost_seconds = max(recent.cost_seconds, known or 0.0)
            self._replan()
        elif self._plan is not None and self._plan.interval is not None and self._may_move and self._ledger.paired:
            raised = self._wanted(recent.cautious_cost_seconds)
            if raised > MUCH_DEARER * self._plan.interval and _is_over(recent, self._settings.budget):
                self._move(raised, recent)

    @property
    def _may_move(self) -> bool:
        """Enough was measured to judge the interval, and no order holds it."""
        return self._settings.every is None and self._ledger.spans >= DECIDING_SPANS

    def _judge_when_complete(self) -> None:
        assert self._plan is not None
        interval = self._plan.interval
        since = self._iteration - (self._judged_at if self._judged_at is not None else self._last_started or 0)
        if since < (interval or WINDOW_ITERATIONS) or not self._ledger.complete:
            return
        self._judged_at = self._iteration
        self._follow_life()
        slowdown = self._ledger.slowdown()
        recent = self._measurement = self._ledger.recent(slowdown)
        if self._ledger.spans == 0:
            return
        self._known.cost_seconds = recent.cost_seconds
        if interval is None or not self._may_move or recent.iterations < WINDOW_ITERATIONS:
            return
        profile = self.profile
        assert profile is not None
        pipeline = pipeline_interval(replace(profile, cost_seconds=recent.cautious_cost_seconds))
        if pipeline > interval * (1 + WORTH_CHANGING):
            self._move(pipeline, recent)
        elif not self._gap.open_if_needed(interval, self._settings.budget):
            self._move(self._decided(interval, recent, self._ledger.settled(slowdown)), recent)

    def _decided(self, interval: int, recent: Measurement, settled: Measurement) -> int:
        """The interval from here on: up at once where noise cannot explain the overhead, down where it is low.

        Up where the newest window is over the budget beyond its own noise, or three in a row are within it, or the
        long run has been for some time. Down where three windows in a row are clearly below half the budget.
        """
        budget = self._settings.budget
        self._long_run_windows = self._long_run_windows + 1 if _is_over(settled, budget) else 0
        self._over_windows = self._over_windows + 1 if recent.overhead > budget else 0
        raised = interval
        if self._over_windows >= OVER_WINDOWS:
            raised = max(raised, self._wanted(recent.cost_seconds))
        if _is_over(recent, budget):
            # The typical cost of the window: one slow checkpoint among three is not yet a reason, two are.
            raised = max(raised, self._wanted(recent.cautious_cost_seconds))
        if self._long_run_windows >= LONG_RUN_WINDOWS:
            raised = max(raised, self._wanted(settled.mean_cost_seconds))
        if raised > interval:
            return raised
        low = min(each.overhead + CLEAR_ERRORS * each.error for each in (recent, settled)) < budget / 2
        self._low_windows = self._low_windows + 1 if low else 0
        lowered = self._wanted(recent.cost_seconds)
        is_lower = self._low_windows >= LOW_WINDOWS and lowered <= interval * (1 - WORTH_CHANGING)
        return lowered if is_lower else interval

    def _move(self, decided: int, recent: Measurement) -> None:
        assert self._plan is not None
        assert self._plan.interval is not None
        if decided == self._plan.interval:
            return
        better = self._planned(recent.cost_seconds)
        if better is not None:
            self._known.cost_seconds = better.cost_seconds
        if decided > self._plan.interval:
            self._ledger.forget()
            self._over_windows = self._low_windows = self._long_run_windows = 0
        self._judged_at = None
        self._set_interval(decided, "")
        self._announce = True

    def _wanted(self, cost_seconds: float) -> int:
        made = self._planned(cost_seconds)
        return made.interval if made is not None and made.interval is not None else 1

    def _planned(self, cost_seconds: float | None, history: History | None = None) -> Plan | None:
        """The policy's own plan for this cost of a checkpoint."""
        profile = self.profile
        if profile is None:
            return None
        return plan(replace(profile, cost_seconds=cost_seconds), self._settings, history or self.life.history)

    def _follow_life(self) -> None:
        """Failures came, or stayed away: where the same costs ask for another interval now, take it."""
        if self._settings.policy in BLIND_TO_LIFE or self._settings.every is not None or self._settings.paused:
            return
        then, now = (
            self._planned(self._known.cost_seconds, each) for each in (self._planned_with, self.life.history)
        )
        before, after = then and then.interval, now and now.interval
        if before == after or (before and after and abs(after - before) <= WORTH_FOLLOWING * before):
            return
        self._replan()

    def _choose_mode(self) -> None:
        """Where to copy to first: memory that there was may be gone, and a copy that was short may be long."""
        profile = self.profile if self._known.on_device else None
        if self._plan is None or profile is None:
            return
        mode, _ = predicted_stall(profile)
        if mode != self._plan.mode:
            self._plan = replace(self._plan, mode=mode)
            self._announce = True

    def _replan(self) -> None:
        """Ask the policy anew, without regard to the interval so far."""
        self._planned_with = self.life.history
        made = plan(self.profile, self._settings, self._planned_with)
        settled = self.profile is not None or self._settings.paused or self._settings.every is not None
        before, self._plan = self._plan, replace(made, in_flight=self.in_flight) if settled else None
        if before is None or self._plan is None or before.interval != self._plan.interval:
            self._new_interval()
            self._announce = self._plan is not None

    def _set_interval(self, interval: int, reason: str) -> None:
        """Keep to `interval` where hysteresis or the past says so, with the policy's figures for it."""
        held = plan(self.profile, replace(self._settings, every=interval), self.life.history)
        wanted = self._planned(self._known.cost_seconds)
        policy = wanted.policy if wanted is not None else self._settings.policy
        if not reason and wanted is not None:
            reason = wanted.reason
        self._plan = replace(held, policy=policy, reason=reason, in_flight=self.in_flight)

    def _new_interval(self) -> None:
        self._ledger.forget()
        self._over_windows = self._low_windows = self._long_run_windows = 0
        self._judged_at = None


def _is_over(measured: Measurement, budget: float) -> bool:
    """Over the budget by more than its own noise."""
    return measured.overhead - CLEAR_ERRORS * measured.error > budget
