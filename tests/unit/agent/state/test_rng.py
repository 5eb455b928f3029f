import contextlib
import random
import types
from unittest import mock

import numpy
import pytest
import torch

from holdfast import accelerators
from holdfast.state.rng import StatefulGenerator, branch_rng, require_rng, restore_rng, rng_state


@pytest.fixture(autouse=True)
def _as_before():
    """Other tests draw from the same generators."""
    state = rng_state()
    yield
    restore_rng(state)


@contextlib.contextmanager
def gpus(*seeds, current=0):
    """As if there were so many CUDA devices, in use; their generators."""
    generators = tuple(torch.Generator().manual_seed(seed) for seed in seeds)
    replaced = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: len(seeds),
        "current_device": lambda: current, "default_generators": generators, "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.random):
            present = {name: value for name, value in replaced.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **present))
        yield generators


def seeds_of(generators):
    return [generator.initial_seed() for generator in generators]


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(1).item(), numpy.random.normal()


def test_random_state_comes_back():
    drawn()
    state = rng_state()
    first = drawn()
    restore_rng(state)
    assert drawn() == first


@pytest.mark.parametrize(
    ("saved_current", "current", "expected"),
    [
        (0, 0, [10, 11, 12, 13]),
        (2, 2, [10, 11, 12, 13]),
        (0, 0, [10, 11]),  # a smaller node
        (2, 0, [12, 11]),  # as many ranks, on more nodes
        (3, 1, [10, 13]),
        (1, 3, [10, 11, 12, 11]),
        (0, 0, [10, 11, 12, 13, 94]),
        (1, 4, [10, 11, 12, 13, 11]),
    ],
)
def test_the_device_that_a_rank_trains_on_goes_on_as_the_one_that_it_had(saved_current, current, expected):
    with gpus(10, 11, 12, 13, current=saved_current):
        state = rng_state()
    with gpus(*range(90, 90 + len(expected)), current=current) as generators:
        restore_rng(state)
        assert seeds_of(generators) == expected


def test_random_state_of_gpus_is_passed_over_where_there_is_none():
    with gpus(10, 11):
        state = rng_state()
    first = drawn()
    restore_rng(state)
    assert drawn() == first
    assert "cuda" not in rng_state()


def test_a_branch_follows_from_each_state_and_from_the_key():
    with gpus(10, 11) as generators:
        state = rng_state()

        def branched(key, **other):
            restore_rng(state | other)
            branch_rng(key)
            return drawn(), [torch.rand(1, generator=generator).item() for generator in generators]

        restore_rng(state)
        unbranched = drawn(), [torch.rand(1, generator=generator).item() for generator in generators]
        first = branched(1)
        assert branched(1) == first
        every = [flat(each) for each in (unbranched, first, branched(2), branched(3))]
        assert all(len(set(values)) == len(every) for values in zip(*every, strict=True))
        apart = {"torch": (2,), "python": (0,), "numpy": (1, 3), "cuda": (4, 5)}
        with gpus(20, 21):
            random.seed(5)
            numpy.random.seed(5)
            torch.manual_seed(5)
            other = rng_state()
        for name, places in apart.items():
            found = flat(branched(1, **{name: other[name]}))
            assert [i for i, (a, b) in enumerate(zip(found, flat(first), strict=True)) if a != b] == list(places)


def flat(drawn):
    numbers, of_devices = drawn
    return [*numbers, *of_devices]


def test_devices_that_come_into_use_later_branch_as_well():
    state, calls = rng_state(), []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "manual_seed_all", calls.append),
    ):
        for key in (1, 1, 2):
            restore_rng(state)
            branch_rng(key)
    assert calls[0] == calls[1] != calls[2]


OWN = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda it: torch.rand(1, generator=it).item()),
    "Python": (lambda: random.Random(7), lambda it: it.random()),
    "NumPy": (lambda: numpy.random.default_rng(7), lambda it: it.normal()),
    "NumPy's Philox": (lambda: numpy.random.Generator(numpy.random.Philox(7)), lambda it: it.normal()),
    "NumPy's old kind": (lambda: numpy.random.RandomState(7), lambda it: it.normal()),
    "NumPy's old kind on PCG64": (
        lambda: numpy.random.RandomState(numpy.random.PCG64(7)),
        lambda it: it.normal(),
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_branch_of_a_generator_follows_from_where_it_is_and_from_the_key(kind):
    make, draw = OWN[kind]

    def branched(key, before=1):
        generator = make()
        for _ in range(before):
            draw(generator)
        StatefulGenerator(generator).branch(key)
        return [draw(generator) for _ in range(3)]

    generator = make()
    unbranched = [draw(generator) for _ in range(4)][1:]
    assert branched(1) == branched(1)
    every = [unbranched, branched(1), branched(2), branched(1, before=3), branched(1, before=0)]
    for values in zip(*every, strict=True):
        assert len(set(values)) == len(every)


def test_the_state_of_an_accelerator_of_another_kind_comes_back(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    module = types.SimpleNamespace(
        is_initialized=lambda: True, is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        get_rng_state_all=lambda: [generator.get_state()], set_rng_state=generator.set_state,
        set_rng_state_all=lambda states: generator.set_state(states[0]), default_generators=(generator,),
    )  # fmt: skip
    real = accelerators.module_of
    monkeypatch.setattr(accelerators, "module_of", lambda kind: module if kind == "xpu" else real(kind))
    state = rng_state()
    require_rng(state)
    first = torch.rand(3, generator=generator)
    restore_rng(state)
    assert torch.equal(torch.rand(3, generator=generator), first)
    branch_rng(1, {"xpu"})
    assert generator.initial_seed() != 3
