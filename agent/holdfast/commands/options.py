"""Arguments and options that several commands share: one name, help text and environment variable for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from holdfast.client import DEFAULT_SERVER

__all__ = [
    "DEFAULT_SERVER", "Checkpoint", "DryRun", "JobName", "Json", "Labels", "NoWait", "OnlyJob", "ReadRate",
    "ReportTo", "Server", "StoreJob", "StoreOption", "StorePath", "StoredCheckpoint", "Timeout", "Token", "Yes",
    "as_label_filters",
]  # fmt: skip

Server = Annotated[
    str, typer.Option("--server", envvar="HOLDFAST_SERVER", metavar="URL", help="The server's address.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HOLDFAST_TOKEN",
        metavar="KEY",
        help="An access key or the shared secret, if the server requires one.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when the server has accepted the request.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="How long to wait for the outcome; the request stays open after that."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")]

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name, as in `holdfast jobs`.")]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint's iteration, or its id, as in 000000001200-3.")
]

StorePath = Annotated[str, typer.Argument(metavar="PATH", help="The store, as given to holdfast.Session.")]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="HOLDFAST_STORE", metavar="PATH", help="The store, as given to holdfast.Session."
    ),
]
StoreJob = Annotated[str, typer.Argument(metavar="JOB", help="The job's name, as in `holdfast store ls`.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=VALUE",
        help="Only jobs with this label, as in team=vision; NAME alone matches any value. Repeatable.",
    ),
]
OnlyJob = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job.")]
ReadRate = Annotated[
    str | None,
    typer.Option(
        "--rate",
        help="Read and write at most this much per second, as in 50MB/s; by default as fast as the store allows.",
    ),
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Report the result to the server of the jobs that use this store, which raises an alert for damage.",
    ),
]
StoredCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="The checkpoint's id, its iteration, or `latest`: the one that a restart resumes from.",
    ),
]


def as_label_filters(labels: Sequence[str] | None) -> list[str]:
    """Return the labels of an option as the server takes them: `team: vision` for `team=vision`."""
    return [re.sub(r"\s*[=:]\s*", ": ", label, count=1) for label in labels or ()]
