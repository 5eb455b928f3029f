"""The dialogs that add, edit and delete annotations. Every form works without scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

from fastapi import Path
from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.field_types import MAX_ANNOTATION, MAX_INTEGER
from holdfast.protocol.jobs import Annotation, NewAnnotation
from holdfast_server.api.endpoints import Router
from holdfast_server.control import iteration_annotations
from holdfast_server.core.access import OPERATE
from holdfast_server.core.errors import InvalidSetting, NotPossible
from holdfast_server.http.dependencies import Db, Now, Who
from holdfast_server.queries.job_view import find_job, view_job
from holdfast_web.job import views
from holdfast_web.shared import forms
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx, Text

Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = Router()


@dataclass(frozen=True, kw_only=True)
class AnnotationDialog(View):
    template: ClassVar[str] = "job/_annotation.html"
    page_template: ClassVar[str] = "job/annotation.html"
    job: str
    annotation: Annotation | None = None
    """The one to edit; `None` for a new one."""
    iteration: str = ""
    text: str = ""
    refusal: str = ""
    refused_field: str = ""
    most: int = MAX_ANNOTATION


@router.endpoint("GET", "/jobs/{job}/annotations/new", access=OPERATE)
def new(job: str, db: Db, iteration: str = "", htmx: Htmx = False) -> Response:
    with db.read() as session:
        row = find_job(session, job)
    return AnnotationDialog(job=job, iteration=iteration or str(row.iteration)).part_or_page(htmx)


@router.endpoint("GET", "/jobs/{job}/annotations/{annotation}", access=OPERATE)
def edit_dialog(job: str, annotation: Number, db: Db, now: Now, htmx: Htmx = False) -> Response:
    found = _annotation(db, job, annotation, now)
    return AnnotationDialog(job=job, annotation=found, text=found.text).part_or_page(htmx)


@router.endpoint("POST", "/jobs/{job}/annotations", access=OPERATE)
def add(
    job: str, db: Db, who: Who, now: Now, iteration: Text = "", text: Text = "", htmx: Htmx = False
) -> Response:
    def act() -> None:
        asked = NewAnnotation(text=text, iteration=forms.iteration(iteration))
        iteration_annotations.add(db, job, asked, who=who, now=now)

    return _do(act, AnnotationDialog(job=job, iteration=iteration, text=text), db, now, htmx)


@router.endpoint("POST", "/jobs/{job}/annotations/{annotation}", access=OPERATE)
def edit(
    job: str, annotation: Number, db: Db, who: Who, now: Now, text: Text = "", htmx: Htmx = False
) -> Response:
    dialog = AnnotationDialog(job=job, annotation=_annotation(db, job, annotation, now), text=text)
    act = partial(iteration_annotations.edit, db, job, annotation, text, who=who, now=now)
    return _do(act, dialog, db, now, htmx)


@router.endpoint("POST", "/jobs/{job}/annotations/{annotation}/delete", access=OPERATE)
def delete(job: str, annotation: Number, db: Db, who: Who, now: Now, htmx: Htmx = False) -> Response:
    dialog = AnnotationDialog(job=job, annotation=_annotation(db, job, annotation, now))
    act = partial(iteration_annotations.delete, db, job, annotation, who=who, now=now)
    return _do(act, dialog, db, now, htmx)


def _annotation(db: Db, job: str, annotation: int, now: float) -> Annotation:
    with view_job(db, job, now=now) as view:
        return iteration_annotations.find(view, annotation)


def _do(act: Callable[[], object], dialog: AnnotationDialog, db: Db, now: float, htmx: bool) -> Response:
    """Answer with the refreshed page, or with the dialog and the reason of a refusal."""
    try:
        act()
    except (InvalidSetting, NotPossible) as refusal:
        field = refusal.field if isinstance(refusal, InvalidSetting) else ""
        return replace(dialog, refusal=str(refusal), refused_field=field).part_or_page(htmx, refusal.status)
    if not htmx:
        return RedirectResponse(f"/jobs/{dialog.job}#annotations", 303)
    with view_job(db, dialog.job, now=now) as view:
        live = views.job_live(view)
    return live.response(headers={"HX-Trigger": "holdfast:annotated"})
