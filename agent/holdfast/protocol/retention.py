"""Which checkpoints may go: rules as people write them, and what follows from them. Pure, and without torch."""

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
_WAY_OUT = "write last 5, every 1000, spaced 12, size 200GB, or several of these with commas between"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays: whatever one of `last`, `every` and `spaced` keeps, as far as `size_bytes` has room for it.

    Raises:
        ValueError: a number that keeps nothing, or no rule at all.
    """

    last: int | None = None
    """The newest so many."""
    every: int | None = None
    """One in each so many iterations: the first that was taken there."""
    spaced: int | None = None
    """About so many, what the other two keep included: the newer half, and older ones ever further apart."""
    size_bytes: float | None = None
    """All of the job's together, those included that must stay. What leaves the smallest gap for its age goes
    first."""
    per_lineage: bool = False
    """The first three hold for each lineage by itself."""

    def __post_init__(self) -> None:
        for name, what in _COUNTS.items():
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"retention '{name} {count}': give a whole number of {what}, at least 1")
        if self.size_bytes is not None and not 0 < self.size_bytes < math.inf:
            raise ValueError(f"retention 'size {self.size_bytes:g}': a size is more than 0 bytes")
        if (self.last, self.every, self.spaced, self.size_bytes) == (None,) * 4:
            raise ValueError(f"retention without a rule keeps nothing: {_WAY_OUT}")

    def __str__(self) -> str:
        said = [f"{name} {count}" for name in _COUNTS if (count := getattr(self, name)) is not None]
        if self.size_bytes is not None:
            said.append(f"size {_spelled(self.size_bytes)}")
        return ", ".join([*said, *([PER_LINEAGE] if self.per_lineage else [])])

    @classmethod
    def keeping(cls, count: int) -> Self:
        """What `keep` says."""
        return cls(spaced=count)


def parse_retention(text: str | Retention) -> Retention:
    """`last 5, every 1000, spaced 12, size 200GB, per lineage`: any of them. ValueError names what is none."""
    if isinstance(text, Retention):
        return text
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"retention {text[:40]!r}… is longer than {MOST_CHARACTERS} characters: {_WAY_OUT}")
    found: dict[str, float | bool] = {}
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        name, value = _parsed(part, text)
        if name in found:
            raise ValueError(f"retention {text!r} says {part.split()[0]!r} twice")
        found[name] = value
    if not found.keys() - {"per_lineage"}:
        raise ValueError(f"retention {text!r} has no rule: {_WAY_OUT}")
    return Retention(**found)  # type: ignore[arg-type]


def _parsed(part: str, text: str) -> tuple[str, float | bool]:
    if " ".join(part.split()) == PER_LINEAGE:
        return "per_lineage", True
    name, _, said = part.partition(" ")
    if name == "size":
        return "size_bytes", parse_bytes(said.strip(), f"retention {text!r}: size")
    digits = said.strip().replace("_", "")
    if name not in _COUNTS or not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"retention {text!r}: {part!r} is no rule: {_WAY_OUT}")
    return name, int(digits)


def expendable(
    checkpoints: Collection[str],
    rules: Retention,
    *,
    never: Collection[str] = (),
    pinned: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The checkpoints that may go, in the order in which they should, and why each, for people.

    Newest means trained last: after a restore, iteration 60 of the lineage it began is newer than iteration 90 of
    the one that was left.

    Args:
        checkpoints: the committed ones, by name.
        rules: what stays.
        never: what stays whatever the rules say, and counts among what they keep. So does the newest.
        pinned: what stays beside that.
        sizes: bytes of each checkpoint; of one that is not there nothing is known, and it counts for none.
    """
    order = sorted(checkpoints, key=_trained)
    kept = {*never, *pinned, *order[-1:]}
    counted = [each for each in order if each not in pinned]
    groups = _by_lineage(counted) if rules.per_lineage else [counted]
    gone: dict[str, str] = {}
    if (rules.last, rules.every, rules.spaced) != (None, None, None):
        said = f"not among what '{_without_size(rules)}' keeps"
        gone = {each: said for group in groups for each in _beyond(group, rules, kept)}
    if rules.size_bytes is not None:
        left = [each for each in order if each not in gone]
        said = f"all together over {_spelled(rules.size_bytes)}"
        gone |= dict.fromkeys(_too_large(left, rules.size_bytes, kept, sizes or {}), said)
    return gone


def _beyond(order: list[str], rules: Retention, kept: Collection[str]) -> list[str]:
    """Those that none of the rules that count keeps."""
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
    """The first in each so many iterations; where several lineages passed there, of the newest."""
    first: dict[int, str] = {}
    for each in order:
        iteration, lineage = parse_checkpoint_id(each)
        known = first.get(iteration // every)
        if known is None or parse_checkpoint_id(known)[1] < lineage:
            first[iteration // every] = each
    return set(first.values())


def _too_large(order: list[str], most_bytes: float, kept: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    return _thinned(order, kept, lambda left: sum(sizes.get(each, 0) for each in left) > most_bytes)


def _thinned(order: list[str], stays: Collection[str], too_much: Callable[[Collection[str]], bool]) -> list[str]:
    """What to take out, one after the other, while it is `too_much`.

    The one goes first whose removal leaves the smallest gap for its age, which spaces what remains exponentially:
    yesterday's iterations are kept hours apart, the last minute's are kept all.
    """
    left, gone = list(order), []
    while too_much(left):
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
    """Iterations trained up to each checkpoint, abandoned ones included, as far as checkpoints tell."""
    iterations = [parse_checkpoint_id(checkpoint)[0] for checkpoint in order]
    steps = (max(1, abs(after - before)) for before, after in itertools.pairwise(iterations))
    return list(itertools.accumulate(steps, initial=iterations[0]))


def _loss(places: list[int], i: int) -> float:
    """The gap that removing one leaves, as a share of its age."""
    before = places[i - 1] if i else 0
    return (places[min(i + 1, len(places) - 1)] - before) / (places[-1] - places[i] + 1)


def _without_size(rules: Retention) -> str:
    return ", ".join(part for part in str(rules).split(", ") if not part.startswith("size "))


def _spelled(size_bytes: float) -> str:
    """In the largest unit that says it exactly."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor and float(f"{size_bytes / factor:.6g}") * factor == size_bytes:
            return f"{size_bytes / factor:g}{unit}"
    return f"{size_bytes:.0f}B"
