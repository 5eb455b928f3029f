"""The goodput, stalls and ranks panels of the job page; each is also a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, cast, get_args

from fastapi import Query
from fastapi.responses import Response

from holdfast.protocol.analyses import Goodput, RankTimes, Recovery
from holdfast.protocol.timeline import ShortWindow, StallsOverTime, Window
from holdfast.protocol.wire import StallKind
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import VIEW
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.http.dependencies import Db, Now
from holdfast_server.queries.goodput import goodput, stalls_over_time
from holdfast_server.queries.job_view import view_job
from holdfast_server.queries.ranks import rank_heat, rank_times
from holdfast_server.queries.recovery import recovery
from holdfast_web.shared.filters import duration
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx

RANKS_SHOWN, RANKS_MOST = 12, 512
"""Number of ranks in the panel and on the ranks page, slowest first."""
HOSTS_SHOWN = 8
"""Number of hosts in the recovery panel, those first whose loss costs most."""
HEAT_STEPS = (0.02, 0.05, 0.15, 0.4)
"""Shares above the median at which a cell gets one step darker."""

router = Router()


@dataclass(frozen=True, kw_only=True)
class BarSegment:
    """One category of the goodput bar, in percent of its length."""

    name: str
    begin: float
    length: float
    share: float


@dataclass(frozen=True, kw_only=True)
class GoodputPart(View):
    template: ClassVar[str] = "job/_goodput.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "goodput"
    job: str
    goodput: Goodput
    bar: list[BarSegment]
    windows: tuple[Window, ...] = get_args(Window)


@dataclass(frozen=True, kw_only=True)
class StallColumn:
    """One time step of the stall plot, in percent."""

    x: float
    parts: list[tuple[StallKind, float, float]]
    """Kind, top and height, from the bottom up."""
    text: str


@dataclass(frozen=True, kw_only=True)
class StallsPart(View):
    template: ClassVar[str] = "job/_stalls.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "stalls"
    job: str
    stalls: StallsOverTime
    columns: list[StallColumn]
    width: float
    """Width of a column in percent."""
    max_seconds: float
    """Total wait of the longest time step."""
    windows: tuple[Window, ...] = get_args(Window)


@dataclass(frozen=True, kw_only=True)
class RecoveryPart(View):
    template: ClassVar[str] = "job/_recovery.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "recovery"
    job: str
    recovery: Recovery
    hosts_shown: int = HOSTS_SHOWN


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """Ten minutes of a rank: the color step from 0 to 4 above the median; None without data."""

    step: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class RanksPart(View):
    template: ClassVar[str] = "job/_ranks.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "ranks"
    job: str
    times: RankTimes
    shown: int
    """Number of rows, slowest first."""
    all_rows: bool
    """Whether this is the ranks page rather than the panel of a job."""
    heat: dict[int, list[HeatCell]]
    windows: tuple[ShortWindow, ...] = get_args(ShortWindow)


def _checked(window: str, windows: object) -> str:
    if window not in get_args(windows):
        raise InvalidSetting("window", f"unknown window {window!r}; use one of {', '.join(get_args(windows))}")
    return window


@router.endpoint("GET", "/jobs/{job}/goodput", access=VIEW)
def job_goodput(job: str, db: Db, now: Now, window: str = "24h", htmx: Htmx = False) -> Response:
    answer = goodput(db, job, cast("Window", _checked(window, Window)), now=now)
    return GoodputPart(job=job, goodput=answer, bar=_bar(answer)).part_or_page(htmx)


@router.endpoint("GET", "/jobs/{job}/recovery", access=VIEW)
def job_recovery(job: str, db: Db, now: Now, htmx: Htmx = False) -> Response:
    with view_job(db, job, now=now) as view:
        answer = recovery(view)
    return RecoveryPart(job=job, recovery=answer).part_or_page(htmx)


@router.endpoint("GET", "/jobs/{job}/ranks", access=VIEW)
def job_ranks(
    job: str,
    db: Db,
    now: Now,
    window: str = "1h",
    rows: Annotated[str, Query(alias="shown")] = "",
    htmx: Htmx = False,
) -> Response:
    _checked(window, ShortWindow)
    times = rank_times(db, job, cast("ShortWindow", window), now=now)
    # a refresh of the full page keeps all rows
    all_rows = rows == "all" or not htmx
    shown = min(RANKS_MOST if all_rows else RANKS_SHOWN, len(times.ranks))
    slowest = [row.rank for row in times.ranks[:shown]]
    heat = rank_heat(db, job, slowest, cast("ShortWindow", window), times.measure, now=now)
    part = RanksPart(job=job, times=times, shown=shown, all_rows=all_rows, heat=_cells(heat, times.median_seconds))
    return part.part_or_page(htmx)


@router.endpoint("GET", "/jobs/{job}/stalls", access=VIEW)
def job_stalls(job: str, db: Db, now: Now, window: str = "24h", htmx: Htmx = False) -> Response:
    stalls = stalls_over_time(db, job, cast("Window", _checked(window, Window)), now=now)
    return _stalls_part(stalls).part_or_page(htmx)


def _stalls_part(stalls: StallsOverTime) -> StallsPart:
    totals = [sum(waited) for waited in zip(*stalls.seconds.values(), strict=True)]
    max_seconds = max(totals, default=0.0)
    width = 100 / max(1, len(totals))
    columns = []
    for index, total in enumerate(totals):
        parts: list[tuple[StallKind, float, float]] = []
        top = 100.0
        for kind, seconds in stalls.seconds.items():
            if seconds[index] > 0:
                height = 100 * seconds[index] / max_seconds
                top -= height
                parts.append((kind, top, height))
        text = ", ".join(f"{kind.replace('_', ' ')} {duration(stalls.seconds[kind][index])}" for kind, *_ in parts)
        if total > 0:
            columns.append(StallColumn(x=index * width, parts=parts, text=text))
    return StallsPart(job=stalls.job, stalls=stalls, columns=columns, width=width, max_seconds=max_seconds)


def _cells(heat: dict[int, list[float | None]], median: float | None) -> dict[int, list[HeatCell]]:
    return {rank: [_cell(seconds, median) for seconds in row] for rank, row in heat.items()}


def _cell(seconds: float | None, median: float | None) -> HeatCell:
    if seconds is None or not median:
        return HeatCell(step=None, text="no data")
    above = seconds / median - 1
    step = sum(above >= limit for limit in HEAT_STEPS)
    return HeatCell(step=step, text=f"{duration(seconds)}, {above * 100:+.0f} % vs. median")


def _bar(answer: Goodput) -> list[BarSegment]:
    """Return the categories that took time, side by side."""
    segments, begin = [], 0.0
    for bucket in answer.buckets:
        if bucket.seconds > 0:
            length = 100 * bucket.share
            segments.append(BarSegment(name=bucket.name, begin=begin, length=length, share=bucket.share))
            begin += length
    return segments
