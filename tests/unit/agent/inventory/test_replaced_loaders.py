"""A loader that a script puts in the place of another is named once if the resumed script does not do so."""

import pytest
import torch

import holdfast
from tests.support.killed_job import run

REPLACED = "had taken its place"
EASY = torch.arange(40.0).reshape(20, 2) / 40
HARD = EASY + 10


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


def chosen_by_the_iteration(job):
    """Uses the second loader first after a resume: it gets the position of the first one."""
    job.session.resume()
    easy, hard = loader_over(EASY), loader_over(HARD)
    while job.session.iteration < 20:
        loader = easy if job.session.iteration < 7 else hard
        for batch in job.session.batches(loader, epochs=None):
            train(job, batch)
            if job.session.iteration in (7, 20):
                break


@pytest.mark.parametrize("loop", [replaced_by_another_loader, replaced_loader_of_torch, chosen_by_the_iteration])
def test_a_loader_that_is_replaced_is_named_once(loop, tmp_path, caplog):
    run(loop, tmp_path, 5)
    run(loop, tmp_path, 9)
    assert REPLACED not in caplog.text
    run(loop, tmp_path)
    assert caplog.text.count(REPLACED) == 1


def one_loader_for_each_epoch(job):
    for epoch in range(2):
        for batch in job.session.batches(loader_over(HARD if epoch else EASY), epochs=1):
            train(job, batch)


def chosen_among_iterators(job):
    easy, hard = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(easy if job.session.iteration < 7 else hard))


def taking_turns(job):
    one, other = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(one if job.session.iteration % 4 < 2 else other))


def two_in_each_iteration(job):
    one, other = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(one) + next(other))


def rarely_the_other(job):
    one, other = (job.session.batches(loader_over(each), epochs=None) for each in (EASY, HARD))
    while job.session.iteration < 20:
        train(job, next(other if job.session.iteration % 8 == 7 else one))


@pytest.mark.parametrize("dies", [7, 8, 12])
@pytest.mark.parametrize(
    "loop",
    [one_loader_for_each_epoch, chosen_among_iterators, taking_turns, two_in_each_iteration, rarely_the_other],
)
def test_loaders_that_are_the_same_after_a_resume_are_exact_and_not_named(loop, dies, tmp_path, caplog):
    whole = run(loop, tmp_path / "whole")
    losses = run(loop, tmp_path / "killed", dies) | run(loop, tmp_path / "killed")
    assert losses == whole
    assert "WARNING" not in caplog.text
