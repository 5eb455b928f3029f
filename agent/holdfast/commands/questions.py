"""The commands `jobs`, `show`, `config`, `logs`, `checkpoints` and `goodput`: what the server knows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal

import typer

from holdfast.client import CheckpointInfo, Client, Edit, JobSummary, NotFound
from holdfast.commands.console import counted, fail, percent, print_json, print_table, say, seconds, with_client
from holdfast.commands.options import JobName, Json, Labels, as_label_filters
from holdfast.protocol.analyses import RecoverySource, category_of
from holdfast.protocol.wire import LeftOutData
from holdfast.units import FixedInterval, format_bytes, format_interval, share

AttemptNumber = Annotated[
    int | None, typer.Option("--attempt", min=0, metavar="N", help="Number of the attempt. Default: the newest.")
]


@with_client
def jobs(
    client: Client,
    search: Annotated[
        str | None, typer.Option("--search", metavar="TEXT", help="Only jobs with this in their name or host.")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="PROJECT", help="Only jobs of this project.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", metavar="OWNER", help="Only jobs of this owner.")] = None,
    label: Labels = None,
    json: Json = False,
) -> None:
    """List the jobs that the server knows.

    Examples: holdfast jobs --search gpu-17  ·  holdfast jobs --label team=nlp  ·
    holdfast jobs --json | jq -r '.[] | select(.status == "silent") | .job'
    """
    known = client.jobs(search=search, project=project, owner=owner, labels=as_label_filters(label))
    if json:
        print_json(known)
    elif known:
        header = (
            "JOB",
            "STATUS",
            "ITERATION",
            "PROGRESS",
            "LOSS",
            "OVERHEAD",
            "BUDGET",
            "EVERY",
            "LAST CHECKPOINT",
            "VERDICT",
        )
        print_table(header, [_row(job) for job in known])
    elif search or project or owner or label:
        say("no job matches")
    else:
        say(f"no jobs yet: start one with holdfast.Session(..., server={client.server!r})")


@with_client
def show(client: Client, job: JobName, json: Json = False) -> None:
    """Show one job: its progress, the cost of its checkpoints, and what a crash would lose now.

    Example: holdfast show char-gpt
    """
    found = client.job(job)
    if json:
        print_json(found)
        return
    recovery: list[RecoverySource] = []
    with contextlib.suppress(NotFound):  # an older server does not know
        recovery = client.recovery(job).sources
    is_current = found.desired.version == (found.applied_version or 0)
    pending = [] if is_current else _pending(found, client.edits(job))
    for name, value in [*_facts(found), *map(_resumption, recovery), *pending]:
        say(f"{name:<16} {value}")


@with_client
def checkpoints(
    client: Client,
    job: JobName,
    limit: Annotated[int, typer.Option(min=1, max=500, metavar="N", help="How many to list.")] = 20,
    every_state: Annotated[
        bool, typer.Option("--all", help="Include checkpoints that cannot be restored: failed, torn, retired.")
    ] = False,
    json: Json = False,
) -> None:
    """List the checkpoints of a job that `holdfast restore` can restore, newest first.

    Example: holdfast checkpoints char-gpt --limit 5
    """
    found = client.checkpoints(job, limit=limit) if every_state else client.restorable(job, limit)
    if json:
        print_json(found)
    elif found:
        header = ("ITERATION", "CHECKPOINT", "KIND", "STATE", "SIZE", "TAKEN", "LABEL")
        print_table(header, [_checkpoint_row(row) for row in found])
    else:
        say(f"{job} has no {'' if every_state else 'restorable '}checkpoint yet")


@with_client
def goodput(
    client: Client,
    job: JobName,
    window: Annotated[
        Literal["1h", "24h", "7d", "all"],
        typer.Option("--window", metavar="TIME", help="How far back: 1h, 24h, 7d or all."),
    ] = "24h",
    json: Json = False,
) -> None:
    """Show where a job's time went: productive, waiting, lost, restoring, starting, down.

    Example: holdfast goodput char-gpt --window 7d
    """
    found = client.goodput(job, window)
    if json:
        print_json(found)
    else:
        lost = f", {counted(found.lost_iterations, 'iteration')} lost" if found.lost_iterations else ""
        kept = counted(found.iterations, "iteration")
        say(f"goodput {percent(found.goodput)} of {seconds(found.wall_seconds)}: {kept}{lost}")
        print_table(
            ("CATEGORY", "TIME", "SHARE", "DEFINITION"),
            [
                (category_of(row.name), seconds(row.seconds), percent(row.share), row.definition)
                for row in found.buckets
            ],
        )


@with_client
def config(
    client: Client,
    job: JobName,
    attempt: AttemptNumber = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ATTEMPT",
            help="Show only what differs from this attempt, or from the `origin` of a fork.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the configuration and environment of an attempt, or how they differ from another attempt's.

    Example: holdfast config char-gpt-fork --against origin
    """
    attempt = _newest_attempt(client, job) if attempt is None else attempt
    found = client.configuration(job, attempt, against=against)
    if json:
        print_json(found)
    elif found.against is not None:
        other = f"attempt {found.against.attempt} of {found.against.job}"
        rows = [(row.name, _value(row.before), _value(row.after)) for row in found.differences]
        if rows:
            print_table(("NAME", other.upper(), f"ATTEMPT {attempt}"), rows)
        else:
            say(f"attempt {attempt} does not differ from {other}")
    else:
        print_table(("NAME", "VALUE"), [*found.configuration.items(), *found.environment.items()])


