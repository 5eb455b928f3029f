"""Annotations of iterations."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.jobs import Annotation, AnnotationChanges, NewAnnotation
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import iteration_annotations
from holdfast_server.core.access import OPERATE, VIEW
from holdfast_server.http.dependencies import Body, Db, Now, Who
from holdfast_server.queries.job_view import view_job

NOT_FOUND = "No such job or annotation"
BY_SCRIPT = "The script wrote it"
BAD_TEXT = "The text is empty or too long"

Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = Router("/api/v1/jobs/{job}/annotations", tag="jobs")


@router.endpoint("GET", "", access=VIEW, returns=dict[str, list[Annotation]], errors={404: "No such job"})
def list_annotations(
    job: str, db: Db, now: Now, limit: Annotated[int, Query(ge=1, le=iteration_annotations.MOST_ROWS)] = 100
) -> Response:
    """List the annotations of people and of the script, latest iterations first."""
    with view_job(db, job, now=now) as view:
        return Json({"annotations": iteration_annotations.list_annotations(view, limit=limit)})


@router.endpoint(
    "POST",
    "",
    access=OPERATE,
    body=NewAnnotation,
    returns=Annotation,
    status=201,
    errors={
        404: "No such job",
        409: "The limit of annotations is reached",
        422: f"{BAD_TEXT}, or the iteration is not finished",
    },
    max_body_bytes=MAX_EDIT_BYTES,
)
def add(job: str, body: Body, db: Db, who: Who, now: Now) -> Response:
    """Annotate an iteration of the path to the current one."""
    asked = parse(body, NewAnnotation)
    return Json(iteration_annotations.add(db, job, asked, who=who, now=now), status_code=201)


@router.endpoint(
    "PATCH",
    "/{annotation}",
    access=OPERATE,
    body=AnnotationChanges,
    returns=Annotation,
    errors={404: NOT_FOUND, 409: BY_SCRIPT, 422: BAD_TEXT},
    max_body_bytes=MAX_EDIT_BYTES,
)
def edit(job: str, annotation: Number, body: Body, db: Db, who: Who, now: Now) -> Response:
    """Change the text of an annotation of a person. The editor becomes its author."""
    changes = parse(body, AnnotationChanges)
    return Json(iteration_annotations.edit(db, job, annotation, changes.text, who=who, now=now))


@router.endpoint("DELETE", "/{annotation}", access=OPERATE, status=204, errors={404: NOT_FOUND, 409: BY_SCRIPT})
def delete(job: str, annotation: Number, db: Db, who: Who, now: Now) -> Response:
    """Delete an annotation of a person."""
    iteration_annotations.delete(db, job, annotation, who=who, now=now)
    return Response(status_code=204)
