"""`holdfast alerts`: what fires, and what somebody does about it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import asking, fail, parsed, print_json, print_or_json, print_table, with_client
from holdfast.commands.options import DEFAULT_SERVER, Json, Server, Token
from holdfast.pacing.policy import duration
from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.protocol.administration import Alert

Number = Annotated[int, typer.Argument(metavar="ALERT", help="Its number, as in `holdfast alerts`.", min=1)]
Project = Annotated[str, typer.Option("--project", help="Whose rules, or where nobody is named: `default`.")]

app = typer.Typer(help="Say what fires; acknowledge and silence it; list the rules.", invoke_without_command=True)


@app.callback(invoke_without_command=True)
def alerts(
    context: typer.Context,
    job: Annotated[str | None, typer.Option("--job", help="Of this job only.")] = None,
    history: Annotated[bool, typer.Option("--all", help="Those that have resolved too.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """List the alerts that fire; acknowledge and silence them; list the rules.

    Examples: holdfast alerts  ·  holdfast alerts --job char-gpt --all  ·  holdfast alerts silence 7 2h
    """
    if context.invoked_subcommand is not None:
        return
    with asking(server, token) as client:
        found = client.alerts(job=job, history=history)
    if json:
        print_json(found)
    elif found:
        now = time.time()
        print_table(("ALERT", "SEVERITY", "STATE", "JOB", "SINCE", "WHAT"), [_row(alert, now) for alert in found])
    else:
        print("nothing has fired yet" if history else "nothing fires")


@app.command()
@with_client
def ack(client: Client, alert: Number, json: Json = False) -> None:
    """Acknowledge an alert: somebody is at it.

    Example: holdfast alerts ack 7
    """
    done = client.acknowledge(_found(client, alert).job, alert)
    print_or_json(done, f"alert {alert} is acknowledged by {done.acknowledged_by}", json=json)


@app.command()
@with_client
def silence(
    client: Client,
    alert: Number,
    time_: Annotated[str, typer.Argument(metavar="TIME", help="How long: 30min, 2h, 3 days.")],
    json: Json = False,
) -> None:
    """Have nobody told of an alert, nor of the same again, for a while.

    Example: holdfast alerts silence 7 2h
    """
    seconds = parsed(lambda text: parse_positive_seconds(text, "TIME"), time_)
    done = client.silence(_found(client, alert).job, alert, seconds=seconds)
    print_or_json(done, f"alert {alert} is silenced for {duration(seconds)}", json=json)


@app.command()
@with_client
def unsilence(client: Client, alert: Number, json: Json = False) -> None:
    """End a silence at once.

    Example: holdfast alerts unsilence 7
    """
    done = client.unsilence(_found(client, alert).job, alert)
    print_or_json(done, f"alert {alert} is {done.state}", json=json)


@app.command()
@with_client
def rules(client: Client, project: Project = "default", json: Json = False) -> None:
    """List what a project wants to be told of. The page of the same name changes it.

    Example: holdfast alerts rules
    """
    found = client.alert_rules(project)
    if json:
        print_json(found)
        return
    header = ("RULE", "ON", "SEVERITY", "LIMIT", "TOLD AFTER", "JOBS")
    print_table(
        header,
        [
            (
                rule.name,
                "yes" if rule.enabled else "no",
                rule.severity,
                _limit(rule.limit, rule.unit),
                duration(rule.for_seconds),
                rule.jobs,
            )
            for rule in found
        ],
    )


def _found(client: Client, alert: int) -> Alert:
    """The newest before the next number is this one, or there is none."""
    page = client.alerts(history=True, limit=1, before=alert + 1)
    if not page or page[0].id != alert:
        fail(f"there is no alert {alert}; `holdfast alerts --all` lists those that there are")
    return page[0]


def _row(alert: Alert, now: float) -> tuple[str, ...]:
    ago = f"{duration(max(0.0, round(now - alert.since)))} ago"
    return (str(alert.id), alert.severity, alert.state, alert.job, ago, f"{alert.title}: {alert.message}")


def _limit(limit: float, unit: str) -> str:
    if not unit:
        return "-"
    return duration(limit) if unit == "seconds" else f"{limit:g} {unit.replace('_', ' ')}"
