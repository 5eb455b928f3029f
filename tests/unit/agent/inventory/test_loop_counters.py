"""Counters of a loop that begin again after a resume, and random numbers drawn before it."""

import gc
import itertools
import json
import random
from datetime import datetime

import pytest
import torch

import holdfast

COUNTER = "counter `"
DRAWN = "draws random numbers between the resume and its first iteration"


class Killed(Exception):
    """The process is gone."""


class Job:
    """A linear model; `end` is the end of an iteration, and the end of the process after iteration `dies`."""

    def __init__(self, store, dies=None):
        torch.manual_seed(0)
        random.seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = holdfast.DataLoader(torch.rand(40, 2), batch_size=2, shuffle=True, seed=1)
        self.session = holdfast.Session(
            "job", store=store, every=1, keep=1000, model=self.model, optimizer=self.optimizer,
            loop=holdfast.Variables(step=0),
        )  # fmt: skip
        self.dies, self.losses, self.steps = dies, {}, 0

    def backward(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self, loss):
        self.session.step(loss=loss)
        self.session.wait(300)
        self.losses[self.session.iteration] = loss.item()
        if self.session.iteration == self.dies:
            raise Killed


def run(loop, store, dies=None):
    job = Job(store, dies)
    try:
        loop(job)
    except Killed:
        job.session._close("SIGKILL")
    else:
        job.session.close()
    return job.losses


def is_exact(loop, path, dies):
    """Whether a job that is killed after an iteration has the losses of one that is not."""
    whole = run(loop, path / "whole")
    return {**run(loop, path / "killed", dies), **run(loop, path / "killed")} == whole


def accumulating(job):
    for i, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        loss = job.backward(batch)
        if (i + 1) % 3 == 0:
            job.update()
        job.end(loss)


def warming_up(job):
    step = 0
    for batch in job.session.batches(job.loader, epochs=1):
        for group in job.optimizer.param_groups:
            group["lr"] = 0.01 * min(10, step + 1)
        loss = job.backward(batch)
        job.update()
        step += 1  # noqa: SIM113
        job.end(loss)


def in_an_attribute(job):
    for batch in job.session.batches(job.loader, epochs=1):
        loss = job.backward(batch)
        job.steps += 1
        if job.steps % 3 != 0:
            job.update()
        job.end(loss)


def last_of_the_epoch(job):
    for epoch in range(2):
        for i, batch in enumerate(job.session.batches(job.loader, epochs=epoch + 1)):
            loss = job.backward(batch)
            if i % 3 == 2 or i == len(job.loader) - 1:
                job.update()
                job.end(loss)


def a_number_of_iterations(job):
    batches = job.session.batches(job.loader, epochs=None)
    for _step in range(10):
        loss = job.backward(next(batches))
        job.update()
        job.end(loss)


def stopped_by_it(job):
    step = 0
    for batch in job.session.batches(job.loader, epochs=None):
        loss = job.backward(batch)
        job.update()
        step = step + 1
        job.end(loss)
        if step >= 10:
            break


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (accumulating, "`if (i + 1) % 3 == 0:`"),
        (warming_up, '`group["lr"] = 0.01 * min(10, step + 1)`'),
        (in_an_attribute, "`if job.steps % 3 != 0:`"),
        (last_of_the_epoch, "`if i % 3 == 2 or i == len(job.loader) - 1:`"),
        (a_number_of_iterations, "`for _step in range(10):`"),
        (stopped_by_it, "`if step >= 10:`"),
    ],
)
def test_a_counter_that_begins_again_is_named_once_with_what_depends_on_it(loop, line, tmp_path, caplog):
    run(loop, tmp_path / "killed", 4)
    assert COUNTER not in caplog.text
    run(loop, tmp_path / "killed")
    assert caplog.text.count(COUNTER) == 1
    assert line in caplog.text
    assert not is_exact(loop, tmp_path / "again", 4)


def logging_by_it(job):
    running = 0.0
    for i, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        loss = job.backward(batch)
        job.update()
        running += loss.item()
        if i % 3 == 2:
            print(f"{i}: {running / 3}")
            running = 0.0
        job.end(loss)


