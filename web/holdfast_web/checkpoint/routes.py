"""The page of one checkpoint: how it was written, how long it is kept, whether it is sound."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.jobs import CheckpointChanges
from holdfast_server.api.endpoints import Router
from holdfast_server.control import control
from holdfast_server.control import verification as verifications
from holdfast_server.core.access import OPERATE, VIEW
from holdfast_server.core.errors import InvalidSetting, NotPossible
from holdfast_server.http.dependencies import Db, Now, Who
from holdfast_server.queries.job_view import view_job
from holdfast_server.queries.summaries import job_summary
from holdfast_server.queries.timeline import story
from holdfast_web.checkpoint import views
from holdfast_web.job.views import FieldInput
from holdfast_web.shared.routing import Text

router = Router()


@router.endpoint("GET", "/jobs/{job}/checkpoints/{checkpoint}", access=VIEW)
def checkpoint_page(
    job: str, checkpoint: str, db: Db, now: Now, other: Annotated[str, Query(alias="with")] = "",
    tensors: str = "", fork: str = "",
) -> Response:  # fmt: skip
    with view_job(db, job, now=now) as view:
        page = views.checkpoint_page(view, checkpoint, other=other, all_tensors=tensors == "all", fork=fork)
    return page.response()


@router.endpoint("GET", "/jobs/{job}/checkpoints/{checkpoint}/verification", access=VIEW)
def verification(job: str, checkpoint: str, db: Db, now: Now) -> Response:
    """Return the progress of a verification; after the verdict, make the browser reload the page."""
    with view_job(db, job, now=now) as view:
        part = views.verification_part(job_summary(view), story(view, checkpoint), now)
    return part.response(headers={} if part.verification.open else {"HX-Refresh": "true"})


@router.endpoint("POST", "/jobs/{job}/checkpoints/{checkpoint}/verify", access=OPERATE)
def verify(job: str, checkpoint: str, db: Db, who: Who, now: Now, against: Text = "") -> Response:
    try:
        verifications.verify(db, job, checkpoint, against=against or None, who=who, now=now)
    except NotPossible as refusal:
        with view_job(db, job, now=now) as view:
            page = views.checkpoint_page(view, checkpoint, other=against, verify_refusal=str(refusal))
        return page.response(refusal.status)
    return _back(job, checkpoint, "verify", against)


@router.endpoint("POST", "/jobs/{job}/checkpoints/{checkpoint}/verify/cancel", access=OPERATE)
def cancel_verification(job: str, checkpoint: str, db: Db, who: Who, now: Now) -> Response:
    verifications.cancel_verification(db, job, checkpoint, who=who, now=now)
    return _back(job, checkpoint, "verify")


@router.endpoint("POST", "/jobs/{job}/checkpoints/{checkpoint}/pin", access=OPERATE)
def pin(job: str, checkpoint: str, db: Db, who: Who, now: Now, pinned: Text) -> Response:
    changes = CheckpointChanges(pinned=pinned == "true")
    try:
        control.change_checkpoint(db, job, checkpoint, changes, who=who, now=now)
    except NotPossible as refusal:
        with view_job(db, job, now=now) as view:
            page = views.checkpoint_page(view, checkpoint, refusal=str(refusal))
        return page.response(refusal.status)
    return _back(job, checkpoint, "retention-section")


@router.endpoint("POST", "/jobs/{job}/checkpoints/{checkpoint}/label", access=OPERATE)
def label(job: str, checkpoint: str, db: Db, who: Who, now: Now, label: Text = "") -> Response:
    try:
        control.change_checkpoint(db, job, checkpoint, CheckpointChanges(label=label), who=who, now=now)
    except InvalidSetting as refusal:
        with view_job(db, job, now=now) as view:
            page = views.checkpoint_page(view, checkpoint, typed=FieldInput(value=label, error=str(refusal)))
        return page.response(refusal.status)
    return _back(job, checkpoint, "retention-section")


def _back(job: str, checkpoint: str, part: str, other: str = "") -> Response:
    query = f"?with={quote(other)}" if other else ""
    return RedirectResponse(f"/jobs/{job}/checkpoints/{checkpoint}{query}#{part}", 303)
