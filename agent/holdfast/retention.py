"""Retention rules, and the checkpoints that they remove. Pure functions without torch.

One module, since each rule consists of its text, its parser and its selection.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import msgspec

from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.units import parse_bytes

PER_LINEAGE = "per lineage"
MOST_CHARACTERS = 100
MOST_METRIC_CHARACTERS = 64
_COUNTS = {"last": "checkpoints", "every": "iterations", "spaced": "checkpoints"}
RULES = {
    "last 5": "the newest 5",
    "every 1000": "one per 1,000 iterations",
    "spaced 12": "about 12, at growing distances",
    "12 by progress": "12, dense where the loss fell fast",
    "best 3 by val_loss": "the 3 with the smallest values of a metric",
    "best 1 by max accuracy": "the one with the largest value",
    "size 200GB": "at most so many bytes of what the other rules keep",
}
"""An example of each rule, and what it keeps, for messages, the command line and the dashboard."""
_USAGE = f"use {', '.join(RULES)}, or several of these separated by commas"
PROGRESS = "loss"
"""The metric from which progress is read."""
_BY_PROGRESS = re.compile(r"(\d[\d_]*)\s+by\s+progress", re.IGNORECASE | re.ASCII)
_BEST = re.compile(r"best\s+(\d[\d_]*)\s+by\s+(?:(max|min)\s+)?(\S+)", re.IGNORECASE | re.ASCII)


class LoggedMetric(msgspec.Struct, kw_only=True, frozen=True):
    """A value that the training loop logged."""

    value: float
    iteration: int
    """The iteration that ended with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRule:
    """A rule that keeps the checkpoints with the best values of a metric.

    Raises:
        ValueError: it keeps nothing, or the name cannot be written in a rule.
    """

    count: int
    metric: str
    """Name of the metric, as the script logs it."""
    largest: bool = False
    """Whether the largest values are the best; by default the smallest are."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"retention '{self}': give a whole number of checkpoints, at least 1")
        if not re.fullmatch(r"[^\s,]+", self.metric) or len(self.metric) > MOST_METRIC_CHARACTERS:
            raise ValueError(
                f"retention '{self}': the name of a metric has no spaces or commas, and at most "
                f"{MOST_METRIC_CHARACTERS} characters"
            )

    def __str__(self) -> str:
        return f"best {self.count} by {'max ' if self.largest else ''}{self.metric}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules that keep what any of `last`, `every`, `spaced`, `progress` and `best` keeps, within `size_bytes`.

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
    progress: int | None = None
    """Number to keep, so that going back to them loses the least of what the loss has fallen."""
    best: tuple[BestRule, ...] = ()
    """Rules that keep the checkpoints with the best values of metrics, one rule per metric and direction."""
    size_bytes: float | None = None
    """Most bytes of all checkpoints of the job. Those whose removal leaves the smallest gap for their age are
    removed first."""
    per_lineage: bool = False
    """Apply all rules but the size to each lineage separately."""

    def __post_init__(self) -> None:
        for name, what in (_COUNTS | {"progress": "checkpoints"}).items():
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"retention '{name} {count}': give a whole number of {what}, at least 1")
        if self.size_bytes is not None and not 0 < self.size_bytes < math.inf:
            raise ValueError(f"retention 'size {self.size_bytes:g}': the size must be more than 0 bytes")
        if not self.counts and self.size_bytes is None:
            raise ValueError(f"retention without a rule keeps nothing: {_USAGE}")

    def __str__(self) -> str:
        said = [f"{name} {count}" for name in _COUNTS if (count := getattr(self, name)) is not None]
        said += [] if self.progress is None else [f"{self.progress} by progress"]
        said += map(str, self.best)
        if self.size_bytes is not None:
            said.append(f"size {_spelled(self.size_bytes)}")
        return ", ".join([*said, *([PER_LINEAGE] if self.per_lineage else [])])

    @property
    def counts(self) -> bool:
        """Whether there is a rule other than `size`."""
        return bool(self.best) or any((self.last, self.every, self.spaced, self.progress))

    @property
    def most_kept(self) -> int | None:
        """Most checkpoints that the rules keep, not counting protected ones; `None` if they set no limit."""
        if not self.counts or self.every is not None or self.per_lineage:
            return None
        spaced = self.spaced or 0
        newest = max(1, self.last or 0, (spaced + 1) // 2)
        return max(spaced, newest + (self.progress or 1) - 1 + sum(rule.count for rule in self.best))

    @classmethod
    def keeping(cls, count: int) -> Self:
        """Return the rules of the setting `keep`."""
        return cls(spaced=count)


def parse_retention(text: str | Retention) -> Retention:
    """Parse rules such as `last 5, every 1000, spaced 12, best 3 by val_loss, size 200GB, per lineage`.

    `12 by progress` is like `spaced 12`, but dense where the loss fell fast. A metric of which the largest value
    is the best: `best 3 by max accuracy`.

    Raises:
        ValueError: names the rule that is invalid.
    """
    if isinstance(text, Retention):
        return text
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"retention {text[:40]!r}… is longer than {MOST_CHARACTERS} characters: {_USAGE}")
    found: dict[str, float | bool] = {}
    best: list[BestRule] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        if part.split()[0].lower() == "best":
            best.append(_parsed_best(part, text))
            continue
        by_progress = _BY_PROGRESS.fullmatch(part)
        name, value = ("progress", int(by_progress[1])) if by_progress else _parsed(part.lower(), text)
        if name in found:
            raise ValueError(f"retention {text!r} contains {part.split()[0]!r} twice")
        found[name] = value
    if not best and not found.keys() - {"per_lineage"}:
        raise ValueError(f"retention {text!r} has no rule: {_USAGE}")
    if len({(each.metric, each.largest) for each in best}) < len(best):
        raise ValueError(f"retention {text!r} contains 'best' twice for the same metric")
    return Retention(best=tuple(best), **found)  # type: ignore[arg-type]


def _parsed_best(part: str, text: str) -> BestRule:
    match = _BEST.fullmatch(part)
    if match is None:
        raise ValueError(
            f"retention {text!r}: {part!r} is not a rule: use best 3 by val_loss, or best 3 by max accuracy"
        )
    count, direction, metric = match.groups()
    return BestRule(count=int(count), metric=metric, largest=(direction or "").lower() == "max")


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
    damaged: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
    metrics: Mapping[str, Mapping[str, LoggedMetric]] | None = None,
) -> dict[str, str]:
    """Return the checkpoints to remove, in order, with a reason for each.

    Newest means trained last: after a restore, iteration 60 of the new lineage is newer than iteration 90 of the
    old.

    Args:
        checkpoints: the names of the committed checkpoints.
        protected: checkpoints to keep in any case, which count toward the rules. The newest is one of them.
        pinned: checkpoints to keep in any case, which do not count toward the rules.
        damaged: checkpoints known as damaged. They do not count toward what the rules keep of the sound ones: all
            rules but the size apply to them separately.
        sizes: sizes in bytes; missing ones count as 0.
        metrics: newest metrics at each checkpoint, by name; one without the metric of a rule is none of the best,
            except while no checkpoint has it: then the newest are kept.
    """
    order, pinned, damaged = sorted(checkpoints, key=_trained), set(pinned), set(damaged)
    kept = {*protected, *pinned, *order[-1:]}
    counted = [each for each in order if each not in pinned]
    groups = [[each for each in counted if (each in damaged) is is_damaged] for is_damaged in (False, True)]
    if rules.per_lineage:
        groups = [lineage for group in groups for lineage in _by_lineage(group)]
    gone: dict[str, str] = {}
    if rules.counts:
        said = f"not kept by '{_without_size(rules)}'"
        gone = {each: said for group in groups for each in _beyond(group, rules, kept, metrics or {})}
    if rules.size_bytes is not None:
        left = [each for each in order if each not in gone]
        said = f"the total exceeds {_spelled(rules.size_bytes)}"
        gone |= dict.fromkeys(_too_large(left, rules.size_bytes, kept, sizes or {}), said)
    return gone


def first_to_delete(
    checkpoints: Collection[str],
    rules: Retention,
    *,
    protected: Collection[str] = (),
    pinned: Collection[str] = (),
    damaged: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
    metrics: Mapping[str, Mapping[str, LoggedMetric]] | None = None,
) -> str | None:
    """Return the checkpoint to remove if the store has no room for all that the rules keep; None if none may go.

    It is a damaged one, or else the first that goes when all rules are lowered step by step. The arguments are
    those of `checkpoints_to_delete`.
    """
    order = sorted(checkpoints, key=_trained)
    keep = {*protected, *pinned}
    useless = [each for each in order if each in damaged and each not in keep]
    if useless:
        return useless[0]
    for lowered in _lowered(rules, len(checkpoints)):
        gone = checkpoints_to_delete(
            checkpoints, lowered, protected=protected, pinned=pinned, sizes=sizes, metrics=metrics
        )
        if gone:
            return next(iter(gone))
    return next((each for each in order[:-1] if each not in keep), None)


def _lowered(rules: Retention, count: int) -> Iterator[Retention]:
    """Yield the rules, then stricter and stricter ones for `count` checkpoints, down to the newest alone."""
    yield rules
    if not rules.counts:
        yield from (Retention(spaced=most) for most in range(count - 1, 0, -1))
        return
    for step in range(1, count + 1):
        yield Retention(
            last=max(1, min(rules.last or 1, count) - step),
            spaced=None if rules.spaced is None else max(1, min(rules.spaced, count) - step),
            progress=None if rules.progress is None else max(1, min(rules.progress, count) - step),
            every=None if rules.every is None else rules.every << step,
            best=tuple(
                dataclasses.replace(rule, count=left)
                for rule in rules.best
                if (left := min(rule.count, count) - step) > 0
            ),
            per_lineage=rules.per_lineage and step < count,
        )
    yield Retention(last=1)


def _beyond(
    order: list[str],
    rules: Retention,
    kept: Collection[str],
    metrics: Mapping[str, Mapping[str, LoggedMetric]],
) -> list[str]:
    """Return the checkpoints that none of the counting rules keeps."""
    stays = set(kept)
    if rules.last is not None:
        stays |= set(order[-rules.last :])
    if rules.every is not None:
        stays |= _milestones(order, rules.every)
    for rule in rules.best:
        stays |= _best(order, rule, metrics)
    if rules.progress is not None:
        stays |= _by_progress(order, rules.progress, metrics)
    if rules.spaced is None:
        return [each for each in order if each not in stays]
    count = rules.spaced
    newest = order[-max(1, (count + 1) // 2) :]
    return _thinned(order, {*stays, *newest}, count, lambda each: 1, _Spacing(order))


def _by_progress(order: list[str], count: int, metrics: Mapping[str, Mapping[str, LoggedMetric]]) -> set[str]:
    """Return the newest checkpoint and those before it from which least progress is missing, on average.

    A checkpoint without a loss counts as one that has learned nothing since the one before it. Where none has one,
    all iterations count the same.
    """
    losses = [metrics.get(each, {}).get(PROGRESS) for each in order]
    values = [logged.value if logged and math.isfinite(logged.value) else None for logged in losses]
    gone = _thinned(order, order[-1:], count, lambda each: 1, _ProgressSpacing(order, values))
    return set(order).difference(gone)


def _milestones(order: Iterable[str], every: int) -> set[str]:
    """Return the first checkpoint of each interval of iterations, on the newest lineage that has one."""
    first: dict[int, str] = {}
    for each in order:
        iteration, lineage = parse_checkpoint_id(each)
        known = first.get(iteration // every)
        if known is None or parse_checkpoint_id(known)[1] < lineage:
            first[iteration // every] = each
    return set(first.values())


def _best(order: list[str], rule: BestRule, metrics: Mapping[str, Mapping[str, LoggedMetric]]) -> set[str]:
    """Return the checkpoints with the best values, one for each time that the metric was logged.

    A metric that is logged rarely has the same value at several checkpoints. The first of them counts, since its
    state is nearest to the one that was measured; on the newest lineage, where several passed it. Of equal values
    the newer are better. While none has a value, the newest are kept in their place.
    """
    nearest: dict[LoggedMetric, str] = {}
    for each in order:
        logged = metrics.get(each, {}).get(rule.metric)
        if logged is None or not math.isfinite(logged.value):
            continue
        known = nearest.get(logged)
        if known is None or parse_checkpoint_id(each)[0] <= parse_checkpoint_id(known)[0]:
            nearest[logged] = each
    if not nearest:
        return set(order[-rule.count :])
    sign = -1 if rule.largest else 1
    newest_first = sorted(nearest.items(), key=lambda found: _trained(found[1]), reverse=True)
    ranked = sorted(newest_first, key=lambda found: sign * found[0].value)
    return {each for _, each in ranked[: rule.count]}


def _too_large(order: list[str], most_bytes: float, kept: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    return _thinned(order, kept, most_bytes, lambda each: sizes.get(each, 0), _Spacing(order))


def _thinned(
    order: list[str], stays: Collection[str], most: float, weigh: Callable[[str], int], spacing: _Spacing
) -> list[str]:
    """Choose checkpoints to remove one by one while the rest weighs more than `most`.

    The next is the one whose removal costs least. By `_Spacing` it leaves the smallest gap for its age, which
    spaces the rest exponentially: all of the last minutes, and hours apart from yesterday.
    """
    gone = list[str]()
    losses = [(spacing.loss(i), i) for i, each in enumerate(order) if each not in stays]
    heapq.heapify(losses)
    removable = {i for _, i in losses}
    weight = sum(map(weigh, order))
    while weight > most and removable:
        loss, i = heapq.heappop(losses)
        if i not in removable:
            continue
        if (now := spacing.loss(i)) != loss:  # a removal only makes the loss of others grow
            heapq.heappush(losses, (now, i))
            continue
        gone.append(order[i])
        removable.remove(i)
        weight -= weigh(order[i])
        for beside in spacing.remove(i):
            if beside in removable:
                heapq.heappush(losses, (spacing.loss(beside), beside))
    return gone


class _Spacing:
    """How far checkpoints are apart, in the iterations trained between them, including abandoned ones."""

    def __init__(self, order: list[str]) -> None:
        self._iterations = [parse_checkpoint_id(each)[0] for each in order]
        self._before = list(range(-1, len(order) - 1))
        self._after = list(range(1, len(order) + 1))
        self._sums = [0] * (len(order) + 1)
        """A Fenwick tree of the distances of each from the one before it."""
        for i in range(len(order)):
            self._add(i, self._distance(i))

    def loss(self, i: int) -> float:
        """Return the gap that removing a checkpoint leaves, relative to its age."""
        after = self._after[i]
        gap = self._distance(i) + (self._distance(after) if after < len(self._after) else 0)
        return gap / (self._sum(len(self._after)) - self._sum(i + 1) + 1)

    def remove(self, i: int) -> tuple[int, int]:
        """Remove one, and return those before and after it, which may be -1 and the number of all."""
        before, after = self._before[i], self._after[i]
        self._add(i, -self._distance(i))
        if before >= 0:
            self._after[before] = after
        if after < len(self._before):
            was = self._distance(after)
            self._before[after] = before
            self._add(after, self._distance(after) - was)
        return before, after

    def _distance(self, i: int) -> int:
        if self._before[i] < 0:
            return self._iterations[i]
        return max(1, abs(self._iterations[i] - self._iterations[self._before[i]]))

    def _add(self, i: int, change: int) -> None:
        at = i + 1
        while at < len(self._sums):
            self._sums[at] += change
            at += at & -at

    def _sum(self, count: int) -> int:
        total = 0
        while count:
            total += self._sums[count]
            count -= count & -count
        return total


class _ProgressSpacing(_Spacing):
    """How much progress is missing at a checkpoint when a job goes back to it from a later iteration."""

    def __init__(self, order: list[str], losses: list[float | None]) -> None:
        super().__init__(order)
        if any(loss is not None for loss in losses):
            lineages = [parse_checkpoint_id(each)[1] for each in order]
            self._losses = _never_rising(lineages, losses)
        else:
            self._losses = [-float(iteration) for iteration in self._iterations]

    def loss(self, i: int) -> float:
        """Return (∫√r)² over the gap that removing a checkpoint leaves, where the loss falls evenly in it.

        Equal gaps by this measure lose the least in all. What is trained after the newest is not known yet, so
        that what a removal adds today would leave the newest iterations without checkpoints.
        """
        before, after = self._before[i], self._after[i]
        if before < 0 or after == len(self._after):
            return math.inf
        fallen = max(0.0, self._losses[before] - self._losses[after])
        return fallen * (self._distance(i) + self._distance(after))


def _never_rising(lineages: list[int], losses: list[float | None]) -> list[float]:
    """Return the losses without noise: on each lineage, the nearest falling sequence (isotonic regression)."""
    found: list[float] = []
    for _, group in itertools.groupby(zip(lineages, losses, strict=True), key=lambda pair: pair[0]):
        levels: list[tuple[float, int, int]] = []
        """(mean, losses in it, checkpoints)"""
        for _, loss in group:
            levels.append((0.0, 0, 1) if loss is None else (loss, 1, 1))
            while len(levels) > 1 and (not levels[-1][1] or not levels[-2][1] or levels[-1][0] > levels[-2][0]):
                (b, m, y), (a, n, x) = levels.pop(), levels.pop()
                levels.append(((a * n + b * m) / max(1, n + m), n + m, x + y))
        found += [mean for mean, _, checkpoints in levels for _ in range(checkpoints)]
    return found


def _by_lineage(order: Iterable[str]) -> list[list[str]]:
    return [list(group) for _, group in itertools.groupby(order, key=lambda each: parse_checkpoint_id(each)[1])]


def _trained(checkpoint: str) -> tuple[int, int]:
    iteration, lineage = parse_checkpoint_id(checkpoint)
    return lineage, iteration


def _without_size(rules: Retention) -> str:
    return ", ".join(part for part in str(rules).split(", ") if not part.startswith("size "))


def _spelled(size_bytes: float) -> str:
    """Format a size in the largest exact unit."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor and float(f"{size_bytes / factor:.6g}") * factor == size_bytes:
            return f"{size_bytes / factor:g}{unit}"
    return f"{size_bytes:.0f}B"
