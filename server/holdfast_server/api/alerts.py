"""Alerts, their rules, and the channels that they are sent to."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Path, Query
from starlette.responses import Response

from holdfast.protocol.administration import (
    Alert,
    AlertChannel,
    AlertDelivery,
    AlertDetails,
    AlertFilter,
    AlertRule,
    AlertStep,
    Severity,
)  # fmt: skip
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast_server.alerts import channels, deliveries, incidents, rules
from holdfast_server.alerts.channels import ChannelChanges, NewChannel
from holdfast_server.alerts.rules import RuleChanges
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.core.access import LISTS, OPERATE, PROJECT_ADMIN, PROJECT_OPERATE, PROJECT_VIEW, VIEW
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.http.dependencies import Asker, Body, Config, Db, Now, Who

NO_ALERT = "No such job or alert"
NO_CHANNEL = "No such project or channel"
RESOLVED = "It has resolved already"
LABELS = "labels of the job that all match: `name`, or `name: value`"

Limit = Annotated[int, Query(ge=1, le=incidents.MAX_ROWS)]
Before = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="the id that the previous page ended with")]
Which = Annotated[AlertFilter, Query(description="`open`: not resolved")]
Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = Router("/api/v1", tag="alerts")


class SilenceRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When the silence ends: at a time, or after a number of seconds."""

    until: float | None = None
    seconds: float | None = None


