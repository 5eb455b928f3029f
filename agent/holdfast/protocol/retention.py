"""Retention rules, and the checkpoints that they remove. Pure functions without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from holdfast.pacing.quantities import parse_bytes
from holdfast.protocol.messages import parse_checkpoint_id

PER_LINEAGE = "per lineage"
MOST_CHARACTERS = 100
_COUNTS = {"last": "checkpoints", "every": "iterations", "spaced": "checkpoints"}
_USAGE = "use last 5, every 1000, spaced 12, size 200GB, or several of these separated by commas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules that keep what any of `last`, `every` and `spaced` keeps, within `size_bytes`.

    Raises:
        ValueError: a rule that keeps nothing, or no rule.
    """

    last: int | None = None
    """Number of the newest checkpoints to keep."""
    every: int | None = None
    """Keep the first checkpoint in each interval of this many iterations."""
    spaced: int | None = None
    """Approximate number to keep, including those of the other rules: the newer half, and older ones at growing
    distances."""
    size_bytes: float | None = None
    """Most bytes of all checkpoints of the job. Those whose removal leaves the smallest gap for their age are
    removed first."""
    per_lineage: bool = False
    """Apply the first three rules to each lineage separately."""

    def __post_init__(self) -> None:
        for name, what in _COUNTS.items():
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"retention '{name} {count}': give a whole number of {what}, at least 1")
        if self.size_bytes is not None and not 0 < self.size_bytes < math.inf:
            raise ValueError(f"retention 'size {self.size_bytes:g}': the size must be more than 0 bytes")
        if (self.last, self.every, self.spaced, self.size_bytes) == (None,) * 4:
            raise ValueError(f"retention without a rule keeps nothing: {_USAGE}")

    def __str__(self) -> str:
        said = [f"{name} {count}" for name in _COUNTS if (count := getattr(self, name)) is not None]
        if self.size_bytes is not None:
            said.append(f"size {_spelled(self.size_bytes)}")
        return ", ".join([*said, *([PER_LINEAGE] if self.per_lineage else [])])

    @classmethod
    def keeping(cls, count: int) -> Self:
        """Return the rules of the setting `keep`."""
        return cls(spaced=count)


def parse_retention(text: str | Retention) -> Retention:
    """Parse rules such as `last 5, every 1000, spaced 12, size 200GB, per lineage`. ValueError names the error."""
    if isinstance(text, Retention):
        return text
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"retention {text[:40]!r}… is longer than {MOST_CHARACTERS} characters: {_USAGE}")
    found: dict[str, float | bool] = {}
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        name, value = _parsed(part, text)
        if name in found:
            raise ValueError(f"retention {text!r} contains {part.split()[0]!r} twice")
        found[name] = value
    if not found.keys() - {"per_lineage"}:
        raise ValueError(f"retention {text!r} has no rule: {_USAGE}")
    return Retention(**found)  # type: ignore[arg-type]


def _parsed(part: str, text: str) -> tuple[str, float | bool]:
    if " ".join(part.split()) == PER_LINEAGE:
        return "per_lineage", True
    name, _, said = part.partition(" ")
    if name == "size":
        return "size_bytes", parse_bytes(said.strip(), f"retention {text!r}: size")
    digits = said.strip().replace("_", "")
    if name not in _COUNTS or not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"retention {text!r}: {part!r} is not a rule: {_USAGE}")
    return name, int(digits)


