"""The comparison page."""

from __future__ import annotations

from typing import Annotated, cast, get_args

from fastapi import Query
from fastapi.responses import Response

from holdfast.protocol.timeline import ComparisonAxis
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import LISTS
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries.comparison import ComparisonQuery
from holdfast_web.comparison import views
from holdfast_web.shared import forms

MOST_SMOOTHING = 0.99
"""Largest weight of the moving average: with 1, it would never change."""
MOST_PLACE = 1e12
"""Largest iteration, and time in seconds, of a window."""

Names = Annotated[list[str] | None, Query()]

router = Router()


@router.endpoint(
    "GET",
    "/compare",
    access=LISTS,  # the query checks each job
)
def compare(
    db: Db,
    now: Now,
    asker: Asker,
    job: Names = None,
    metric: Names = None,
    x: str = "",
    start: Annotated[str, Query(alias="from")] = "",
    end: Annotated[str, Query(alias="to")] = "",
    smooth: str = "",
    log: str = "",
) -> Response:
    if x not in ("", *get_args(ComparisonAxis)):
        raise InvalidSetting("x", f"unknown axis {x!r}; use one of {', '.join(get_args(ComparisonAxis))}")
    weight = forms.number("smooth", smooth) if smooth.strip() else 0.0
    if not 0 <= weight <= MOST_SMOOTHING:
        raise InvalidSetting("smooth", f"smoothing {smooth} is outside 0 to {MOST_SMOOTHING}")
    chosen = tuple(dict.fromkeys(name for name in metric or () if name))
    query = ComparisonQuery(
        jobs=tuple(dict.fromkeys(name.strip() for name in job or () if name.strip())),
        metrics=chosen or ("loss",),
        axis=cast("ComparisonAxis", x or "iteration"),
        start=_place("from", start),
        end=_place("to", end),
    )
    address = views.ComparisonAddress(query=query, chosen=chosen, smoothing=weight, logarithmic=bool(log))
    return views.comparison_page(db, address, asker, now=now).response()


def _place(field: str, text: str) -> float | None:
    """Parse one end of the window, an iteration or a time in seconds; `None` if it is empty."""
    if not text.strip():
        return None
    value = forms.number(field, text)
    if not abs(value) <= MOST_PLACE:
        raise InvalidSetting(field, f"{field} {value:g} is outside -{MOST_PLACE:g} to {MOST_PLACE:g}")
    return value
