"""How long a job is to train, and the samples of an iteration, as its loader knows them."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.data.cursor import cursor_over
from holdfast.telemetry.run_length import RunLength


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([float(number)]) for number in range(100))


def loader_of(dataset=None, **options):
    return holdfast.DataLoader(dataset or Samples(), batch_size=10, **options)


def followed(loader, epochs, batches=1):
    length, cursor = RunLength(), cursor_over(loader)
    length.follow(loader, cursor.epoch, epochs, lambda: batches)
    return length, cursor


def draw(cursor, batches):
    source = cursor.batches()
    for _ in range(batches):
        next(source)


def test_the_total_is_that_of_all_epochs_wherever_training_is():
    length, cursor = followed(loader_of(), epochs=3)
    assert length.total_iterations(0) == 30
    draw(cursor, 7)
    assert length.total_iterations(7) == 30


def test_several_batches_of_an_iteration_count_as_one():
    length, _ = followed(loader_of(), epochs=3, batches=4)
    assert length.total_iterations(0) == 8  # the last one takes what is left
    assert length.samples_per_iteration() == 40


def test_the_samples_are_those_of_all_ranks():
    length, _ = followed(loader_of(rank=1, world_size=4), epochs=2)
    assert length.samples_per_iteration() == 40
    assert length.total_iterations(0) == 6


@pytest.mark.parametrize("epochs", [None, 1])
def test_a_call_without_an_end_or_for_one_epoch_says_nothing_about_the_length(epochs):
    length, _ = followed(loader_of(), epochs)
    assert length.total_iterations(0) is None
    assert length.samples_per_iteration() == 10


def test_a_script_that_asks_epoch_by_epoch_gets_no_wrong_length():
    length, loader = RunLength(), loader_of()
    cursor = cursor_over(loader)
    for epoch in range(3):
        length.follow(loader, cursor.epoch, epoch + 1, lambda: 1)
        for _ in cursor.batches():
            pass
        assert length.total_iterations(10 * epoch) is None


def test_nothing_is_known_of_another_loader_of_a_stream_or_before_the_first_iteration():
    plain = torch.utils.data.DataLoader(Samples(), batch_size=10)
    assert followed(plain, 3)[0].total_iterations(0) is None
    assert followed(plain, 3)[0].samples_per_iteration() is None
    assert followed(loader_of(Stream()), 3)[0].total_iterations(0) is None
    assert followed(loader_of(), 3, batches=0)[0].total_iterations(0) is None


def test_an_epoch_has_as_many_iterations_wherever_training_is():
    length, cursor = followed(loader_of(), epochs=None, batches=4)
    assert length.epoch_iterations() == 3
    draw(cursor, 7)
    assert length.epoch_iterations() == 3
    assert followed(loader_of(Stream()), epochs=3)[0].epoch_iterations() is None
