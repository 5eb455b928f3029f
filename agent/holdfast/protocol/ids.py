"""Names of jobs, and ids of checkpoints."""

from __future__ import annotations

import functools
import re

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"([0-9]{12})-([0-9]{1,9})")


def is_job_name(job: object) -> bool:
    return isinstance(job, str) and _JOB.fullmatch(job) is not None


def validate_job(job: str) -> str:
    """Return `job` unchanged. ValueError: the name cannot be a directory and a URL segment."""
    if not is_job_name(job):
        raise ValueError(
            f"job name {job!r}: use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return job


@functools.lru_cache
def checkpoint_id(iteration: int, lineage: int) -> str:
    """Return the id of a checkpoint, as in `000000001200-3`."""
    return f"{iteration:012d}-{lineage}"


@functools.lru_cache
def parse_checkpoint_id(checkpoint: str) -> tuple[int, int]:
    """Return (iteration, lineage) of a checkpoint id. ValueError: it is not one."""
    match = _CHECKPOINT.fullmatch(checkpoint)
    if match is None:
        raise ValueError(
            f"checkpoint id {checkpoint!r}: expected <iteration, 12 digits>-<lineage>, as in 000000001200-3"
        )
    return int(match[1]), int(match[2])


def is_checkpoint_id(name: str) -> bool:
    """Return whether a name in a store is a checkpoint id."""
    return _CHECKPOINT.fullmatch(name) is not None
