"""What is asked of a run, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .scale import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    scale: Scale
    folder: Path
    only: list[str]
    k: int
    every_iterations: int
    rounds: int
    until: float
    """No further round begins that would not be over by this `time.monotonic()`."""
    idle_pairs: int
    growth_checkpoints: int


@dataclass(slots=True)
class Results:
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By contender, by measure, in the order of the rounds."""
    limits: dict[str, list[float]] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Extra memory, and for how many snapshots in flight."""
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    idle: list[float] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)
    state_bytes: int = 0
