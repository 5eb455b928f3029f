"""Values that operators change while a job trains."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.protocol.values import JobValue, NewValue
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import approvals
from holdfast_server.core.access import OPERATE, VIEW
from holdfast_server.http.dependencies import Asker, Body, Db, Now
from holdfast_server.queries.job_view import view_job
from holdfast_server.records import job_values

router = Router("/api/v1/jobs/{job}/values", tag="control")


@router.endpoint("GET", "", access=VIEW, returns=dict[str, list[JobValue]], errors={404: "No such job"})
def list_values(job: str, db: Db, now: Now) -> Response:
    """List the values of the script that can be changed, with their last changes."""
    with view_job(db, job, now=now) as view:
        return Json({"values": job_values.values_of(view.session, view.job)})


@router.endpoint(
    "PUT",
    "/{value}",
    access=OPERATE,
    body=NewValue,
    returns=JobValue,
    errors={404: "No such job or value", 409: "The job is protected", 422: "The script does not allow it"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def set_value(job: str, value: str, body: Body, db: Db, asker: Asker, now: Now) -> Response:
    """Change a value on all ranks at the same iteration. This replaces a change that is not applied yet."""
    return Json(approvals.set_value(db, job, value, parse(body, NewValue).value, asker=asker, now=now))
