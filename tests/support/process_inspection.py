"""Processes, threads and open descriptors that a test has left behind."""

import contextlib
import os
import threading
from pathlib import Path

PREEXISTING = {"processes": set(), "threads": set()}
"""Processes and threads that existed before the test: shared servers, threads of earlier sessions."""


def record_preexisting_processes_and_threads():
    PREEXISTING.update(processes=set(), threads=set())
    PREEXISTING.update(processes=set(children()), threads=set(threading.enumerate()))


def children():
    """Process ids of this process's children since the test began, zombies included."""
    pids = set()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that of a thread which has just ended
            pids.update(map(int, path.read_text().split()))
    return sorted(pids - PREEXISTING["processes"])


def descriptors(pid="self"):
    """What each open descriptor of a process is."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def our_threads(*, pool=False):
    """Names of the threads that the test has started; those of the pool, which stays, are left out by default."""
    ours = (thread.name for thread in threading.enumerate() if thread not in PREEXISTING["threads"])
    return [name for name in ours if name.startswith("holdfast") and (pool or "-io-" not in name)]
