"""The controller: decides at each iteration boundary whether a checkpoint starts, within the overhead budget.

One module, since all of its decisions read the same few measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from holdfast.pacing.estimator import Observation, OverheadEstimate, SlowdownEstimate
from holdfast.pacing.failures import JobHistory
from holdfast.pacing.interval_cost import pipeline_interval, predicted_stall, write_budget, write_interval
from holdfast.pacing.overhead_samples import (
    CLEAR_ERRORS,
    PROBE_IDLE,
    WINDOW_ITERATIONS,
    BaselineProbe,
    OverheadSamples,
    ProfileSamples,
)
from holdfast.pacing.planner import plan
from holdfast.pacing.policy import IntervalPlan, Profile, SnapshotMode, profile_from_json, profile_to_json
from holdfast.pacing.settings import MAX_INTERVAL, PacingSettings, settings_to_json
from holdfast.units import duration, format_iterations, percent

SETTLING_CHECKPOINTS = 3
"""The first checkpoints allocate memory and files; each of so many sets a new interval without hysteresis."""
FIRST_SECONDS = 60.0
"""Training time after which the first checkpoint no longer waits for its memory, and after which a profile of long
iterations is complete."""
MIN_PROFILE_IDLE = 3
"""Idle iterations that a profile needs, however long they take."""
MIN_CHECKPOINTS = 2
"""Checkpoints since the last change from which the interval is judged."""
UNAWARE_POLICIES = frozenset({"checkfreq", "fixed", "goodput", "young-daly"})
"""Policies that ignore the progress of training: no loss is read for them."""
SPREAD_POLICIES = frozenset({"coci"})
"""Policies that keep the write budget over the whole job, not at each time."""
WANTED_CHANGE = 0.2
"""Least relative change of the wanted interval, or of the mean time that it depends on, that counts."""
MIN_CHANGE = 0.1
"""Minimum relative change of the interval for any other reason."""
RAISE_EARLY_FACTOR = 1.5
"""Increase of the interval for which two expensive checkpoints in a row suffice."""
LEAST_RAISE = 0.25
"""Relative increase of an interval that grows, at least: room for noise, so that it rarely grows again."""
OVER_CHECKPOINTS, LONG_OVER_CHECKPOINTS = 3, 6
"""Checkpoints in a row over the budget, within noise, after which the typical one sets the interval; and the mean
one, if there are more of them than a window holds."""
LONG_RUN_WINDOWS = 6
"""Windows in a row over the budget on average, after which rare expensive checkpoints count."""


class Controller:
    """Chooses the interval of one job from its measurements. Its methods take microseconds and never raise."""

    def __init__(
        self,
        settings: PacingSettings,
        *,
        world_size: int = 1,
        max_in_flight: int = 1,
        total_iterations: int | None = None,
        warmup_iterations: int = 5,
        profile_iterations: int = 15,
    ) -> None:
        """Begin without measurements.

        Args:
            max_in_flight: how many checkpoints may be under way at the same time.
            total_iterations: how many iterations the job is to have; `None` if unknown.
        """
        self._settings = settings
        self.job_history = JobHistory(world_size, total_iterations)
        self._planned_with = self.job_history.history
        """The failure history from which the interval was chosen."""
        self._planned_seconds: float | None = None
        """The mean time of an iteration from which it was chosen, which limits the unsaved work."""
        self._warmup_left = warmup_iterations
        self._profile_iterations = profile_iterations
        self._profiled, self._profiled_seconds = 0, 0.0
        self.trained_seconds = 0.0
        """Time in finished iterations of this attempt."""
        self._samples = OverheadSamples()
        self.max_in_flight = max(1, max_in_flight)
        self._measured = ProfileSamples(self._samples, self.max_in_flight)
        self._probe = BaselineProbe(self._samples)
        self._over_checkpoints = self._long_run_windows = 0
        self._low_windows = LowWindows()
        self._settled = 0
        """Number of measured checkpoints that the plan takes into account."""
        self._plan: IntervalPlan | None = None
        self.mode: SnapshotMode = "cpu"
        """Where the next snapshot is copied to first (Algorithm 1 of CheckFreq)."""
        self._announce = False
        self._iteration = 0
        self._iteration_seconds: float | None = None
        """Duration of an iteration; `None`: to be computed from the samples."""
        self._last_started: int | None = None
        self._judged_at: int | None = None
        self._first_retry = 0
        self._has_started = False
        self._busy = False
        """A checkpoint overlapped the newest iteration."""
        self._newest: OverheadEstimate | None = None
        self._replan()

    @property
    def total_iterations(self) -> int | None:
        """How many iterations the script says that the job is to have."""
        return self.job_history.total_iterations

    @property
    def settings(self) -> PacingSettings:
        return self._settings

    @property
    def plan(self) -> IntervalPlan | None:
        """`None` while iterations and the first checkpoint are measured."""
        return self._plan

    @property
    def profile(self) -> Profile | None:
        """The measured profile or, until it is complete, the one from the checkpoint that was resumed."""
        return self._measured.profile if self._profile_complete else self._measured.saved

    @property
    def spread(self) -> dict[str, float]:
        """Median absolute deviation of the measurements, by field of the profile."""
        return self._measured.spread

    @property
    def write_budget(self) -> float | None:
        """The write budget in force, in bytes per second; `None` until the size of a checkpoint is known."""
        profile = self.profile
        return self._settings.write_bytes_per_second if profile is None else write_budget(profile, self._settings)

    @property
    def measured_overhead(self) -> float | None:
        """(time with checkpoints / time without) - 1 in the newest window; `None` before the first interval."""
        return self._newest.overhead if self._newest else None

    @property
    def measured_window_iterations(self) -> int:
        return self._newest.iterations if self._newest else 0

    @property
    def follows_losses(self) -> bool:
        """Whether the policy may use the losses that the script logs."""
        return self._settings.policy not in UNAWARE_POLICIES

    def change(self, settings: PacingSettings) -> None:
        """Apply an operator's settings: in force at the next `due`, announced by the next `observe`."""
        if settings == self._settings:
            return
        self._settings = settings
        self._probe.stop()
        self._restart_judging()
        self._replan()
        self._announce = True

    def observe(self, *seen: Observation) -> IntervalPlan | None:
        """Account for the iterations finished since the last call; return the plan if it changed."""
        self._iteration, self._iteration_seconds = seen[-1].iteration, None
        self._busy = seen[-1].in_flight
        if self._last_started is None:
            self._last_started = seen[0].iteration - 1
        seconds = math.fsum(each.seconds for each in seen if math.isfinite(each.seconds) and each.seconds > 0)
        self.trained_seconds += seconds
        self.job_history.trained(seen[-1].iteration, seconds)
        warm = min(self._warmup_left, len(seen))
        self._warmup_left -= warm
        if warm < len(seen):
            self._account(seen[warm:])
        if self._announce:
            self._announce = False
            return self._plan
        return None

    def due(self, iteration: int, waited_seconds: float = 0.0, *, ahead: int = 0) -> bool:
        """Return whether a checkpoint should start at the end of `iteration`.

        Args:
            iteration: the iteration that ends then.
            waited_seconds: time since the last checkpoint began, or since the start.
            ahead: how many iterations from now it ends; a time interval is compared with the expected time then.
        """
        if self._plan is None:
            if not self._has_started:
                return True  # before the first checkpoint a crash loses everything
            return self._profile_complete and not self._busy and iteration >= self._first_retry
        every = self._settings.every
        if isinstance(every, timedelta):
            left = every.total_seconds() - waited_seconds
            return not self._settings.paused and left <= (ahead and ahead * self._expected_iteration_seconds)
        if self._plan.interval is None or self._probe.is_active or self._last_started is None:
            return False
        return iteration - self._last_started >= self._plan.interval

    def started(self, iteration: int) -> None:
        """Record that a checkpoint started at the end of `iteration`, for whatever reason."""
        # A first checkpoint that fails (full disk) is tried again, with growing distance.
        self._first_retry = iteration + max(self._profile_iterations, 2 * (iteration - (self._last_started or 0)))
        self._last_started = iteration
        self._has_started = True
        self.job_history.began_checkpoint()
        self._judged_at = None
        if self._warmup_left == 0:  # during warm-up there is no baseline to compare its cost with
            self._samples.started()

    def measured(self, taken: Profile) -> None:
        """Record the measurements of a checkpoint that became durable."""
        self._first_retry = 0
        if self._plan is None and self._samples.spans == 0:
            return  # started during warm-up: the next one is measured
        self._measured.checkpoint(taken)
        if taken.memory_total_bytes > 0 and (profile := self._measured.profile) is not None:
            self.mode, _ = predicted_stall(profile)

    def restored(self, iteration: int) -> None:
        """Continue from `iteration` after a restore in place."""
        self._iteration = self._last_started = iteration
        self._first_retry = 0
        self._judged_at = None
        self._probe.stop()
        self._samples.restart()
        # The first iteration after a restore has cold caches and a restarted loader.
        self._warmup_left = max(self._warmup_left, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job needs, as JSON types."""
        profile = self.profile
        return {
            "version": 1,
            "settings": settings_to_json(self._settings),
            "interval": self._plan.interval if self._plan else None,
            "profile": None if profile is None else profile_to_json(profile),
            "job_history": self.job_history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved interval until this machine is measured; an invalid state is ignored."""
        self.job_history.load_state_dict(state.get("job_history"))
        saved = profile_from_json(state.get("profile"))
        if saved is None:
            return
        self._measured.saved, self._measured.cost_seconds = saved, saved.cost_seconds
        self._replan()
        interval = state.get("interval")
        same = state.get("settings") == settings_to_json(self._settings)
        if same and self._settings.every is None and isinstance(interval, int) and interval > 0:
            reason = f"every {format_iterations(interval)}, as before the restart, until measured again"
            self._set_interval(interval, reason)
        self._announce = True

    @property
    def _expected_iteration_seconds(self) -> float:
        """0 while unknown."""
        if self._iteration_seconds is None:
            self._iteration_seconds = self._samples.iteration_seconds or 0.0
        return self._iteration_seconds

    @property
    def _profile_complete(self) -> bool:
        idle = self._samples.idle_iterations
        if idle >= self._profile_iterations or self._profiled >= 4 * self._profile_iterations:
            return True
        return idle >= MIN_PROFILE_IDLE and self._profiled_seconds >= FIRST_SECONDS

    def _account(self, seen: Sequence[Observation]) -> None:
        self._profiled += len(seen)
        self._profiled_seconds += sum(each.seconds for each in seen)
        self._samples.add(seen)
        self._measured.update(seen)
        self._probe.advance(len(seen))
        if self._measured.checkpoints != self._settled and self._profile_complete:
            self._settle()
        if self._plan is not None:
            self._judge_when_complete()

    def _settle(self) -> None:
        """Take a new checkpoint into account: the first few set the plan, two very expensive ones raise it."""
        if not self._samples.shows_cost:
            return  # a restore undid its iterations: without them it would look free
        settling = self._settled < SETTLING_CHECKPOINTS
        self._settled = self._measured.checkpoints
        recent = self._samples.recent(self._samples.slowdown())
        if settling:
            # The highest likely cost: the budget is a ceiling, also while little is measured.
            # A resumed job knows its cost from more checkpoints than these, and may lower it later.
            saved = self._measured.saved.cost_seconds if self._measured.saved is not None else None
            self._measured.cost_seconds = max(recent.upper_cost_seconds, saved or 0.0)
            self._replan()
        elif (
            self._plan is not None and self._plan.interval is not None and self._may_judge and self._samples.paired
        ):
            raised = self._wanted(recent.cautious_cost_seconds)
            if raised > RAISE_EARLY_FACTOR * self._plan.interval and _is_over(recent, self._settings.budget):
                self._move(raised, recent)

    @property
    def _may_judge(self) -> bool:
        return self._settings.every is None and self._samples.checkpoints >= MIN_CHECKPOINTS

    def _judge_when_complete(self) -> None:
        """Once an interval, compare the newest window with the budget."""
        assert self._plan is not None
        interval = self._plan.interval
        since = self._iteration - (self._judged_at if self._judged_at is not None else self._last_started or 0)
        if since < (interval or WINDOW_ITERATIONS) or not self._samples.complete or self._probe.is_active:
            return
        self._judged_at = self._iteration
        self._follow_changes()
        interval = self._plan.interval
        slowdown = self._samples.slowdown()
        recent = self._newest = self._samples.recent(slowdown)
        if self._samples.spans == 0:
            return
        self._measured.cost_seconds = recent.cost_seconds
        if interval is None or self._settings.every is not None:
            return
        if self._may_judge:
            self._judge(interval, recent, slowdown)
        if self._plan.interval == interval:
            self._set_pending(self._explain_wait(recent))

    def _judge(self, interval: int, recent: OverheadEstimate, slowdown: SlowdownEstimate) -> None:
        profile = self.profile
        assert profile is not None
        pipeline = pipeline_interval(replace(profile, cost_seconds=recent.cautious_cost_seconds))
        is_spread = self._settings.policy in SPREAD_POLICIES
        written = 1 if is_spread else write_interval(profile, self._settings)
        shortest = max(pipeline, written)
        if shortest > interval * (1 + MIN_CHANGE):
            self._move(shortest, recent)
        elif not self._probe.start_if_needed(interval, self._settings.budget, slowdown):
            self._move(self._decide(interval, recent, self._samples.settled(slowdown)), recent)

    def _decide(self, interval: int, recent: OverheadEstimate, settled: OverheadEstimate) -> int:
        """Return the next interval.

        It grows if the newest window is over the budget beyond its noise, if it is over it for three checkpoints,
        if it remains so for longer than a window, or if the long-run average has been over it for some time. It
        falls if windows in a row are clearly below half the budget: see `LowWindows`.
        """
        budget = self._settings.budget
        is_over = recent.overhead > budget
        self._long_run_windows = self._long_run_windows + 1 if _is_over(settled, budget) else 0
        self._over_checkpoints = self._over_checkpoints + self._samples.open_checkpoints if is_over else 0
        raised = interval
        if self._over_checkpoints >= OVER_CHECKPOINTS:
            raised = max(raised, self._wanted(recent.cost_seconds))
        if self._over_checkpoints >= _long_over_checkpoints(recent):
            # The typical cost may fit into the budget: this much longer keeps it at any cost.
            raised = max(raised, math.ceil(min(interval * recent.overhead / budget, MAX_INTERVAL)))
        if _is_over(recent, budget):
            # The typical cost in the window: one slow checkpoint of three is no reason, two are.
            raised = max(raised, self._wanted(recent.cautious_cost_seconds))
        if self._long_run_windows >= LONG_RUN_WINDOWS:
            raised = max(raised, self._wanted(settled.mean_cost_seconds))
        if raised > interval:
            return raised
        low = min(each.overhead + CLEAR_ERRORS * each.error for each in (recent, settled)) < budget / 2
        lowered = self._wanted(recent.upper_cost_seconds)
        is_low = low and lowered <= interval * (1 - MIN_CHANGE) and recent.iterations >= WINDOW_ITERATIONS
        return self._low_windows.add(lowered if is_low else None, self.trained_seconds) or interval

    def _explain_wait(self, recent: OverheadEstimate) -> str:
        """Return what a change of the interval waits for; empty if none is due."""
        measured = f"measured overhead {percent(recent.overhead)}"
        if self._probe.is_active:
            pause = f"checkpoints pause until {format_iterations(PROBE_IDLE)} without one are measured"
            return f"every iteration overlaps a checkpoint: {pause}"
        if recent.overhead > self._settings.budget:
            needed = OVER_CHECKPOINTS
            if self._over_checkpoints >= needed:
                needed = _long_over_checkpoints(recent)
            left = max(1, needed - self._over_checkpoints)
            return f"{measured} is over the budget: the interval grows if it still is after {_more(left)}"
        if self._low_windows:
            windows, seconds = self._low_windows.left(self.trained_seconds)
            waits = [_more(windows * max(1, self._samples.open_checkpoints))] if windows else []
            wait = " and ".join([*waits, duration(seconds)] if seconds else waits)
            return f"{measured} is below half the budget: the interval falls if it still is after {wait}"
        return ""

    def _set_pending(self, pending: str) -> None:
        assert self._plan is not None
        if bool(pending) != bool(self._plan.pending):
            self._announce = True
        self._plan = replace(self._plan, pending=pending)

    def _move(self, decided: int, recent: OverheadEstimate) -> None:
        assert self._plan is not None
        if self._plan.interval is None or decided == self._plan.interval:
            return
        if (better := self._planned(recent.cost_seconds)) is not None:
            self._measured.cost_seconds = better.cost_seconds
        grows = decided > self._plan.interval
        self._low_windows.moved(self.trained_seconds, grows=grows)
        if grows:
            decided = max(decided, math.ceil(self._plan.interval * (1 + LEAST_RAISE)))
            self._restart_judging()
        self._judged_at = None
        self._set_interval(decided, "")
        if (self._plan.overhead or 0.0) > self._settings.budget:
            wait = f"the interval grows further if it is still over the budget after {_more(OVER_CHECKPOINTS)}"
            self._set_pending(f"noise can explain the rest of the overhead: {wait}")
        self._announce = True

    def _wanted(self, cost_seconds: float) -> int:
        made = self._planned(cost_seconds)
        return made.interval if made is not None and made.interval is not None else 1

    def _planned(self, cost_seconds: float | None) -> IntervalPlan | None:
        """Return the policy's plan for this cost of a checkpoint."""
        profile = self.profile
        if profile is None:
            return None
        return plan(replace(profile, cost_seconds=cost_seconds), self._settings, self.job_history.history)

    def _follow_changes(self) -> None:
        """Plan anew if the failure rate, the loss or the mean time of an iteration changes the wanted interval."""
        settings, profile = self._settings, self.profile
        if settings.every is not None or settings.paused or profile is None:
            return
        then, seconds = self._planned_seconds, profile.mean_seconds
        if then and seconds and abs(seconds - then) <= WANTED_CHANGE * then:
            then = seconds  # or noise would change an interval of a few iterations by a fifth
        earlier = replace(profile, mean_seconds=then)
        now = plan(profile, settings, self.job_history.history)
        before, after = plan(earlier, settings, self._planned_with).interval, now.interval
        if settings.policy in SPREAD_POLICIES and after:
            self._plan = now  # each distance is planned; larger changes are announced below
        if before == after or (before and after and abs(after - before) <= WANTED_CHANGE * before):
            return
        self._replan()

    def _replan(self) -> None:
        """Ask the policy, without regard to the interval so far."""
        profile = self.profile
        self._planned_with = self.job_history.history
        self._planned_seconds = profile.mean_seconds if profile is not None else None
        made = plan(profile, self._settings, self._planned_with)
        known = profile is not None or self._settings.paused or self._settings.every is not None
        before, self._plan = self._plan, made if known else None
        if before is None or self._plan is None or before.interval != self._plan.interval:
            self._restart_judging()
            self._announce = self._plan is not None

    def _set_interval(self, interval: int, reason: str) -> None:
        """Set an interval that the policy did not choose; an empty `reason` stands for the policy's own."""
        profile = self.profile
        self._planned_seconds = profile.mean_seconds if profile is not None else None
        held = plan(profile, replace(self._settings, every=interval), self.job_history.history)
        wanted = self._planned(self._measured.cost_seconds)
        policy = wanted.policy if wanted is not None else self._settings.policy
        if not reason and wanted is not None:
            reason = wanted.reason
        self._plan = replace(held, policy=policy, reason=reason)

    def _restart_judging(self) -> None:
        """Judge a new interval by what is measured from here on."""
        self._samples.forget()
        self._over_checkpoints = self._long_run_windows = 0
        self._low_windows.clear()
        self._judged_at = None


def _is_over(measured: OverheadEstimate, budget: float) -> bool:
    """Return whether the overhead exceeds the budget by more than its noise."""
    return measured.overhead - CLEAR_ERRORS * measured.error > budget


def _long_over_checkpoints(recent: OverheadEstimate) -> int:
    """Return the checkpoints over the budget that a single expensive one, while in the window, cannot explain."""
    return max(LONG_OVER_CHECKPOINTS, recent.checkpoints + 1)


def _more(checkpoints: int) -> str:
    return "1 more checkpoint" if checkpoints == 1 else f"{checkpoints:,} more checkpoints"


LOW_WINDOWS = 3
"""Windows in a row below half the budget after which the interval falls."""
FIRST_CALM_SECONDS = 60.0
"""Training time for which these windows must be low, at least."""
CALM_SECONDS, MOST_CALM_SECONDS = 600.0, 3600.0
"""The same after a fall was undone; it doubles up to the second figure."""


class LowWindows:
    """The windows in a row below half the budget, and the longest interval that one of them calls for.

    An interval that grows soon after a fall shows that load comes and goes. Falls then wait for low windows during
    all of its turns, so that the interval does not follow each of them.
    """

    def __init__(self) -> None:
        self._count, self._since_seconds, self._longest = 0, 0.0, 1
        self._calm_seconds = FIRST_CALM_SECONDS
        self._fell_at_seconds = -math.inf

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, wanted: int | None, now_seconds: float) -> int | None:
        """Add a window; return the interval to fall to, once it is time.

        Args:
            wanted: the interval that a low window calls for; `None` for a window that is not low.
            now_seconds: time that training has taken.
        """
        if wanted is None:
            self.clear()
            return None
        if not self._count:
            self._since_seconds = now_seconds
        self._count += 1
        self._longest = max(self._longest, wanted)
        windows, seconds = self.left(now_seconds)
        if windows or seconds:
            return None
        longest = self._longest
        self.clear()
        return longest

    def clear(self) -> None:
        """Begin anew; each fall needs as many windows."""
        self._count, self._longest = 0, 1

    def left(self, now_seconds: float) -> tuple[int, float]:
        """Return how many more windows, and how much more time, a fall needs."""
        seconds = self._since_seconds + self._calm_seconds - now_seconds
        return max(0, LOW_WINDOWS - self._count), max(0.0, seconds)

    def moved(self, now_seconds: float, *, grows: bool) -> None:
        """Record a change of the interval."""
        if not grows:
            self._fell_at_seconds = now_seconds
        elif now_seconds - self._fell_at_seconds < max(CALM_SECONDS, self._calm_seconds):
            self._calm_seconds = min(max(CALM_SECONDS, 2 * self._calm_seconds), MOST_CALM_SECONDS)
