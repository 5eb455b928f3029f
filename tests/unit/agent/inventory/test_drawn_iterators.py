"""Generators that a loop draws from without the session, which begin anew at each start."""

import itertools

import pytest
import torch

import holdfast

UNSAVED = "the loop draws from the generator"


def documents():
    for number in itertools.count():
        yield torch.full((1,), number / 100)


def packed(source):
    while True:
        yield next(source)


def slices(data):
    i = 0
    while True:
        yield data[i]
        i += 1


def random_batches():
    while True:
        index = torch.randint(8, (1,))
        yield index / 8


def train(session, model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.step()


def drawing_from(make):
    def loop(session, *trained):
        session.resume()
        batches = make()
        batch = next(batches)
        while session.iteration < 4:
            train(session, *trained, batch)
            batch = next(batches)

    return loop


def iterating_over_a_variable(session, *trained):
    session.resume()
    batches = documents()
    for _, batch in enumerate(batches):
        train(session, *trained, batch)
        if session.iteration == 4:
            break


def moving_it(session, *trained):
    session.resume()
    batches = documents()
    for _ in range(session.iteration):
        next(batches)
    while session.iteration < 4:
        train(session, *trained, next(batches))


def giving_the_position(session, *trained):
    session.resume()
    batches = slices(torch.rand(8, 1)[session.iteration :])
    while session.iteration < 4:
        train(session, *trained, next(batches))


def drawing_from_the_session(session, *trained):
    batches = session.batches(documents())
    while session.iteration < 4:
        train(session, *trained, next(batches))


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        (drawing_from(documents), 1),
        (drawing_from(lambda: packed(documents())), 1),
        (drawing_from(lambda: slices(torch.rand(8, 1))), 1),
        (iterating_over_a_variable, 1),
        (drawing_from(random_batches), 0),
        (moving_it, 0),
        (giving_the_position, 0),
        (drawing_from_the_session, 0),
    ],
)
def test_a_generator_whose_position_is_in_no_checkpoint_is_named(loop, count, tmp_path, caplog):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.Session("job", store=tmp_path, model=model, optimizer=optimizer) as session:
        loop(session, model, optimizer)
    assert caplog.text.count(UNSAVED) == count


def test_a_generator_is_not_named_where_the_script_keeps_its_position(tmp_path, caplog):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"model": model, "optimizer": optimizer, "loop": holdfast.Variables(document=0)}
    with holdfast.Session("job", store=tmp_path, **objects) as session:
        drawing_from(documents)(session, model, optimizer)
    assert UNSAVED not in caplog.text
