"""The options of a run, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .scale import TrainingScale


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    scale: TrainingScale
    folder: Path
    only: list[str]
    k: int
    every_iterations: int
    """Iterations with a checkpoint after each; 0 leaves that measurement out."""
    rounds: int
    starts: int
    """Contenders that start at the same time."""
    until: float
    """`time.monotonic()` by which the last round must end."""


@dataclass(slots=True)
class Results:
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Samples by contender and measure, in the order of the rounds."""
    limits: dict[str, list[float]] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Extra memory, and the number of snapshots that it holds."""
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    state_bytes: int = 0
