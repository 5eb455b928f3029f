"""Orders to pause, continue and end training."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.protocol.wire import Desired
from holdfast_server.api.desired_state import tagged
from holdfast_server.api.endpoints import Router
from holdfast_server.control import approvals, control
from holdfast_server.core.access import OPERATE, RESTORE
from holdfast_server.http.dependencies import Asker, Db, Now, Who

router = Router("/api/v1/jobs/{job}/training", tag="control")
ERRORS = {404: "No such job", 409: "The job has ended, its training is not paused, or it is protected"}


@router.endpoint("POST", "/pause", access=RESTORE, returns=Desired, errors=ERRORS)
def pause(job: str, db: Db, asker: Asker, now: Now) -> Response:
    """Pause training after a checkpoint at the next boundary; the processes wait and keep their devices."""
    return tagged(approvals.order_training(db, job, "pause", asker=asker, now=now))


@router.endpoint("POST", "/continue", access=OPERATE, returns=Desired, errors=ERRORS)
def go_on(job: str, db: Db, who: Who, now: Now) -> Response:
    """Continue paused training. This needs no approval, even for a protected job."""
    return tagged(control.order_training(db, job, "continue", who=who, now=now))


@router.endpoint("POST", "/end", access=RESTORE, returns=Desired, errors=ERRORS)
def end(job: str, db: Db, asker: Asker, now: Now) -> Response:
    """End training after a checkpoint. `holdfast run` does not start it again."""
    return tagged(approvals.order_training(db, job, "end", asker=asker, now=now))
