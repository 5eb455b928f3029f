"""Alerts: what fires, what people do about it, what they want to be told of, and where."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.administration import Alert, AlertChannel, AlertDelivery, AlertRule
from holdfast.protocol.messages import MAX_INTEGER
from holdfast_server.alerts import channels, deliveries, incidents, rules
from holdfast_server.alerts.channels import NewChannel
from holdfast_server.alerts.rules import RuleChanges
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.core.request_id import request_id
from holdfast_server.http.dependencies import Asker, Clock, Config, Db, Who

NO_ALERT = "No such job, or no alert of it of that number"
NO_CHANNEL = "No such project or channel"
OVER = "It has resolved already"

Limit = Annotated[int, Query(ge=1, le=incidents.MAX_ROWS)]
Before = Annotated[
    int | None, Query(ge=0, le=MAX_INTEGER, description="the number that the page before ended with")
]
Which = Annotated[Literal["open", "all"], Query(description="`all`: those that have resolved too")]
Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = APIRouter(tags=["alerts"])


class SilenceRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How long nobody is told: until a time, or for so many seconds."""

    until: float | None = None
    seconds: float | None = None


@router.get("/alerts", responses=returns(dict[str, list[Alert]]))
async def alerts(
    db: Db,
    clock: Clock,
    asker: Asker,
    state: Which = "open",
    project: str | None = None,
    limit: Limit = 100,
    before: Before = None,
) -> Response:
    """Of all jobs that whoever asks may see, the newest first."""
    found = await incidents.listed(
        db,
        now=clock(),
        visible_projects=asker.visible_projects,
        project=project,
        open_only=state == "open",
        before=before,
        limit=limit,
    )
    return Json({"alerts": found})


@router.get("/jobs/{job}/alerts", responses=returns(dict[str, list[Alert]], _404="No such job"))
async def of_job(
    job: str, db: Db, clock: Clock, state: Which = "open", limit: Limit = 100, before: Before = None
) -> Response:
    """Of one job, the newest first."""
    found = await incidents.listed(db, now=clock(), job=job, open_only=state == "open", before=before, limit=limit)
    return Json({"alerts": found})


@router.post("/jobs/{job}/alerts/{alert}/acknowledge", responses=returns(Alert, _404=NO_ALERT, _409=OVER))
async def acknowledge(job: str, alert: Number, db: Db, clock: Clock, who: Who) -> Response:
    """Somebody is at it. It goes on firing, and is told of once more when it resolves."""
    done = await incidents.acknowledge(db, job, alert, who=who, request_id=request_id(), now=clock())
    return Json(done)


@router.post(
    "/jobs/{job}/alerts/{alert}/silence",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(SilenceRequest),
    responses=returns(Alert, _404=NO_ALERT, _409=OVER, _422="Not a time in the next 90 days"),
)
async def silence(job: str, alert: Number, request: Request, db: Db, clock: Clock, who: Who) -> Response:
    """Nobody is told of it, nor of the same rule and job again, until then."""
    now, asked = clock(), parse(await request.body(), SilenceRequest)
    if (asked.until is None) == (asked.seconds is None):
        raise InvalidSetting("until", "say either until when, or for how many seconds")
    until = now + (asked.seconds or 0.0) if asked.until is None else asked.until
    return Json(await incidents.silence(db, job, alert, until=until, who=who, request_id=request_id(), now=now))


@router.post("/jobs/{job}/alerts/{alert}/unsilence", responses=returns(Alert, _404=NO_ALERT, _409=OVER))
async def unsilence(job: str, alert: Number, db: Db, clock: Clock, who: Who) -> Response:
    """The silence is over at once."""
    return Json(await incidents.unsilence(db, job, alert, who=who, request_id=request_id(), now=clock()))


@router.get(
    "/projects/{project}/alert-rules", responses=returns(dict[str, list[AlertRule]], _404="No such project")
)
async def project_rules(project: str, db: Db) -> Response:
    """The built-in ones first, as they are in this project; then its own."""
    return Json({"rules": await rules.listed(db, project)})


@router.put(
    "/projects/{project}/alert-rules/{rule}",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(RuleChanges),
    responses=returns(AlertRule, _404="No such project", _422="Not a rule"),
)
async def change_rule(project: str, rule: str, request: Request, db: Db, clock: Clock, who: Who) -> Response:
    """Change a rule, or make one of the project's own under a new name. What is left out stays as it is."""
    changes = parse(await request.body(), RuleChanges)
    done = await rules.change(db, project, rule, changes, who=who, request_id=request_id(), now=clock())
    return Json(done)


@router.delete(
    "/projects/{project}/alert-rules/{rule}",
    status_code=204,
    responses={204: {"description": "It is gone, or as it came"}, 404: {"description": "No such rule"}},
)
async def remove_rule(project: str, rule: str, db: Db, clock: Clock, who: Who) -> Response:
    """A rule of the project's own is gone; a built-in one is as it came."""
    await rules.remove(db, project, rule, who=who, request_id=request_id(), now=clock())
    return Response(status_code=204)


@router.get(
    "/projects/{project}/alert-channels", responses=returns(dict[str, list[AlertChannel]], _404="No such project")
)
async def project_channels(project: str, db: Db) -> Response:
    """Where this project's alerts are sent."""
    return Json({"channels": await channels.listed(db, project)})


@router.post(
    "/projects/{project}/alert-channels",
    status_code=201,
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(NewChannel),
    responses=returns(
        AlertChannel,
        201,
        _404="No such project",
        _409="Mail or webhooks are off on this server",
        _422="Not a channel",
    ),
)
async def create_channel(
    project: str, request: Request, db: Db, config: Config, clock: Clock, who: Who
) -> Response:
    """Mail addresses, or the URL of a webhook, whose secret is in this answer and in no other."""
    asked = parse(await request.body(), NewChannel)
    made = await channels.create(db, config.alerts, project, asked, who=who, request_id=request_id(), now=clock())
    return Json(made, status_code=201)


@router.delete(
    "/projects/{project}/alert-channels/{channel}",
    status_code=204,
    responses={204: {"description": "It is gone"}, 404: {"description": NO_CHANNEL}},
)
async def remove_channel(project: str, channel: str, db: Db, clock: Clock, who: Who) -> Response:
    """Nothing is sent there any more, not even what waits."""
    await channels.remove(db, project, channel, who=who, request_id=request_id(), now=clock())
    return Response(status_code=204)


@router.post(
    "/projects/{project}/alert-channels/{channel}/test",
    status_code=202,
    responses=returns(AlertDelivery, 202, _404=NO_CHANNEL),
)
async def test_channel(project: str, channel: str, db: Db, clock: Clock) -> Response:
    """Send a message there that says nothing else; its deliveries tell whether it arrived."""
    return Json(await deliveries.test(db, project, channel, now=clock()), status_code=202)


@router.get(
    "/projects/{project}/alert-channels/{channel}/deliveries",
    responses=returns(dict[str, list[AlertDelivery]], _404=NO_CHANNEL),
)
async def channel_deliveries(
    project: str, channel: str, db: Db, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Response:
    """The newest first, with what went wrong last. What the other side answered is told to nobody."""
    return Json({"deliveries": await deliveries.log(db, project, channel, limit=limit)})