@with_client
def logs(client: Client, job: JobName, attempt: AttemptNumber = None, json: Json = False) -> None:
    """Print the last lines of output of an attempt under `holdfast run`, at most 1,000.

    Example: holdfast logs char-gpt --attempt 2 | tail
    """
    found = client.output(job, _newest_attempt(client, job) if attempt is None else attempt)
    if json:
        print_json(found)
        return
    for line in found.lines:
        say(line)
    if not found.lines:
        say(
            f"the server has no output of attempt {found.attempt} of {job}: start the script with `holdfast run` "
            "to send it",
            error=True,
        )


def _newest_attempt(client: Client, job: str) -> int:
    newest = client.attempts(job, limit=1)
    if not newest:
        fail(f"{job} has no attempt yet")
    return newest[0].attempt


def _value(value: str | None) -> str:
    return "-" if value is None else value


def _row(job: JobSummary) -> tuple[str, ...]:
    return (
        job.job,
        job.status,
        str(job.iteration),
        "-" if job.progress is None else share(job.progress),
        _loss(job),
        percent(job.measured_overhead),
        percent(job.budget),
        _short_interval(job.interval_in_force),
        str(job.last_durable.iteration) if job.last_durable else "-",
        job.verdict.text if job.verdict else job.status_reason or "",
    )


def _checkpoint_row(row: CheckpointInfo) -> tuple[str, ...]:
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.at))
    pin = "" if not row.pinned else f"kept for {row.pinned_by}" if row.is_kept_for_alert else "pinned"
    label = ", ".join(filter(None, [pin, row.label]))
    size = format_bytes(row.payload_bytes) if row.payload_bytes else "-"  # of one that only an inventory named
    return str(row.iteration), row.id, row.kind, row.state_name, size, taken, label


def _facts(job: JobSummary) -> list[tuple[str, str]]:
    status = f"{job.status} ({job.status_reason})" if job.status_reason else job.status
    speed = f", {job.iterations_per_second:.3g} per second" if job.iterations_per_second else ""
    window = (
        f" over {counted(job.measured_window_iterations, 'iteration')}" if job.measured_window_iterations else ""
    )
    durable = job.last_durable
    verdict = job.verdict
    facts = [
        ("job", job.job),
        *([("verdict", verdict.text)] if verdict else []),
        *([("next step", verdict.next_step)] if verdict and verdict.next_step else []),
        ("status", status),
        ("iteration", f"{job.iteration} on lineage {job.lineage}{speed}"),
        *([("progress", _progress(job))] if job.progress is not None else []),
        *([("throughput", speeds)] if (speeds := _throughput(job)) else []),
        ("attempt", f"{job.attempt}, {counted(job.restarts, 'restart')}"),
        ("loss", _loss(job)),
        ("overhead", f"{percent(job.measured_overhead)} measured{window}, budget {percent(job.budget)}"),
        ("interval", _interval(job)),
        ("unsaved work", _unsaved_work(job)),
        ("last checkpoint", f"{durable.iteration} ({durable.id})" if durable else "none yet"),
        ("checkpoints", str(job.checkpoints_total)),
        ("last report", f"{seconds(job.last_contact_seconds)} ago"),
    ]
    facts += [("left out", _left_out(one)) for one in job.left_out]
    if job.open_order:
        order = job.open_order
        by = f", requested by {order.who}" if order.who else ""
        facts.append(("restore", f"to {order.iteration}: {order.state}{by} (request {order.id})"))
    return facts


def _left_out(data: LeftOutData) -> str:
    loader = f" of loader {data.loader}" if data.loader else ""
    batches = "1 batch" if data.batches == 1 else f"{data.batches:,} batches"
    return f"{batches}{loader} after iteration {data.iteration}"


def _resumption(source: RecoverySource) -> tuple[str, str]:
    """Return where the job would resume after a failure, and the newest checkpoint there."""
    newest = f"{source.name} has {'nothing' if source.iteration is None else source.iteration}"
    note = f" ({source.note})" if source.note else ""
    after = f"{source.resumes_from} if {source.failure}, {counted(source.loses, 'iteration')} again"
    return "would resume at", f"{after}; {newest}{note}"


def _progress(job: JobSummary) -> str:
    left = "" if job.remaining_seconds is None else f", about {seconds(job.remaining_seconds)} left"
    return f"{share(job.progress or 0.0)} of {job.total_iterations:,} iterations{left}"


def _throughput(job: JobSummary) -> str:
    figures = (("tokens", job.tokens_per_second), ("samples", job.samples_per_second))
    return ", ".join(
        f"{value:,.{0 if value >= 100 else 2}f} {name} per second" for name, value in figures if value is not None
    )


def _pending(job: JobSummary, edits: Sequence[Edit]) -> list[tuple[str, str]]:
    """Return the changes that the job has not applied yet, oldest first."""
    changes = [
        f"version {edit.version}: {edit.summary}" + (f", by {edit.who}" if edit.who else "")
        for edit in reversed(edits)
        if edit.version > (job.applied_version or 0)
    ]
    return [("not yet applied", change) for change in changes or [f"version {job.desired.version}"]]


def _short_interval(interval: FixedInterval | None) -> str:
    return format_interval(interval) if isinstance(interval, timedelta) else str(interval or "-")


def _interval(job: JobSummary) -> str:
    if job.desired.paused:
        return "paused: no checkpoints"
    if (interval := job.interval_in_force) is None:
        return "not decided yet"
    return f"every {format_interval(interval)} ({job.policy or 'policy unknown'})"


def _unsaved_work(job: JobSummary) -> str:
    if job.unsaved_iterations is None:
        return "-"
    return f"{counted(job.unsaved_iterations, 'iteration')}, {seconds(job.unsaved_seconds)}"


def _loss(job: JobSummary) -> str:
    return "-" if job.loss is None else f"{float(job.loss):.4g}"
