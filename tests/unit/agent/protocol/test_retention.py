from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.retention import (
    BestRule,
    LoggedMetric,
    Retention,
    checkpoints_to_delete,
    first_to_delete,
    parse_retention,
)


def ids(*iterations: int, lineage: int = 1) -> list[str]:
    return [checkpoint_id(iteration, lineage) for iteration in iterations]


def left(checkpoints: list[str], rules: str, **options: object) -> list[str]:
    gone = checkpoints_to_delete(checkpoints, parse_retention(rules), **options)  # type: ignore[arg-type]
    return [each for each in checkpoints if each not in gone]


def trained_under(rules: str, iterations: range, sizes: dict[str, int] | None = None) -> list[str]:
    """What is there in the end, where a session looks after each checkpoint."""
    there: list[str] = []
    for iteration in iterations:
        there = left([*there, *ids(iteration)], rules, sizes=sizes or {})
    return there


# What people write


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("last 5", Retention(last=5)),
        ("every 1_000", Retention(every=1000)),
        ("Spaced 12, last 3", Retention(spaced=12, last=3)),
        ("size 200GB", Retention(size_bytes=200e9)),
        ("best 3 by val_loss", Retention(best=(BestRule(count=3, metric="val_loss"),))),
        ("BEST 2 by MAX Acc/top-1", Retention(best=(BestRule(count=2, metric="Acc/top-1", largest=True),))),
        ("best 1 by max", Retention(best=(BestRule(count=1, metric="max"),))),
        ("best  1  by min loss,last 2", Retention(last=2, best=(BestRule(count=1, metric="loss"),))),
        ("size 1.5 TiB,per  lineage, last 2", Retention(size_bytes=1.5 * 1024**4, last=2, per_lineage=True)),
    ],
)
def test_rules_are_read_as_people_write_them(said: str, means: Retention) -> None:
    assert parse_retention(said) == means
    assert parse_retention(str(means)) == means


