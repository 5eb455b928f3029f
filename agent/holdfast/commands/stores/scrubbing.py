"""`holdfast store scrub`: find damage in a store, and repair it."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from holdfast.checkpoint.reading import RateLimiter
from holdfast.checkpoint.scrub import ScrubbedCheckpoint
from holdfast.checkpoint.scrub import scrub as scrub_checkpoint
from holdfast.client import Client, NotFound
from holdfast.commands.console import (
    EXIT_REFUSED,
    asking,
    complain,
    counted,
    parsed,
    print_json,
    print_table,
    progress_bar,
    say,
)
from holdfast.commands.options import Json, OnlyJob, ReadRate, ReportTo, StorePath, Token
from holdfast.commands.stores.arguments import opened
from holdfast.commands.stores.listing import named
from holdfast.protocol.jobs import MAX_REASON, ScrubReport
from holdfast.units import format_bytes, parse_speed

_REPAIR = "Repair damaged files from their parity, where possible."


def scrub(
    path: StorePath,
    job: OnlyJob = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Read only the checkpoint of this name; needs --job.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help=_REPAIR)] = False,
    rate: ReadRate = None,
    server: ReportTo = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Read every byte of every checkpoint, with parity files and copies of manifests, and list the damage.

    With --repair, files are repaired bit for bit from their parity. Jobs may keep running. The exit code is 0 when
    all checkpoints are sound or were repaired, and 1 when damage remains.

    Examples: holdfast store scrub checkpoints  ·  holdfast store scrub checkpoints --repair --rate 50MB/s  ·
    holdfast store scrub s3://bucket/checkpoints --job char-gpt --json  ·
    holdfast store scrub checkpoints --repair --server http://127.0.0.1:7117
    """
    pace = pace_of(rate)
    found = []
    with opened(path) as store:
        wanted, has_failed = named(store, job, checkpoint)
        for number, (name, each) in enumerate(wanted, 1):
            with progress_bar(f"{name} {each} ({number} of {len(wanted)})") as progress:
                found.append(scrub_checkpoint(store, name, each, repair=repair, pace=pace, progress=progress))
    if json:
        print_json(found)
    else:
        _print(found, path, repair=repair)
    if server is not None:
        with asking(server, token) as client:
            for scrubbed in found:
                _report(client, scrubbed)
    if has_failed or any(each.state not in ("sound", "repaired", "removed") for each in found):
        raise typer.Exit(EXIT_REFUSED)


def pace_of(rate: str | None) -> RateLimiter | None:
    """Return the limit that `--rate` sets."""
    return None if rate is None else RateLimiter(parsed(lambda text: parse_speed(text, "--rate"), rate))


def report_scrub(client: Client, job: str, checkpoint: str, report: ScrubReport) -> None:
    """Report what was found in a checkpoint; name one that the server does not know."""
    try:
        client.report_scrub(job, checkpoint, report)
    except NotFound:
        complain(f"{client.server} does not know {job} {checkpoint}")


def _report(client: Client, found: ScrubbedCheckpoint) -> None:
    if found.state == "removed" or found.state == "unreadable":
        return
    report = ScrubReport(
        state=found.state,
        host=socket.gethostname(),
        read_bytes=found.read_bytes,
        seconds=found.seconds,
        reason="; ".join(map(str, found.files))[:MAX_REASON] or None,
    )
    report_scrub(client, found.job, found.checkpoint, report)


def _print(found: list[ScrubbedCheckpoint], path: str, *, repair: bool) -> None:
    if not found:
        say(f"no checkpoints in {path}")
        return
    rows = [(each.job, each.checkpoint, format_bytes(each.read_bytes), each.state) for each in found]
    print_table(("JOB", "CHECKPOINT", "READ", "STATE"), rows)
    for each in found:
        if each.reason is not None:
            say("", f"{each.job} {each.checkpoint} is unreadable: {each.reason}")
        for file in each.files:
            say("", f"{each.job} {each.checkpoint}/{file}")
    repairable = [each for each in found if each.state == "repairable"]
    if repairable and not repair:
        say("", f"repair {counted(len(repairable), 'checkpoint')} with: holdfast store scrub {path} --repair")
