import collections
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import BLOCK, Permutation, RankShare

untimed = settings(deadline=None)
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([97, 103, 1000, 4099]))
RANKS, BATCHES = st.integers(1, 7), st.integers(1, 9)
TAILS = st.sampled_from(["pad", "short", "drop"])


@untimed
@given(SIZES, st.integers(), st.integers(0, 100))
def test_every_index_comes_once(size, seed, epoch):
    assert sorted(Permutation(size, seed, epoch).at(range(size))) == list(range(size))


@untimed
@given(st.integers(1, 3000), st.data())
def test_any_place_is_found_by_itself(size, data):
    whole = list(Permutation(size, 7, 2).at(range(size)))
    places = range(data.draw(st.integers(0, size)), data.draw(st.integers(0, 2 * size)), data.draw(RANKS))
    assert list(Permutation(size, 7, 2).at(places)) == [whole[place % size] for place in places]


def test_blocks_join_without_a_seam():
    size = 3 * BLOCK + 5
    assert sorted(Permutation(size, 1).at(range(size))) == list(range(size))
    odd = list(Permutation(size, 1).at(range(1, size, 2)))
    assert odd == list(Permutation(size, 1).at(range(size)))[1::2]


def test_nothing_of_the_datasets_size_is_built():
    far = range(10**15, 10**15 + 3)
    found = list(Permutation(10**15 + 7, 1, 0).at(far))
    assert len({*found}) == 3
    assert all(0 <= index < 10**15 + 7 for index in found)


def test_the_order_never_changes_or_positions_in_checkpoints_would_mean_something_else():
    assert list(Permutation(10, 1, 0).at(range(10))) == [3, 9, 4, 1, 0, 6, 5, 8, 7, 2]
    assert list(Permutation(2_000_003, 1, 3).at(range(1_000_000, 1_000_004))) == [1182185, 281738, 550161, 887537]


def test_every_order_is_as_likely_as_any_other():
    for size, epochs, bound in ((3, 300, 21), (4, 1200, 50)):  # chi-square at one in a thousand
        found = collections.Counter(tuple(Permutation(size, 5, e).at(range(size))) for e in range(epochs))
        expected = epochs / math.factorial(size)
        assert len(found) == math.factorial(size)
        assert sum((count - expected) ** 2 / expected for count in found.values()) < bound


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(Permutation(50, seed, epoch).at(range(50))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def dealt(size, start, world_size, batch_size, tail):
    """What each rank is given, batch by batch."""
    shares = [
        RankShare(rank=r, world_size=world_size, batch_size=batch_size, tail=tail) for r in range(world_size)
    ]
    places = [list(share.places(start, size)) for share in shares]
    assert [math.ceil(len(p) / batch_size) for p in places] == [s.iterations(start, size) for s in shares]
    return shares, [[p[i : i + batch_size] for i in range(0, len(p), batch_size)] for p in places]


@untimed
@given(SIZES, st.data(), RANKS, BATCHES, TAILS)
def test_iteration_after_iteration_takes_the_next_places_of_the_order(size, data, world_size, batch_size, tail):
    start = data.draw(st.integers(0, size))
    shares, ranks = dealt(size, start, world_size, batch_size, tail)
    iterations = shares[0].iterations(start, size)
    seen = []
    for i in range(iterations):
        before, after = shares[0].after(start, i, size)[0], shares[0].after(start, i + 1, size)[0]
        taken = sorted(place for batches in ranks for place in (batches[i] if i < len(batches) else []))
        assert taken[: after - before] == list(range(before, after))
        seen += taken
    assert len({*seen}) == len(seen)
    given_out = [place for place in seen if place < size]
    left_out = size - start - len(given_out)
    assert given_out == list(range(start, start + len(given_out)))
    assert 0 <= left_out < (world_size * batch_size if tail == "drop" else 1)
    assert shares[0].after(start, iterations, size) == (size - left_out, len(seen) - len(given_out))


@untimed
@given(SIZES, st.data(), RANKS, BATCHES, TAILS)
def test_ranks_make_equally_many_iterations_unless_the_user_wants_no_sample_twice(
    size, data, world_size, batch_size, tail
):
    start = data.draw(st.integers(0, size))
    _, ranks = dealt(size, start, world_size, batch_size, tail)
    if tail == "short":
        counts = [sum(map(len, batches)) for batches in ranks]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)  # the first rank is never the one that ends early
        assert all(place < size for batches in ranks for batch in batches for place in batch)
    else:
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    padding = sum(place >= size for batches in ranks for batch in batches for place in batch)
    assert padding < world_size if tail == "pad" else padding == 0


@untimed
@given(SIZES, st.integers(), st.sampled_from(["pad", "short"]))
def test_ranks_may_become_more_or_fewer_at_any_iteration(size, seed, tail):
    change, place, seen = random.Random(seed), 0, []
    while place < size:
        world_size, batch_size = change.randint(1, 5), change.randint(1, 4)
        shares, ranks = dealt(size, place, world_size, batch_size, tail)
        iterations = change.randint(1, shares[0].iterations(place, size))
        seen += sorted(p for batches in ranks for batch in batches[:iterations] for p in batch if p < size)
        place, _ = shares[0].after(place, iterations, size)
    assert seen == list(range(size))
