"""A job that goes on with another number of ranks, or split another way: the same samples, the same numbers."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest

from holdfast.checkpoint import restore
from holdfast.store import open_store
from tests.support.exact_multi_rank_job import EPOCHS, QUIET_BATCH, QUIET_SAMPLES

BATCHES = EPOCHS * QUIET_SAMPLES // QUIET_BATCH
CHAINS = {
    "fewer and more ranks": [("fsdp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)],
    "fewer and more replicas": [("ddp", 4), ("ddp", 2), ("ddp", 3), ("ddp", 4)],
    "all on one process": [("fsdp", 4), ("plain", 1)],
    "from replicas to shards and back": [("ddp", 3), ("fsdp", 2), ("ddp", 4)],
    "a split by columns and rows": [("tensor", 2), ("plain", 1), ("tensor", 4)],
    "both at once": [("tensor and fsdp", 4), ("plain", 1), ("tensor and fsdp", 4)],
    "replicas of shards": [("hsdp", 4), ("plain", 1), ("hsdp", 4)],
}
SHORT = ("fewer and more ranks", "from replicas to shards and back", "both at once")
"""With these and `hsdp` below, every way to split a model is met."""


@pytest.fixture(scope="module")
def fixed(ranks, tmp_path_factory):
    """(samples in order, losses) of a run on four ranks that nothing interrupts."""
    where = {"store": str(tmp_path_factory.mktemp("fixed")), "until": BATCHES}
    return together(ranks.run(4, "tests.support.exact_multi_rank_workloads.leg", kind="ddp", **where))


def together(leg: list[dict[str, Any]]) -> tuple[list[list[int]], list[float]]:
    """Of each iteration: the samples of all ranks in the order in which they are dealt out, and the mean loss."""
    parts = {each["part of the data"]: each for each in leg}  # some ranks may share one
    shares = [parts[number] for number in sorted(parts)]
    samples = [
        [index for turn in zip_longest(*iteration) for index in turn if index is not None]
        for iteration in zip(*(each["samples"] for each in shares), strict=True)
    ]
    losses = [sum(each) / len(each) for each in zip(*(each["losses"] for each in shares), strict=True)]
    return samples, losses


def go_through(ranks, store, chain, **options):
    """(samples, losses, padding) of a job that is started anew for each link of a chain."""
    samples: list[list[int]] = []
    losses: list[float] = []
    left = None
    for number, (kind, world_size) in enumerate(chain):
        until = BATCHES * (number + 1) // len(chain)
        start = {"store": str(store), "kind": kind, "until": until, "seed": number}
        leg = ranks.run(world_size, "tests.support.exact_multi_rank_workloads.leg", **start, **options)
        assert left is None or [each["begun"] for each in leg] == [left] * world_size
        left = leg[0]["ended"]
        assert [each["ended"] for each in leg] == [left] * world_size
        for mine, seen in zip((samples, losses), together(leg), strict=True):
            mine += seen
    return samples, losses, leg[0]["padded"]


@pytest.mark.parametrize(
    "chain", [pytest.param(chain, marks=[] if chain in SHORT else pytest.mark.long) for chain in CHAINS]
)
def test_each_start_goes_on_with_the_next_sample_from_the_numbers_that_were_left(chain, fixed, ranks, tmp_path):
    samples, losses, padded = go_through(ranks, tmp_path, CHAINS[chain])
    assert samples == fixed[0]
    for first in range(0, BATCHES, BATCHES // EPOCHS):
        epoch = [index for iteration in samples[first : first + BATCHES // EPOCHS] for index in iteration]
        assert sorted(epoch) == list(range(QUIET_SAMPLES))
    assert losses == pytest.approx(fixed[1], rel=1e-4)
    assert padded == 0


def test_compressed_checkpoints_with_parity_are_resharded_like_plain_ones(fixed, ranks, tmp_path):
    pytest.importorskip("numpy")
    chain = [("fsdp", 2), ("ddp", 3), ("fsdp", 2)]
    # a budget that a job this small keeps: compression pauses otherwise
    options = {"compress": True, "parity": "10+2", "budget": 1.0}
    samples, losses, _ = go_through(ranks, tmp_path, chain, **options)
    assert samples == fixed[0]
    assert losses == pytest.approx(fixed[1], rel=1e-4)
    store = open_store(str(tmp_path))
    found = [restore.manifest(store, "job", each) for each in store.checkpoints("job")]
    encoded = {manifest.world_size for manifest in found if any(file.encoding for file in manifest.files)}
    assert encoded == {2, 3}
    assert all(file.parity for manifest in found for file in manifest.files)


@pytest.mark.parametrize(
    "kind", ["hsdp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("tensor", "tensor and fsdp"))]
)
def test_a_job_that_is_split_as_before_goes_on_to_the_bit(kind, ranks, tmp_path):
    whole = go_through(ranks, tmp_path / "whole", [(kind, 4)])
    assert go_through(ranks, tmp_path / "parts", [(kind, 4)] * 2) == whole


@pytest.mark.parametrize("saved", [("tensor", 2), ("plain", 1)])
def test_more_ranks_that_share_each_sample_drop_the_same_of_it(saved, fixed, ranks, tmp_path):
    """Those of a tensor-parallel group: what each has of the whole model stays the same only then."""
    _, losses, _ = go_through(ranks, tmp_path, [saved, ("tensor", 4)], dropout=0.3)
    assert losses != pytest.approx(fixed[1], rel=1e-2)


@pytest.mark.parametrize(("tail", "twice"), [("pad", 1), pytest.param("short", 0, marks=pytest.mark.long)])
def test_samples_that_do_not_divide_come_once_but_for_the_padding_that_is_counted(tail, twice, ranks, tmp_path):
    count = QUIET_SAMPLES - 1  # no number of ranks here divides it
    chain = CHAINS["fewer and more replicas"]
    samples, _, padded = go_through(ranks, tmp_path, chain, samples=count, tail=tail)
    for first in range(0, BATCHES, BATCHES // EPOCHS):
        epoch = [index for iteration in samples[first : first + BATCHES // EPOCHS] for index in iteration]
        assert sorted(epoch[:count]) == list(range(count))
        assert epoch[count:] == epoch[:twice]
    assert padded == EPOCHS * twice
