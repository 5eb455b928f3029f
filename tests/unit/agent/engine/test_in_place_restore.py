"""A restore in place: what it reads into, what it leaves where it was, and what it does to later checkpoints."""

import copy

import pytest
import torch

import holdfast
from holdfast.checkpoint import reading, restore
from holdfast.engine.coordination import RestoreTarget
from holdfast.engine.in_place_restore import CheckpointToRestore
from holdfast.state.adapters import adapter_for
from holdfast.state.encoder import Encoder
from holdfast.store import Ending, open_store
from tests.support.small_session import iterate

SIDE = 256
"""Of a weight: one of so many is large, and so are its moments."""


class FrozenLayerJob:
    """A frozen layer and a trained one, whose loop counts session.iteration."""

    def __init__(self, store, **options):
        torch.manual_seed(0)
        self.store = store
        self.model = torch.nn.Sequential(torch.nn.Linear(4, SIDE), torch.nn.Linear(SIDE, SIDE, bias=False))
        self.model[0].requires_grad_(False)
        # all it has is large: nothing changes its place in a restore, and what was worked out for snapshots holds
        self.optimizer = torch.optim.SGD(self.model[1].parameters(), lr=1e-4, momentum=0.9)
        self.session = holdfast.Session(
            *("m",),
            store=store,
            every=1,
            keep=20,
            loop=holdfast.Variables(),
            model=self.model,
            optimizer=self.optimizer,
            **options,
        )
        self.session.resume()
        self.states = {}

    def train(self, until):
        while self.session.iteration < until:
            self.iterate()
            self.states[self.session.iteration] = self.state()
        return self

    def iterate(self):
        iterate(self.model, self.optimizer, self.session)
        self.session.wait(300)

    def restore(self, iteration):
        """At the boundary after one more iteration."""
        self.session.restore(iteration)
        self.iterate()

    def state(self):
        return copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()["state"]))

    def moments(self):
        return [own["momentum_buffer"].data_ptr() for own in self.optimizer.state.values()]

    def stored(self, checkpoint):
        return restore.load(open_store(self.store), "m", checkpoint).tensors


@pytest.fixture
def job(tmp_path):
    job = FrozenLayerJob(str(tmp_path / "store")).train(until=4)
    yield job
    job.session.close()


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def test_a_restore_reads_into_memory_that_is_there(job, monkeypatch):
    moments = job.moments()
    asked = []
    monkeypatch.setattr(reading, "fresh_memory", lambda size_bytes: asked.append(size_bytes))
    job.restore(2)
    assert same(job.state(), job.states[2])
    assert (asked, job.moments()) == ([], moments)


def test_what_comes_after_a_restore_is_stored_whole(job, caplog):
    oracle = job.states
    job.restore(2)
    job.states = {}
    job.train(until=5)
    assert same({number: job.states[number] for number in (3, 4)}, {number: oracle[number] for number in (3, 4)})
    assert "changed while" not in caplog.text
    stored = job.stored("000000000005-2")
    assert all(same(stored[f"model.{name}"], tensor) for name, tensor in job.model.state_dict().items())


def test_a_restore_without_memory_that_is_free_asks_for_its_own(job, monkeypatch):
    asked, fresh = [], reading.fresh_memory
    monkeypatch.setattr(
        reading, "fresh_memory", lambda size_bytes: [fresh(size_bytes), asked.append(size_bytes)][0]
    )
    taken, job.session._saver.snapshots._free = job.session._saver.snapshots._free, []
    with job.session._saver.snapshots.borrowed_memory() as room:
        assert room is None
        job.session._saver.snapshots._free = taken
        target = CheckpointToRestore(job.session._saver.history, "000000000002-1")
        job.session._boundary.in_place_restore._take_back(target, "000000000004-1", RestoreTarget(), room)
    assert same(job.state(), job.states[2])
    assert sum(asked) > SIDE * SIDE * 4


def test_a_damaged_checkpoint_is_refused_and_training_goes_on(job, tmp_path):
    (payload,) = (tmp_path / "store" / "m").glob("000000000002-1/*.safetensors")
    with payload.open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x5a\xa5\x5a")
    other = FrozenLayerJob(str(tmp_path / "other")).train(until=7)
    job.restore(2)
    assert (job.session.iteration, job.session.lineage) == (5, 1)
    job.train(until=7)
    assert same(job.states[7], other.states[7])
    stored = job.stored("000000000007-1")
    assert all(same(stored[f"model.{name}"], tensor) for name, tensor in job.model.state_dict().items())
    other.session.close()


def trained(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(2)]
    optimizer = torch.optim.AdamW([layer.weight for layer in layers])
    for layer in layers:
        layer.weight.grad = torch.randn(SIDE, SIDE)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("sharing", [False, True])
def test_an_optimizer_whose_tensors_share_memory_is_loaded_all_the_same(sharing):
    source, target = trained(1), trained(2)
    if sharing:
        one, other = target.state.values()
        other["exp_avg"] = one["exp_avg"]
        one["exp_avg_sq"] = one["exp_avg_sq"].double()
    encoder = Encoder((), set())
    tree = adapter_for("optimizer", source).encode(source.state_dict(), encoder, {})
    borrowed = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
    adapter_for("optimizer", target).load(tree, borrowed, adopt=False)
    for tensor in borrowed.values():
        tensor.zero_()  # their memory is used for something else
    assert same(target.state_dict(), source.state_dict())


class Scaled(torch.nn.Linear):
    """Keeps what it is given, as layers in eight bits do."""

    def __init__(self):
        super().__init__(4, 4)
        self.amax = torch.arange(4.0)

    def get_extra_state(self):
        return {"amax": self.amax}

    def set_extra_state(self, state):
        self.amax = state["amax"]


class Assigned(torch.nn.Linear):
    def __init__(self):
        super().__init__(SIDE, SIDE)

    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.weight.data = state_dict[prefix + "weight"]
        self.bias.data = state_dict[prefix + "bias"]


@pytest.mark.parametrize("kind", [Scaled, Assigned])
def test_what_a_module_keeps_of_its_state_is_its_own(kind):
    module = torch.nn.Sequential(kind())
    before = copy.deepcopy(module.state_dict())
    encoder = Encoder((), set())
    tree = adapter_for("model", module).encode(module.state_dict(), encoder, {})
    borrowed = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
    adapter_for("model", module).load(tree, borrowed, adopt=False)
    for tensor in borrowed.values():
        tensor.zero_()  # their memory is used for something else
    assert same(dict(module.state_dict()), dict(before))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_restore_left_half_applied_is_never_saved(tmp_path, error):
    """Nor by a script that closes the session whatever has happened, or goes on training."""
    job = FrozenLayerJob(str(tmp_path / "store")).train(until=4)

    def broken(*_):
        raise error("half-way")

    job.optimizer.load_state_dict = broken
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else holdfast.RestoreFailed):
        job.restore(2)
    before = open_store(job.store).checkpoints("m")
    assert before[-1] == "000000000005-1"
    job.iterate()
    job.session.close()
    assert open_store(job.store).checkpoints("m") == before
    assert open_store(job.store).records("m", Ending)[-1].reason == "RestoreFailed"
