"""The command `holdfast alerts`: list, acknowledge and silence alerts, and list the rules."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import (
    asking,
    fail,
    parsed,
    print_json,
    print_or_json,
    print_table,
    say,
    with_client,
)
from holdfast.commands.options import DEFAULT_SERVER, Json, OnlyJob, Server, Token
from holdfast.protocol.administration import Alert
from holdfast.units import duration, parse_positive_seconds

Number = Annotated[
    int, typer.Argument(metavar="ALERT", help="The alert's number, as in `holdfast alerts`.", min=1)
]
Project = Annotated[
    str | None,
    typer.Option(
        "--project",
        metavar="PROJECT",
        help="The project whose rules to list. [default: the key's project, or default]",
    ),
]

app = typer.Typer(help="List, acknowledge and silence alerts; list the rules.", invoke_without_command=True)


@app.callback(invoke_without_command=True)
def alerts(
    context: typer.Context,
    job: OnlyJob = None,
    history: Annotated[bool, typer.Option("--all", help="Include resolved alerts.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """List the open alerts. The subcommands acknowledge and silence them, and list the rules.

    Examples: holdfast alerts  ·  holdfast alerts --job char-gpt --all  ·  holdfast alerts silence 7 2h
    """
    if context.invoked_subcommand is not None:
        return
    with asking(server, token) as client:
        found = client.alerts.find(job=job, history=history)
    if json:
        print_json(found)
    elif found:
        now = time.time()
        print_table(
            ("ALERT", "SEVERITY", "STATE", "JOB", "SINCE", "DESCRIPTION"), [_row(alert, now) for alert in found]
        )
    else:
        say("no alerts yet" if history else "no open alerts")


@app.command()
@with_client
def ack(client: Client, alert: Number, json: Json = False) -> None:
    """Acknowledge an alert, to show that you are working on it.

    Example: holdfast alerts ack 7
    """
    done = client.alerts.acknowledge(_found(client, alert).job, alert)
    print_or_json(done, f"alert {alert} is acknowledged by {done.acknowledged_by}", json=json)


@app.command()
@with_client
def silence(
    client: Client,
    alert: Number,
    time_: Annotated[str, typer.Argument(metavar="TIME", help="How long: 30min, 2h, 3 days.")],
    json: Json = False,
) -> None:
    """Send no notifications for an alert, and for its recurrences, for some time.

    Example: holdfast alerts silence 7 2h
    """
    seconds = parsed(lambda text: parse_positive_seconds(text, "TIME"), time_)
    done = client.alerts.silence(_found(client, alert).job, alert, seconds=seconds)
    print_or_json(done, f"alert {alert} is silenced for {duration(seconds)}", json=json)


@app.command()
@with_client
def unsilence(client: Client, alert: Number, json: Json = False) -> None:
    """End the silence of an alert.

    Example: holdfast alerts unsilence 7
    """
    done = client.alerts.unsilence(_found(client, alert).job, alert)
    print_or_json(done, f"alert {alert} is {done.state}", json=json)


@app.command()
@with_client
def rules(client: Client, project: Project = None, json: Json = False) -> None:
    """List the alert rules of a project. The alerts page of the dashboard changes them.

    Example: holdfast alerts rules
    """
    found = client.alerts.rules(project)
    if json:
        print_json(found)
        return
    rows = [
        (
            rule.name,
            "yes" if rule.enabled else "no",
            rule.severity,
            _limit(rule.limit, rule.unit),
            duration(rule.for_seconds),
            rule.jobs,
        )
        for rule in found
    ]
    print_table(("RULE", "ON", "SEVERITY", "LIMIT", "DELAY", "JOBS"), rows)


def _found(client: Client, alert: int) -> Alert:
    """Return the alert with this number: the newest one below the next number, if it exists."""
    page = client.alerts.find(history=True, limit=1, before=alert + 1)
    if not page or page[0].id != alert:
        fail(f"there is no alert {alert}; `holdfast alerts --all` lists all alerts")
    return page[0]


def _row(alert: Alert, now: float) -> tuple[str, ...]:
    ago = f"{duration(max(0.0, round(now - alert.since)))} ago"
    return (str(alert.id), alert.severity, alert.state, alert.job, ago, f"{alert.title}: {alert.message}")


def _limit(limit: float, unit: str) -> str:
    if not unit:
        return "-"
    return duration(limit) if unit == "seconds" else f"{limit:g} {unit.replace('_', ' ')}"
