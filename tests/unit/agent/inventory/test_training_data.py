"""Training data that a script replaces while it trains: exact after a resume, or named once."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import holdfast
from tests.support.killed_job import run

REPLACED = "A script that replaces its training data"
EASY = torch.arange(40.0).reshape(20, 2) / 40
HARD = EASY + 10


class Samples(Dataset):
    def __init__(self, data):
        self.data, self.reads, self.last, self.memory = data, 0, None, {}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.reads += 1
        self.last = self.data[index]
        self.memory[index] = self.last
        return self.last + 0 * len(self.memory)


def loader_over(data, make=holdfast.DataLoader):
    return make(data, batch_size=2, **({"shuffle": True, "seed": 1} if make is holdfast.DataLoader else {}))


def train(job, batch):
    loss = job.backward(batch / 100)
    job.update()
    job.end(loss)


def replaced_by_another_loader(job, make=holdfast.DataLoader):
    loader = loader_over(EASY, make)
    while job.session.iteration < 20:
        for batch in job.session.batches(loader, epochs=None):
            train(job, batch)
            if job.session.iteration == 7:
                loader = loader_over(HARD, make)
                break
            if job.session.iteration == 20:
                break


def replaced_loader_of_torch(job):
    replaced_by_another_loader(job, torch.utils.data.DataLoader)


def replaced_in_a_dataset(job):
    dataset = Samples(EASY)
    for batch in job.session.batches(loader_over(dataset), epochs=2):
        train(job, batch)
        if job.session.iteration == 7:
            dataset.data = HARD


def replaced_in_a_dataset_of_torch(job):
    dataset = TensorDataset(EASY)
    for (batch,) in job.session.batches(loader_over(dataset), epochs=2):
        train(job, batch)
        if job.session.iteration == 7:
            dataset.tensors = (HARD,)


def replaced_within_a_dataset(job):
    dataset = Subset(Samples(EASY), range(20))
    for batch in job.session.batches(loader_over(ConcatDataset([dataset])), epochs=2):
        train(job, batch)
        if job.session.iteration == 7:
            dataset.indices = [0] * 20


@pytest.mark.parametrize(
    "loop",
    [
        replaced_by_another_loader,
        replaced_loader_of_torch,
        replaced_in_a_dataset,
        replaced_in_a_dataset_of_torch,
        replaced_within_a_dataset,
    ],
)
def test_data_that_is_replaced_is_named_once(loop, tmp_path, caplog):
    run(loop, tmp_path, 5)
    run(loop, tmp_path, 9)
    assert REPLACED not in caplog.text
    run(loop, tmp_path)
    assert caplog.text.count(REPLACED) == 1


def chosen_by_the_iteration(job):
    job.session.resume()
    easy, hard = loader_over(EASY), loader_over(HARD)
    while job.session.iteration < 20:
        loader = easy if job.session.iteration < 7 else hard
        for batch in job.session.batches(loader, epochs=None):
            train(job, batch)
            if job.session.iteration in (7, 20):
                break


def one_loader_for_each_epoch(job):
    for epoch in range(2):
        for batch in job.session.batches(loader_over(HARD if epoch else EASY), epochs=1):
            train(job, batch)


def set_again_by_the_iteration(job):
    dataset = Samples(EASY)
    job.session.resume()
    if job.session.iteration >= 7:
        dataset.data = HARD
    for batch in job.session.batches(loader_over(dataset), epochs=2):
        train(job, batch)
        if job.session.iteration == 7:
            dataset.data = HARD


def taking_turns(job):
    one, other = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(one if job.session.iteration % 4 < 2 else other))


def two_in_each_iteration(job):
    one, other = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(one) + next(other))


def one_after_the_other(job):
    for data in (EASY, HARD):
        for batch in job.session.batches(loader_over(data), epochs=1):
            train(job, batch)


@pytest.mark.parametrize("dies", [8, 10, 12])
@pytest.mark.parametrize(
    "loop",
    [
        chosen_by_the_iteration,
        one_loader_for_each_epoch,
        set_again_by_the_iteration,
        taking_turns,
        two_in_each_iteration,
        one_after_the_other,
    ],
)
def test_data_that_is_the_same_after_a_resume_is_exact_and_not_named(loop, dies, tmp_path, caplog):
    whole = run(loop, tmp_path / "whole")
    losses = run(loop, tmp_path / "killed", dies) | run(loop, tmp_path / "killed")
    assert losses == whole
    assert "WARNING" not in caplog.text


def test_a_dataset_cannot_be_replaced_in_a_loader():
    loader = loader_over(EASY)
    with pytest.raises(ValueError, match="construct another loader"):
        loader.dataset = HARD
    assert loader.dataset is EASY
