"""Ledgers of the jobs of a soak, and what must hold for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """An iteration of one rank."""

    pid: int
    attempt: int
    lineage: int
    iteration: int
    loss: str
    note: float


class Ledger:
    """The lines that one rank has written so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.steps: list[Step] = []
        self.durable: list[str] = []
        """Ids of its checkpoints that became durable."""
        self.lost: list[str] = []
        """Restarts before a durable checkpoint of the same lineage."""
        self._ground: dict[int, int] = {}
        """Iteration of the newest durable checkpoint by lineage."""

    def read(self) -> list[Step]:
        """Read the new lines, and return all steps."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            self._offset += len(whole) + bool(whole)
            for line in whole.decode().splitlines():
                self._add(line.split())
        return self.steps

    def _add(self, words: list[str]) -> None:
        if words[0] == "durable":
            self.durable.append(words[1])
            iteration, lineage = map(int, words[1].split("-"))
            self._ground[lineage] = max(self._ground.get(lineage, 0), iteration)
            return
        pid, attempt, lineage, iteration = map(int, words[:4])
        step = Step(pid, attempt, lineage, iteration, words[4], float(words[5]))
        is_new_attempt = self.steps and self.steps[-1].attempt != attempt
        if is_new_attempt and iteration <= (ground := self._ground.get(lineage, 0)):
            self.lost.append(f"attempt {attempt} began at {iteration - 1}, before the durable {ground}-{lineage}")
        self.steps.append(step)


def differences(steps: list[Step], reference: Mapping[int, str]) -> Iterator[str]:
    """Yield the iterations with another loss than an undisturbed run, and jumps that no restore explains."""
    for step in steps:
        if step.loss != (expected := reference.get(step.iteration)):
            yield f"iteration {step.iteration} of attempt {step.attempt}: loss {step.loss}, not {expected}"
    for before, after in itertools.pairwise(steps):
        if after.attempt == before.attempt and after.lineage == before.lineage:
            if after.iteration != before.iteration + 1:
                yield f"iteration {after.iteration} after {before.iteration} in attempt {after.attempt}"
        elif after.attempt < before.attempt or after.lineage < before.lineage:
            yield f"attempt {after.attempt}, lineage {after.lineage} after {before.attempt}, {before.lineage}"
        elif after.lineage == before.lineage and after.iteration > before.iteration + 1:
            yield f"iterations {before.iteration + 1} to {after.iteration - 1} are missing"
