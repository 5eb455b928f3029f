"""The command `holdfast alerts`: list, acknowledge and silence alerts, and list the rules."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client, NotFound
from holdfast.commands.console import (
    EXIT_USAGE,
    asking,
    fail,
    parsed,
    print_json,
    print_or_json,
    print_table,
    say,
    with_client,
)
from holdfast.commands.options import DEFAULT_SERVER, Json, Labels, OnlyJob, Server, Token, as_label_filters
from holdfast.protocol.administration import Alert, AlertDetails
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

app = typer.Typer(
    help="List, acknowledge, silence and comment on alerts; list the rules; route the channels.",
    invoke_without_command=True,
)


@app.callback(invoke_without_command=True)
def alerts(
    context: typer.Context,
    job: OnlyJob = None,
    label: Labels = None,
    history: Annotated[bool, typer.Option("--all", help="Include resolved alerts.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """List the open alerts. The subcommands acknowledge and silence them, and list the rules.

    Examples: holdfast alerts  ·  holdfast alerts --job char-gpt --all  ·  holdfast alerts --label team=nlp
    """
    if context.invoked_subcommand is not None:
        return
    if job is not None and label:
        fail("give either --job or --label", EXIT_USAGE)
    with asking(server, token) as client:
        found = client.alerts.find(job=job, labels=as_label_filters(label), history=history)
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
def show(client: Client, alert: Number, json: Json = False) -> None:
    """Show an alert with its history: states, comments, and the messages that were sent.

    Example: holdfast alerts show 7
    """
    found = _details(client, alert)
    if json:
        print_json(found)
        return
    shown = found.alert
    say(f"alert {shown.id} of {shown.job}: {shown.title}, {shown.severity}, {shown.state}")
    say(shown.message)
    if found.runbook:
        say(f"runbook: {found.runbook}")
    if found.group:
        say(f"sent with: {', '.join(f'{other.id} ({other.job})' for other in found.group)}")
    now = time.time()
    rows = [(_ago(step.at, now), step.state, step.who or "-", step.text) for step in found.steps]
    print_table(("TIME", "STATE", "WHO", "TEXT"), rows)


@app.command()
@with_client
def comment(
    client: Client, alert: Number, text: Annotated[str, typer.Argument(help="The comment.")], json: Json = False
) -> None:
    """Comment on an alert, open or resolved.

    Example: holdfast alerts comment 7 "the switch of rack 3 was replaced"
    """
    done = client.alerts.comment(_details(client, alert).alert.job, alert, text)
    print_or_json(done, f"commented on alert {alert}", json=json)


@app.command()
@with_client
def channels(client: Client, project: Project = None, json: Json = False) -> None:
    """List the channels of a project, each with the jobs whose alerts it receives.

    Example: holdfast alerts channels
    """
    found = client.alerts.channels(project)
    if json:
        print_json(found)
        return
    rows = [
        (each.id, each.name, each.kind, each.least_severity, each.owner or "any", _labels(each.labels))
        for each in found
    ]
    print_table(("CHANNEL", "NAME", "SERVICE", "SEVERITY", "OWNER", "LABELS"), rows)


@app.command()
@with_client
def route(
    client: Client,
    channel: Annotated[
        str, typer.Argument(metavar="CHANNEL", help="The channel's name or id, as in `holdfast alerts channels`.")
    ],
    owner: Annotated[
        str | None, typer.Option("--owner", help="Pattern for the owners of jobs, as in ada-*; '' for any.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Pattern for a label of jobs; repeatable. '' for any."),
    ] = None,
    project: Project = None,
    json: Json = False,
) -> None:
    """Change which jobs' alerts a channel receives: a job must match all options.

    Example: holdfast alerts route oncall --owner ada --label team=nlp
    """
    labels = None if label is None else dict(parsed(_label, each) for each in label if each)
    found = [known.id for known in client.alerts.channels(project) if channel in (known.id, known.name)]
    if len(found) != 1:
        fail(f"{len(found) or 'no'} channels are named {channel!r}; `holdfast alerts channels` lists their ids")
    done = client.alerts.route_channel(found[0], owner=owner, labels=labels, project=project)
    text = f"{done.name} receives alerts of jobs with owner {done.owner or 'any'}, labels {_labels(done.labels)}"
    print_or_json(done, text, json=json)


@app.command()
@with_client
def ack(client: Client, alert: Number, json: Json = False) -> None:
    """Acknowledge an alert, to show that you are working on it.

    Example: holdfast alerts ack 7
    """
    done = client.alerts.acknowledge(_details(client, alert).alert.job, alert)
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
    done = client.alerts.silence(_details(client, alert).alert.job, alert, seconds=seconds)
    print_or_json(done, f"alert {alert} is silenced for {duration(seconds)}", json=json)


@app.command()
@with_client
def unsilence(client: Client, alert: Number, json: Json = False) -> None:
    """End the silence of an alert.

    Example: holdfast alerts unsilence 7
    """
    done = client.alerts.unsilence(_details(client, alert).alert.job, alert)
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
            f"{rule.fired_7d:,}",
            rule.runbook or "-",
        )
        for rule in found
    ]
    print_table(("RULE", "ON", "SEVERITY", "LIMIT", "DELAY", "JOBS", "FIRED 7 D", "RUNBOOK"), rows)


def _details(client: Client, alert: int) -> AlertDetails:
    try:
        return client.alerts.details(alert)
    except NotFound:
        fail(f"there is no alert {alert}; `holdfast alerts --all` lists all alerts")


def _label(text: str) -> tuple[str, str]:
    name, separator, value = as_label_filters([text])[0].partition(": ")
    if not separator or not name:
        raise ValueError(f"label {text!r}: write NAME=VALUE, as in team=nlp")
    return name, value


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in labels.items()) or "any"


def _ago(at: float, now: float) -> str:
    return f"{duration(max(0.0, round(now - at)))} ago"


def _row(alert: Alert, now: float) -> tuple[str, ...]:
    text = f"{alert.title}: {alert.message}"
    return (str(alert.id), alert.severity, alert.state, alert.job, _ago(alert.since, now), text)


def _limit(limit: float, unit: str) -> str:
    if not unit:
        return "-"
    return duration(limit) if unit == "seconds" else f"{limit:g} {unit.replace('_', ' ')}"
