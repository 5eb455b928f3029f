"""Counters of a loop that begin again after a resume."""

import argparse
import ast
import gc
import json
from datetime import datetime

import pytest
import torch

from holdfast.inventory.script_code import whole_number
from tests.support.killed_job import is_exact, run

COUNTER = "counter `"


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


def over_slices_of_the_data(job):
    data = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))

    def train():
        for _number, i in enumerate(range(0, data.size(0), 2)):
            loss = job.backward(data[i : i + 2])
            job.update()
            job.end(loss)

    job.session.resume()
    for _epoch in range(job.session.iteration // 10, 2):
        train()


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (accumulating, "`if (i + 1) % 3 == 0:`"),
        (warming_up, '`group["lr"] = 0.01 * min(10, step + 1)`'),
        (in_an_attribute, "`if job.steps % 3 != 0:`"),
        (last_of_the_epoch, "`if i % 3 == 2 or i == len(job.loader) - 1:`"),
        (a_number_of_iterations, "`for _step in range(10):`"),
        (stopped_by_it, "`if step >= 10:`"),
        (over_slices_of_the_data, "`for _number, i in enumerate(range(0, data.size(0), 2)):`"),
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


def stopping_after_it_with_an_option_that_is_off(job):
    args = argparse.Namespace(dry_run=False)
    for i, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        loss = job.backward(batch)
        job.update()
        if i % 3 == 2:
            print(i)
            if args.dry_run:
                break
        job.end(loss)


def skipping_by_it_with_an_option_that_is_not_set(job):
    """As examples of accelerate and diffusers do when their own checkpoints resume."""
    args = argparse.Namespace(resume_from_checkpoint=None)
    for step, batch in enumerate(job.session.batches(job.loader, epochs=1)):
        if args.resume_from_checkpoint and step < 4:
            continue
        loss = job.backward(batch)
        job.update()
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("len(x) // n", 3), ("x.size(0) - 1", 5), ("x.size()[1]", 2), ("x.shape[1] * n", 4), ("len(names)", 2),
        ("x.size(2)", None), ("n // 0", None), ("len(own)", None), ("n / 2", None), ("f(n)", None), ("True", None),
    ],
)  # fmt: skip
def test_sizes_are_read_without_code_of_the_script(text, value):
    class Own(list):
        def __len__(self):
            raise AssertionError

    values = {"x": torch.zeros(6, 2), "n": 2, "names": ["a", "b"], "own": Own()}
    assert whole_number(ast.parse(text, mode="eval").body, values) == value


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


def that_counts_epochs(job):
    for epoch in range(2):
        for batch in job.session.batches(job.loader, epochs=epoch + 1):
            loss = job.backward(batch)
            if epoch != 2:
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
        (stopping_after_it_with_an_option_that_is_off, 5),
        (skipping_by_it_with_an_option_that_is_not_set, 5),
        (named_in_a_comprehension, 5),
        (of_batches_of_different_sizes, 5),
        (tidying, 5),
        (aligned, 4),
        (by_the_session, 5),
        (in_variables, 5),
        (of_each_epoch, 20),
        (that_counts_epochs, 19),
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