def named_in_a_comprehension(job):
    labels = [i % 3 for i in range(7)]
    for i, batch in enumerate(job.session.batches(job.loader, epochs=len(labels) // 7)):
        loss = job.backward(batch)
        job.update()
        if i % 3 == 2:
            print(i)
        job.end(loss)


def of_batches_of_different_sizes(job):
    loop = job.session._training.registry.objects["loop"]
    for batch in job.session.batches(job.loader, epochs=1):
        loss = job.backward(batch)
        loop.step += 10 * (job.session.iteration + 1)
        if loop.step % 3:
            job.update()
        job.end(loss)


def tidying(job):
    for i, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        loss = job.backward(batch)
        job.update()
        if i % 3 == 2:
            torch.cuda.empty_cache()
            gc.collect()
            print(datetime.now(), [p.norm().item() for p in job.model.parameters()], json.dumps({"i": i}))
        job.end(loss)


def aligned(job):
    for number, batch in enumerate(job.session.batches(job.loader, epochs=3), start=1):
        loss = job.backward(batch)
        if number % 4 == 0 or not job.loader.batches_left(epochs=3):
            job.update()
            job.end(loss)


def by_the_session(job):
    job.session.resume()
    batches = job.session.batches(job.loader, epochs=None)
    for step in range(job.session.iteration, 12):
        loss = job.backward(next(batches))
        if step % 3:
            job.update()
        job.end(loss)


def in_variables(job):
    loop = job.session._training.registry.objects["loop"]
    for batch in job.session.batches(job.loader, epochs=1):
        loss = job.backward(batch)
        loop.step += 1
        if loop.step % 3:
            job.update()
        job.end(loss)


def of_each_epoch(job):
    for epoch in range(3):
        for i, batch in enumerate(job.session.batches(job.loader, epochs=epoch + 1)):
            loss = job.backward(batch)
            if i != 7:
                job.update()
            job.end(loss)


def several_updates(job):
    for batch in job.session.batches(job.loader, epochs=1):
        for _ in range(3):
            loss = job.backward(batch)
            job.update()
        job.end(loss)


@pytest.mark.parametrize(
    ("loop", "dies"),
    [
        (logging_by_it, 5),
        (named_in_a_comprehension, 5),
        (of_batches_of_different_sizes, 5),
        (tidying, 5),
        (aligned, 4),
        (by_the_session, 5),
        (in_variables, 5),
        (of_each_epoch, 20),
        (several_updates, 4),
    ],
)
def test_a_counter_on_which_nothing_depends_or_that_goes_on_is_not_named(loop, dies, tmp_path, caplog):
    assert is_exact(loop, tmp_path, dies)
    assert COUNTER not in caplog.text


def taken_back(job):
    for i, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        if job.session.iteration == 8 and not job.steps:
            job.steps = 1
            job.session.restore(4)
        loss = job.backward(batch)
        if (i + 1) % 3 == 0:
            job.update()
        job.end(loss)


def test_a_counter_that_a_restore_in_place_does_not_take_back_is_named(tmp_path, caplog):
    run(taken_back, tmp_path)
    assert caplog.text.count("the counter `i` of the loop goes on after the restore") == 1


def noise_after_resume(job):
    job.session.resume()
    noise = torch.randn(2, 2)
    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < 12:
        loss = job.backward(next(batches) + noise + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)


def shuffled_after_batches(job):
    batches = job.session.batches(job.loader, epochs=None)
    order = [1.0, 2.0, 3.0]
    random.shuffle(order)
    for batch in itertools.islice(batches, 12):
        loss = job.backward(batch * order[0] * (1 + random.random()))
        job.update()
        job.end(loss)


@pytest.mark.parametrize(
    ("loop", "code"), [(noise_after_resume, "torch.randn(2, 2)"), (shuffled_after_batches, "shuffle")]
)
def test_random_numbers_between_the_resume_and_the_loop_are_named(loop, code, tmp_path, caplog):
    run(loop, tmp_path, 4)
    assert DRAWN not in caplog.text
    run(loop, tmp_path)
    assert caplog.text.count(DRAWN) == 1
    assert not is_exact(loop, tmp_path / "again", 4)


def noise_before_resume(job):
    noise = torch.randn(2, 2)
    job.session.resume()
    scale = job.model(torch.ones(2)).item() * 0
    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < 12:
        loss = job.backward(next(batches) + noise + scale + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)


def noise_within_the_iteration(job):
    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < 12:
        noise = torch.randn(2, 2)
        loss = job.backward(next(batches) + noise)
        job.update()
        job.end(loss)


def evaluating_at_the_top(job):
    batches = job.session.batches(job.loader, epochs=None)
    job.model.requires_grad_(True)
    for step in range(job.session.iteration, 12):
        if step % 4 == 0:
            job.model(torch.rand(4, 2))
        loss = job.backward(next(batches) + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)


@pytest.mark.parametrize("loop", [noise_before_resume, noise_within_the_iteration, evaluating_at_the_top])
def test_random_numbers_of_an_iteration_or_before_the_resume_are_not_named(loop, tmp_path, caplog):
    run(loop, tmp_path, 4)
    run(loop, tmp_path)
    assert DRAWN not in caplog.text
    assert is_exact(loop, tmp_path / "again", 4)


UNSEEDED = "from generators that it does not seed"


def noise_between(job):
    noise = torch.randn(2, 2)
    for batch in job.session.batches(job.loader, epochs=1):
        loss = job.backward(batch + noise)
        job.update()
        job.end(loss)


def noise_between_if_there_is_none(job):
    loop = job.session._training.registry.objects["loop"]
    job.session.resume()
    if not hasattr(loop, "noise"):
        loop.noise = torch.randn(2, 2)
    for batch in job.session.batches(job.loader, epochs=1):
        loss = job.backward(batch + loop.noise)
        job.update()
        job.end(loss)


@pytest.mark.parametrize(
    ("loop", "is_seeded", "is_named"),
    [(noise_between, True, False), (noise_between, False, True), (noise_between_if_there_is_none, False, False)],
)
def test_random_numbers_before_the_resume_are_named_if_they_are_not_seeded(
    loop, is_seeded, is_named, tmp_path, caplog, monkeypatch
):
    if not is_seeded:
        monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.seed())
    for dies in (3, 5, None):
        run(loop, tmp_path, dies)
    assert caplog.text.count(UNSEEDED) == (2 if is_named else 0)
    assert DRAWN not in caplog.text
