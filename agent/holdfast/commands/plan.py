"""`holdfast plan`: which interval, at what price, for a job that runs or for one that is only thought of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from holdfast.client import JobPlan
from holdfast.commands.console import (
    DEFAULT_SERVER,
    EXIT_USAGE,
    Json,
    Server,
    Token,
    asking,
    counted,
    fail,
    percent,
    print_json,
)
from holdfast.commands.plan_comparison import Answer, simulated, tell
from holdfast.commands.plan_inputs import BYTES_PER_PARAMETER, Premise, Typed, premises_of
from holdfast.pacing import parse_budget, parse_every, policies
from holdfast.pacing import plan as decide
from holdfast.pacing.policy import duration
from holdfast.pacing.quantities import parse_seconds
from holdfast.pacing.settings import parse_mtbf
from holdfast.pacing.what_if import Outlook, outlook

MAX_RANKS = 10_000_000
_JOB, _CLUSTER, _CHOICE = "The job", "The cluster", "The choice"


def _option(
    panel: str, metavar: str, told: str, *names: str, least: float | None = None, most: float | None = None
) -> Any:
    return typer.Option(*names, help=told, metavar=metavar, min=least, max=most, rich_help_panel=panel)


_Text = str | None
_State = _option(_JOB, "SIZE", "Of a checkpoint, all ranks together: 6.5GB.")
_Parameters = _option(_JOB, "COUNT", "Instead of the size: 124M, 7B, 405B.")
_Each = _option(
    _JOB, "BYTES", "Of one, with the optimizer's: 14 for mixed precision and Adam.", least=0.1, most=64
)
_Iteration = _option(_JOB, "TIME", "What one takes: 2.5s.")
_Stall = _option(_JOB, "TIME", "What a checkpoint costs training, where that is known: 5s.")
_Lag = _option(_JOB, "TIME", "From its start until it is durable, where that is known: 2min.")
_Job = _option(_JOB, "JOB", "Instead of all these: what the server has measured of a job.")
_Ranks = _option(_CLUSTER, "COUNT", "GPUs; they share the state.", least=1, most=MAX_RANKS)
_Copy = _option(_CLUSTER, "SPEED", "Of one rank, from GPU to host memory: 10GB/s.")
_Write = _option(_CLUSTER, "SPEED", "Of one rank, to the store: 500MB/s.")
_Mtbf = _option(_CLUSTER, "TIME", "Mean time between failures of the whole job: 3h.")
_Restart = _option(_CLUSTER, "TIME", "From a failure until it trains again: 3min.")
_Budget = _option(_CHOICE, "SHARE", "Overhead that is allowed: 3.5%.")
_Policy = _option(_CHOICE, "NAME", f"The one in force: {', '.join(policies)}.")
_Simulate = typer.Option("--simulate", help="Run every policy through failures as well.", rich_help_panel=_CHOICE)
_Every = _option(
    _CHOICE, "COUNT", "Iterations: an interval to look at beside the others.", "--every", "--interval"
)


def plan(
    state: Annotated[_Text, _State] = None,
    parameters: Annotated[_Text, _Parameters] = None,
    bytes_per_parameter: Annotated[float, _Each] = BYTES_PER_PARAMETER,
    iteration: Annotated[_Text, _Iteration] = None,
    stall: Annotated[_Text, _Stall] = None,
    lag: Annotated[_Text, _Lag] = None,
    job: Annotated[_Text, _Job] = None,
    ranks: Annotated[int | None, _Ranks] = None,
    copy_bandwidth: Annotated[_Text, _Copy] = None,
    write_bandwidth: Annotated[_Text, _Write] = None,
    mtbf: Annotated[_Text, _Mtbf] = None,
    restart: Annotated[_Text, _Restart] = None,
    budget: Annotated[_Text, _Budget] = None,
    policy: Annotated[_Text, _Policy] = None,
    every: Annotated[_Text, _Every] = None,
    simulate: Annotated[bool, _Simulate] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """Compare checkpoint intervals: cost, expected loss to failures, the best one. Needs no server and no torch.

    ETTR, the effective training time ratio, is the share of time that moves training forward and is not lost
    again: too short an interval spends it on checkpoints, too long a one loses it at every failure. What is left
    out is assumed, and the answer says so.

    Examples: `holdfast plan --parameters 405B --ranks 16384 --iteration 5s --mtbf 3h --restart 5min`

    `holdfast plan --ranks 16384 --mtbf 3.09h --stall 5s --lag 2min --restart 5min --budget 2%`

    `holdfast plan --parameters 7B --ranks 64 --simulate`

    `holdfast plan --state 6.5GB --every 500`  ·  `holdfast plan --job char-gpt --mtbf 12h --json`
    """
    typed = Typed(
        state=state, parameters=parameters, bytes_per_parameter=bytes_per_parameter, ranks=ranks,
        iteration=iteration, copy_bandwidth=copy_bandwidth, write_bandwidth=write_bandwidth, stall=stall, lag=lag,
        mtbf=mtbf, restart=restart, budget=budget, every=every, policy=policy,
    )  # fmt: skip
    try:
        answer = _imagined(typed) if job is None else _measured(job, typed, server, token)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    if simulate:
        answer = replace(answer, simulated=simulated(answer.outlook))
    if json:
        print_json(answer)
    else:
        tell(answer)


def _imagined(typed: Typed) -> Answer:
    profile, settings, history, told = premises_of(typed)
    present = decide(profile, settings, history).interval
    in_force = settings.every is not None
    asked = () if typed.every is None or in_force else (parse_every(typed.every),)
    found = outlook(profile, settings, history, present=present, asked=asked)
    # A policy gives its reasons for a job that was measured, and this one was not.
    policies = (each if each.interval is None else replace(each, reason="") for each in found.policies)
    within = "" if in_force else f" with a budget of {percent(settings.budget)}"
    decides = f"{settings.policy}{within} takes one every"
    return Answer(outlook=replace(found, policies=tuple(policies)), in_force=decides, rests_on=told)


MEASURED_ANYWAY = (
    "state", "parameters", "iteration", "stall", "lag", "copy_bandwidth", "write_bandwidth", "policy",
)  # fmt: skip


def _measured(job: str, typed: Typed, server: str, token: str | None) -> Answer:
    given = [f"--{name.replace('_', '-')}" for name in MEASURED_ANYWAY if getattr(typed, name) is not None]
    if given:
        raise ValueError(f"{given[0]} is measured of a job that runs: leave out --job or {given[0]}")
    what_if: dict[str, float | int | None] = {
        "budget": None if typed.budget is None else parse_budget(typed.budget),
        "every": None if typed.every is None else parse_every(typed.every),
        "mtbf": None if typed.mtbf is None else parse_mtbf(typed.mtbf),
        "ranks": typed.ranks,
        "restart": None if typed.restart is None else parse_seconds(typed.restart, "--restart"),
    }
    with asking(server, token) as client:
        known = client.plan(job, **what_if)
    if known.outlook is None:
        fail(f"nothing to plan with yet: {known.why_none}")
    by = ", set by hand," if known.held_by_hand else ""
    return Answer(
        outlook=known.outlook,
        in_force=f"In force{by} is one every",
        rests_on=_premises_of_job(known, known.outlook),
    )


def _premises_of_job(known: JobPlan, found: Outlook) -> list[Premise]:
    seen = f"{counted(known.failures, 'failure')} in {duration(known.running_seconds)}"
    between = f"one in {duration(found.mtbf_seconds)}"
    likely = f"90% between {duration(found.mtbf_low_seconds)} and {duration(found.mtbf_high_seconds)}"
    failures = {
        "estimated": f"the usual rate, corrected by {seen}; {likely}",
        "assumed": f"assumed, as published: {seen} here",
    }
    origins = known.origins
    return [
        Premise(name="iteration", value=duration(found.iteration_seconds), origin="measured"),
        Premise(name="cost of one", value=duration(found.cost_seconds), origin="measured"),
        Premise(name="durable after", value=duration(found.lag_seconds), origin="measured"),
        Premise(name="ranks", value=f"{found.world_size:,}", origin=_origin(origins, "world_size")),
        Premise(
            name="failures", value=between, origin=failures.get(origins.get("mtbf_seconds", ""), f"given; {seen}")
        ),
        Premise(name="restart", value=duration(found.restart_seconds), origin=_origin(origins, "restart_seconds")),
        Premise(name="budget", value=percent(found.budget), origin=_origin(origins, "budget")),
    ]


def _origin(origins: Mapping[str, str], name: str) -> str:
    origin = origins.get(name, "")
    return "given" if origin == "stated" else origin