class NewComment(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A comment on an alert."""

    text: str


@router.endpoint("GET", "/alerts", access=LISTS, returns=dict[str, list[Alert]])
def alerts(
    db: Db,
    now: Now,
    asker: Asker,
    state: Which = "open",
    project: str | None = None,
    severity: Severity | None = None,
    job: Annotated[str | None, Query(description="part of a job's name, case-insensitive")] = None,
    rule: str | None = None,
    label: Annotated[list[str] | None, Query(description=LABELS)] = None,
    limit: Limit = 100,
    before: Before = None,
) -> Response:
    """List the alerts of all jobs that you may see, newest first."""
    found = incidents.list_alerts(
        db,
        now=now,
        visible_projects=asker.visible_projects,
        project=project,
        severity=severity,
        search=job or "",
        rule=rule,
        labels=label or (),
        state=state,
        before=before,
        limit=limit,
    )
    return Json({"alerts": found})


@router.endpoint("GET", "/alerts/{alert}", access=LISTS, returns=AlertDetails, errors={404: "No such alert"})
def alert_details(alert: Number, db: Db, now: Now, asker: Asker) -> Response:
    """Return an alert with its history of states, comments and messages, and the alerts of its group."""
    return Json(incidents.details(db, alert, visible_projects=asker.visible_projects, now=now))


@router.endpoint(
    "GET", "/jobs/{job}/alerts", access=VIEW, returns=dict[str, list[Alert]], errors={404: "No such job"}
)
def of_job(
    job: str, db: Db, now: Now, state: Which = "open", limit: Limit = 100, before: Before = None
) -> Response:
    """List the alerts of one job, newest first."""
    found = incidents.list_alerts(db, now=now, job=job, state=state, before=before, limit=limit)
    return Json({"alerts": found})


@router.endpoint(
    "POST",
    "/jobs/{job}/alerts/{alert}/acknowledge",
    access=OPERATE,
    returns=Alert,
    errors={404: NO_ALERT, 409: RESOLVED},
)
def acknowledge(job: str, alert: Number, db: Db, now: Now, who: Who) -> Response:
    """Acknowledge an alert. No further message is sent until it resolves."""
    done = incidents.acknowledge(db, job, alert, who=who, now=now)
    return Json(done)


@router.endpoint(
    "POST",
    "/jobs/{job}/alerts/{alert}/silence",
    access=OPERATE,
    body=SilenceRequest,
    returns=Alert,
    errors={404: NO_ALERT, 409: RESOLVED, 422: "Not a time in the next 90 days"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def silence(job: str, alert: Number, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Suppress messages about this alert, and about later ones of the same rule and job, until a time."""
    asked = parse(body, SilenceRequest)
    if (asked.until is None) == (asked.seconds is None):
        raise InvalidSetting("until", "give either until or seconds")
    until = now + (asked.seconds or 0.0) if asked.until is None else asked.until
    return Json(incidents.silence(db, job, alert, until=until, who=who, now=now))


@router.endpoint(
    "POST",
    "/jobs/{job}/alerts/{alert}/unsilence",
    access=OPERATE,
    returns=Alert,
    errors={404: NO_ALERT, 409: RESOLVED},
)
def unsilence(job: str, alert: Number, db: Db, now: Now, who: Who) -> Response:
    """End a silence."""
    return Json(incidents.unsilence(db, job, alert, who=who, now=now))


@router.endpoint(
    "POST",
    "/jobs/{job}/alerts/{alert}/comments",
    access=OPERATE,
    body=NewComment,
    returns=AlertStep,
    status=201,
    errors={404: NO_ALERT, 422: "The text is empty or too long"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def add_comment(job: str, alert: Number, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Comment on an alert, open or resolved."""
    text = parse(body, NewComment).text
    return Json(incidents.comment(db, job, alert, text, who=who, now=now), status_code=201)


@router.endpoint(
    "GET",
    "/projects/{project}/alert-rules",
    access=PROJECT_VIEW,
    returns=dict[str, list[AlertRule]],
    errors={404: "No such project"},
)
def project_rules(project: str, db: Db, now: Now) -> Response:
    """List the built-in rules as set in this project, then its custom ones, each with its recent alerts."""
    return Json({"rules": rules.list_rules(db, project, now=now)})


@router.endpoint(
    "PUT",
    "/projects/{project}/alert-rules/{rule}",
    access=PROJECT_OPERATE,
    body=RuleChanges,
    returns=AlertRule,
    errors={404: "No such project", 422: "Invalid field"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def change_rule(project: str, rule: str, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Change a rule, or create a custom one under a new name. Fields that are left out do not change."""
    changes = parse(body, RuleChanges)
    done = rules.change(db, project, rule, changes, who=who, now=now)
    return Json(done)


@router.endpoint(
    "DELETE",
    "/projects/{project}/alert-rules/{rule}",
    access=PROJECT_OPERATE,
    status=204,
    errors={404: "No such rule"},
)
def remove_rule(project: str, rule: str, db: Db, now: Now, who: Who) -> Response:
    """Remove a custom rule, or reset a built-in one to its default."""
    rules.remove(db, project, rule, who=who, now=now)
    return Response(status_code=204)


@router.endpoint(
    "GET",
    "/projects/{project}/alert-channels",
    access=PROJECT_ADMIN,
    returns=dict[str, list[AlertChannel]],
    errors={404: "No such project"},
)
def project_channels(project: str, db: Db) -> Response:
    """List the channels that this project's alerts are sent to."""
    return Json({"channels": channels.list_channels(db, project)})


@router.endpoint(
    "POST",
    "/projects/{project}/alert-channels",
    access=PROJECT_ADMIN,
    body=NewChannel,
    returns=AlertChannel,
    status=201,
    errors={404: "No such project", 409: "Email or webhooks are disabled on this server", 422: "Invalid field"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def create_channel(project: str, body: Body, db: Db, config: Config, now: Now, who: Who) -> Response:
    """Create a channel. Only this answer contains the secret that signs a webhook's messages."""
    asked = parse(body, NewChannel)
    made = channels.create(db, config.alerts, project, asked, who=who, now=now)
    return Json(made, status_code=201)


@router.endpoint(
    "PATCH",
    "/projects/{project}/alert-channels/{channel}",
    access=PROJECT_ADMIN,
    body=ChannelChanges,
    returns=AlertChannel,
    errors={404: NO_CHANNEL, 422: "Invalid field"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def change_channel(project: str, channel: str, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Change which alerts a channel receives. Fields that are left out do not change."""
    changes = parse(body, ChannelChanges)
    return Json(channels.change(db, project, channel, changes, who=who, now=now))


@router.endpoint(
    "DELETE",
    "/projects/{project}/alert-channels/{channel}",
    access=PROJECT_ADMIN,
    status=204,
    errors={404: NO_CHANNEL},
)
def remove_channel(project: str, channel: str, db: Db, now: Now, who: Who) -> Response:
    """Remove a channel and its queued messages."""
    channels.remove(db, project, channel, who=who, now=now)
    return Response(status_code=204)


@router.endpoint(
    "POST",
    "/projects/{project}/alert-channels/{channel}/test",
    access=PROJECT_ADMIN,
    returns=AlertDelivery,
    status=202,
    errors={404: NO_CHANNEL},
)
def test_channel(project: str, channel: str, db: Db, now: Now) -> Response:
    """Queue a test message; the list of deliveries shows whether it arrived."""
    return Json(deliveries.send_test(db, project, channel, now=now), status_code=202)


@router.endpoint(
    "GET",
    "/projects/{project}/alert-channels/{channel}/deliveries",
    access=PROJECT_ADMIN,
    returns=dict[str, list[AlertDelivery]],
    errors={404: NO_CHANNEL},
)
def channel_deliveries(
    project: str, channel: str, db: Db, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Response:
    """List a channel's messages, newest first, each with its last error."""
    return Json({"deliveries": deliveries.list_deliveries(db, project, channel, limit=limit)})
