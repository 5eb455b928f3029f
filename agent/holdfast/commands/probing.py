"""`holdfast probe`: how the data are loaded, measured now, and what would make it faster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client, JobSummary, NoticeRow
from holdfast.commands.console import (
    DEFAULT_SERVER,
    JobName,
    Json,
    NoWait,
    Server,
    Token,
    asking,
    fail,
    print_json,
)
from holdfast.commands.control import POLL_SECONDS, acknowledgement, is_applied, told, wait_until_applied
from holdfast.protocol import Desired

CODE = "data"
"""Of the notice that answers."""


def probe(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 120.0,
    json: Json = False,
) -> None:
    """Measure how long a batch takes to fetch and to prepare, and what would make loading faster.

    At the end of an iteration the job reads the batches that come next twice, for at most 10 seconds in which
    training waits. The place in the data stays what it was. A checkpoint that is being written is waited for.

    Example: holdfast probe char-gpt
    """
    deadline = time.monotonic() + (0.0 if no_wait else timeout)
    with asking(server, token) as client:
        before = max((notice.id for notice in client.notices(job)), default=0)
        desired = client.edit(job, probe_request=True)
        try:
            seen = wait_until_applied(client, job, desired.version, deadline - time.monotonic())
            if not json:
                print(f"a probe of the data: {told(seen, desired.version)}", flush=True)
            answer = None
            if not no_wait and is_applied(seen, desired.version):
                answer, seen = _answer(client, seen, before, deadline)
        except KeyboardInterrupt:
            fail(f"no longer waiting; what was asked of {job} stays asked")
    if json:
        print_json({**acknowledgement(seen, desired), "answer": answer})
    if not no_wait:
        _conclude(seen, desired, answer, timeout, quiet=json)


def _answer(client: Client, seen: JobSummary, before: int, deadline: float) -> tuple[NoticeRow | None, JobSummary]:
    """The first notice about the data since; None when the job had gone or the time was up."""
    while True:
        since = [notice for notice in client.notices(seen.job) if notice.code == CODE and notice.id > before]
        answer = min(since, key=lambda notice: notice.id, default=None)
        if answer is not None or not seen.alive or time.monotonic() >= deadline:
            return answer, seen
        time.sleep(POLL_SECONDS)
        seen = client.job(seen.job)


def _conclude(
    seen: JobSummary, desired: Desired, answer: NoticeRow | None, timeout: float, *, quiet: bool
) -> None:
    if answer is not None and answer.level == "info":
        if not quiet:
            print("\n".join(answer.message.split(". ")))
    elif answer is not None:
        fail(answer.message)
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"{seen.job} is {seen.status}, and a request does not wait for the next start: nothing was measured")
    elif not seen.alive:
        fail(f"{seen.job} is {seen.status}: it ended before it answered")
    else:
        fail(f"no answer after {timeout:g} s; when it comes, the job's page shows it among its notices")
