"""Which backend writes: the one asked for or, with "auto", the one that measurably costs training least. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

SIMPLEST_FIRST = ("thread", "process")
"""A thread needs no memory of its own and has no second process to lose."""
WARM_UP = 1
"""Measurements passed over: the first checkpoint starts a process and touches memory for the first time."""
TRIES = 3
NOISE_SECONDS = 0.002
NOISE_SHARE = 0.2
"""Costs that differ by less are alike: then the simplest wins …"""
SLOWER = 2.0
"""… unless another is durable so many times sooner."""
DEARER, DEARER_SECONDS, LATELY = 2.0, 0.01, 9
"""When the last so many cost so many times what they did at the choice, and clearly more, all are tried anew."""


class Choice:
    """The backend of the next checkpoint, and why.

    Args:
        wanted: a backend, or "auto".
        refused: why this platform or store cannot have a backend, by its name; empty where it goes without saying.
    """

    def __init__(self, wanted: str, refused: Mapping[str, str]) -> None:
        if wanted != "auto" and wanted not in SIMPLEST_FIRST:
            raise ValueError(f"persist backend {wanted!r}: use auto, {', '.join(SIMPLEST_FIRST)}")
        self._auto = wanted == "auto"
        wanted_ones = [name for name in SIMPLEST_FIRST if wanted in (name, "auto")]
        self._candidates = [name for name in wanted_ones if name not in refused] or ["thread"]
        self._out = {name: refused[name] for name in wanted_ones if name not in self._candidates}
        self._try_all()

    @property
    def current(self) -> str:
        if self._chosen is not None:
            return self._chosen
        return min(self._candidates, key=lambda name: len(self._measured[name]))

    @property
    def chosen(self) -> str | None:
        """None while several are tried."""
        return self._chosen

    @property
    def possible(self) -> list[str]:
        """Those that may write a checkpoint which is begun now."""
        return [self._chosen] if self._chosen is not None else list(self._candidates)

    @property
    def reason(self) -> str:
        """In words, for people."""
        return "; ".join([self._why, *(f"{name} is out: {why}" for name, why in self._out.items() if why)])

    def measured(self, backend: str, cost_seconds: float, persist_seconds: float) -> None:
        """What a checkpoint cost training, stalls and interference, and how long it took to become durable."""
        if backend not in self._candidates or len(self._candidates) == 1:
            return
        measured = self._measured[backend]
        measured.append((cost_seconds, persist_seconds))
        del measured[WARM_UP:-LATELY]  # no more are ever looked at
        if self._chosen is None:
            self._choose_if_known()
        elif backend == self._chosen and self._is_dearer():
            self._try_all()

    def failed(self, backend: str, why: str) -> None:
        """It broke: not the store, but what it writes with. Where it was a choice of ours, it is dropped."""
        if self._auto and backend != "thread":
            self.refused(backend, why)

    def refused(self, backend: str, why: str) -> None:
        """It cannot write here; what can always write is a thread."""
        if backend not in self._candidates:
            return
        self._out[backend] = why
        self._candidates.remove(backend)
        self._candidates = self._candidates or ["thread"]
        if self._chosen == backend or len(self._candidates) == 1:
            self._try_all()
        elif self._chosen is None:
            self._choose_if_known()

    def _try_all(self) -> None:
        self._measured: dict[str, list[tuple[float, float]]] = {name: [] for name in self._candidates}
        self._chosen: str | None = None
        self._cost_when_chosen = 0.0
        self._why = f"{', '.join(self._candidates)} are tried in turn"
        if len(self._candidates) == 1:
            self._chosen = self._candidates[0]
            self._why = f"{self._chosen}: " + ("no other can write here" if self._out else "as set")

    def _choose_if_known(self) -> None:
        if any(len(self._measured[name]) < WARM_UP + TRIES for name in self._candidates):
            return
        costs = {name: self._median(name, 0) for name in self._candidates}
        persists = {name: self._median(name, 1) for name in self._candidates}
        least = min(costs.values())
        alike = [name for name in self._candidates if costs[name] <= least + _noise(least)]
        soonest = min(persists[name] for name in alike)
        chosen = next(name for name in alike if persists[name] <= SLOWER * soonest)
        self._chosen, self._cost_when_chosen = chosen, costs[chosen]
        self._why = _told(chosen, costs, persists)

    def _median(self, name: str, which: int) -> float:
        return statistics.median(measured[which] for measured in self._measured[name][WARM_UP:][-TRIES:])

    def _is_dearer(self) -> bool:
        assert self._chosen is not None
        lately = [cost_seconds for cost_seconds, _ in self._measured[self._chosen][WARM_UP:]]
        dear = DEARER * self._cost_when_chosen + DEARER_SECONDS
        return len(lately) >= LATELY and statistics.median(lately) > dear


def _noise(cost_seconds: float) -> float:
    return max(NOISE_SECONDS, NOISE_SHARE * abs(cost_seconds))


def _told(chosen: str, costs: Mapping[str, float], persists: Mapping[str, float]) -> str:
    others = [f"{_milliseconds(costs[name])} with {name}" for name in costs if name != chosen]
    alike = [n for n in costs if n != chosen and abs(costs[n] - costs[chosen]) <= _noise(min(costs.values()))]
    told = f"{chosen}: a checkpoint costs training {_milliseconds(costs[chosen])}, {', '.join(others)}"
    if not alike:
        return told
    sooner = [name for name in alike if persists[name] > SLOWER * persists[chosen]]
    why = f"durable sooner than with {sooner[0]}" if sooner else "the simplest of those that cost about the same"
    return f"{told} ({why})"


def _milliseconds(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1000:.3g} ms"
