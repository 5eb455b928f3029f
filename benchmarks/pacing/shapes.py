"""All policies on jobs of many shapes, by the formula of ETTR: training time, writes and unsaved work of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.commands.plan_inputs import PlanOptions, plan_inputs
from holdfast.pacing import PacingSettings
from holdfast.pacing.interval_cost import Limit, binding_limit, write_budget
from holdfast.pacing.settings import DAY
from holdfast.pacing.what_if import IntervalComparison, IntervalForecast, compare_intervals
from holdfast.units import duration, format_bytes, percent

ONE_GPU = [
    (f"1 GPU, {state}, iterations of {iteration}", PlanOptions(state=state, iteration=iteration, mtbf="7days"))
    for state in ("100MB", "1GB", "5GB")
    for iteration in ("50ms", "200ms", "1s")
]
CLUSTERS = [
    (f"{ranks:,} GPUs, {parameters} parameters, {store}",
     PlanOptions(parameters=parameters, ranks=ranks, iteration=iteration, write_bandwidth=speed, restart="5min"))
    for ranks, parameters, iteration in ((8, "1B", "500ms"), (1024, "70B", "5s"), (16384, "405B", "5s"))
    for store, speed in (("local disk", "1GB/s"), ("slow bucket", "30MB/s"))
]  # fmt: skip
SHAPES = [*ONE_GPU, *CLUSTERS]


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """What the policies do on one shape of job."""

    shape: str
    comparison: IntervalComparison
    limit: Limit | None
    """What decides the interval of the default policy."""

    @property
    def policies(self) -> dict[str, IntervalForecast]:
        own = (each for each in self.comparison.policies if each.interval is not None and not each.decided_by)
        return {each.name: each for each in own}

    @property
    def default(self) -> IntervalForecast:
        return self.policies[PacingSettings().policy]

    @property
    def behind(self) -> float:
        """ETTR of the best policy less that of the default."""
        return max(each.ettr or 0.0 for each in self.policies.values()) - (self.default.ettr or 0.0)

    def written_a_day(self, policy: str) -> float:
        """Bytes that a policy sends to the store each day."""
        chosen = self.policies[policy]
        interval = (chosen.achieved_seconds or 1.0) * (1 + (chosen.overhead or 0))
        return self.comparison.written_bytes * DAY / interval

    @property
    def of_write_budget(self) -> float:
        """The largest share of the write budget that a policy uses."""
        budget = self.comparison.write_bytes_per_second * DAY
        return max(self.written_a_day(each) for each in self.policies) / budget


def result(shape: str, options: PlanOptions) -> ShapeResult:
    profile, settings, history, _ = plan_inputs(options)
    found = ShapeResult(shape, compare_intervals(profile, settings, history), None)
    assert write_budget(profile, settings) == found.comparison.write_bytes_per_second
    return replace(found, limit=binding_limit(profile, settings, found.default.interval or 1))


def figures() -> dict[str, float]:
    """Print a table, and return the figures."""
    print("all policies on jobs of many shapes, by the formula (ETTR, bytes written a day):")
    rows = [result(*shape) for shape in SHAPES]
    for row in rows:
        default = row.default
        policies = "  ".join(
            f"{name} {each.ettr or 0:.2%} {format_bytes(round(row.written_a_day(name)))}"
            for name, each in row.policies.items()
        )
        every = duration(default.achieved_seconds or 0)
        unsaved = duration(default.unsaved_seconds or 0)
        print(
            f"  {row.shape}: every {every}, overhead {percent(default.overhead or 0)}, unsaved at most {unsaved}, "
            f"decided by {row.limit or 'failures'}\n    {policies}"
        )
    behind, written = max(row.behind for row in rows), max(row.of_write_budget for row in rows)
    print(f"  the default is {100 * behind:.2f} points behind the best policy at most")
    print(f"  no policy writes more than {written:.3f} of the write budget", flush=True)
    return {"default_behind_best_points": round(100 * behind, 3), "written_of_write_budget": round(written, 4)}
