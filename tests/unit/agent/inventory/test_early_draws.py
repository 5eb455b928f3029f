"""Random numbers that a script draws before its first batch, wherever on the stack of the script it does."""

import collections
import contextlib
import itertools
import linecache
import random
import textwrap

import pytest
import torch

from tests.support.killed_job import is_exact, run

DRAWN = "draws random numbers between the resume and its first iteration"
UNSEEDED = "from generators that it does not seed"


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


def next_batch_in_advance(job):
    job.session.resume()
    batch = torch.randn(2, 2)
    while job.session.iteration < 12:
        if job.session.iteration % 5 == 0:
            job.model(torch.rand(4, 2))  # an evaluation
        loss = job.backward(batch)
        batch = torch.randn(2, 2)
        job.update()
        job.end(loss)


@pytest.mark.parametrize("loop", [noise_after_resume, shuffled_after_batches, next_batch_in_advance])
def test_random_numbers_between_the_resume_and_the_loop_are_named(loop, tmp_path, caplog):
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


def scaled_and_evaluating(job):
    batches = job.session.batches(job.loader, epochs=None)
    scale = job.model(torch.ones(2)).item() * 0
    for step in range(job.session.iteration, 12):
        if step % 4 == 0:
            job.model(torch.rand(4, 2))
        scale = job.model(torch.ones(2)).item() * 0
        loss = job.backward(next(batches) + scale + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)


@pytest.mark.parametrize(
    "loop", [noise_before_resume, noise_within_the_iteration, evaluating_at_the_top, scaled_and_evaluating]
)
def test_random_numbers_of_an_iteration_or_before_the_resume_are_not_named(loop, tmp_path, caplog):
    run(loop, tmp_path, 4)
    run(loop, tmp_path)
    assert DRAWN not in caplog.text
    assert is_exact(loop, tmp_path / "again", 4)


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
    monkeypatch.setattr(random, "seed", lambda seed: None)
    for dies in (3, 5, None):
        random.random()  # each start has another state of a generator that it does not draw from
        run(loop, tmp_path, dies)
    assert caplog.text.count(UNSEEDED) == (2 if is_named else 0)
    assert DRAWN not in caplog.text


def train(job, noise=0.0):
    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < 12:
        loss = job.backward(next(batches) + noise + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)


def in_functions_of_functions(job):
    def outermost():
        return outer()

    def outer():
        return middle()

    def middle():
        job.session.resume()
        noise = torch.randn(2, 2)
        return first(noise)

    def first(noise):
        return second(noise)

    def second(noise):
        return third(noise)

    def third(noise):
        return train(job, noise)

    outermost()


def resumed_by_a_deeper_function(job):
    def resume(depth=5):
        return resume(depth - 1) if depth else job.session.resume()

    def prepare():
        resume()
        return torch.randn(2, 2)

    train(job, prepare())


def under_a_condition_that_holds(job):
    if __name__ != "__main__":
        job.session.resume()
        noise = torch.randn(2, 2)
        train(job, noise)
    else:
        torch.manual_seed(0)


@contextlib.contextmanager
def open_files():
    yield


def below_a_library(job):
    @open_files()
    def main():
        job.session.resume()
        begin()

    @open_files()
    def begin():
        noise = torch.randn(2, 2)
        train(job, noise)

    main()


@pytest.mark.parametrize(
    "loop",
    [
        in_functions_of_functions,
        resumed_by_a_deeper_function,
        under_a_condition_that_holds,
        below_a_library,
    ],
)
def test_draws_in_any_function_of_the_script_are_named(loop, tmp_path, caplog):
    run(loop, tmp_path, 4)
    assert DRAWN not in caplog.text
    run(loop, tmp_path)
    assert caplog.text.count(DRAWN) == 1


