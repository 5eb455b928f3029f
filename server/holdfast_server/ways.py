"""The ways to where many jobs are, as a table to join: what `Ancestry` is for one job, in one statement."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CTE, BigInteger, BindParameter, Select, and_, case, cast, func, literal, select

from holdfast.protocol import checkpoint_id
from holdfast_server import models
from holdfast_server.ancestry import END

_LINEAGE_AT = len(checkpoint_id(0, 0))
"""Where the lineage begins in a checkpoint's id, counted from 1 as SQL does."""


def to_where_they_are(jobs: BindParameter[Any] | Select[str]) -> CTE:
    """Rows (job, lineage, upto): the lineages on each job's way, with the last iteration that belongs to it.

    `jobs`: `db.named_jobs()`, or a question that finds them.
    """
    job, lineage = models.Job, models.Lineage
    way = (
        select(job.name.label("job"), job.lineage.label("lineage"), literal(END, BigInteger).label("upto"))
        .where(job.name.in_(jobs))
        .cte("way", recursive=True)
    )
    parent = cast(func.substr(lineage.parent, _LINEAGE_AT), BigInteger)
    upto = case((lineage.iteration < way.c.upto, lineage.iteration), else_=way.c.upto)
    here = and_(lineage.job == way.c.job, lineage.lineage == way.c.lineage)
    # UNION, not UNION ALL: reports that lead in a circle come to an end.
    return way.union(select(way.c.job, parent, upto).join(lineage, here).where(lineage.parent.is_not(None)))