def checkpoints_to_delete(
    checkpoints: Collection[str],
    rules: Retention,
    *,
    protected: Collection[str] = (),
    pinned: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the checkpoints to remove, in order, with a reason for each.

    Newest means trained last: after a restore, iteration 60 of the new lineage is newer than iteration 90 of the
    old.

    Args:
        checkpoints: the names of the committed checkpoints.
        rules: the retention rules.
        protected: checkpoints to keep in any case, which count toward the rules. The newest is one of them.
        pinned: checkpoints to keep in any case, which do not count toward the rules.
        sizes: sizes in bytes; missing ones count as 0.
    """
    order = sorted(checkpoints, key=_trained)
    kept = {*protected, *pinned, *order[-1:]}
    counted = [each for each in order if each not in pinned]
    groups = _by_lineage(counted) if rules.per_lineage else [counted]
    gone: dict[str, str] = {}
    if (rules.last, rules.every, rules.spaced) != (None, None, None):
        said = f"not kept by '{_without_size(rules)}'"
        gone = {each: said for group in groups for each in _beyond(group, rules, kept)}
    if rules.size_bytes is not None:
        left = [each for each in order if each not in gone]
        said = f"the total exceeds {_spelled(rules.size_bytes)}"
        gone |= dict.fromkeys(_too_large(left, rules.size_bytes, kept, sizes or {}), said)
    return gone


def _beyond(order: list[str], rules: Retention, kept: Collection[str]) -> list[str]:
    """Return the checkpoints that none of the counting rules keeps."""
    stays = set(kept)
    if rules.last is not None:
        stays |= set(order[-rules.last :])
    if rules.every is not None:
        stays |= _milestones(order, rules.every)
    if rules.spaced is None:
        return [each for each in order if each not in stays]
    count = rules.spaced
    newest = order[-max(1, (count + 1) // 2) :]
    return _thinned(order, {*stays, *newest}, lambda left: len(left) > count)


def _milestones(order: Iterable[str], every: int) -> set[str]:
    """Return the first checkpoint of each interval of iterations, on the newest lineage that has one."""
    first: dict[int, str] = {}
    for each in order:
        iteration, lineage = parse_checkpoint_id(each)
        known = first.get(iteration // every)
        if known is None or parse_checkpoint_id(known)[1] < lineage:
            first[iteration // every] = each
    return set(first.values())


def _too_large(order: list[str], most_bytes: float, kept: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    return _thinned(order, kept, lambda left: sum(sizes.get(each, 0) for each in left) > most_bytes)


def _thinned(order: list[str], stays: Collection[str], too_many: Callable[[Collection[str]], bool]) -> list[str]:
    """Choose checkpoints to remove one by one while there are `too_many`.

    The next is the one whose removal leaves the smallest gap for its age, which spaces the rest exponentially: all
    of the last minutes, and hours apart from yesterday.
    """
    left, gone = list(order), []
    while too_many(left):
        removable = [i for i, each in enumerate(left) if each not in stays]
        if not removable:
            break
        places = _places(left)
        gone.append(left.pop(min(removable, key=lambda i: _loss(places, i))))
    return gone


def _by_lineage(order: Iterable[str]) -> list[list[str]]:
    return [list(group) for _, group in itertools.groupby(order, key=lambda each: parse_checkpoint_id(each)[1])]


def _trained(checkpoint: str) -> tuple[int, int]:
    iteration, lineage = parse_checkpoint_id(checkpoint)
    return lineage, iteration


def _places(order: list[str]) -> list[int]:
    """Return the iterations trained up to each checkpoint, including abandoned ones."""
    iterations = [parse_checkpoint_id(checkpoint)[0] for checkpoint in order]
    steps = (max(1, abs(after - before)) for before, after in itertools.pairwise(iterations))
    return list(itertools.accumulate(steps, initial=iterations[0]))


def _loss(places: list[int], i: int) -> float:
    """Return the gap that removing a checkpoint leaves, relative to its age."""
    before = places[i - 1] if i else 0
    return (places[min(i + 1, len(places) - 1)] - before) / (places[-1] - places[i] + 1)


def _without_size(rules: Retention) -> str:
    return ", ".join(part for part in str(rules).split(", ") if not part.startswith("size "))


def _spelled(size_bytes: float) -> str:
    """Format a size in the largest exact unit."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor and float(f"{size_bytes / factor:.6g}") * factor == size_bytes:
            return f"{size_bytes / factor:g}{unit}"
    return f"{size_bytes:.0f}B"
