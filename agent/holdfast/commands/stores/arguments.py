"""Arguments of the store commands: a store, a job in it, a checkpoint of the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.checkpoint import restore
from holdfast.commands.console import EXIT_USAGE, complain, fail
from holdfast.errors import DamagedCheckpoint, HoldfastError, NoSuchCheckpoint
from holdfast.protocol.ids import is_checkpoint_id, parse_checkpoint_id
from holdfast.store import Store, open_store

T = TypeVar("T")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Store]:
    """Open the store at `path`; its errors end the command with one sentence."""
    if "://" not in path and not os.path.isdir(path):
        fail(f"store {path!r}: the directory does not exist", EXIT_USAGE)
    try:
        store = open_store(path)
        if "://" not in path and any(map(is_checkpoint_id, os.listdir(path))) and not store.jobs():
            parent, name = os.path.split(os.path.abspath(path))
            fail(f"{path!r} is one job of the store {parent!r}: give that, and --job {name}", EXIT_USAGE)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(reason(error))
    try:
        yield store
    except DamagedCheckpoint as error:
        fail(f"damaged: {error}")
    except HoldfastError as error:
        fail(str(error))
    except OSError as error:
        fail(reason(error))


def reason(error: OSError) -> str:
    """Return the text of an OSError, with the file name first."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def jobs_of(store: Store, job: str | None) -> list[str]:
    """Return all jobs of a store, or the given one. Exits when it does not exist."""
    jobs = store.jobs()
    if job is not None and job not in jobs:
        fail(f"store {store.url!r} has no job {job!r}; it has: {', '.join(jobs) or 'none'}")
    return jobs if job is None else [job]


def for_each_job(store: Store, job: str | None, act: Callable[[str], T]) -> tuple[list[T], bool]:
    """Return `act` of each job, or of the given one, and whether one failed.

    With several jobs, one that cannot be read is named, and does not keep the others from being read.
    """
    results, has_failed = list[T](), False
    for name in jobs_of(store, job):
        try:
            results.append(act(name))
        except (HoldfastError, OSError) as error:
            if job is not None:
                raise
            complain(f"job {name} cannot be read: {reason(error) if isinstance(error, OSError) else error}")
            has_failed = True
    return results, has_failed


def chosen(store: Store, job: str, named: str) -> str:
    """Return the id of the named checkpoint. Exits with the nearest ones when it does not exist."""
    jobs_of(store, job)
    if named == "latest":
        newest = next((checkpoint for checkpoint, _ in restore.candidates(store, job)), None)
        return newest or fail(f"{job} has no checkpoint in {store.url}")
    if named.isascii() and named.isdecimal():
        try:
            return restore.find(store, job, int(named))
        except NoSuchCheckpoint as error:
            fail(str(error))
    try:
        parse_checkpoint_id(named)
    except ValueError:
        fail(
            f"checkpoint {named!r}: give its name as shown by `holdfast store ls`, its iteration, or latest",
            EXIT_USAGE,
        )
    if named not in store.checkpoints(job):
        fail(f"{job} has no checkpoint {named}; list them with: holdfast store ls {store.url} --job {job}")
    return named
