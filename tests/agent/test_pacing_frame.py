"""Where things are on the picture that the terminal and the page draw."""

from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast.pacing import History, Profile, Settings
from holdfast.pacing.failures import Failures
from holdfast.pacing.frame import Frame
from holdfast.pacing.outlook import Outlook, outlook


@pytest.fixture
def found() -> Outlook:
    profile = Profile(iteration_seconds=1, persist_seconds=120, cost_seconds=5)
    history = History(failures=Failures(world_size=16_384, mean_seconds=11_124), restart_seconds=300)
    return outlook(profile, Settings(), history, present=2000)


def test_the_frame_is_logarithmic_in_time_and_holds_every_choice(found: Outlook) -> None:
    frame = Frame(found)
    middle = (frame.low * frame.high) ** 0.5
    assert [frame.x(frame.low / 2), frame.x(middle), frame.x(frame.high * 2)] == [0, pytest.approx(0.5), 1]
    for choice in (found.best, found.present, *found.around, *found.policies):
        assert choice is not None
        assert choice.effective is not None
        assert 0 <= frame.y(choice.effective) <= 1
    assert frame.y(0.0) < 0


@pytest.mark.parametrize("most", [2, 3, 5, 8])
def test_the_scales_have_round_figures_and_not_too_many(found: Outlook, most: int) -> None:
    frame = Frame(found)
    times, shares = frame.times(most), frame.shares(most)
    assert 1 <= len(times) <= most
    assert times == sorted(times)
    assert all(frame.low <= time <= frame.high for time in times)
    assert set(times) <= {60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 43200}
    assert 1 <= len(shares) <= most + 1
    assert len({round(other - one, 6) for one, other in pairwise(shares)}) <= 1
    assert all(0 <= frame.y(share) <= 1 for share in shares)


def test_a_curve_that_is_flat_looks_flat() -> None:
    calm = outlook(Profile(iteration_seconds=1, cost_seconds=1e-6), Settings(), History())
    frame = Frame(calm)
    assert frame.top - frame.bottom >= 0.0099
