"""Commands about protected jobs: protect, approve and decline."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import fail, print_or_json, with_client
from holdfast.commands.options import JobName, Json
from holdfast.protocol.administration import Approval

_Id = Annotated[
    str | None, typer.Argument(metavar="REQUEST", help="The request's id; optional if only one request waits.")
]


@with_client
def protect(
    client: Client,
    job: JobName,
    off: Annotated[
        bool, typer.Option("--off", help="Remove the protection, which needs approval as well.")
    ] = False,
    json: Json = False,
) -> None:
    """Protect a job: a second person must approve restores, pauses, ends and value changes within 15 minutes.

    This needs a server with accounts. The job's own rule `on_trouble` needs no approval.

    Examples: holdfast protect char-gpt  ·  holdfast protect char-gpt --off
    """
    seen = client.protect(job, protected=not off)
    print_or_json(seen, f"{job} is {'protected' if seen.protected else 'not protected'}", json=json)


@with_client
def approve(client: Client, job: JobName, request: _Id = None, json: Json = False) -> None:
    """Approve another person's request for a protected job; the server carries it out immediately.

    Example: holdfast approve char-gpt
    """
    done = client.approvals.approve(job, _waiting(client, job, request).id)
    print_or_json(done, f"approved: {done.what}, requested by {done.who}", json=json)


@with_client
def decline(client: Client, job: JobName, request: _Id = None, json: Json = False) -> None:
    """Decline a request for a protected job, or withdraw your own.

    Example: holdfast decline char-gpt
    """
    done = client.approvals.decline(job, _waiting(client, job, request).id)
    print_or_json(done, f"declined: {done.what}, requested by {done.who}", json=json)


def _waiting(client: Client, job: str, request: str | None) -> Approval:
    """Return the request that is meant."""
    found = [each for each in client.approvals.find(job) if each.state == "waiting" and request in (None, each.id)]
    if not found:
        fail("no request waits for approval")
    if len(found) > 1:
        listed = "".join(f"\n  {each.id}  {each.what}, requested by {each.who}" for each in found)
        fail(f"several requests wait for approval; give the id of one:{listed}")
    return found[0]
