"""`holdfast store drill`: prove that a start could load the newest checkpoint of a job."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.checkpoint import restore
from holdfast.commands.console import (
    EXIT_REFUSED,
    EXIT_USAGE,
    asking,
    fail,
    print_json,
    print_table,
    progress_bar,
    say,
)
from holdfast.commands.options import Json, ReadRate, ReportTo, StorePath, Token
from holdfast.commands.stores.arguments import chosen, for_each_job, opened
from holdfast.commands.stores.scrubbing import pace_of, report_scrub
from holdfast.protocol.jobs import MAX_REASON, ScrubReport, ScrubState
from holdfast.store import Store
from holdfast.units import duration, format_bytes

if TYPE_CHECKING:
    from holdfast.checkpoint.drill import DrilledCheckpoint

_STATES: dict[str, ScrubState] = {"loads": "sound", "repairable": "repairable", "damaged": "damaged"}
"""What is reported to the server, by the outcome of a drill."""
_ALL = "Load every checkpoint, not only the newest that loads."


def drill(
    path: StorePath,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this job.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Load the checkpoint of this name instead of the newest; needs JOB.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=_ALL)] = False,
    rate: ReadRate = None,
    server: ReportTo = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Load the newest checkpoint of each job into memory, and decode it as a start of the job would.

    Every byte is read from the storage device and verified. Damage is repaired in memory where parity allows it,
    and the state of every rank is decoded. This needs no device and no script, but as much memory as the size of
    the checkpoint. If the newest checkpoint does not load, earlier ones follow until one does: the one that a
    start would resume from. The exit code is 0 when the newest checkpoint of each job loads, and 1 otherwise.

    Examples: holdfast store drill checkpoints  ·  holdfast store drill checkpoints char-gpt --rate 200MB/s  ·
    holdfast store drill s3://bucket/run char-gpt --server http://127.0.0.1:7117
    """
    from holdfast.checkpoint.drill import drill as load  # with torch

    pace = pace_of(rate)
    drilled: list[DrilledCheckpoint] = []
    with opened(path) as store:
        wanted, has_failed = _wanted(store, job, checkpoint)
        for name, candidates in wanted:
            for candidate in candidates:
                with progress_bar(f"{name} {candidate}") as progress:
                    outcome = load(store, name, candidate, pace=pace, progress=progress)
                drilled.append(outcome)
                if not every and outcome.state not in ("damaged", "removed"):  # a start passes over only these
                    break
    if json:
        print_json(drilled)
    else:
        _print(drilled, path)
    if server is not None:
        with asking(server, token) as client:
            for outcome in drilled:
                if (state := _STATES.get(outcome.state)) is not None:
                    report_scrub(client, outcome.job, outcome.checkpoint, _report(outcome, state))
    if has_failed or any(not outcome.is_loadable and outcome.state != "removed" for outcome in drilled):
        raise typer.Exit(EXIT_REFUSED)


def _wanted(store: Store, job: str | None, checkpoint: str | None) -> tuple[list[tuple[str, list[str]]], bool]:
    """Return the checkpoints of each job, in the order of a start, and whether a job could not be read."""
    if checkpoint is not None:
        if job is None:
            fail("--checkpoint needs a job", EXIT_USAGE)
        return [(job, [chosen(store, job, checkpoint)])], False
    return for_each_job(store, job, lambda name: (name, [each for each, _ in restore.candidates(store, name)]))


def _report(outcome: DrilledCheckpoint, state: ScrubState) -> ScrubReport:
    return ScrubReport(
        state=state,
        host=socket.gethostname(),
        read_bytes=outcome.read_bytes,
        seconds=outcome.seconds,
        reason=(outcome.reason or "")[:MAX_REASON] or None,
    )


def _print(drilled: list[DrilledCheckpoint], path: str) -> None:
    if not drilled:
        say(f"no checkpoints in {path}")
        return
    rows = [
        (
            *(each.job, each.checkpoint, str(each.ranks or "-"), f"{each.tensors:,}" if each.tensors else "-"),
            *(format_bytes(each.read_bytes), duration(each.seconds), each.state),
        )
        for each in drilled
    ]
    print_table(("JOB", "CHECKPOINT", "RANKS", "TENSORS", "READ", "TIME", "STATE"), rows)
    for each in drilled:
        if each.reason is not None:
            say("", f"{each.job} {each.checkpoint} is {each.state}: {each.reason}")
    for job in dict.fromkeys(each.job for each in drilled):
        outcomes = [each for each in drilled if each.job == job]
        if outcomes[0].state == "damaged":
            loadable = next((each.checkpoint for each in outcomes if each.is_loadable), None)
            start = f"resumes from {loadable}" if loadable else "begins at iteration 0: no other checkpoint loads"
            say("", f"A start of {job} {start}")
