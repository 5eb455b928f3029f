"""The attempts of a job: the panel that lists them, and a page for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastapi.responses import Response

from holdfast.protocol.attempts import AttemptConfiguration, AttemptOutput, AttemptSummary
from holdfast.protocol.jobs import JobSummary
from holdfast_server.api.attempts import AttemptNumber
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import VIEW
from holdfast_server.core.errors import UnknownAttempt
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries import attempts, summaries
from holdfast_server.queries.job_view import view_job
from holdfast_server.records.attempt_reports import places_of
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx

SHOWN, MOST = 5, 200
"""Number of attempts in the panel and on the page of all attempts, newest first."""
NOTHING = "none"
"""Compare with no attempt."""

router = Router()


@dataclass(frozen=True, kw_only=True)
class AttemptsPart(View):
    template: ClassVar[str] = "job/_attempts.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "attempts"
    job: str
    attempts: list[AttemptSummary]
    has_more: bool
    end: str
    """How the newest attempt ended, if it has not reported that; `running` while it runs."""
    origin: bool
    """Whether the job is a fork whose origin the user may see."""
    place: str
    """Device and scheduler's job of rank 0 of the newest attempt; empty if unknown."""
    now: float


@dataclass(frozen=True, kw_only=True)
class OutputPart(View):
    template: ClassVar[str] = "job/_output.html"
    job: str
    attempt: int
    output: AttemptOutput


@dataclass(frozen=True, kw_only=True)
class AttemptPage(View):
    template: ClassVar[str] = "job/attempt.html"
    job: str
    attempt: AttemptSummary
    found: AttemptConfiguration
    output: OutputPart
    against: str
    """What it is compared with: the number of an attempt, `origin` or `none`."""
    shared: list[tuple[str, dict[str, str]]]
    """The values of each section that do not differ."""
    choices: list[tuple[str, str]]
    """Values and labels of what it can be compared with."""
    now: float


def _shared(found: AttemptConfiguration) -> list[tuple[str, dict[str, str]]]:
    """Return the values of each section that do not differ, which are all without a comparison."""
    differing = {(each.section, each.name) for each in found.differences}
    sections = (("configuration", found.configuration), ("environment", found.environment))
    return [
        (section, {name: value for name, value in values.items() if (section, name) not in differing})
        for section, values in sections
    ]


def _newest_end(job: JobSummary) -> str:
    if job.supervisor is not None and not job.supervisor.has_started:
        return job.supervisor.reason
    return "running" if job.alive else "not reported"


@router.endpoint("GET", "/jobs/{job}/attempts", access=VIEW)
def job_attempts(job: str, db: Db, now: Now, asker: Asker, htmx: Htmx = False) -> Response:
    most = SHOWN if htmx else MOST
    with view_job(db, job, now=now) as view:
        found = attempts.attempts(view, limit=most + 1)
        family = summaries.family(view, visible=asker.visible_projects)
        summary = summaries.job_summary(view)
        place = places_of(view.session, job, view.job.uid).get(0)
    part = AttemptsPart(
        job=job, attempts=found[:most], has_more=len(found) > most, now=now, end=_newest_end(summary),
        origin=family.origin is not None and family.origin.project is not None,
        place=", ".join(filter(None, (place.device, place.scheduler_job))) if place else "",
    )  # fmt: skip
    return part.part_or_page(htmx)


@router.endpoint("GET", "/jobs/{job}/attempts/{attempt}", access=VIEW)
def attempt_page(job: str, attempt: AttemptNumber, db: Db, now: Now, asker: Asker, against: str = "") -> Response:
    visible = asker.visible_projects
    with view_job(db, job, now=now) as view:
        known = attempts.attempts(view, limit=MOST)
        family = summaries.family(view, visible=visible)
        this = next((row for row in known if row.attempt == attempt), None)
        if this is None:
            raise UnknownAttempt(job, f"attempt {attempt}")
        others = [row.attempt for row in known if row is not this]
        choices = [(str(number), f"attempt {number}") for number in others]
        origin = family.origin
        if origin is not None and origin.project is not None:
            choices.append((attempts.ORIGIN, f"its origin {origin.job}"))
        earlier = next((str(number) for number in others if number < attempt), None)
        default = earlier or (attempts.ORIGIN if origin is not None and origin.project is not None else NOTHING)
        against = against or default
        found = attempts.configuration(
            view, attempt, against="" if against == NOTHING else against, visible=visible
        )
        output = OutputPart(job=job, attempt=attempt, output=attempts.output(view, attempt))
    page = AttemptPage(
        job=job, output=output, attempt=this, found=found, against=against, shared=_shared(found),
        choices=[*choices, (NOTHING, "nothing")], now=now,
    )  # fmt: skip
    return page.response()


@router.endpoint("GET", "/jobs/{job}/attempts/{attempt}/output", access=VIEW)
def attempt_output(job: str, attempt: AttemptNumber, db: Db, now: Now) -> Response:
    with view_job(db, job, now=now) as view:
        output = attempts.output(view, attempt)
    return OutputPart(job=job, attempt=attempt, output=output).response()
