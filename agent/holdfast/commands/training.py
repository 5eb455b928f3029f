"""Commands that pause, continue and end the training of a job."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from typing import Annotated

import typer

from holdfast.client import Client, JobSummary
from holdfast.commands.console import fail, print_json, say, with_client
from holdfast.commands.control import POLL_SECONDS
from holdfast.commands.options import JobName, Json, NoWait, Timeout, Yes
from holdfast.errors import Fenced
from holdfast.protocol.orders import HaltAction
from holdfast.store import open_store
from holdfast.store.records import HaltNote, newest_halt

_Store = Annotated[
    str | None,
    typer.Option("--store", metavar="PATH", help="The job's store, to continue it there without a server."),
]


@with_client
def pause(
    client: Client, job: JobName, no_wait: NoWait = False, timeout: Timeout = 300.0, json: Json = False
) -> None:
    """Pause training after a checkpoint, until `holdfast continue`.

    All ranks wait at the same boundary and keep their memory and devices. Neither the supervisor nor an alert rule
    counts this as a hang. SIGTERM ends a paused job; it is still paused after the next start.

    Example: holdfast pause char-gpt
    """
    seen = _order(client, job, "pause", _is_paused, timeout=None if no_wait else timeout)
    paused = f"training of {job} is paused after iteration {seen.iteration:,}"
    _print(seen, paused if _is_paused(seen) else f"pause of {job} requested", json=json)


@with_client
def go_on(
    client: Client,
    job: JobName,
    store: _Store = None,
    no_wait: NoWait = False,
    timeout: Timeout = 60.0,
    json: Json = False,
) -> None:
    """Continue paused training.

    Without a server, give the store: the job checks it every few seconds.

    Examples: holdfast continue char-gpt  ·  holdfast continue char-gpt --store /checkpoints
    """
    if store is not None:
        _continue_in_store(job, store)
        say(f"training of {job} continues within seconds, or at its next start")
        return
    seen = _order(client, job, "continue", lambda seen: not _is_paused(seen), timeout=None if no_wait else timeout)
    waits = f"{job} is {seen.status}" if _is_paused(seen) or not seen.alive else f"training of {job} continues"
    _print(seen, waits, json=json)


@with_client
def end(
    client: Client,
    job: JobName,
    yes: Yes = False,
    no_wait: NoWait = False,
    timeout: Timeout = 300.0,
    json: Json = False,
) -> None:
    """End training after a checkpoint. `holdfast run` does not start it again.

    The script exits with status 77, and `holdfast run` with 0. A later start resumes from that checkpoint.

    Example: holdfast end char-gpt
    """
    if not yes:
        found = client.job(job)
        typer.confirm(f"End training of {job} at about iteration {found.iteration:,}?", abort=True)
    seen = _order(client, job, "end", lambda seen: seen.has_ended, timeout=None if no_wait else timeout)
    _print(seen, f"{job} is {seen.status}: {seen.status_reason}", json=json)


def _is_paused(seen: JobSummary) -> bool:
    return seen.training_paused_at is not None


def _order(
    client: Client,
    job: str,
    action: HaltAction,
    is_done: Callable[[JobSummary], bool],
    *,
    timeout: float | None,
) -> JobSummary:
    """Order it, and wait until it is done, the job has ended, or the time is up."""
    client.order_training(job, action)
    deadline = time.monotonic() + (timeout or 0.0)
    while True:
        seen = client.job(job)
        if timeout is None or is_done(seen) or not seen.alive:
            return seen
        if time.monotonic() >= deadline:
            fail(f"not done after {timeout:g} s: {job} is {seen.status}; the order stays open")
        time.sleep(POLL_SECONDS)


def _print(seen: JobSummary, text: str, *, json: bool) -> None:
    if json:
        print_json(seen)
    else:
        say(text)


def _continue_in_store(job: str, path: str) -> None:
    try:
        store = open_store(path)
        note = newest_halt(store, job)
        if note is None or note.state != "paused":
            fail(f"training of {job} is not paused according to {path}")
        store.append(
            job,
            HaltNote(
                attempt=store.latest_attempt(job), state="continued", by=_user(), order=note.order,
                iteration=note.iteration, at=time.time(),
            ),
        )  # fmt: skip
    except (OSError, ValueError, Fenced) as error:
        fail(str(error))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container in which the number of the user has no name
        return "an operator"
