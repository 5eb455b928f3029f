"""What a second capture takes from the first must be what a full one would have found."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Variables
from holdfast.format.shards import names_in
from holdfast.save.run import WriteResult
from holdfast.save.snapshotter import Snapshotter
from holdfast.state.registry import Registry
from tests.support.persist_job import requested


class TiedModel(nn.Module):
    """Tied weights, a frozen layer, batch norm, a buffer that state_dict() leaves out."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.norm, self.frozen = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        self.seen.add_(1)
        return self.head(self.frozen(self.norm(self.embedding(tokens))))


class CaptureJob:
    def __init__(self, optimizer=torch.optim.AdamW, wrap=lambda model: model, **options):
        torch.manual_seed(3)
        self.model = TiedModel()
        self.run = wrap(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(trained, **{"lr": 1e-2, **options})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loop = Variables(best=1.0)
        self.registry = Registry(
            {"model": self.run, "optimizer": self.optimizer, "scheduler": self.scheduler, "loop": self.loop}
        )

    def step(self, times=1, micro=1):
        for _ in range(times):
            for _ in range(micro):
                self.run(torch.randint(16, (4,))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def capture(self):
        return self.registry.capture({"iteration": 1})

    def in_full(self):
        """As a registry that has captured nothing before finds it."""
        fresh = Registry(self.registry.objects)
        return fresh.capture({"iteration": 1})


def same(one, other):
    assert comparable(one) == comparable(other)
    assert list(one.tensors) == list(other.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert places(one) == places(other)
    assert one.deferred == other.deferred
    assert one.frozen == other.frozen


def comparable(captured):
    """The trees without how objects were constructed: a fresh registry finds them as training left them."""
    return {
        k: {name: v for name, v in tree.items() if name != "construction"} for k, tree in captured.trees.items()
    }


def places(captured):
    return [(t.data_ptr(), t.shape, t.dtype) for n, t in captured.tensors.items() if not n.startswith("rng")]


OPTIMIZERS = {
    "one by one": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "a tensor for a learning rate": (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(1e-2)}),
    "momentum alone": (torch.optim.SGD, {"momentum": 0.9}),
    "state before the first step": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_second_capture_finds_what_a_full_one_finds(kind):
    optimizer, options = OPTIMIZERS[kind]
    job = CaptureJob(optimizer, **options).step()
    first = job.capture()
    job.step()
    second = job.capture()
    same(second, job.in_full())
    assert second.structure is first.structure
    assert second.trees["scheduler"] != first.trees["scheduler"]


def test_an_optimizer_with_lists_in_its_state_is_walked_each_time():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    registry = Registry({"model": model, "optimizer": optimizer})

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        found = registry.capture({})
    same(found, Registry(registry.objects).capture({}))


def add_a_parameter(job):
    job.model.late = nn.Parameter(torch.ones(5))
    job.optimizer.add_param_group({"params": [job.model.late]})


def add_a_layer_within(job):
    job.model.norm.extra = nn.Linear(2, 2)


def replace_a_buffer(job):
    job.model.norm.running_mean = torch.full((8,), 7.0)


def swap_weights_through_data(job):
    job.model.embedding.weight.data = torch.full((16, 8), 0.5)


def look_at_the_same_memory_otherwise(job):
    weight = job.model.embedding.weight
    weight.data = weight.data.view(8, 16).t()


def shrink_in_place(job):
    weight = job.model.embedding.weight
    weight.data = weight.data[:8]


def halve(job):
    job.model.frozen.half()


def load(job):
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))


def untie(job):
    job.model.head.weight = nn.Parameter(job.model.head.weight.detach().clone())


def hook(job):
    def exclude(module, state, prefix, metadata):
        del state["frozen.bias"]

    job.model.register_state_dict_post_hook(exclude)


def unfreeze(job):
    job.model.frozen.requires_grad_(True)
    job.optimizer.add_param_group({"params": list(job.model.frozen.parameters())})


def more_variables(job):
    job.loop.history = torch.arange(4)


CHANGES = [
    add_a_parameter, add_a_layer_within, replace_a_buffer, swap_weights_through_data,
    look_at_the_same_memory_otherwise, shrink_in_place, halve, load, untie, hook,
    unfreeze, more_variables,
]  # fmt: skip


@pytest.mark.parametrize("value", [np.float32(0.01), np.int64(3), np.array([1, 2]), (0.9, np.float32(0.9))])
def test_settings_that_hold_arrays_are_encoded_each_time(value):
    job = CaptureJob().step()
    job.optimizer.param_groups[0]["marker"] = value
    for _ in range(3):
        captured = job.capture()
        assert names_in(captured.trees["optimizer"]) <= captured.tensors.keys()
        full = job.in_full()
        assert comparable(captured) == comparable(full)
        assert all(torch.equal(captured.tensors[name], full.tensors[name]) for name in full.tensors)


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (1e-3, torch.tensor(1e-3)), ((0.9, 1), (0.9, 1.0))]
)
def test_settings_that_are_equal_but_not_the_same_are_encoded_anew(one, other):
    job = CaptureJob().step()
    job.optimizer.param_groups[0]["marker"] = one
    job.capture()
    job.capture()
    job.optimizer.param_groups[0]["marker"] = other
    found, expected = job.capture(), job.in_full()
    assert repr(comparable(found)["optimizer"]) == repr(comparable(expected)["optimizer"])
    assert list(found.tensors) == list(expected.tensors)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_two_captures_is_found(change):
    job = CaptureJob().step()
    before = job.capture()
    change(job)
    after = job.capture()
    same(after, job.in_full())
    assert after.structure is not before.structure
    same(job.capture(), after)


def test_frozen_parameters_are_those_that_nobody_trains():
    assert CaptureJob().step().capture().frozen == {"model.frozen.weight", "model.frozen.bias"}


def test_an_average_of_weights_needs_no_gradient_but_is_not_frozen():
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = Registry({"model": model, "average": average, "optimizer": optimizer}).capture({})
    assert captured.frozen == set()
    assert "average.module.weight" in captured.deferred


def test_tied_weights_are_stored_once():
    captured = CaptureJob().step().capture()
    assert [n for n in captured.tensors if n.startswith("model.") and "weight" in n and "norm" not in n] == [
        "model.embedding.weight",
        "model.frozen.weight",
    ]


WRAPS = {"plain": lambda model: model, "compiled": lambda model: torch.compile(model, backend="eager")}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_snapshot_beside_training_is_the_state_of_the_boundary(kind, wrap):
    """Forward and backward of the next iterations run while it is taken; the update waits."""
    optimizer, options = OPTIMIZERS[kind]
    job = CaptureJob(optimizer, WRAPS[wrap], **options)
    snapshotter = Snapshotter()

    def wait(*_):
        snapshotter.wait_copied()

    job.optimizer.register_step_pre_hook(wait)
    for i in range(6):
        job.step(micro=1 + i % 3)
        captured = job.capture()
        expected = {name: tensor.clone() for name, tensor in captured.tensors.items()}
        run = requested(i, snapshotter)
        snapshotter.begin(run, captured)
        snapshotter.copy(run)
        job.step(micro=2)
        assert run.state == "copied"
        assert run.copy.problem is None
        found = snapshotter._layouts[0]._targets
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        run.end("failed", WriteResult())
    snapshotter.close()


def test_an_optimizer_that_counts_beside_the_state_of_its_parameters_is_captured():
    job = CaptureJob()
    job.capture()
    job.step().optimizer.state["count"] = torch.ones(())
    same(job.capture(), job.in_full())
