import random
import time

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from holdfast import DataLoader
from holdfast.data.loading_probe import WARM_UP_BATCHES, probe
from holdfast.errors import NoProbe
from tests.support.clock import FakeClock
from tests.support.recording_datasets import IndexRecordingDataset, RandomNumberDataset, epoch, random_states
from tests.support.slow_dataset import SlowDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes")

MANY = {"batch_size": 4, "shuffle": True, "seed": 3}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
WORKERS = [{"num_workers": 0}, {"num_workers": 2}, PERSISTENT]
PATIENCE = 600.0
"""Limit for probes with real workers, which start late on a busy machine."""


def drawing_clock():
    """Draws where nothing else guards against it, as a dataset does that draws on a device."""
    random.random(), torch.rand(1)
    return time.perf_counter()


def plain(batch):
    return tuple(tuple(column.tolist()) for column in batch)


@pytest.mark.parametrize("workers", range(5))
@pytest.mark.parametrize(("fetch", "prep"), [(0.005, 0.05), (0.05, 0.005), (0.02, 0.02)])
def test_injected_waits_are_told_apart_to_the_last_digit(workers, fetch, prep):
    clock = FakeClock(100.0)
    data = SlowDataset(400, clock.wait, fetch=fetch / 4, prep=prep / 4)
    probed = probe(DataLoader(data, num_workers=workers, **MANY), batches=10, clock=clock)
    assert (probed.fetch_seconds, probed.prep_seconds) == pytest.approx((fetch, prep), abs=1e-9)
    assert (probed.batches, probed.workers) == (10, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_waits_in_real_time_are_told_apart(workers):
    loader = DataLoader(SlowDataset(100, time.sleep, fetch=0.03, prep=0.01), num_workers=workers)
    probed = probe(loader, batches=10, most_seconds=PATIENCE)
    assert probed.prep_seconds >= 0.01
    assert probed.load_seconds >= 0.04  # how they differ is asserted on a clock that no other load slows down


def test_a_half_full_cache_counts_with_the_half_that_it_saves():
    clock = FakeClock(100.0)
    data = SlowDataset(200, clock.wait, fetch=0.02, prep=0.01)
    data.reads[::2] = 1
    probed = probe(DataLoader(data), batches=20, clock=clock)
    assert (probed.fetch_seconds, probed.prep_seconds) == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_starting_takes_is_left_out(workers):
    clock = FakeClock(100.0)

    class Starting(SlowDataset):
        started = False

        def __getitem__(self, index):
            if not self.started:
                Starting.started = True
                self.wait(3.0)
            return super().__getitem__(index)

    probed = probe(DataLoader(Starting(100, clock.wait, prep=0.01), num_workers=workers), batches=10, clock=clock)
    assert (probed.fetch_seconds, probed.prep_seconds) == pytest.approx((0, 0.01))


def test_what_takes_longer_the_second_time_was_not_fetched():
    clock = FakeClock(100.0)

    class Slowing(SlowDataset):
        def __getitem__(self, index):
            self.wait(0.001 * self.reads.sum().item())
            return super().__getitem__(index)

    probed = probe(DataLoader(Slowing(100, clock.wait, prep=0.01)), batches=10, clock=clock)
    assert probed.fetch_seconds == 0
    assert probed.prep_seconds == pytest.approx(0.01 + 0.001 * (WARM_UP_BATCHES + 4.5))


@pytest.mark.parametrize("how", WORKERS, ids=str)
@pytest.mark.parametrize("drawn", [0, 1, 6])
def test_training_sees_every_sample_and_every_random_number_as_if_nobody_had_probed(how, drawn):
    calm = DataLoader(RandomNumberDataset(), **MANY)
    expected = epoch(calm) + epoch(calm)
    loader = DataLoader(RandomNumberDataset(), **MANY, **how)
    batches = iter(loader)
    seen = [plain(next(batches)) for _ in range(drawn)]
    before = loader.state_dict(), random_states(), loader.generator.get_state().tolist()
    assert probe(loader, batches=10, most_seconds=PATIENCE, clock=drawing_clock).batches == 10
    assert (loader.state_dict(), random_states(), loader.generator.get_state().tolist()) == before
    assert seen + [plain(batch) for batch in batches] + epoch(loader) == expected


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 4, "sampler": SequentialSampler(range(40))},
        {"sampler": RandomSampler(range(40)), "batch_size": 4},
        {"batch_sampler": BatchSampler(RandomSampler(range(40)), 4, drop_last=False)},
        {"batch_size": None, "shuffle": True},
        {"batch_size": 4, "drop_last": True, "rank": 1, "world_size": 3},
    ],
    ids=["sampler", "random", "batch_sampler", "samples", "ranks"],
)
def test_every_kind_of_order_goes_on_where_it_was(how):
    def drawn(loader, *, probed):
        found = []
        for number, batch in enumerate(loader, start=1):
            found.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            if number == 2 and probed:
                probe(loader, batches=3, most_seconds=PATIENCE)
        return found

    calm, disturbed = DataLoader(IndexRecordingDataset(40), **how), DataLoader(IndexRecordingDataset(40), **how)
    for _ in range(2):
        expected = drawn(calm, probed=False)
        assert drawn(disturbed, probed=True) == expected
        assert len(expected) > 2


