"""The rate of what a rank writes: its part of the share, however small, from the first byte on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.distributed.ranks import Ranks
from holdfast.pacing import Controller, PacingSettings
from holdfast.save.store_shares import StoreShares
from holdfast.telemetry.reporter import Reporter, TrainingPosition


@pytest.fixture
def shares(tmp_path: Any) -> StoreShares:
    return StoreShares(tmp_path, Ranks(), Reporter("job", TrainingPosition()), Controller(PacingSettings()))


def test_a_rank_pays_for_the_first_bytes_at_a_rate_far_below_a_megabyte(shares: StoreShares) -> None:
    run: Any = SimpleNamespace(is_urgent=False)
    pace = shares.pace(run, SimpleNamespace(bytes_per_second=50_000.0, kind="scheduled"))  # type: ignore[arg-type]
    assert pace is not None
    began = time.monotonic()
    pace(5_000)
    assert time.monotonic() - began >= 0.09
    run.is_urgent = True
    pace(10**12)  # does not wait: the last checkpoint of a job


def test_a_job_without_a_share_writes_without_a_limit(shares: StoreShares) -> None:
    draft: Any = SimpleNamespace(bytes_per_second=0.0, kind="scheduled")
    assert shares.pace(SimpleNamespace(is_urgent=False), draft) is None  # type: ignore[arg-type]
    assert not shares.has_limited
