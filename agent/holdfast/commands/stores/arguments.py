"""What the store's commands are given: a store, a job in it, a checkpoint of that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from holdfast.checkpoint import restore
from holdfast.commands.console import EXIT_USAGE, fail
from holdfast.errors import DamagedCheckpoint, HoldfastError, NoSuchCheckpoint
from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.store import Store, open_store


@contextlib.contextmanager
def opened(path: str) -> Iterator[Store]:
    """The store at `path`; what goes wrong with it ends the command with one sentence."""
    if "://" not in path and not os.path.isdir(path):
        fail(f"store {path!r}: there is no such directory", EXIT_USAGE)
    try:
        store = open_store(path)
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
    """An operating system's error as a sentence: what it is about first."""
    told = error.strerror or str(error)
    return f"{error.filename}: {told}" if error.filename else told


def jobs_of(store: Store, job: str | None) -> list[str]:
    """All jobs of a store, or the one asked for."""
    jobs = store.jobs()
    if job is not None and job not in jobs:
        fail(f"store {store.url!r} has no job {job!r}; it has: {', '.join(jobs) or 'none'}")
    return jobs if job is None else [job]


def chosen(store: Store, job: str, named: str) -> str:
    """The checkpoint that a person named, or the end of the command with those near it."""
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
        fail(f"checkpoint {named!r}: give its name, as `store ls` does, its iteration, or latest", EXIT_USAGE)
    if named not in store.checkpoints(job):
        fail(f"{job} has no checkpoint {named}; `holdfast store ls {store.url} --job {job}` lists what there is")
    return named
