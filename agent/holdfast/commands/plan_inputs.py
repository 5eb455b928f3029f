"""The inputs of `holdfast plan` for a planned job: figures from the options, and assumptions for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.commands.console import percent
from holdfast.format.parity_file import parse_parity
from holdfast.format.parity_stripes import MOST_IMPORTANT_SHARE, parity_bytes
from holdfast.pacing import (
    DEFAULT_BUDGET,
    FailureHistory,
    PacingSettings,
    Profile,
    parse_budget,
    parse_every,
    parse_policy,
)
from holdfast.pacing.failures import (
    ASSUMED_RESTART_SECONDS,
    GPU_HOURS_BETWEEN_FAILURES,
    JOB_HOURS_BETWEEN_FAILURES,
    FailureEstimate,
)
from holdfast.pacing.interval_cost import write_budget
from holdfast.pacing.settings import (
    DEFAULT_UNSAVED_SECONDS,
    parse_mtbf,
    parse_unsaved_work,
    parse_write_budget,
)
from holdfast.units import (
    FixedInterval,
    duration,
    format_bytes,
    format_rate,
    parse_bytes,
    parse_count,
    parse_positive_seconds,
    parse_seconds,
    parse_speed,
)

BYTES_PER_PARAMETER = 14.0
"""Mixed precision with Adam: 2 for the weight, 4 for its float32 copy, 4 for each of two moments."""
COPY_BYTES_PER_SECOND = 10e9
"""Copy of one GPU to pinned host memory over PCIe, beside other traffic."""
WRITE_BYTES_PER_SECOND = 500e6
ITERATION_SECONDS = 1.0
COMPRESSION_RATIO = 1.2
"""Of weights and moments in fp32 and bf16, in measurements."""
COMPRESSED_BYTES_PER_SECOND = 450e6
PARITY_BYTES_PER_SECOND = 2e9
"""Bytes of data for which one core computes a parity block per stripe; 10+2 takes twice the time."""
INTERFERENCE = 0.05
"""Assumed share by which training is slower while a checkpoint is copied and written."""
MAX_BYTES_PER_RANK = 4e12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that describe a planned job, as text."""

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
    write_budget: str | None = None
    max_unsaved_work: str | None = None
    every: str | None = None
    policy: str | None = None
    parity: str | None = None
    compress: bool | None = None
    unchanged: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """One figure that a plan rests on."""

    name: str
    value: str
    origin: str
    """`given`, `assumed` or `measured`, with details after a colon."""


def plan_inputs(options: PlanOptions) -> tuple[Profile, PacingSettings, FailureHistory, list[PlanInput]]:
    """Parse the options and add the assumptions.

    Raises:
        ValueError: an option is invalid; the text names it and the remedy.
    """
    inputs: list[PlanInput] = []
    profile = _profile(options, inputs)
    ranks = options.ranks or 1
    mtbf = None if options.mtbf is None else parse_mtbf(options.mtbf)
    failures = FailureEstimate(world_size=ranks, mean_seconds=mtbf)
    published = (
        f"assumed: 1 in {GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU-hours + 1 in {JOB_HOURS_BETWEEN_FAILURES:.0f} h"
    )
    inputs.append(_input("ranks", f"{ranks:,}", options.ranks))
    inputs.append(_input("failures", f"one in {duration(1 / failures.rate)}", options.mtbf, published))
    restart = _parse(options.restart, "--restart", parse_seconds, ASSUMED_RESTART_SECONDS)
    inputs.append(_input("restart", duration(restart), options.restart))
    settings = PacingSettings(
        budget=DEFAULT_BUDGET if options.budget is None else parse_budget(options.budget),
        policy=PacingSettings().policy if options.policy is None else parse_policy(options.policy),
        every=_fixed_interval(options),
        write_bytes_per_second=None if options.write_budget is None else parse_write_budget(options.write_budget),
        max_unsaved_seconds=DEFAULT_UNSAVED_SECONDS
        if options.max_unsaved_work is None
        else parse_unsaved_work(options.max_unsaved_work),
    )
    default = "assumed: the default"
    inputs.append(_input("budget", percent(settings.budget), options.budget, default))
    rate = format_rate(write_budget(profile, settings))
    inputs.append(_input("write budget", rate, options.write_budget, default))
    unsaved = f"at most {duration(settings.max_unsaved_seconds)}"
    inputs.append(_input("unsaved work", unsaved, options.max_unsaved_work, default))
    return profile, settings, FailureHistory(failures=failures, restart_seconds=restart), inputs


def _fixed_interval(options: PlanOptions) -> FixedInterval | None:
    """Return `--every` for the policy fixed; for other policies it is an interval to compare."""
    if options.policy is None or parse_policy(options.policy) != "fixed":
        return None
    if options.every is None:
        raise ValueError("the policy fixed needs an interval: add --every 500")
    return parse_every(options.every)