def test_rules_are_told_in_one_way() -> None:
    said = str(
        parse_retention("per lineage, size 0.2TB,best 1 by max a, spaced 12,best 2 by min a,every 1000,  last 5")
    )
    assert said == "last 5, every 1000, spaced 12, best 1 by max a, best 2 by a, size 200GB, per lineage"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "has no rule: use last 5, every 1000"),
        ("per lineage", "has no rule"),
        ("lst 5", "'lst 5' is not a rule: use last 5"),
        ("last", "'last' is not a rule"),
        ("last -1", "'last -1' is not a rule"),
        ("last 0", "'last 0': give a whole number of checkpoints, at least 1"),
        ("every 0", "a whole number of iterations, at least 1"),
        ("last 5, last 6", "contains 'last' twice"),
        ("best 3", "'best 3' is not a rule: use best 3 by val_loss, or best 3 by max accuracy"),
        ("best by loss", "'best by loss' is not a rule"),
        ("best 3 by avg loss", "'best 3 by avg loss' is not a rule"),
        ("best 0 by loss", "'best 0 by loss': give a whole number of checkpoints, at least 1"),
        ("best 1 by loss, best 2 by loss", "contains 'best' twice for the same metric"),
        (f"best 1 by {'x' * 65}", "at most 64 characters"),
        ("size much", "is not a size: write 6.5GB or 512MiB"),
        ("size 0GB", "must be greater than 0"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_way_out(said: str, why: str) -> None:
    with pytest.raises(ValueError, match="retention") as refused:
        parse_retention(said)
    assert why in str(refused.value)


# One rule


def test_the_last_stay() -> None:
    assert left(ids(10, 20, 30, 40), "last 2") == ids(30, 40)


def test_of_each_stretch_of_iterations_the_first_stays_for_good() -> None:
    kept = trained_under("every 100", range(30, 1000, 30))
    assert kept == ids(30, 120, 210, 300, 420, 510, 600, 720, 810, 900, 990)


def test_where_two_lineages_passed_the_milestone_of_the_newer_stays() -> None:
    checkpoints = [*ids(10, 110, 210), *ids(60, 120, lineage=2)]
    assert left(checkpoints, "every 100") == [*ids(210), *ids(60, 120, lineage=2)]
    assert left(checkpoints, "every 100, per lineage") == checkpoints


def test_spaced_ones_lie_ever_further_apart() -> None:
    kept = trained_under("spaced 8", range(10, 5000, 10))
    assert kept[-4:] == ids(4960, 4970, 4980, 4990)
    assert len(kept) == 8
    iterations = [int(each[:12]) for each in kept]
    gaps = [b - a for a, b in itertools.pairwise(iterations)]
    assert gaps[0] > 100
    assert gaps[0] == max(gaps)


def test_what_has_room_stays() -> None:
    sizes = dict.fromkeys(ids(*range(10, 2000, 10)), 4_000_000)
    kept = trained_under("size 20MB", range(10, 2000, 10), sizes)
    assert (len(kept), kept[-1]) == (5, ids(1990)[0])
    assert left(ids(10, 20, 30), "size 12MB", sizes=sizes) == ids(10, 20, 30)


# The best by a metric


def logged(**values: float) -> dict[str, LoggedMetric]:
    """Each value logged at its own iteration."""
    return {name: LoggedMetric(value=value, iteration=round(value * 1000)) for name, value in values.items()}


def measured(*places: tuple[str, float, int]) -> dict[str, dict[str, LoggedMetric]]:
    """(checkpoint, value, iteration that logged it)"""
    return {each: {"loss": LoggedMetric(value=value, iteration=at)} for each, value, at in places}


def test_the_smallest_values_are_the_best_unless_the_largest_are_asked_for() -> None:
    checkpoints = ids(10, 20, 30, 40, 50)
    metrics = dict(zip(checkpoints, (logged(loss=each) for each in (5.0, 1.0, 3.0, 2.0, 4.0)), strict=True))
    assert left(checkpoints, "best 2 by loss", metrics=metrics) == ids(20, 40, 50)
    assert left(checkpoints, "best 2 by max loss", metrics=metrics) == ids(10, 50)
    assert left(checkpoints, "best 1 by loss, best 1 by max loss", metrics=metrics) == ids(10, 20, 50)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("rule", ["best 2 by loss", "best 2 by max loss"])
def test_a_checkpoint_without_a_finite_value_is_none_of_the_best(odd: float | None, rule: str) -> None:
    checkpoints = ids(10, 20, 30)
    metrics = {checkpoints[0]: logged(loss=1.0)}
    metrics[checkpoints[1]] = {} if odd is None else {"loss": LoggedMetric(value=odd, iteration=20)}
    assert left(checkpoints, rule, metrics=metrics) == ids(10, 30)


def test_while_none_has_the_metric_the_newest_stay() -> None:
    checkpoints = [*ids(10, 20, 30, 40), *ids(25, 35, lineage=2)]
    other = {each: logged(accuracy=1.0) for each in checkpoints}
    assert left(checkpoints, "best 3 by loss", metrics=other) == [*ids(40), *ids(25, 35, lineage=2)]
    assert left(checkpoints, "last 2, best 3 by loss", metrics=other) == [*ids(40), *ids(25, 35, lineage=2)]
    # each lineage for itself, where the rules are applied so
    some = other | {each: logged(loss=1.0) for each in ids(10)}
    kept = left(checkpoints, "best 1 by loss, per lineage", metrics=some)
    assert kept == [*ids(10), *ids(35, lineage=2)]
    assert left(checkpoints, "best 3 by loss", metrics=some) == [*ids(10), *ids(35, lineage=2)]


def test_of_several_with_the_value_of_one_measurement_the_nearest_counts() -> None:
    one = [(each, 0.5, 100) for each in ids(100, 110, 120)]
    other = [(each, 0.7, 200) for each in ids(205, 210)]
    checkpoints = [*ids(100, 110, 120, 205, 210), *ids(300)]
    kept = left(checkpoints, "best 2 by loss", metrics=measured(*one, *other))
    assert kept == ids(100, 205, 300)


def test_where_the_nearest_is_gone_the_next_one_counts() -> None:
    metrics = measured(*((each, 0.5, 100) for each in ids(110, 120)))
    assert left(ids(110, 120, 300), "best 2 by loss", metrics=metrics) == ids(110, 300)


def test_of_equal_values_the_newer_are_better() -> None:
    metrics = measured(*((each, 0.5, int(each[:12])) for each in ids(10, 20, 30)))
    assert left(ids(10, 20, 30, 40), "best 1 by loss", metrics=metrics) == ids(30, 40)


def test_what_two_lineages_measured_alike_counts_once_on_the_newer() -> None:
    again = ids(10, lineage=2)
    metrics = measured((ids(10)[0], 0.5, 10), (again[0], 0.5, 10), (ids(20)[0], 0.9, 20))
    checkpoints = [*ids(10, 20), *again, *ids(40, lineage=2)]
    assert left(checkpoints, "best 1 by loss", metrics=metrics) == [*again, *ids(40, lineage=2)]
    assert left(checkpoints, "best 1 by loss, per lineage", metrics=metrics) == [
        *ids(10),
        *again,
        *ids(40, lineage=2),
    ]


def test_the_best_so_far_stay_while_training_goes_on() -> None:
    losses = {10 * k: abs(k - 30) / 100 + 0.001 * (k % 3) for k in range(1, 100)}
    metrics = measured(*((ids(at)[0], value, at) for at, value in losses.items()))
    there: list[str] = []
    for at in losses:
        there = left([*there, *ids(at)], "last 2, best 3 by loss", metrics=metrics)
    best = sorted(losses, key=lambda at: (losses[at], -at))[:3]
    assert there == ids(*sorted(best), 980, 990)


# Several rules, and what stays whatever they say


def test_what_any_rule_keeps_stays() -> None:
    assert left(ids(10, 20, 110, 120, 210, 220), "last 1, every 100") == ids(10, 110, 210, 220)


def test_the_size_is_a_ceiling_over_the_other_rules() -> None:
    sizes = dict.fromkeys(ids(10, 110, 210, 220), 10)
    assert left(ids(10, 110, 210, 220), "last 1, every 100, size 20B", sizes=sizes) == ids(210, 220)


def test_what_is_never_to_go_counts_among_those_kept_and_what_is_pinned_does_not() -> None:
    checkpoints = ids(1, 2, 3, 4, 5, 6)
    assert left(checkpoints, "spaced 2", protected=ids(1, 3)) == ids(1, 3, 6)
    assert left(checkpoints, "last 2", pinned=ids(1, 6)) == ids(1, 4, 5, 6)
    sizes = dict.fromkeys(checkpoints, 9)
    assert left(checkpoints, "size 1B", protected=ids(2), pinned=ids(1), sizes=sizes) == ids(1, 2, 6)


def test_what_is_known_as_damaged_takes_no_place_of_a_sound_one() -> None:
    damaged, sound = ids(10, 20, 30), ids(1, 2, 3, 4, lineage=2)
    assert left([*damaged, *sound], "last 3", damaged=damaged) == [*damaged, *sound[1:]]
    assert left([*damaged, *sound], "spaced 4", damaged=damaged) == [*damaged, *sound]
    assert left([*damaged, *sound], "last 2", damaged=damaged) == [*damaged[1:], *sound[2:]]
    assert left([*damaged, *sound], "last 3, per lineage", damaged=[*damaged, sound[3]]) == [*damaged, *sound]
    sizes = dict.fromkeys([*damaged, *sound], 10)
    assert left([*damaged, *sound], "size 40B", damaged=damaged, sizes=sizes)[-1:] == sound[-1:]


def test_after_a_restore_what_is_trained_now_is_newer_than_what_was_left() -> None:
    now = ids(50, 60, lineage=2)
    for rules in ("spaced 2", "last 2"):
        assert left([*ids(80, 90), *now], rules) == now


def test_each_lineage_keeps_its_own_where_that_is_wanted() -> None:
    checkpoints = [*ids(10, 20, 30), *ids(20, 40, 50, lineage=2)]
    assert left(checkpoints, "last 1, per lineage") == [*ids(30), *ids(50, lineage=2)]


def test_each_is_told_why_it_goes() -> None:
    gone = checkpoints_to_delete(
        ids(1, 2, 3), parse_retention("last 2, size 1B"), sizes=dict.fromkeys(ids(1, 2, 3), 1)
    )
    assert gone == {ids(1)[0]: "not kept by 'last 2'", ids(2)[0]: "the total exceeds 1B"}


# Whatever the rules and the checkpoints

counts = st.none() | st.integers(1, 8)
metric_names = st.sampled_from(["loss", "accuracy"])
best_rules = st.builds(BestRule, count=st.integers(1, 4), metric=metric_names, largest=st.booleans())
logged_metrics = st.builds(
    LoggedMetric,
    value=st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf, -math.inf]),
    iteration=st.integers(1, 8),
)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    """Checkpoints of a few lineages, some of which must stay, their sizes, and rules."""
    places = st.tuples(st.integers(1, 60), st.integers(1, 4))
    checkpoints = sorted({checkpoint_id(*place) for place in draw(st.lists(places, max_size=30))})
    some = st.sets(st.sampled_from(checkpoints)) if checkpoints else st.just(set())
    rules = {"last": draw(counts), "every": draw(counts), "spaced": draw(counts)}
    best = {(each.metric, each.largest): each for each in draw(st.lists(best_rules, max_size=2))}
    size = draw(st.none() | st.integers(1, 300))
    if size is None and not any(rules.values()) and not best:
        rules["last"] = 1
    return {
        "checkpoints": checkpoints,
        "rules": Retention(size_bytes=size, per_lineage=draw(st.booleans()), best=tuple(best.values()), **rules),
        "protected": draw(some),
        "pinned": draw(some),
        "damaged": draw(some),
        "sizes": {each: draw(st.integers(0, 40)) for each in draw(some)},
        "metrics": {each: draw(st.dictionaries(metric_names, logged_metrics)) for each in draw(some)},
    }


