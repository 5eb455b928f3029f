"""The command that lists and changes values of a script while it trains."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import fail, print_json, print_or_json, say, with_client
from holdfast.commands.control import POLL_SECONDS
from holdfast.commands.options import JobName, Json, NoWait, Timeout
from holdfast.protocol.value_rules import bounds, shown
from holdfast.protocol.values import JobValue, ValueEdit

DEFAULT = "default"
"""Word for the value of the training script."""


@with_client
def value(
    client: Client,
    job: JobName,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the value, as in session.value; omit it to list all."),
    ] = None,
    new: Annotated[
        str | None,
        typer.Argument(
            metavar="[VALUE]",
            help="The new value, or `default`: the training script's own; omit it to show the value.",
        ),
    ] = None,
    no_wait: NoWait = False,
    timeout: Timeout = 60.0,
    json: Json = False,
) -> None:
    """Show the values of a script, or change one on all ranks at the same iteration.

    Examples: holdfast value char-gpt  ·  holdfast value char-gpt lr_scale 0.5  ·  holdfast value char-gpt lr_scale
    default
    """
    if name is None or new is None:
        values = [each for each in client.values(job) if name in (None, each.definition.name)]
        if name is not None and not values:
            fail(f"{job} has no value {name}")
        if json:
            print_json(values)
            return
        for line in [_line(each) for each in values] or [f"the script of {job} has no values"]:
            say(line)
        return
    changed = client.set_value(job, name, None if new == DEFAULT else new)
    edit = changed.changes[0] if changed.changes else None
    if edit is not None and not no_wait:
        changed, edit = _followed(client, job, changed, edit, timeout)
    print_or_json(changed, f"{name} {_wanted(changed, edit)}: {_state(edit)}", json=json)
    if edit is not None and edit.state in ("refused", "superseded"):
        raise typer.Exit(1)


def _followed(
    client: Client, job: str, changed: JobValue, edit: ValueEdit, timeout: float
) -> tuple[JobValue, ValueEdit]:
    """Wait until a change is settled, the job is not running, or the time is up."""
    deadline = time.monotonic() + timeout
    while edit.state == "requested" and time.monotonic() < deadline and client.job(job).alive:
        time.sleep(POLL_SECONDS)
        name = changed.definition.name
        changed = next(each for each in client.values(job) if each.definition.name == name)
        edit = next((each for each in changed.changes if each.id == edit.id), edit)
    return changed, edit


def _line(value: JobValue) -> str:
    definition, script = (
        value.definition,
        "" if value.is_default else f", script {shown(value.definition.default)}",
    )
    choices = f", one of {', '.join(map(shown, definition.choices))}" if definition.choices else ""
    allowed = f", allowed {bounds(definition)}" if bounds(definition) else choices
    edit = value.changes[0] if value.changes else None
    pending = f"; {shown(edit.value, definition.default)} requested" if edit and edit.state == "requested" else ""
    return f"{definition.name} {shown(value.value)}{script}{allowed}{pending}"


def _wanted(value: JobValue, edit: ValueEdit | None) -> str:
    return shown(value.value if edit is None else edit.value, value.definition.default)


def _state(edit: ValueEdit | None) -> str:
    if edit is None:
        return "already in force"
    match edit.state:
        case "applied":
            return f"applied at iteration {edit.iteration}"
        case "requested":
            return "delivered, not applied yet" if edit.delivered else "not delivered yet"
    return f"{edit.state}: {edit.reason}"
