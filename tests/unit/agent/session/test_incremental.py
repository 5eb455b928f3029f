"""The setting `incremental` of a session, and what else is done with its checkpoints."""

import pytest
import torch

pytest.importorskip("numpy")

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.draining import drain
from holdfast.checkpoint.export import export
from holdfast.checkpoint.forking import fork
from holdfast.checkpoint.scrub import scrub
from holdfast.config import Config
from holdfast.store import open_store, open_tiers

ROWS, WIDTH = 20_000, 32


class Trainer:
    """Sparse embeddings, of which few rows change in an update, and a dense layer."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict(
            {"bag": torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=True), "dense": torch.nn.Linear(WIDTH, 4)}
        )
        self.sparse = torch.optim.SparseAdam(list(self.model["bag"].parameters()), lr=0.1)
        self.optimizer = torch.optim.AdamW(self.model["dense"].parameters())
        self.states = {}

    def objects(self):
        return {"model": self.model, "sparse": self.sparse, "optimizer": self.optimizer}

    def update(self, session):
        rows = torch.randint(0, ROWS, (1, 50), generator=torch.Generator().manual_seed(session.iteration))
        for optimizer in (self.sparse, self.optimizer):
            optimizer.zero_grad()
        self.model["dense"](self.model["bag"](rows)).square().sum().backward()
        for optimizer in (self.sparse, self.optimizer):
            optimizer.step()
        session.checkpoint()
        session.step()
        assert all(outcome.is_durable for outcome in session.wait(60))
        self.states[session.iteration] = self.state()

    def state(self):
        moments = self.sparse.state_dict()["state"][0]
        return [each.detach().clone() for each in (*self.model.parameters(), moments["exp_avg"])]


def train(root, updates=5, **options):
    trainer = Trainer()
    settings = {"every": 10**9, "incremental": "auto"} | options
    with holdfast.Session("job", store=root, **settings, **trainer.objects()) as session:
        session.resume()
        for _ in range(updates):
            trainer.update(session)
    return trainer


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def endings(store, checkpoint):
    return sorted(file.name.rpartition(".")[2] for file in restore.manifest(store, "job", checkpoint).files)


@pytest.mark.parametrize("parity", [None, "4+2", "important 4+2"])
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "planes"])
def test_a_session_resumes_exactly(tmp_path, parity, compress):
    first = train(tmp_path / "s", parity=parity, compress=compress)
    store = open_store(tmp_path / "s")
    newest = store.checkpoints("job")[-1]
    is_important = parity is not None and parity.startswith("important")
    assert ("rows" in endings(store, newest)) != is_important
    assert scrub(store, "job", newest).state == "sound"
    trainer = Trainer()
    with holdfast.Session(
        "job", store=tmp_path / "s", every=10**9, incremental="auto", parity=parity, compress=compress,
        **trainer.objects(),
    ) as session:  # fmt: skip
        assert session.resume() == 5
        assert same(trainer.state(), first.states[5])
        for _ in range(3):
            trainer.update(session)
    checkpoints = store.checkpoints("job")[-3:]
    assert ("base" in endings(store, checkpoints[1])) != is_important
    for checkpoint in checkpoints:
        restore.verify(store, "job", checkpoint)


def test_it_is_off_unless_asked_for_and_can_be_switched_off(tmp_path, monkeypatch):
    train(tmp_path / "off", incremental=None)
    monkeypatch.setenv("HOLDFAST_DISABLE", "incremental")
    train(tmp_path / "disabled")
    for name in ("off", "disabled"):
        store = open_store(tmp_path / name)
        assert {each for point in store.checkpoints("job") for each in endings(store, point)} == {"safetensors"}


@pytest.mark.parametrize(
    ("given", "found"), [("auto", "auto"), ("on", True), (True, True), ("off", False), (None, False)]
)
def test_the_setting(monkeypatch, given, found):
    assert Config.from_arguments_and_environment(incremental=given).incremental == found


def test_a_setting_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="incremental='often'"):
        Config.from_arguments_and_environment(incremental="often")


def test_what_is_copied_elsewhere_is_whole(tmp_path):
    """A fork, a copy in the store behind, and an export."""
    trainer = train(tmp_path / "s")
    store = open_store(tmp_path / "s")
    newest = store.checkpoints("job")[-1]
    weight = trainer.states[5][0]
    fork(store, "job", newest, "branch")
    export(store, "job", newest, tmp_path / "model.safetensors", "safetensors", only="model")
    tiers = open_tiers(store, tmp_path / "far")
    drain(tiers, "job", newest)
    for each in store.checkpoints("job"):
        store.delete("job", each, 1)
    for source, job in ((store, "branch"), (open_store(tmp_path / "far"), "job")):
        restore.verify(source, job, newest)
        assert torch.equal(restore.load(source, job, newest).tensors["model.bag.weight"], weight)
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "model.safetensors")["bag.weight"], weight)


def test_a_damaged_layer_is_read_from_the_copy_behind_and_replaced(tmp_path):
    train(tmp_path / "s")
    store = open_store(tmp_path / "s")
    newest = store.checkpoints("job")[-1]
    tiers = open_tiers(store, tmp_path / "far")
    drain(tiers, "job", newest)
    for suffix in (".rows", ".base"):
        name = max(
            file.name for file in restore.manifest(store, "job", newest).files if file.name.endswith(suffix)
        )
        path = store.path("job", newest) / name
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        loaded = restore.load(tiers, "job", newest)
        assert any(name in each for each in loaded.repaired)
        assert scrub(tiers, "job", newest, repair=True).state == "repaired"
        assert scrub(store, "job", newest).state == "sound"


def test_a_start_begins_with_a_base(tmp_path):
    trainer = Trainer()
    with holdfast.Session("job", store=tmp_path, every=10**9, incremental=True, **trainer.objects()) as session:
        session.resume()
        for _ in range(3):
            trainer.update(session)
    trainer = Trainer()
    with holdfast.Session("job", store=tmp_path, every=10**9, incremental=True, **trainer.objects()) as session:
        assert session.resume() == 3
        trainer.update(session)
    store = open_store(tmp_path)
    files = restore.manifest(store, "job", store.checkpoints("job")[-1]).files
    assert {file.written_by for file in files} == {None}