def newest(checkpoints: list[str]) -> list[str]:
    return sorted(checkpoints, key=lambda each: parse_checkpoint_id(each)[::-1])


@settings(max_examples=300)
@given(situations())
def test_the_newest_what_must_stay_and_what_is_pinned_never_go(situation: dict) -> None:
    gone = checkpoints_to_delete(**situation)
    assert set(gone) <= set(situation["checkpoints"])
    assert not set(gone) & {*situation["protected"], *situation["pinned"], *newest(situation["checkpoints"])[-1:]}


@given(situations())
def test_what_stays_would_stay_again(situation: dict) -> None:
    gone = checkpoints_to_delete(**situation)
    again = situation | {"checkpoints": [each for each in situation["checkpoints"] if each not in gone]}
    assert checkpoints_to_delete(**again) == {}


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_in_which_a_store_lists_changes_nothing(situation: dict, random: object) -> None:
    shuffled = list(situation["checkpoints"])
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert checkpoints_to_delete(**situation | {"checkpoints": shuffled}) == checkpoints_to_delete(**situation)


@given(situations())
def test_no_more_than_the_most_that_the_rules_keep_stay(situation: dict) -> None:
    most = situation["rules"].most_kept
    gone = checkpoints_to_delete(**situation | {"protected": (), "pinned": (), "damaged": ()})
    assert most is None or len(situation["checkpoints"]) - len(gone) <= most


