"""The profile of a job that is only planned, made of sizes and speeds."""

from __future__ import annotations

import pytest

from holdfast.commands.plan_inputs import INTERFERENCE, PlanOptions, plan_inputs
from holdfast.pacing import Profile

SLOW = {"state": "64GB", "copy_bandwidth": "8GB/s", "write_bandwidth": "1GB/s", "iteration": "2s"}


def profile_of(**given: str | int) -> Profile:
    return plan_inputs(PlanOptions(**given))[0]  # type: ignore[arg-type]


def test_ranks_share_the_state_and_copy_and_write_it_at_once() -> None:
    profile = profile_of(**SLOW)
    assert (profile.snapshot_seconds, profile.persist_seconds, profile.checkpoint_bytes) == (8, 64, 64_000_000_000)
    shared = profile_of(**SLOW, ranks=32)
    assert (shared.snapshot_seconds, shared.persist_seconds) == (0.25, 2)


def test_an_unknown_cost_is_what_of_the_copy_does_not_fit_and_a_slower_loop() -> None:
    assert profile_of(**SLOW).cost_seconds == pytest.approx(6 + INTERFERENCE * 72)
    assert profile_of(**SLOW | {"state": "8GB"}).cost_seconds == pytest.approx(INTERFERENCE * 9)


def test_what_is_known_takes_the_place_of_what_would_follow() -> None:
    profile = profile_of(state="64GB", stall="5s", lag="2min")
    assert profile.cost_seconds == 5
    assert profile.snapshot_seconds + profile.persist_seconds == pytest.approx(120)
    assert profile.snapshot_seconds == pytest.approx(6.4)
    at_once = profile_of(state="64GB", lag="1s")
    assert (at_once.snapshot_seconds, at_once.persist_seconds) == (1, 0)
