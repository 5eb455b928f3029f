"""Two attempts of one job at the same time: the messages for each of them."""

from __future__ import annotations

import contextlib
import os
import socket

from holdfast.store import Attempt, Ending, Store
from holdfast.store.records import newest_attempt
from holdfast.system import processes, supervisor_channel


def describe_replacement(store: Store, job: str, attempt: int) -> str:
    """Say which attempt has replaced `attempt`, as far as the store can be read, and what to do."""
    other = ""
    with contextlib.suppress(OSError):
        newest = newest_attempt(store, job)
        if newest is not None and newest.number > attempt:
            other = f" (attempt {newest.number}, process {newest.pid} on {newest.host})"
    if supervisor_channel.is_supervised():
        follows = (
            "This one saves nothing from now on, and ends. If it is another training, give it another job name"
        )
    else:
        follows = "This one saves nothing from now on: stop it, or give it another job name"
    return f"another process has started this job{other}. {follows}"


def describe_running_predecessor(store: Store, job: str, attempt: int) -> str | None:
    """Describe the attempt before `attempt` if it has not ended and its process runs on this machine."""
    if attempt < 2:
        return None
    try:
        before = next((each for each in store.records(job, Attempt, attempt - 1) if each.number < attempt), None)
        if before is None or before.host != socket.gethostname() or before.pid == os.getpid():
            return None
        if not processes.has_run_since(before.pid, before.started_at):
            return None
        if any(each.attempt == before.number for each in store.records(job, Ending, before.number)):
            return None
    except OSError:
        return None
    return (
        f"attempt {before.number} (process {before.pid} on this machine) was still running and can no longer "
        "save. If it is another training, give that one its own job name"
    )
