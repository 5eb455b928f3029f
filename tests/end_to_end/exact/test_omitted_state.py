"""Proof that the oracle sees everything: each part of the state, left as a fresh start has it, makes it differ."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from holdfast.state.registry import Registry
from tests.support.exact_job import DEVICE, ExactJob
from tests.support.training_log import first_difference

BEGIN, END = 18, 30
"""Where the checkpoint is, in the second epoch and between two batches of an update; where a resume is judged."""
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")

Undo = Callable[[], None]


def state_of(item: Any, *keys: str) -> Undo:
    """Puts these entries of its state_dict, or all of it, back to what they are now."""
    before = copy.deepcopy(item.state_dict())

    def undo() -> None:
        item.load_state_dict(item.state_dict() | {key: before[key] for key in keys or before})

    return undo


def values_of(tensors: Any) -> Undo:
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def undo() -> None:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)

    return undo


def moments(optimizer: torch.optim.Optimizer, key: str, spoil: Callable[[Any], Any]) -> Undo:
    """A fresh optimizer has none, so they are made what its first update would begin from."""

    def undo() -> None:
        for state in optimizer.state.values():
            state[key] = spoil(state[key])

    return undo


def generator(get: Callable[[], Any], put: Callable[[Any], Any]) -> Undo:
    before = copy.deepcopy(get())
    return lambda: put(before)


def attribute(item: Any, name: str) -> Undo:
    before = copy.deepcopy(getattr(item, name))
    return lambda: setattr(item, name, before)


def gradients(job: ExactJob) -> Undo:
    def undo() -> None:
        for parameter in job.model.parameters():
            parameter.grad = None

    return undo


def learning_rate(job: ExactJob) -> Undo:
    before = job.optimizer.param_groups[0]["lr"]
    return lambda: job.optimizer.param_groups[0].update(lr=before)


ITEMS: dict[str, tuple[Callable[[ExactJob], Undo], str]] = {
    "parameters": (lambda job: values_of(job.model.parameters()), "parameters"),
    "the tied weight": (lambda job: values_of([job.model.there.weight]), "parameters"),
    "a parameter in bfloat16": (lambda job: values_of(job.model.head.parameters()), "parameters"),
    "BatchNorm's mean": (lambda job: values_of([job.model.norm.running_mean]), "buffers"),
    "BatchNorm's variance": (lambda job: values_of([job.model.norm.running_var]), "buffers"),
    "BatchNorm's count": (lambda job: values_of([job.model.norm.num_batches_tracked]), "buffers"),
    "a buffer outside the state_dict": (lambda job: values_of([job.model.drift]), "buffers"),
    "gradients between the batches of an update": (gradients, "gradients"),
    "first moments": (lambda job: moments(job.optimizer, "exp_avg", torch.zeros_like), "optimizer"),
    "second moments": (lambda job: moments(job.optimizer, "exp_avg_sq", torch.zeros_like), "optimizer"),
    "the optimizer's step": (lambda job: moments(job.optimizer, "step", torch.zeros_like), "optimizer"),
    "the learning rate": (learning_rate, "optimizer"),
    "another optimizer's moments": (lambda job: moments(job.heavy, "momentum", torch.zeros_like), "heavy"),
    "the dtype of moments": (lambda job: moments(job.heavy, "momentum", torch.Tensor.bfloat16), "heavy"),
    "a count that is a plain number": (lambda job: moments(job.heavy, "count", lambda _: 0.0), "heavy"),
    "a schedule": (lambda job: state_of(job.schedule), "schedule"),
    "a schedule inside a schedule": (lambda job: state_of(job.schedule._schedulers[1]), "schedule"),
    "a schedule that follows the loss": (lambda job: state_of(job.plateau), "plateau"),
    "the loss scale": (lambda job: state_of(job.scaler, "scale"), "scaler"),
    "the loss scale's count": (lambda job: state_of(job.scaler, "_growth_tracker"), "scaler"),
    "averaged weights": (lambda job: values_of(job.ema.module.parameters()), "ema"),
    "averaged buffers": (lambda job: values_of(job.ema.module.buffers()), "ema"),
    "the average's count": (lambda job: values_of([job.ema.n_averaged]), "ema"),
    "Python's generator": (lambda job: generator(random.getstate, random.setstate), "random state of Python"),
    "NumPy's generator": (
        lambda job: generator(numpy.random.get_state, numpy.random.set_state),
        "random state of NumPy",
    ),
    "torch's generator": (
        lambda job: generator(torch.get_rng_state, torch.set_rng_state),
        "random state of torch",
    ),
    "a torch.Generator": (lambda job: generator(job.noise.get_state, job.noise.set_state), "noise"),
    "a random.Random": (lambda job: generator(job.dice.getstate, job.dice.setstate), "dice"),
    "a numpy.random.Generator": (lambda job: attribute(job.choice.bit_generator, "state"), "choice"),
    "what the loop counts": (lambda job: attribute(job.loop, "batches"), "loop"),
    "what the loop remembers": (lambda job: attribute(job.loop, "best"), "loop"),
}


if DEVICE == "cuda":
    ITEMS["the device's generator"] = (
        lambda job: generator(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "random state of the device",
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job that was killed between two batches of an update."""
    store = tmp_path_factory.mktemp("left out")
    job = ExactJob(store, accumulation=4, across=True, every=BEGIN).run(until=BEGIN)
    job.settle()
    job.crash()
    return store


def resumed(store: Path) -> ExactJob:
    job = ExactJob(store, seed=99, accumulation=4, across=True, every=10**9)
    assert job.session.resume() == BEGIN
    return job


def test_nothing_left_out_makes_no_difference(store, undisturbed):
    seen = resumed(store).run(until=END).crash().log
    assert sorted(seen) == list(range(BEGIN + 1, END + 1))
    assert first_difference(undisturbed(4, True), seen) is None


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_left_out_is_seen_and_named(item, store, undisturbed, monkeypatch):
    left_out, named = ITEMS[item]
    whole = Registry.apply
    job = ExactJob(store, seed=99, accumulation=4, across=True, every=10**9)

    def all_but_one(*args: Any, **how: Any) -> None:
        undo = left_out(job)
        whole(*args, **how)
        undo()

    monkeypatch.setattr(Registry, "apply", all_but_one)
    assert job.session.resume() == BEGIN
    difference = first_difference(undisturbed(4, True), job.run(until=END).crash().log)
    assert difference is not None
    assert named in difference.partition(": ")[2].split(", ")


@pytest.mark.parametrize("position", [{"taken": 0}, {"epoch": 0}])
def test_a_position_left_out_is_seen_in_the_samples(position, store, undisturbed, monkeypatch):
    job = ExactJob(store, seed=99, accumulation=4, across=True, every=10**9)
    load = type(job.loader).load_state_dict
    monkeypatch.setattr(type(job.loader), "load_state_dict", lambda self, state: load(self, state | position))
    assert job.session.resume() == BEGIN
    difference = first_difference(undisturbed(4, True), job.run(until=END).crash().log)
    assert difference is not None
    assert "samples" in difference
