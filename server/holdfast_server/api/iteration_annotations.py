"""Annotations of iterations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.jobs import Annotation, AnnotationChanges, NewAnnotation
from holdfast.protocol.messages import MAX_INTEGER
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import iteration_annotations
from holdfast_server.http.dependencies import Db, Now, Who

NOT_FOUND = "No such job or annotation"
BY_SCRIPT = "The script wrote it"
BAD_TEXT = "The text is empty or too long"

Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = APIRouter(prefix="/jobs/{job}/annotations", tags=["jobs"])


@router.get("", responses=returns(dict[str, list[Annotation]], _404="No such job"))
async def list_annotations(
    job: str, db: Db, limit: Annotated[int, Query(ge=1, le=iteration_annotations.MOST_ROWS)] = 100
) -> Response:
    """List the annotations of people and of the script, those of the latest iterations first."""
    return Json({"annotations": await iteration_annotations.list_annotations(db, job, limit=limit)})


@router.post(
    "",
    status_code=201,
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(NewAnnotation),
    responses=returns(
        Annotation, 201, _404="No such job", _409="The limit of annotations is reached",
        _422=f"{BAD_TEXT}, or the iteration is not finished",
    ),
)  # fmt: skip
async def add(job: str, request: Request, db: Db, who: Who, now: Now) -> Response:
    """Annotate an iteration of the path to the current one."""
    asked = parse(await request.body(), NewAnnotation)
    return Json(await iteration_annotations.add(db, job, asked, who=who, now=now), status_code=201)


@router.patch(
    "/{annotation}",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(AnnotationChanges),
    responses=returns(Annotation, _404=NOT_FOUND, _409=BY_SCRIPT, _422=BAD_TEXT),
)
async def edit(job: str, annotation: Number, request: Request, db: Db, who: Who, now: Now) -> Response:
    """Change the text of an annotation of a person. The editor becomes its author."""
    changes = parse(await request.body(), AnnotationChanges)
    return Json(await iteration_annotations.edit(db, job, annotation, changes.text, who=who, now=now))


@router.delete("/{annotation}", status_code=204, responses=returns(None, 204, _404=NOT_FOUND, _409=BY_SCRIPT))
async def delete(job: str, annotation: Number, db: Db, who: Who, now: Now) -> Response:
    """Delete an annotation of a person."""
    await iteration_annotations.delete(db, job, annotation, who=who, now=now)
    return Response(status_code=204)
