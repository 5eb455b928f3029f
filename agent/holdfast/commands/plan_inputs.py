"""What `holdfast plan` rests on: the figures that were given, and those assumed in place of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.commands.console import percent, size
from holdfast.pacing import DEFAULT_BUDGET, History, Profile, Settings, parse_budget, parse_every, parse_policy
from holdfast.pacing.failures import (
    ASSUMED_RESTART_SECONDS,
    GPU_HOURS_BETWEEN_FAILURES,
    JOB_HOURS_BETWEEN_FAILURES,
    Failures,
)
from holdfast.pacing.policy import duration
from holdfast.pacing.quantities import parse_bytes, parse_count, parse_positive_seconds, parse_seconds, parse_speed
from holdfast.pacing.settings import parse_mtbf

BYTES_PER_PARAMETER = 14.0
"""Mixed precision with Adam: 2 for the weight, 4 for its float32 copy, 4 for each of two moments."""
COPY_BYTES_PER_SECOND = 10e9
"""From a GPU to pinned host memory over PCIe, with room for what else goes that way."""
WRITE_BYTES_PER_SECOND = 500e6
ITERATION_SECONDS = 1.0
INTERFERENCE = 0.05
"""The share by which training is slower while a checkpoint is copied and written, where it was not measured."""
NOTHING_TO_PLAN = (
    "say what to plan for: its size (--state 6.5GB or --parameters 7B), what a checkpoint costs (--stall 2s), "
    "or a job that runs (--job NAME)"
)
MOST_BYTES_A_RANK = 4e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A job that is only thought of, as the options have it."""

    state: str | None = None
    parameters: str | None = None
    bytes_per_parameter: float = BYTES_PER_PARAMETER
    ranks: int | None = None
    iteration: str | None = None
    copy_bandwidth: str | None = None
    write_bandwidth: str | None = None
    stall: str | None = None
    lag: str | None = None
    mtbf: str | None = None
    restart: str | None = None
    budget: str | None = None
    every: str | None = None
    policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Premise:
    """One figure that the answer rests on."""

    name: str
    value: str
    origin: str
    """`given`, `assumed` or `measured`; with more to it after a colon."""


def premises_of(typed: Typed) -> tuple[Profile, Settings, History, list[Premise]]:
    """All that an outlook asks for, and what it rests on.

    ValueError, naming the option and the way out, for what cannot be.
    """
    told: list[Premise] = []
    profile = _profile(typed, told)
    ranks = typed.ranks or 1
    failures = Failures(world_size=ranks, mean_seconds=None if typed.mtbf is None else parse_mtbf(typed.mtbf))
    published = (
        f"assumed: 1 in {GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU-hours + 1 in {JOB_HOURS_BETWEEN_FAILURES:.0f} h"
    )
    told.append(_premise("ranks", f"{ranks:,}", typed.ranks))
    told.append(_premise("failures", f"one in {duration(1 / failures.rate)}", typed.mtbf, published))
    restart = _read(typed.restart, "--restart", parse_seconds, ASSUMED_RESTART_SECONDS)
    told.append(_premise("restart", duration(restart), typed.restart))
    settings = Settings(
        budget=DEFAULT_BUDGET if typed.budget is None else parse_budget(typed.budget),
        policy=Settings().policy if typed.policy is None else parse_policy(typed.policy),
        every=_kept(typed),
    )
    told.append(_premise("budget", percent(settings.budget), typed.budget, "assumed: the default"))
    history = History(failures=failures, restart_seconds=restart)
    return profile, settings, history, told


def _kept(typed: Typed) -> int | None:
    """The interval that the policy fixed keeps; for any other, `--every` is one to look at beside it."""
    if typed.policy is None or parse_policy(typed.policy) != "fixed":
        return None
    if typed.every is None:
        raise ValueError("the policy fixed keeps the interval that it is given: add --every 500")
    return parse_every(typed.every)


def _profile(typed: Typed, told: list[Premise]) -> Profile:
    """What measuring might find: the ranks share the state, and copy and write their parts at once."""
    state_bytes = _state_bytes(typed, told)
    iteration = _read(typed.iteration, "--iteration", parse_positive_seconds, ITERATION_SECONDS)
    copy = _read(typed.copy_bandwidth, "--copy-bandwidth", parse_speed, COPY_BYTES_PER_SECOND)
    write = _read(typed.write_bandwidth, "--write-bandwidth", parse_speed, WRITE_BYTES_PER_SECOND)
    snapshot, persist = (state_bytes / (typed.ranks or 1) / speed for speed in (copy, write))
    if typed.lag is not None:
        durable_seconds = parse_seconds(typed.lag, "--lag")
        snapshot = min(snapshot, durable_seconds)
        persist = durable_seconds - snapshot
    if typed.stall is not None:
        cost = parse_seconds(typed.stall, "--stall")
    else:
        # the part of the copy that does not fit into an iteration, and a slower loop until it is durable
        cost = max(0.0, snapshot - iteration) + INTERFERENCE * (snapshot + persist)
    told.append(_premise("iteration", duration(iteration), typed.iteration))
    if state_bytes:
        told.append(_premise("copying", f"{size(round(copy))}/s a rank", typed.copy_bandwidth))
        told.append(_premise("writing", f"{size(round(write))}/s a rank", typed.write_bandwidth))
    slower = f"assumed: {percent(INTERFERENCE)} slower until it is durable"
    told.append(_premise("cost of one", duration(cost), typed.stall, slower))
    durable = duration(snapshot + persist)
    follows = "follows from size and speeds" if state_bytes else "assumed: at once"
    told.append(_premise("durable after", durable, typed.lag, follows))
    return Profile(
        iteration_seconds=iteration,
        snapshot_seconds=snapshot,
        persist_seconds=persist,
        checkpoint_bytes=round(state_bytes),
        cost_seconds=cost,
    )


def _state_bytes(typed: Typed, told: list[Premise]) -> float:
    if typed.state is not None and typed.parameters is not None:
        raise ValueError("--state and --parameters both say how large it is: give one of them")
    if typed.state is not None:
        state_bytes = parse_bytes(typed.state, "--state")
        told.append(Premise(name="state", value=size(round(state_bytes)), origin="given"))
    elif typed.parameters is not None:
        state_bytes = parse_count(typed.parameters, "--parameters") * typed.bytes_per_parameter
        each = f"{typed.parameters} parameters of {typed.bytes_per_parameter:g} bytes"
        told.append(Premise(name="state", value=size(round(state_bytes)), origin=f"given: {each}"))
    elif typed.stall is not None:
        state_bytes = 0.0
    else:
        raise ValueError(NOTHING_TO_PLAN)
    if state_bytes / (typed.ranks or 1) > MOST_BYTES_A_RANK:
        share = size(round(state_bytes / (typed.ranks or 1)))
        raise ValueError(
            f"a state of {size(round(state_bytes))} is {share} a rank, more than any has: give --ranks"
        )
    return state_bytes


def _read(text: str | None, name: str, parse: Callable[[str, str], float], assumed: float) -> float:
    return assumed if text is None else parse(text, name)


def _premise(name: str, value: str, given: object, otherwise: str = "assumed") -> Premise:
    return Premise(name=name, value=value, origin=otherwise if given is None else "given")
