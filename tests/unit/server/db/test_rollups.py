"""Roll-ups against what a plain loop finds, whatever the numbers and however they were cut into batches."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select

from holdfast_server import models
from holdfast_server.samples import rollups, sample_codec, sample_series
from holdfast_server.samples.rollups import DOWN, LAST, LEVELS, MAXIMUM, MINIMUM, NAN, SUM, UP
from holdfast_server.samples.sample_codec import BUILT_IN, Table

METRICS = ("loss", "accuracy")
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
derandomized = settings(derandomize=True, deadline=None, max_examples=60)


@st.composite
def tables(draw):
    steps = draw(st.lists(st.integers(1, 400), min_size=1, max_size=60))
    iteration = draw(st.integers(0, 40_000)) + np.cumsum(steps)
    rows = len(BUILT_IN) + len(METRICS)
    values = draw(
        st.lists(st.lists(NUMBERS, min_size=len(steps), max_size=len(steps)), min_size=rows, max_size=rows)
    )
    table = Table(iteration.astype(np.int64), METRICS, np.array(values))
    table.at[:] = np.abs(np.nan_to_num(table.at)) % 1e9
    return table


def naive(table, width):
    """Bucket by bucket and column by column."""
    buckets = {}
    for row, iteration in enumerate(table.iteration.tolist()):
        buckets.setdefault(iteration // width, []).append(row)
    for bucket, rows in sorted(buckets.items()):
        for column in range(len(table.values)):
            values = [float(table.values[column, row]) for row in rows]
            finite = [value for value in values if math.isfinite(value)]
            odd = {
                NAN: sum(map(math.isnan, values)),
                UP: values.count(math.inf),
                DOWN: values.count(-math.inf),
            }
            yield bucket, column, values, finite, odd


def agrees(rollup, table, width):
    place = {int(last) // width: bucket for bucket, last in enumerate(rollup.last)}
    count = 0
    for number, column, values, finite, odd in naive(table, width):
        bucket = place[number]
        stats = rollup.stats[bucket, column]
        assert rollup.rows[bucket] == len(values)
        assert {kind: rollup.odd[bucket, column, kind] for kind in odd} == odd
        assert rollup.finite[bucket, column] == len(finite)
        assert stats[MINIMUM] == min(finite, default=math.inf)
        assert stats[MAXIMUM] == max(finite, default=-math.inf)
        assert stats[LAST] == pytest.approx(values[-1], nan_ok=True, rel=0, abs=0)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = sum(np.abs(np.array(finite, dtype=float)))
        if math.isfinite(scale):
            assert stats[SUM] == pytest.approx(math.fsum(finite), rel=1e-12, abs=1e-12 * scale)
        count += 1
    assert count == len(rollup) * len(table.values)


@derandomized
@given(tables(), st.sampled_from(LEVELS))
def test_a_rollup_is_what_a_loop_finds(table, level):
    agrees(rollups.of_table(table, 1 << level), table, 1 << level)


@derandomized
@given(tables(), st.lists(st.integers(0, 60), max_size=5))
def test_parts_add_up_to_the_whole_at_every_level(table, cuts):
    edges = sorted({0, len(table), *(cut for cut in cuts if cut < len(table))})
    parts = [table.rows(slice(first, last)) for first, last in pairwise(edges)]
    fine = [rollups.of_table(part, 1 << LEVELS[0]) for part in reversed(parts)]
    for level in LEVELS:
        agrees(rollups.combined(fine, 1 << level), table, 1 << level)


@derandomized
@given(tables())
def test_what_is_encoded_is_read_again_bit_by_bit(table):
    rollup = rollups.of_table(table, 64)
    encoded = list(rollups.encoded(rollup))
    rows = list(zip(rollup.first.tolist(), rollup.last.tolist(), rollup.rows.tolist(), encoded, strict=True))
    again = rollups.decoded(rows, len(table.values) + 1)
    known = len(table.values)
    assert again.stats[:, :known].tobytes() == rollup.stats.tobytes()
    assert (again.odd[:, :known] == rollup.odd).all()
    # A metric that came later: nothing of it was measured.
    assert (again.odd[:, known, NAN] == rollup.rows).all()
    assert (again.finite[:, known] == 0).all()


@derandomized
@given(tables())
def test_a_chunk_holds_every_bit(table):
    again = sample_codec.unpack(sample_codec.pack(table))
    assert (again.iteration == table.iteration).all()
    assert again.metrics == METRICS
    assert np.array_equal(again.values, table.values, equal_nan=True)
    assert (np.signbit(again.values) == np.signbit(table.values))[~np.isnan(table.values)].all()


def test_losses_in_single_precision_take_half_the_room():
    rows = 2000
    rng = np.random.default_rng(1)
    values = rng.standard_normal((len(BUILT_IN) + 1, rows))
    double = sample_codec.pack(Table(np.arange(rows), ("loss",), values))
    values[-1] = values[-1].astype(np.float32)
    single = sample_codec.pack(Table(np.arange(rows), ("loss",), values))
    assert len(double) - len(single) > 3.5 * rows


def stored_in(connection):
    rows = models.table(models.RollupRecord)
    query = select(rows.c.level, rows.c.first_iteration, rows.c.last_iteration, rows.c.rows, rows.c.columns)
    return connection.execute(query.order_by(rows.c.bucket)).all()


@derandomized
@given(tables(), st.lists(st.integers(1, 59), max_size=6), st.randoms(use_true_random=False))
def test_what_comes_batch_by_batch_is_each_level_by_itself(table, cuts, chance):
    """In whatever order. Of the levels above the finest, the buckets that the stretch has come past."""
    edges = sorted({0, len(table), *(cut for cut in cuts if cut < len(table))})
    parts = [table.rows(slice(first, last)) for first, last in pairwise(edges)]
    if chance.random() < 0.5:
        chance.shuffle(parts)
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        models.table(models.RollupRecord).create(connection)
        reached = int(parts[0].iteration[0])
        for part in parts:
            sample_series.roll_up(connection, 1, part, reached)
            reached = max(reached, int(part.iteration[-1]) + 1)
        rows = stored_in(connection)
    engine.dispose()
    end = reached
    for level in LEVELS:
        found = [row[1:] for row in rows if row[0] == level]
        whole = table if level == LEVELS[0] else table.rows(table.iteration < end >> level << level)
        assert bool(found) == bool(len(whole))
        if found:
            agrees(rollups.decoded(found, len(table.values)), whole, 1 << level)


def test_a_batch_writes_what_it_comes_past(monkeypatch):
    written = []
    monkeypatch.setattr(
        sample_series._ROLLUP, "run", lambda _, *rows: written.append([row["level"] for row in rows])
    )
    engine = create_engine("sqlite://")
    values = np.ones((len(BUILT_IN) + len(METRICS), 50))
    with engine.begin() as connection:
        models.table(models.RollupRecord).create(connection)
        for first in range(1, 301, 50):
            sample_series.roll_up(connection, 1, Table(np.arange(first, first + 50), METRICS, values), first)
    engine.dispose()
    assert written == [[6], [6, 6], [6, 6], [6, 6], [6], [6, 6, 8]]
