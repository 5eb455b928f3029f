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


def test_what_is_not_written_again_compression_and_parity_change_the_write_and_not_the_copy() -> None:
    plain = profile_of(**SLOW)
    reused = profile_of(**SLOW, unchanged="75%")
    assert (reused.snapshot_seconds, reused.persist_seconds) == (plain.snapshot_seconds, 16)
    protected = profile_of(**SLOW, parity="10+2")
    assert protected.persist_seconds == pytest.approx(64 + 64 + 0.205 * 64, rel=0.01)
    compressed = profile_of(**SLOW, compress=True)
    assert compressed.persist_seconds == pytest.approx(64e9 / 450e6 + 64 / 1.2)
    assert protected.snapshot_seconds == compressed.snapshot_seconds == plain.snapshot_seconds


def test_each_of_them_is_among_the_inputs() -> None:
    given = PlanOptions(state="64GB", parity="10+2", compress=True, unchanged="0.9")
    lines = {each.name: (each.value, each.origin) for each in plan_inputs(given)[3]}
    assert lines["unchanged"] == ("90 %", "given: not written again")
    assert lines["compressing"] == ("450 MB/s a rank", "assumed, 1/1.2 of the size")
    assert lines["parity"] == ("1 GB/s a rank", "assumed, 10+2 is 20.5 % more")


@pytest.mark.parametrize("text", ["most", "100%", "-1%", "1.5"])
def test_a_share_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--unchanged '.*write 90% or 0.9$"):
        profile_of(state="64GB", unchanged=text)
