"""A profile made of sizes and speeds."""

from __future__ import annotations

import pytest

from holdfast.commands.premises import INTERFERENCE, profile_of


def test_ranks_share_the_state_and_copy_and_write_it_at_once() -> None:
    profile = profile_of(64e9, copy_bytes_per_second=8e9, write_bytes_per_second=1e9, iteration_seconds=2)
    assert (profile.snapshot_seconds, profile.persist_seconds, profile.checkpoint_bytes) == (8, 64, 64_000_000_000)
    shared = profile_of(64e9, 32, copy_bytes_per_second=8e9, write_bytes_per_second=1e9)
    assert (shared.snapshot_seconds, shared.persist_seconds) == (0.25, 2)


def test_an_unknown_cost_is_what_of_the_copy_does_not_fit_and_a_slower_loop() -> None:
    profile = profile_of(64e9, copy_bytes_per_second=8e9, write_bytes_per_second=1e9, iteration_seconds=2)
    assert profile.cost_seconds == pytest.approx(6 + INTERFERENCE * 72)
    hidden = profile_of(8e9, copy_bytes_per_second=8e9, write_bytes_per_second=1e9, iteration_seconds=2)
    assert hidden.cost_seconds == pytest.approx(INTERFERENCE * 9)


def test_what_is_known_takes_the_place_of_what_would_follow() -> None:
    profile = profile_of(64e9, cost_seconds=5, durable_seconds=120)
    assert profile.cost_seconds == 5
    assert profile.snapshot_seconds + profile.persist_seconds == pytest.approx(120)
    assert profile.snapshot_seconds == pytest.approx(6.4)
    at_once = profile_of(64e9, durable_seconds=1)
    assert (at_once.snapshot_seconds, at_once.persist_seconds) == (1, 0)