@pytest.mark.parametrize("how", [{"num_workers": 2}, PERSISTENT], ids=str)
def test_it_reads_what_no_worker_was_told_to_read_yet(how):
    data = SlowDataset(100, lambda _: None)
    loader = DataLoader(data, batch_size=4, **how)
    batches = iter(loader)
    next(batches)
    told = (1 + 2 * 2) * 4  # two batches for each worker beside the one that was taken
    first = max(WARM_UP_BATCHES, 2 * 2) * 4
    probe(loader, batches=5, most_seconds=PATIENCE)
    assert data.reads[told:].tolist() == [2] * (first + 20) + [0] * (80 - first - 20)
    assert sum(1 for _ in batches) == 24
    assert data.reads.tolist() == [1] * told + [3] * (first + 20) + [1] * (80 - first - 20)


def test_a_probe_near_the_end_of_an_epoch_goes_on_into_the_next():
    ledger = IndexRecordingDataset(8)
    loader = DataLoader(ledger, batch_size=2, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    ledger.read.clear()
    assert probe(loader, batches=5, most_seconds=PATIENCE).batches == 5
    read = list(ledger.read)
    coming = [*next(batches).tolist()]
    assert list(batches) == []
    for batch in loader:
        coming += batch.tolist()
    assert read[: len(coming)] == coming


def test_a_restored_loader_is_probed_from_its_place():
    ledger = IndexRecordingDataset(100)
    loader = DataLoader(ledger, batch_size=2)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    ledger.read.clear()
    probe(loader, batches=5, most_seconds=PATIENCE)
    assert ledger.read[:4] == [8, 9, 10, 11]


def test_it_ends_when_its_time_is_up_with_what_it_has():
    clock = FakeClock(100.0)
    loader = DataLoader(SlowDataset(100, clock.wait, fetch=0.5, prep=0.5))
    probed = probe(loader, batches=50, most_seconds=10.0, clock=clock)
    assert (probed.fetch_seconds, probed.prep_seconds, probed.batches) == (0.5, 0.5, 3)
    assert clock.now == 100 + 5 * 1.0 + 5 * 0.5


def test_a_batch_too_slow_to_be_read_twice_is_told():
    clock = FakeClock(100.0)
    with pytest.raises(NoProbe, match=r"a batch takes about 12 s to load, too long to read batches twice in 10 s"):
        probe(DataLoader(SlowDataset(100, clock.wait, prep=12.0)), clock=clock)


def test_workers_are_not_waited_for_longer_than_that():
    loader = DataLoader(SlowDataset(100, time.sleep, prep=1.0), num_workers=1)
    with pytest.raises(NoProbe, match=r"no batch was loaded within 0\.05 s"):
        probe(loader, most_seconds=0.1)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_reading_raises_is_told_and_training_goes_on(workers):
    class UnreadableSampleDataset(IndexRecordingDataset):
        def __getitem__(self, index):
            if index > 20:
                raise LookupError("sample 21 is gone")
            return super().__getitem__(index)

    loader = DataLoader(UnreadableSampleDataset(40), batch_size=2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    before = random_states()
    with pytest.raises(NoProbe, match="reading the next batches raised LookupError: sample 21 is gone"):
        probe(loader)
    assert random_states() == before
    assert next(batches).tolist() == [2, 3]


class NumberStream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class LengthlessSampler(SequentialSampler):
    __len__ = None


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([1, 2, 3], r"list cannot be read ahead of training.*holdfast\.DataLoader"),
        (torch.utils.data.DataLoader(range(4)), r"DataLoader cannot be read ahead"),
        (DataLoader(NumberStream()), r"NumberStream is iterable.*only once"),
        (
            DataLoader(IndexRecordingDataset(8), sampler=LengthlessSampler(range(8))),
            r"only the sampler knows the next batches",
        ),
        (
            DataLoader(IndexRecordingDataset(8), sampler=SequentialSampler(range(8))),
            r"repeat the request at the beginning of an epoch",
        ),
    ],
    ids=["list", "torch", "iterable", "endless", "between epochs"],
)
def test_any_other_loader_is_told_why_not(loader, why):
    with pytest.raises(NoProbe, match=why):
        probe(loader)


def set_up(worker_id):
    torch.utils.data.get_worker_info().dataset.prep = 0.25


def test_a_worker_init_fn_reaches_the_dataset():
    clock = FakeClock(100.0)
    loader = DataLoader(SlowDataset(100, clock.wait), num_workers=1, worker_init_fn=set_up)
    assert probe(loader, batches=5, clock=clock).prep_seconds == pytest.approx(0.25)