def test_draws_before_the_resume_are_named_in_any_function(tmp_path, caplog, monkeypatch):
    def outer(job):
        def middle():
            inner()

        def inner():
            last()

        def last():
            noise = torch.randn(2, 2)
            train(job, noise)

        middle()

    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.seed())
    for dies in (3, None):
        run(outer, tmp_path, dies)
    assert caplog.text.count(UNSEEDED) == 1


def test_the_main_function_of_another_module_is_seen(tmp_path, caplog, monkeypatch):
    (tmp_path / "early_draws_package").mkdir()
    (tmp_path / "early_draws_package" / "loop.py").write_text(
        "import torch\n\n\ndef main(job, train):\n    job.session.resume()\n    noise = torch.randn(2, 2)\n"
        "    begin(job, train, noise)\n\n\ndef begin(job, train, noise):\n    train(job, noise)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from early_draws_package.loop import main

    for dies in (4, None):
        run(lambda job: main(job, train), tmp_path / "store", dies)
    assert caplog.text.count(DRAWN) == 1
    assert "(line 6)" in caplog.text


CELLS = [
    "import torch\nfrom unittest import mock\nsession = job.session\nsession.resume()",
    "noise = torch.randn(2, 2)",
    "print(noise.shape)",
    """
    batches = session.batches(job.loader, epochs=None)
    while session.iteration < 12:
        loss = job.backward(next(batches) + noise + 0.1 * torch.randn(2, 2))
        job.update()
        job.end(loss)
    """,
]


def notebook(cells):
    def execute(job):
        texts = [""]
        names = {"__name__": "__main__", "In": texts, "job": job}
        for number, cell in enumerate(map(textwrap.dedent, cells), start=1):
            path = f"/tmp/ipykernel_1/{number}.py"
            texts.append(cell)
            linecache.cache[path] = len(cell), None, cell.splitlines(keepends=True), path
            exec(compile(cell, path, "exec"), names)

    return execute


@pytest.fixture
def as_ipython(monkeypatch):
    """The functions of this module are those of a library, such as IPython, that runs the cells."""
    monkeypatch.setitem(notebook.__globals__, "__name__", "torch.notebooks")


def test_cells_of_a_notebook_are_seen(tmp_path, caplog, as_ipython):
    for dies in (4, None):
        run(notebook(CELLS), tmp_path, dies)
    assert caplog.text.count(DRAWN) == 1
    assert "(cell 2 line 1)" in caplog.text


def test_cells_that_draw_nothing_are_not_named(tmp_path, caplog, as_ipython):
    cells = ["noise = 0.0", *CELLS[:1], CELLS[2].replace("noise.shape", "noise"), CELLS[3]]
    for dies in (4, None):
        run(notebook(cells), tmp_path, dies)
    assert "draws random numbers" not in caplog.text


def handled_by_a_library(job):
    """A library has the loop, and calls a function of the script in each iteration."""
    job.session.resume()
    batches = job.session.batches(job.loader, epochs=None)

    @open_files()
    def iteration():
        noise = 0.1 * torch.randn(2, 2)
        loss = job.backward(next(batches) + noise)
        if job.session.iteration == 4:
            random.random()
            torch.randn(7)
        job.update()
        job.end(loss)

    collections.deque(map(lambda _: iteration(), range(job.session.iteration, 12)), maxlen=0)  # noqa: C417


def drawing_in_an_iteration_of_deep_functions(job):
    def forward(batch):
        return inner(batch)

    def inner(batch):
        return job.backward(batch + torch.randn(2, 2))

    def one(batch):
        loss = forward(batch)
        job.update()
        return end(loss)

    def end(loss):
        return last(loss)

    def last(loss):
        return job.end(loss)

    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < 12:
        one(next(batches))


@pytest.mark.parametrize("loop", [handled_by_a_library, drawing_in_an_iteration_of_deep_functions])
def test_draws_of_an_iteration_are_not_named(loop, tmp_path, caplog):
    run(loop, tmp_path, 4)
    run(loop, tmp_path)
    assert "draws random numbers" not in caplog.text
