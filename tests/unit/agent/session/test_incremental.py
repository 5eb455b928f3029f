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
from holdfast.errors import DamagedCheckpoint
from holdfast.protocol.wire import Checkpoint
from holdfast.store import open_store, open_tiers
from holdfast.store.local import LocalWriter
from holdfast.store.local_reader import LocalReader
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store

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


def test_it_is_on_by_default_and_can_be_switched_off(tmp_path, monkeypatch):
    train(tmp_path / "default", incremental=None)
    store = open_store(tmp_path / "default")
    assert "rows" in endings(store, store.checkpoints("job")[-1])
    train(tmp_path / "off", incremental=False)
    monkeypatch.setenv("HOLDFAST_DISABLE", "incremental")
    train(tmp_path / "disabled")
    monkeypatch.delenv("HOLDFAST_DISABLE")
    monkeypatch.setattr("holdfast.engine.optional_parts.find_spec", lambda name: None)
    train(tmp_path / "without NumPy", incremental=None)
    for name in ("off", "disabled", "without NumPy"):
        store = open_store(tmp_path / name)
        assert {each for point in store.checkpoints("job") for each in endings(store, point)} == {"safetensors"}


@pytest.mark.parametrize(
    ("given", "found"), [("auto", "auto"), ("on", True), (True, True), ("off", False), (None, "auto")]
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


def test_a_copy_reads_back_only_what_was_sent(tmp_path, monkeypatch):
    train(tmp_path / "s")
    store = open_store(tmp_path / "s")
    tiers, checkpoints = open_tiers(store, tmp_path / "far"), store.checkpoints("job")
    drain(tiers, "job", checkpoints[-2])
    read, read_into = set(), LocalReader.read_into

    def note(self, start, target):
        read.add(self._path)
        read_into(self, start, target)

    monkeypatch.setattr(LocalReader, "read_into", note)
    drain(tiers, "job", checkpoints[-1])
    payload = {path.name for path in read if path.is_relative_to(tmp_path / "far") and path.suffix != ".json"}
    newest = restore.manifest(store, "job", checkpoints[-1])
    assert payload == {file.name for file in newest.files if file.written_by is None}
    restore.verify(open_store(tmp_path / "far"), "job", checkpoints[-1])


def test_a_copy_that_differs_from_what_was_sent_does_not_count(tmp_path, monkeypatch):
    train(tmp_path / "s")
    store = open_store(tmp_path / "s")
    tiers, newest = open_tiers(store, tmp_path / "far"), store.checkpoints("job")[-1]
    write = LocalWriter.write

    def damage(self, file, parts, **options):
        if file.endswith(".rows"):
            parts = [bytes(sum(map(len, parts)))]
        return write(self, file, parts, **options)

    monkeypatch.setattr(LocalWriter, "write", damage)
    with pytest.raises(DamagedCheckpoint, match=r"\.rows"):
        drain(tiers, "job", newest)
    assert not open_store(tmp_path / "far").checkpoints("job")


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


def test_the_rows_that_changed_are_reported_by_tensor(store, linked):
    loop = holdfast.Variables(table=torch.zeros(20_000, 32))
    with holdfast.Session("job", store=store, every=10**9, incremental=True, loop=loop, **linked) as session:
        session.resume()
        for rows in ([1], [3, 4, 700]):
            loop.table[rows] += 1
            session.checkpoint()
            session.step()
            session.wait(60)
        link = session._reporter.link
    base, found = [each for each in link.of(Checkpoint) if each.state == "durable"][:2]
    assert base.changed == []
    (changed,) = found.changed
    assert (changed.name, changed.rows, changed.row_bytes) == ("loop.table", 20_000, 128)
    assert (changed.changed_rows, changed.stored_rows, changed.size_bytes) == (3, 3, loop.table.nbytes)
