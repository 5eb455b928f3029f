"""Responses on many jobs, and changes of many."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.protocol.jobs import JobStatus, JobSummary


class JobFilter(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A selection of jobs; omitted fields match all."""

    search: str = ""
    """Part of a name, in any case."""
    status: JobStatus | None = None
    project: str | None = None
    owner: str | None = None
    """Who launched the newest attempt."""
    labels: list[str] = []
    """Labels that must all match: `name` for any value, or `name: value`."""
    archived: bool = False
    """Whether to select the archived jobs instead of the others."""


BulkAction = Literal[
    "checkpoint",
    "pause",
    "resume",
    "pause_training",
    "continue_training",
    "budget",
    "write_budget",
    "on_trouble",
    "acknowledge",
    "archive",
    "unarchive",
    "delete",
]


class BulkChange(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One change of several jobs, which are named or selected by a filter."""

    action: BulkAction
    """Take a checkpoint now, pause or resume checkpoints, pause or continue training, set a budget or the reaction
    to wrong losses, acknowledge the firing alerts; archive jobs that have ended, unarchive them, or delete them
    with all data on the server.
    """
    jobs: list[str] | UnsetType = UNSET
    filter: JobFilter | UnsetType = UNSET
    budget: float | str | None = None
    """New budget as a fraction, or text such as "2%"; `None`: back to the script's budget."""
    write_budget: float | str | None = None
    """New write budget in bytes per second, or text such as "2TB/day"; `None`: back to the script's."""
    on_trouble: str | None = None
    """New reaction to wrong losses, such as `observe`; `None`: back to the script's."""
    preview: bool = False
    """Whether to change nothing, and only answer which jobs would be changed."""


class BulkOutcome(Struct, kw_only=True, frozen=True):
    """The outcome of a bulk change for one job."""

    job: str
    refusal: str = ""
    """Why the job is not changed; empty if it is."""
    version: int | None = None
    """New version of the desired state, if the change made one."""
    alerts: int = 0
    """Number of acknowledged alerts."""


class BulkResult(Struct, kw_only=True, frozen=True):
    """The outcomes of a bulk change, in the order of the names."""

    changed: int
    """Number of jobs that are changed or, in a preview, would be."""
    outcomes: list[BulkOutcome]


class Fleet(Struct, kw_only=True, frozen=True):
    """One page of the jobs that match."""

    jobs: list[JobSummary]
    page: int
    """Page number from 1; the last page, if a later one was requested."""
    pages: int
    size: int
    """Maximum number of jobs per page."""
    total: int
    """Number of jobs on all pages."""
    counts: dict[JobStatus, int]
    """Number of jobs by status, before filtering by status."""
    archived: int = 0
    """Number of archived jobs that match otherwise, which a list leaves out unless it asks for them."""
    projects: list[str]
    """Projects that the caller may view, before filtering by project."""