@given(situations())
def test_every_rule_gets_what_it_asks_for_unless_there_is_no_room(situation: dict) -> None:
    rules: Retention = situation["rules"]
    gone, checkpoints = checkpoints_to_delete(**situation), situation["checkpoints"]
    counted = newest([each for each in checkpoints if each not in situation["pinned"]])
    if rules.size_bytes is None:
        for lineage in {parse_checkpoint_id(each)[1] for each in counted} if rules.per_lineage else {0}:
            own = [each for each in counted if lineage in (0, parse_checkpoint_id(each)[1])]
            assert not set(gone) & set(own[-(rules.last or 0) :] if rules.last else [])
            assert not set(gone) & set(own[-((rules.spaced + 1) // 2) :] if rules.spaced else [])
            for rule in rules.best:
                sign = -1 if rule.largest else 1
                found = {each: situation["metrics"].get(each, {}).get(rule.metric) for each in own}
                finite = {each: metric for each, metric in found.items() if metric and math.isfinite(metric.value)}
                measurements = sorted({(sign * each.value, each.iteration) for each in finite.values()})
                stays = {
                    (sign * finite[each].value, finite[each].iteration) for each in finite if each not in gone
                }
                worst = [value for value, _ in measurements[: rule.count]][-1:]
                assert len(stays) >= min(rule.count, len(measurements))
                assert all(each in stays for each in measurements if worst and each[0] < worst[0])
    elif gone:
        stays = [each for each in checkpoints if each not in gone]
        free = set(stays) - {*situation["protected"], *situation["pinned"], *newest(checkpoints)[-1:]}
        size = sum(situation["sizes"].get(each, 0) for each in stays)
        assert size <= rules.size_bytes or not free


# A store with too little room


def removed_in_turn(checkpoints: list[str], rules: str, **options: object) -> list[str]:
    """What goes, one after the other, until no more may."""
    there, gone = list(checkpoints), list[str]()
    while (first := first_to_delete(there, parse_retention(rules), **options)) is not None:  # type: ignore[arg-type]
        there.remove(first)
        gone.append(first)
    return gone


@pytest.mark.parametrize(
    ("rules", "in_turn"),
    [
        ("last 9", [1, 2, 3, 4, 5, 6, 7]),
        ("every 1, last 3", [3, 5, 2, 6, 7, 4, 1]),
        ("best 9 by loss", [2, 4, 6, 7, 5, 3, 1]),
        ("size 1TB", [1, 3, 5, 2, 6, 4, 7]),
        ("spaced 9", [1, 3, 5, 2, 6, 4, 7]),
        ("spaced 4, size 10B", [1, 3, 5, 2, 6, 4, 7]),
    ],
)
def test_a_full_store_loses_first_what_costs_least_by_its_rules(rules: str, in_turn: list[int]) -> None:
    checkpoints = ids(*range(1, 9))
    losses = dict(zip(checkpoints, (1, 9, 2, 8, 3, 7, 6, 5), strict=True))
    metrics = {each: {"loss": LoggedMetric(value=loss, iteration=loss)} for each, loss in losses.items()}
    gone = removed_in_turn(checkpoints, rules, metrics=metrics, sizes=dict.fromkeys(checkpoints, 1))
    assert gone == ids(*in_turn), "down to the newest"


def test_what_is_damaged_goes_first_and_what_must_stay_never_does() -> None:
    checkpoints = ids(1, 2, 3, 4, 5, 6)
    options = {"damaged": ids(4, 5), "protected": ids(1, 5), "pinned": ids(2)}
    assert removed_in_turn(checkpoints, "last 9", **options) == ids(4, 3)


@settings(deadline=None)
@given(situations())
def test_a_full_store_never_loses_the_newest_what_must_stay_or_what_is_pinned(situation: dict) -> None:
    gone = removed_in_turn(
        situation["checkpoints"], str(situation["rules"]),
        protected=situation["protected"], pinned=situation["pinned"],
    )  # fmt: skip
    order = sorted(situation["checkpoints"], key=lambda each: parse_checkpoint_id(each)[::-1])
    stays = {*situation["protected"], *situation["pinned"], *order[-1:]}
    assert set(order) - set(gone) == stays & set(order)


# By progress


def losses(checkpoints: list[str], noise: float = 0.0) -> dict[str, dict[str, LoggedMetric]]:
    """The metrics of a loss that falls to exp(-5) by iteration 10,000."""
    rng = random.Random(1)
    found = {}
    for each in checkpoints:
        iteration, _ = parse_checkpoint_id(each)
        loss = math.exp(-iteration / 2000) * (1 + rng.gauss(0, noise))
        found[each] = {"loss": LoggedMetric(value=loss, iteration=iteration)}
    return found


def progress_lost(checkpoints: list[str]) -> float:
    """What going back to the newest of them loses of the loss, from a moment as likely as any other."""
    at = [0, *(parse_checkpoint_id(each)[0] for each in checkpoints)]
    return sum(
        (b - a) * math.exp(-a / 2000) - 2000 * (math.exp(-a / 2000) - math.exp(-b / 2000))
        for a, b in itertools.pairwise(at)
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_by_progress_keeps_what_loses_least_of_the_loss(noise: float) -> None:
    there: list[str] = []
    known = losses(ids(*range(100, 10_001, 100)), noise)
    for each in known:
        there = left([*there, each], "12 by progress", metrics=known)
    assert len(there) == 12
    even = ids(*(round(n * 10_000 / 12) for n in range(1, 13)))
    assert progress_lost(there) < 0.85 * progress_lost(even)
    assert progress_lost(there) < 0.6 * progress_lost(left(list(known), "spaced 12"))


def test_by_progress_without_losses_all_iterations_count_the_same() -> None:
    kept = left(ids(*range(10, 171, 10)), "9 by progress")
    assert kept == ids(*range(10, 171, 20))


def test_by_progress_a_new_lineage_counts_from_its_own_start() -> None:
    """After a restore the loss is as high as then: its checkpoints are not those of a loss that stands still."""
    old, new = ids(*range(10, 101, 10)), ids(*range(30, 101, 10), lineage=2)
    known = losses([*old, *new])
    kept = left([*old, *new], "8 by progress", metrics={each: known[each] for each in [*old, *new]})
    assert len(kept) == 8
    assert sum(each in new for each in kept) >= 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_by_progress_a_loss_that_is_not_finite_counts_as_none(value: float) -> None:
    checkpoints = ids(*range(10, 101, 10))
    odd = {each: {"loss": LoggedMetric(value=value, iteration=1)} for each in checkpoints}
    assert left(checkpoints, "4 by progress", metrics=odd) == left(checkpoints, "4 by progress")


def test_by_progress_is_parsed_and_written() -> None:
    rules = parse_retention("last 2, 12 BY  progress")
    assert str(rules) == "last 2, 12 by progress"
    assert parse_retention(str(rules)) == rules
    assert rules.most_kept == 13
    with pytest.raises(ValueError, match="'progress 0': give a whole number of checkpoints, at least 1"):
        parse_retention("0 by progress")
    with pytest.raises(ValueError, match="contains '12' twice"):
        parse_retention("12 by progress, 12 by progress")
