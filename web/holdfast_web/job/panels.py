"""Two panels of a job's page: where its time went, and how its ranks compare. Each is a page of its own, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, cast, get_args

from fastapi import APIRouter, Query
from fastapi.responses import Response

from holdfast.answers import Goodput, RankTimes, ShortWindow, StallsOverTime, Window
from holdfast.protocol import StallKind
from holdfast_server.dependencies import Clock, Db
from holdfast_server.errors import InvalidSetting
from holdfast_server.goodput import goodput, stalls_over_time
from holdfast_server.ranks import rank_heat, rank_times
from holdfast_web.shared.filters import duration
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx, PageRoute

RANKS_SHOWN, RANKS_MOST = 12, 512
"""Of the slowest, in the panel of a job and on the page of its ranks."""
HEAT_STEPS = (0.02, 0.05, 0.15, 0.4)
"""From which share above the median on a cell is one step darker."""

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One part of the bar, in percent of its length."""

    name: str
    begin: float
    length: float
    share: float


@dataclass(frozen=True, kw_only=True)
class GoodputPart(View):
    template: ClassVar[str] = "job/_goodput.html"
    page_template: ClassVar[str] = "job/goodput.html"
    job: str
    goodput: Goodput
    bar: list[Stretch]
    windows: tuple[Window, ...] = get_args(Window)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One stretch of time in the picture of stalls: what each kind adds, from the bottom up, in percent."""

    x: float
    parts: list[tuple[StallKind, float, float]]
    """Kind, top and height."""
    said: str


@dataclass(frozen=True, kw_only=True)
class StallsPart(View):
    template: ClassVar[str] = "job/_stalls.html"
    page_template: ClassVar[str] = "job/stalls.html"
    job: str
    stalls: StallsOverTime
    columns: list[Column]
    width: float
    """Of a column, in percent."""
    most: float
    """Seconds, in the stretch that waited longest."""
    windows: tuple[Window, ...] = get_args(Window)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Ten minutes of a rank: how far above the median, in steps of colour from 0 to 4; None: nothing was told."""

    step: int | None
    said: str


@dataclass(frozen=True, kw_only=True)
class RanksPart(View):
    template: ClassVar[str] = "job/_ranks.html"
    page_template: ClassVar[str] = "job/ranks.html"
    job: str
    times: RankTimes
    shown: int
    """How many rows, the slowest first."""
    whole: bool
    """All that there are to show, as on the page of the ranks; otherwise the few of a job's panel."""
    heat: dict[int, list[Cell]]
    windows: tuple[ShortWindow, ...] = get_args(ShortWindow)


def _known(window: str, windows: object) -> str:
    if window not in get_args(windows):
        raise InvalidSetting("window", f"no window {window!r}: ask for one of {', '.join(get_args(windows))}")
    return window


@router.get("/jobs/{job}/goodput")
async def job_goodput(job: str, db: Db, clock: Clock, window: str = "24h", htmx: Htmx = False) -> Response:
    answer = await goodput(db, job, cast("Window", _known(window, Window)), now=clock())
    part = GoodputPart(job=job, goodput=answer, bar=_bar(answer))
    return part.response() if htmx else part.page()


@router.get("/jobs/{job}/ranks")
async def job_ranks(
    job: str,
    db: Db,
    clock: Clock,
    window: str = "1h",
    rows: Annotated[str, Query(alias="shown")] = "",
    htmx: Htmx = False,
) -> Response:
    now = clock()
    _known(window, ShortWindow)
    times = await rank_times(db, job, cast("ShortWindow", window), now=now)
    # The page asks for its part again, and keeps its rows.
    whole = rows == "all" or not htmx
    shown = min(RANKS_MOST if whole else RANKS_SHOWN, len(times.ranks))
    slowest = [row.rank for row in times.ranks[:shown]]
    heat = await rank_heat(db, job, slowest, cast("ShortWindow", window), times.measure, now=now)
    part = RanksPart(job=job, times=times, shown=shown, whole=whole, heat=_cells(heat, times.median_seconds))
    return part.response() if htmx else part.page()


@router.get("/jobs/{job}/stalls")
async def job_stalls(job: str, db: Db, clock: Clock, window: str = "24h", htmx: Htmx = False) -> Response:
    stalls = await stalls_over_time(db, job, cast("Window", _known(window, Window)), now=clock())
    part = _stalls_part(stalls)
    return part.response() if htmx else part.page()


def _stalls_part(stalls: StallsOverTime) -> StallsPart:
    totals = [sum(waited) for waited in zip(*stalls.seconds.values(), strict=True)]
    most = max(totals, default=0.0)
    width = 100 / max(1, len(totals))
    columns = []
    for place, total in enumerate(totals):
        parts: list[tuple[StallKind, float, float]] = []
        top = 100.0
        for kind, seconds in stalls.seconds.items():
            if seconds[place] > 0:
                height = 100 * seconds[place] / most
                top -= height
                parts.append((kind, top, height))
        told = ", ".join(f"{kind.replace('_', ' ')} {duration(stalls.seconds[kind][place])}" for kind, *_ in parts)
        if total > 0:
            columns.append(Column(x=place * width, parts=parts, said=told))
    return StallsPart(job=stalls.job, stalls=stalls, columns=columns, width=width, most=most)


def _cells(heat: dict[int, list[float | None]], median: float | None) -> dict[int, list[Cell]]:
    return {rank: [_cell(seconds, median) for seconds in row] for rank, row in heat.items()}


def _cell(seconds: float | None, median: float | None) -> Cell:
    if seconds is None or not median:
        return Cell(step=None, said="nothing was told")
    above = seconds / median - 1
    step = sum(above >= limit for limit in HEAT_STEPS)
    return Cell(step=step, said=f"{duration(seconds)}, {above * 100:+.0f} % from the median")


def _bar(answer: Goodput) -> list[Stretch]:
    """What took any time, one beside the other."""
    stretches, begin = [], 0.0
    for bucket in answer.buckets:
        if bucket.seconds > 0:
            length = 100 * bucket.share
            stretches.append(Stretch(name=bucket.name, begin=begin, length=length, share=bucket.share))
            begin += length
    return stretches
