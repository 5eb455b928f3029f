"""`holdfast plan`: compares checkpoint intervals for a running or a planned job."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.client import JobPlan
from holdfast.commands.console import EXIT_USAGE, asking, counted, fail, percent, print_json
from holdfast.commands.options import DEFAULT_SERVER, Json, Server, Token
from holdfast.commands.plan_comparison import PlanReport, print_report
from holdfast.commands.plan_inputs import BYTES_PER_PARAMETER, PlanInput, PlanOptions, parse_share, plan_inputs
from holdfast.commands.plan_simulation import TraceOptions, with_simulation
from holdfast.pacing import interval_iterations, parse_budget, parse_every, policy_names
from holdfast.pacing import plan as decide
from holdfast.pacing.settings import parse_mtbf, parse_unsaved_work, parse_write_budget
from holdfast.pacing.what_if import IntervalComparison, compare_intervals
from holdfast.simulation import compare_placement
from holdfast.units import duration, format_rate, parse_seconds

MAX_RANKS = 10_000_000
_JOB, _CLUSTER, _CHOICE, _TRACE = "The job", "The cluster", "The choice", "A recorded fault trace"


def _option(
    panel: str, metavar: str, text: str, *names: str, least: float | None = None, most: float | None = None
) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, min=least, max=most, rich_help_panel=panel)


_Text = str | None
_State = _option(_JOB, "SIZE", "Size of a checkpoint of all ranks together: 6.5GB.")
_Parameters = _option(_JOB, "COUNT", "Number of parameters, instead of the size: 124M, 7B, 405B.")
_Each = _option(
    _JOB, "BYTES", "Bytes per parameter with optimizer state: 14 for mixed precision and Adam.", least=0.1, most=64
)
_Iteration = _option(_JOB, "TIME", "Duration of an iteration: 2.5s.")
_Stall = _option(_JOB, "TIME", "Training time that a checkpoint costs, if known: 5s.")
_Lag = _option(_JOB, "TIME", "Time from the start of a checkpoint until it is durable, if known: 2min.")
_Job = _option(_JOB, "JOB", "A running job: use its measurements instead of the options above.")
_Ranks = _option(_CLUSTER, "COUNT", "Number of GPUs; they share the state.", least=1, most=MAX_RANKS)
_Copy = _option(_CLUSTER, "SPEED", "Copy speed of one rank from GPU to host memory: 10GB/s.")
_Write = _option(_CLUSTER, "SPEED", "Write speed of one rank to the store: 500MB/s.")
_Parity = _option(_JOB, "CODE", "Parity in each checkpoint: 10+2, or important 10+2.")
_Compress = typer.Option("--compress", help="Checkpoints are compressed.", rich_help_panel=_JOB)
_Unchanged = _option(_JOB, "SHARE", "Share of the state that is frozen, and so not written again: 90%.")
_Mtbf = _option(_CLUSTER, "TIME", "Mean time between failures of the whole job: 3h.")
_Restart = _option(_CLUSTER, "TIME", "Time from a failure until training continues: 3min.")
_Budget = _option(_CHOICE, "SHARE", "Maximum overhead: 3.5%.")
_WriteBudget = _option(_CHOICE, "RATE", "Maximum that checkpoints may send to the store: 2TB/day.")
_Unsaved = _option(_CHOICE, "TIME", "Work that a failure may lose, as far as both budgets allow: 10min.")
_Policy = _option(_CHOICE, "NAME", f"Policy in force: {', '.join(policy_names())}.")
_Total = _option(_CHOICE, "COUNT", "With --policy coci: iterations of the job.", least=2)
_FallsTo = _option(
    _CHOICE, "SHARE", "With --policy coci: the final loss above its floor, as a share of the initial one: 1%."
)
_Simulate = typer.Option("--simulate", help="Also simulate every policy with failures.", rich_help_panel=_CHOICE)
_TraceFile = _option(
    _TRACE,
    "FILE",
    "Simulate with the faults of a JSON list of node_id, event_time and event_type (fault_start or fault_end).",
)
_ClusterNodes = _option(
    _TRACE, "COUNT", "Nodes of the trace's cluster; default: those that have a fault.", least=1
)
_GpusPerNode = _option(_TRACE, "COUNT", "GPUs of a node, 8 by default; the job needs --ranks GPUs.", least=1)
_Spares = _option(_TRACE, "COUNT", "Spare nodes; without a healthy one, the job waits for a repair.", least=0)
_Level = _option(_TRACE, "LEVEL", 'Only faults whose fault_type has this Level, as in "Hardware Failure".')
_Unit = _option(_TRACE, "UNIT", "Unit of event_time: days (the default), hours or seconds.")
_Accelerate = _option(_TRACE, "FACTOR", "Divide all times of the trace by this.", least=1e-3, most=1e6)
_Every = _option(
    _CHOICE, "INTERVAL", "Another interval to compare: iterations, or a time as in 10min.", "--every", "--interval"
)


def plan(
    state: Annotated[_Text, _State] = None,
    parameters: Annotated[_Text, _Parameters] = None,
    bytes_per_parameter: Annotated[float, _Each] = BYTES_PER_PARAMETER,
    iteration: Annotated[_Text, _Iteration] = None,
    stall: Annotated[_Text, _Stall] = None,
    lag: Annotated[_Text, _Lag] = None,
    parity: Annotated[_Text, _Parity] = None,
    compress: Annotated[bool, _Compress] = False,
    unchanged: Annotated[_Text, _Unchanged] = None,
    job: Annotated[_Text, _Job] = None,
    ranks: Annotated[int | None, _Ranks] = None,
    copy_bandwidth: Annotated[_Text, _Copy] = None,
    write_bandwidth: Annotated[_Text, _Write] = None,
    mtbf: Annotated[_Text, _Mtbf] = None,
    restart: Annotated[_Text, _Restart] = None,
    budget: Annotated[_Text, _Budget] = None,
    write_budget: Annotated[_Text, _WriteBudget] = None,
    max_unsaved_work: Annotated[_Text, _Unsaved] = None,
    policy: Annotated[_Text, _Policy] = None,
    every: Annotated[_Text, _Every] = None,
    total: Annotated[int | None, _Total] = None,
    loss_falls_to: Annotated[_Text, _FallsTo] = None,
    simulate: Annotated[bool, _Simulate] = False,
    trace: Annotated[Path | None, _TraceFile] = None,
    cluster_nodes: Annotated[int | None, _ClusterNodes] = None,
    gpus_per_node: Annotated[int | None, _GpusPerNode] = None,
    spares: Annotated[int | None, _Spares] = None,
    trace_level: Annotated[_Text, _Level] = None,
    trace_unit: Annotated[_Text, _Unit] = None,
    accelerate: Annotated[float | None, _Accelerate] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """Compare checkpoint intervals: cost, expected loss to failures, the best one. Needs no server and no torch.

    ETTR, the effective training time ratio, is the share of time spent on progress that no failure undoes. A short
    interval costs more checkpoints; a long one loses more work per failure. The output marks the values that it
    assumes for omitted options.

    Examples: `holdfast plan --parameters 405B --ranks 16384 --iteration 5s --mtbf 3h --restart 5min`

    `holdfast plan --ranks 16384 --mtbf 3.09h --stall 5s --lag 2min --restart 5min --budget 2%`

    `holdfast plan --parameters 7B --ranks 64 --simulate`

    `holdfast plan --stall 5s --lag 2min --ranks 3040 --trace fault_trace.json --cluster-nodes 400 --spares 20`

    `holdfast plan --state 6.5GB --write-budget 500GB/day --policy coci --total 100000 --loss-falls-to 1%`

    `holdfast plan --state 6.5GB --every 500`  ·  `holdfast plan --job char-gpt --mtbf 12h --json`
    """
    options = PlanOptions(
        state=state, parameters=parameters, bytes_per_parameter=bytes_per_parameter, ranks=ranks,
        iteration=iteration, copy_bandwidth=copy_bandwidth, write_bandwidth=write_bandwidth, stall=stall, lag=lag,
        mtbf=mtbf, restart=restart, budget=budget, write_budget=write_budget, max_unsaved_work=max_unsaved_work,
        every=every, policy=policy,
        parity=parity, compress=compress or None, unchanged=unchanged,
    )  # fmt: skip
    try:
        recorded = TraceOptions(
            trace, cluster_nodes, gpus_per_node, spares, trace_level, trace_unit, accelerate
        ).read()
        steepness = _steepness(policy, total, loss_falls_to, job)
        report = _plan_new_job(options) if job is None else _plan_running_job(job, options, server, token)
        if steepness is not None and total is not None:
            profile, settings, history, _ = plan_inputs(options)
            placement = compare_placement(profile, settings, history, total, steepness)
            report = replace(report, placement=placement)
        if simulate or recorded is not None:
            report = with_simulation(report, recorded)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    if json:
        print_json(report)
    else:
        print_report(report)


def _steepness(policy: str | None, total: int | None, loss_falls_to: str | None, job: str | None) -> float | None:
    """Return θT of the loss that `coci` is to follow; `None` without its options."""
    if total is None and loss_falls_to is None:
        return None
    if policy != "coci" or total is None or loss_falls_to is None or job is not None:
        raise ValueError("--total and --loss-falls-to belong together, with --policy coci and without --job")
    share = parse_share(loss_falls_to, "--loss-falls-to")
    if not 0 < share < 1:
        raise ValueError(f"--loss-falls-to {loss_falls_to!r}: give more than 0 and less than 100%")
    return -math.log(share)


def _plan_new_job(options: PlanOptions) -> PlanReport:
    profile, settings, history, inputs = plan_inputs(options)
    current = decide(profile, settings, history).interval
    is_fixed = settings.every is not None
    requested: tuple[int, ...] = ()
    if options.every is not None and not is_fixed:
        requested = (interval_iterations(parse_every(options.every), profile.iteration_seconds),)
    comparison = compare_intervals(profile, settings, history, current=current, requested=requested)
    # the reasons of policies call figures measured or predicted, and these are given
    policies = (each if each.interval is None else replace(each, reason="") for each in comparison.policies)
    within = "" if is_fixed else f" with a budget of {percent(settings.budget)}"
    return PlanReport(
        comparison=replace(comparison, policies=tuple(policies)),
        current=f"{settings.policy}{within} takes one every",
        inputs=inputs,
    )


MEASURED_OPTIONS = (
    "state", "parameters", "iteration", "stall", "lag", "copy_bandwidth", "write_bandwidth", "policy",
    "parity", "compress", "unchanged",
)  # fmt: skip
"""Options that contradict --job."""


def _plan_running_job(job: str, options: PlanOptions, server: str, token: str | None) -> PlanReport:
    given = [f"--{name.replace('_', '-')}" for name in MEASURED_OPTIONS if getattr(options, name) is not None]
    if given:
        raise ValueError(f"{given[0]} is measured for a running job: leave out --job or {given[0]}")
    if options.every is not None:
        parse_every(options.every)  # its error names the option; the server parses the text again
    what_if: dict[str, float | str | None] = {
        "budget": None if options.budget is None else parse_budget(options.budget),
        "write_budget": None if options.write_budget is None else parse_write_budget(options.write_budget),
        "max_unsaved_work": None
        if options.max_unsaved_work is None
        else parse_unsaved_work(options.max_unsaved_work),
        "every": None if options.every is None else str(options.every),
        "mtbf": None if options.mtbf is None else parse_mtbf(options.mtbf),
        "ranks": options.ranks,
        "restart": None if options.restart is None else parse_seconds(options.restart, "--restart"),
    }
    with asking(server, token) as client:
        answer = client.plan(job, **what_if)
    if answer.comparison is None:
        fail(f"no plan yet: {answer.why_none}")
    by = ", set by hand," if answer.held_by_hand else ""
    return PlanReport(
        comparison=answer.comparison,
        current=f"The interval in force{by} is",
        inputs=_inputs_of_job(answer, answer.comparison),
    )


def _inputs_of_job(answer: JobPlan, comparison: IntervalComparison) -> list[PlanInput]:
    seen = f"{counted(answer.failures, 'failure')} in {duration(answer.running_seconds)}"
    low, high = duration(comparison.mtbf_low_seconds), duration(comparison.mtbf_high_seconds)
    failures = {
        "estimated": f"published rate corrected by {seen}; 90 % between {low} and {high}",
        "assumed": f"assumed: published rate; {seen} observed",
    }.get(answer.origins.get("mtbf_seconds", ""), f"given; {seen} observed")

    def origin(name: str) -> str:
        return answer.origins.get(name, "").replace("stated", "given")

    return [
        PlanInput(
            name="iteration",
            value=duration(comparison.iteration_seconds),
            origin="measured: without checkpoints and rare long waits; UNSAVED counts both",
        ),
        PlanInput(name="cost of one", value=duration(comparison.cost_seconds), origin="measured"),
        PlanInput(name="durable after", value=duration(comparison.lag_seconds), origin="measured"),
        PlanInput(name="ranks", value=f"{comparison.world_size:,}", origin=origin("world_size")),
        PlanInput(name="failures", value=f"one in {duration(comparison.mtbf_seconds)}", origin=failures),
        PlanInput(name="restart", value=duration(comparison.restart_seconds), origin=origin("restart_seconds")),
        PlanInput(name="budget", value=percent(comparison.budget), origin=origin("budget")),
        PlanInput(
            name="write budget",
            value=format_rate(comparison.write_bytes_per_second),
            origin=origin("write_bytes_per_second"),
        ),
        PlanInput(
            name="unsaved work",
            value=f"at most {duration(comparison.max_unsaved_seconds)}",
            origin=origin("max_unsaved_seconds"),
        ),
    ]
