"""The status of many jobs in one statement is the status of each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from holdfast.protocol.wire import SupervisorReport
from holdfast_server import models
from holdfast_server.records.job_status import current_attempt, longest_seconds, status_in_sql, status_of
from holdfast_server.samples.limits import RecentSamples

NOW = 1_790_000_000.0

jobs = st.fixed_dictionaries(
    {
        "last_contact_at": st.sampled_from([0.0, 19.0, 20.0, 20.5, 29.0, 30.0, 31.0, 120.0, 121.0, 1e6]).map(
            lambda ago: NOW - ago
        ),
        "longest_seconds": st.sampled_from([0.0, 0.1, 6.0, 7.0, 10.0, 1e5]),
        "paused": st.booleans(),
        "paused_version": st.integers(0, 2),
        "applied_version": st.integers(0, 2),
    }
)
attempts = st.none() | st.fixed_dictionaries(
    {
        "iterations": st.integers(0, 2),
        "finished": st.sampled_from([None, "finished", "interrupted", "relaunched", "ValueError", "killed", ""]),
        "supervised": st.booleans(),
        "supervisor": st.sampled_from([None, "restarting", "gave_up", "stopped", "ended"]),
        "supervisor_until": st.sampled_from([None, NOW - 1, NOW, NOW + 1]),
        "supervisor_report": st.just(msgspec.msgpack.encode(SupervisorReport(at=0, state="ended", reason=""))),
    }
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    models.Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(jobs, attempts), min_size=1, max_size=20))
def test_the_database_tells_the_same_status_as_the_function(engine: Engine, cases: list) -> None:
    with Session(engine) as session:
        session.add(models.ProjectRecord(name=models.DEFAULT_PROJECT, created_at=0.0))
        expected = {}
        for number, (job_fields, attempt_fields) in enumerate(cases):
            job = models.JobRecord(name=f"job-{number}", created_at=0.0, uid="current", **job_fields)
            session.add(job)
            attempt = None
            for uid, fields in (("current", attempt_fields), ("earlier", {"iterations": 1, "finished": None})):
                if fields is None:
                    continue
                made = models.AttemptRecord(
                    job=job.name,
                    uid=uid,
                    attempt=1,
                    started_at=0.0,
                    iteration=0,
                    lineage=1,
                    last_iteration=3,
                    **fields,
                )
                session.add(made)
                attempt = made if uid == "current" else attempt
            expected[job.name] = status_of(job, attempt, now=NOW).status
        session.flush()
        query = select(models.JobRecord.name, status_in_sql(now=NOW)).outerjoin(
            models.AttemptRecord, current_attempt()
        )
        assert {name: status for name, status in session.execute(query)} == expected  # noqa: C416 - rows are no plain tuples
        session.rollback()


def test_the_longest_iteration_is_one_that_was_measured() -> None:
    assert longest_seconds(RecentSamples()) == 0.0
    assert longest_seconds(RecentSamples(seconds=[0.5, math.nan, math.inf, 2.0])) == 2.0
