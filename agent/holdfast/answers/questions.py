"""What is worked out from what a job did."""

from __future__ import annotations

import msgspec

from holdfast.answers.jobs import CheckpointRow
from holdfast.pacing.outlook import Outlook
from holdfast.pacing.profile import Plan


class TimeBucket(msgspec.Struct, kw_only=True, frozen=True):
    """One of the things that time went into."""

    name: str = ""
    seconds: float = 0.0
    share: float = 0.0
    """Of the window."""
    definition: str = ""


class Goodput(msgspec.Struct, kw_only=True, frozen=True):
    """Where the time of a job went; the buckets sum up to the window."""

    job: str
    window: str = ""
    begins_at: float = 0.0
    """When the window begins, or the job did where that was later."""
    ends_at: float = 0.0
    """Now, or when the job came to the end that somebody wanted."""
    wall_seconds: float = 0.0
    goodput: float | None = None
    """Share of the time that moved training forward and was not lost; None without any time."""
    iterations: int = 0
    """That stand."""
    lost_iterations: int = 0
    buckets: list[TimeBucket] = []


class RankRow(msgspec.Struct, kw_only=True, frozen=True):
    """One rank, by the mean of its iterations in the window."""

    rank: int = 0
    iterations: int = 0
    iteration_seconds: float = 0.0
    longest_seconds: float = 0.0
    stall_seconds: float = 0.0
    data_seconds: float = 0.0
    barrier_seconds: float | None = None
    """From its own last gradient to the update; None where that cannot be measured."""
    own_seconds: float = 0.0
    """The iteration without the barrier: what this rank itself took."""
    waits_seconds: float | None = None
    """How much longer than the rank that the others wait for it stood at the barrier."""
    deviation: float = 0.0
    """Of its own seconds from the median, as a share of that."""
    straggler: bool = False
    cause: str = ""
    """Of a straggler: what most of the difference is; empty for others."""


class RankTimes(msgspec.Struct, kw_only=True, frozen=True):
    """How the ranks of the attempt that is or was the last compare."""

    job: str
    window: str = ""
    world_size: int = 0
    reporting: int = 0
    """How many ranks told of iterations in the window."""
    measure: str = ""
    """What is compared, in words."""
    median_seconds: float | None = None
    deviation_seconds: float | None = None
    """The median absolute deviation from it."""
    waited_for: int | None = None
    """The rank that stands least at the barrier, where others stand there notably longer."""
    waiting_gpu_seconds: float | None = None
    """What all ranks together wait for it, in each iteration."""
    stragglers: list[int] = []
    ranks: list[RankRow] = []
    """The slowest first."""


class SettingsPreview(msgspec.Struct, kw_only=True, frozen=True):
    """What settings would lead to."""

    plan: Plan | None = None
    in_force: Plan | None = None
    """The same of the interval in force; None without one."""
    why_none: str = ""
    """Why there is no plan; empty when there is one."""
    measured_overhead: float | None = None


class JobPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What if: every interval weighed for this job, as it is or as it might be."""

    job: str
    outlook: Outlook | None = None
    why_none: str = ""
    """Why there is none; empty when there is one."""
    held_by_hand: bool = False
    """The interval in force is one that a person ordered."""
    failures: int = 0
    """Attempts that ended without being asked to."""
    running_seconds: float = 0.0
    """In how much time, over all attempts."""
    restarts: int = 0
    """How many of them a measured restart time rests on."""
    origins: dict[str, str] = {}
    """Of `mtbf_seconds`, `restart_seconds`, `world_size`, `budget`: where each comes from."""


class RestorePreview(msgspec.Struct, kw_only=True, frozen=True):
    """What a restore would give up, and take."""

    checkpoint: CheckpointRow
    from_iteration: int = 0
    to_iteration: int = 0
    iterations_abandoned: int = 0
    """Left behind on the lineage that the job is on; they stay visible, and restorable."""
    seconds_abandoned: float | None = None
    gpu_hours_abandoned: float | None = None
    """The same on every rank."""
    points_abandoned: int = 0
    """Durable checkpoints among what is left behind."""
    attempt: int = 0
    host: str = ""
    """Of the attempt that runs, or ran last; empty where it did not say."""
    world_size: int = 1
    supervised: bool = False
    """A supervisor starts the job again, should this attempt end."""
    estimated_seconds: float | None = None
    estimated_from: str = ""
    """What the estimate rests on, in words; empty when there is none."""
    alive: bool = False
    mode: str = "in_place"
    """`in_place`, `relaunch`, or `next_start`: somebody has to start the script again."""
    what: str = ""
    """What would happen, and when, in words."""
    safety_checkpoint: bool = False
    """Of the state that is left, before anything else. Otherwise its newest durable checkpoint is the way back."""


class Kept(msgspec.Struct, kw_only=True, frozen=True):
    """How long a project keeps what its jobs reported, and how much that is."""

    project: str = ""
    samples_seconds: float | None = None
    fine_seconds: float | None = None
    reports_seconds: float | None = None
    samples_bytes: int | None = None
    stored_bytes: int = 0
    """Of samples, roll-ups left out."""