def _profile(options: PlanOptions, inputs: list[PlanInput]) -> Profile:
    """Predict a profile: each rank copies and writes its share of the state, all at the same time."""
    state_bytes = _state_bytes(options, inputs)
    iteration = _parse(options.iteration, "--iteration", parse_positive_seconds, ITERATION_SECONDS)
    copy = _parse(options.copy_bandwidth, "--copy-bandwidth", parse_speed, COPY_BYTES_PER_SECOND)
    write = _parse(options.write_bandwidth, "--write-bandwidth", parse_speed, WRITE_BYTES_PER_SECOND)
    snapshot = state_bytes / (options.ranks or 1) / copy
    if not state_bytes and (options.parity or options.compress or options.unchanged):
        raise ValueError("--parity, --compress and --unchanged need the size: give --state or --parameters")
    writing: list[PlanInput] = []
    new_bytes, encoding = _written(options, state_bytes / (options.ranks or 1), writing)
    persist = encoding + new_bytes / write
    if options.lag is not None:
        durable_seconds = parse_seconds(options.lag, "--lag")
        snapshot = min(snapshot, durable_seconds)
        persist = durable_seconds - snapshot
    if options.stall is not None:
        cost = parse_seconds(options.stall, "--stall")
    else:
        # the part of the copy that does not fit into an iteration, and slower training until it is durable
        cost = max(0.0, snapshot - iteration) + INTERFERENCE * (snapshot + persist)
    inputs.append(_input("iteration", duration(iteration), options.iteration))
    if state_bytes:
        inputs.append(_input("copying", f"{format_bytes(round(copy))}/s a rank", options.copy_bandwidth))
        inputs.append(_input("writing", f"{format_bytes(round(write))}/s a rank", options.write_bandwidth))
        inputs.extend(writing)
    slower = f"assumed: {percent(INTERFERENCE)} slower until it is durable"
    inputs.append(_input("cost of one", duration(cost), options.stall, slower))
    follows = "follows from size and speeds" if state_bytes else "assumed: at once"
    inputs.append(_input("durable after", duration(snapshot + persist), options.lag, follows))
    return Profile(
        iteration_seconds=iteration,
        snapshot_seconds=snapshot,
        persist_seconds=persist,
        checkpoint_bytes=round(state_bytes),
        written_bytes=new_bytes * (options.ranks or 1),
        cost_seconds=cost,
    )


def _written(options: PlanOptions, rank_bytes: float, inputs: list[PlanInput]) -> tuple[float, float]:
    """Return the bytes that a rank writes, and the seconds of encoding them."""
    seconds = 0.0
    if options.unchanged is not None:
        share = parse_share(options.unchanged, "--unchanged")
        rank_bytes *= 1 - share
        inputs.append(PlanInput(name="unchanged", value=percent(share), origin="given: not written again"))
    if options.compress:
        seconds += rank_bytes / COMPRESSED_BYTES_PER_SECOND
        rank_bytes /= COMPRESSION_RATIO
        speed = f"{format_bytes(round(COMPRESSED_BYTES_PER_SECOND))}/s a rank"
        inputs.append(
            PlanInput(name="compressing", value=speed, origin=f"assumed, 1/{COMPRESSION_RATIO} of the size")
        )
    code = None if options.parity is None else parse_parity(options.parity)
    if code is not None:
        protected_bytes = rank_bytes * (MOST_IMPORTANT_SHARE if code.is_important else 1)
        seconds += protected_bytes * code.parity_blocks / PARITY_BYTES_PER_SECOND
        added_bytes = parity_bytes(code, round(rank_bytes))
        at_most = "at most " if code.is_important else ""
        speed = f"{format_bytes(round(PARITY_BYTES_PER_SECOND / code.parity_blocks))}/s a rank"
        inputs.append(
            PlanInput(
                name="parity",
                value=speed,
                origin=f"assumed, {code} is {at_most}{percent(added_bytes / rank_bytes)} more",
            )
        )
        rank_bytes += added_bytes
    return rank_bytes, seconds


def parse_share(text: str, name: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a share: write 90% or 0.9") from None
    if not 0 <= share < 1:
        raise ValueError(f"{name} {text!r} is outside 0% to 100%: write 90% or 0.9")
    return share


def _state_bytes(options: PlanOptions, inputs: list[PlanInput]) -> float:
    if options.state is not None and options.parameters is not None:
        raise ValueError("--state and --parameters both give the size: use one of them")
    if options.state is not None:
        state_bytes = parse_bytes(options.state, "--state")
        inputs.append(PlanInput(name="state", value=format_bytes(round(state_bytes)), origin="given"))
    elif options.parameters is not None:
        state_bytes = parse_count(options.parameters, "--parameters") * options.bytes_per_parameter
        each = f"{options.parameters} parameters of {options.bytes_per_parameter:g} bytes"
        inputs.append(PlanInput(name="state", value=format_bytes(round(state_bytes)), origin=f"given: {each}"))
    elif options.stall is not None:
        state_bytes = 0.0
    else:
        raise ValueError(
            "nothing to plan for: give the size (--state 6.5GB or --parameters 7B), the cost of a checkpoint "
            "(--stall 2s), or a running job (--job NAME)"
        )
    if state_bytes / (options.ranks or 1) > MAX_BYTES_PER_RANK:
        share = format_bytes(round(state_bytes / (options.ranks or 1)))
        raise ValueError(
            f"a state of {format_bytes(round(state_bytes))} is {share} a rank, more than any machine has: "
            "give --ranks"
        )
    return state_bytes


def _parse(text: str | None, name: str, parse: Callable[[str, str], float], default: float) -> float:
    return default if text is None else parse(text, name)


def _input(name: str, value: str, given: object, otherwise: str = "assumed") -> PlanInput:
    return PlanInput(name=name, value=value, origin=otherwise if given is None else "given")
