"""Fake clock: a time that passes only when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import holdfast
from holdfast.engine import boundary, rank_coordination


class FakeClock:
    """Callable clock whose time a test sets, or moves on with `wait`.

    A worker process of a data loader gets a copy of it, so waits in one process are not seen in another.
    """

    def __init__(self, now: float = 1_790_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Move the time on by `seconds` instead of sleeping."""
        self.now += seconds


def train_by(clock: FakeClock, session: holdfast.Session, replace: Callable[..., None] = setattr) -> None:
    """Let the boundaries between the session's iterations see this clock; `replace`: as `monkeypatch.setattr`."""
    fake_time = SimpleNamespace(monotonic=clock, perf_counter=clock)
    replace(boundary, "time", fake_time)
    replace(rank_coordination, "time", fake_time)
    replace(session._meter.clock, "_clock", clock)
    session._boundary._taken_at = clock()
    session._meter.clock._began = clock()
    if (last := getattr(session._boundary._coordinator, "_last_agreement", None)) is not None:
        session._boundary._coordinator._last_agreement = (last[0], clock())
