"""`holdfast delete` and `holdfast reset-numbers`: what an admin of a job's project does."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.commands.console import (
    DEFAULT_SERVER,
    EXIT_USAGE,
    JobName,
    Json,
    Server,
    Token,
    asking,
    fail,
    print_json,
)
from holdfast.protocol import MAX_ATTEMPT, MAX_LINEAGE


def delete(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a job from the server, with all that is stored of it there. Its checkpoints stay in the store.

    The job must not be running. A later report under the same name begins a new job.

    Example: holdfast delete char-gpt
    """
    with asking(server, token) as client:
        found = client.job(job)
        if not yes:
            print(f"{job} is {found.status}, at iteration {found.iteration}. Its checkpoints stay in its store.")
            typer.confirm(f"Delete all that {client.server} has stored of it?", abort=True)
        client.delete_job(job)
    print(f"{job} is deleted; its checkpoints stay in its store")


def reset_numbers(
    job: JobName,
    attempt: Annotated[
        int | None, typer.Option(min=0, max=MAX_ATTEMPT, help="The largest attempt number of the job.")
    ] = None,
    lineage: Annotated[
        int | None, typer.Option(min=0, max=MAX_LINEAGE, help="The largest lineage number of the job.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """Correct the largest attempt or lineage number that the server knows of a job.

    For a job of which a report told wrong numbers: revoke the key that sent it first. `holdfast store show` tells
    the numbers that the store has.

    Example: holdfast reset-numbers char-gpt --attempt 7 --lineage 3
    """
    if attempt is None and lineage is None:
        fail("nothing to change: give --attempt, --lineage or both", EXIT_USAGE)
    with asking(server, token) as client:
        numbers = client.reset_numbers(job, attempt=attempt, lineage=lineage)
    if json:
        print_json(numbers)
    else:
        print(
            f"{job}: the next attempt is {numbers.latest_attempt + 1} or later, and the next lineage "
            f"{numbers.latest_lineage + 1} or later"
        )
