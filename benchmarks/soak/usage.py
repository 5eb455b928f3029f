"""Memory, descriptors and threads of the processes of a soak."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, NamedTuple

import psutil

from benchmarks.ingest.memory import BLOCKS, MemorySample, slope

WARM_UP_SHARE = 1 / 3
JUDGED_HOURS = 0.25
"""Slopes of shorter lives are reported, not judged: memory grows while caches fill."""
LIMIT_MB_PER_HOUR = 20.0
LIMIT_COUNT = 8


class Sample(NamedTuple):
    hours: float
    megabytes: float
    descriptors: int
    threads: int


class Usage:
    """Samples by role and process: a slope belongs to one process."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._samples: dict[str, dict[int, list[Sample]]] = {}

    def sample(self, role: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                hours = (time.monotonic() - self._began) / 3600
                size = process.memory_info().rss / 1e6
                new = Sample(hours, size, process.num_fds(), process.num_threads())
            self._samples.setdefault(role, {}).setdefault(pid, []).append(new)

    def newest(self, role: str) -> Sample | None:
        lives = self._samples.get(role)
        return max((life[-1] for life in lives.values()), key=lambda each: each.hours) if lives else None

    def judged(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return one row for the longest life of each role, and what is wrong."""
        rows, wrong = [], []
        for role, lives in self._samples.items():
            life = max(lives.values(), key=lambda each: each[-1].hours - each[0].hours)
            late = life[int(len(life) * WARM_UP_SHARE) :]
            hours = late[-1].hours - late[0].hours
            row: dict[str, Any] = {
                "what": "memory", "role": role, "lives": len(lives), "minutes": round(hours * 60, 1),
                "first_mb": round(life[0].megabytes), "last_mb": round(life[-1].megabytes),
            }  # fmt: skip
            if len(late) >= 2 * BLOCKS:
                fitted = slope([MemorySample(each.hours, each.megabytes) for each in late])
                row |= {"mb_per_hour": round(fitted.megabytes_per_hour, 1), "error": round(fitted.error, 1)}
                low = fitted.megabytes_per_hour - 2 * fitted.error
                if hours >= JUDGED_HOURS and low > LIMIT_MB_PER_HOUR:
                    wrong.append(f"{role}: memory grows by {fitted.megabytes_per_hour:.0f} MB an hour")
            for name in ("descriptors", "threads"):
                counts = [getattr(each, name) for each in late]
                quarter = max(len(counts) // 4, 1)
                first, last = statistics.median(counts[:quarter]), statistics.median(counts[-quarter:])
                row[name] = f"{first:.0f} to {last:.0f}"
                if last > first + LIMIT_COUNT:
                    wrong.append(f"{role}: {name} grew from {first:.0f} to {last:.0f}")
            rows.append(row)
        return rows, wrong
