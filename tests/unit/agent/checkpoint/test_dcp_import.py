"""A directory of torch.distributed.checkpoint as the beginning of a job."""

import pickle
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.dcp_import import ImportRefused, import_dcp
from holdfast.checkpoint.export import export
from holdfast.errors import IncompatibleCheckpoint
from holdfast.store import open_store


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


@pytest.fixture
def saved(tmp_path):
    """A directory with a model and its optimizer, and the model."""
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    return written(state, tmp_path / "dcp"), model


def written(state, path):
    with warnings.catch_warnings(action="ignore"):  # that there is one process, and of torch 2.6 itself
        dcp.save(state, checkpoint_id=path)
    return path


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def session_of(store, model, **more):
    optimizer = torch.optim.AdamW(model.parameters())
    return holdfast.Session("new", store=store.url, model=model, optimizer=optimizer, **more)


@pytest.mark.parametrize("most", [5 * 10**9, 600])
def test_a_job_begins_with_the_imported_model(saved, store, most):
    source, model = saved
    made = import_dcp(source, store, "new", shard_bytes=most)
    assert made.left_out == ["optimizer", "step"]
    restore.verify(store, "new", made.checkpoint)
    found = network(2)
    with session_of(store, found, keep_settings={"optimizer": None}) as session:
        session.resume()
        assert session.iteration == 0
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)
        session.step()
    files = list((store.root / "new" / made.checkpoint).glob("*.safetensors"))
    assert len(files) == (2 if most > 600 else 3)


def test_the_next_start_goes_on_from_the_jobs_own_checkpoint(saved, store):
    import_dcp(saved[0], store, "new", iteration=1000)
    with session_of(store, network(2), keep_settings={"optimizer": None}) as session:
        session.resume()
        assert session.iteration == 1000
        session.step()
    with session_of(store, network(3)) as session:
        assert session.resume() == 1001


def test_an_object_that_the_directory_lacks_is_named(saved, store):
    import_dcp(saved[0], store, "new")
    session = session_of(store, network(2))
    with pytest.raises(IncompatibleCheckpoint, match="holds no 'optimizer'"):
        session.resume()
    session.close()


def test_names_at_the_top_are_a_model(tmp_path, store):
    model = network(1)
    source = written(model.state_dict(), tmp_path / "top")
    made = import_dcp(source, store, "new", keyword="net")
    assert made.tensors == len(model.state_dict())
    assert set(restore.manifest(store, "new", made.checkpoint).state) == {"net", "rng", "session"}


def test_what_cannot_be_imported_is_refused_and_leaves_nothing(saved, store, tmp_path):
    source, model = saved
    with pytest.raises(
        ImportRefused, match="no tensors in an entry 'app'; its entries are model, optimizer, step"
    ):
        import_dcp(source, store, "new", model="app")
    with pytest.raises(ImportRefused, match=r"has no \.metadata"):
        import_dcp(tmp_path, store, "new")
    other = written({"app": model.state_dict(), "step": 1}, tmp_path / "other")
    with pytest.raises(ImportRefused, match="no entry 'model', but app, step: choose"):
        import_dcp(other, store, "new")
    assert store.jobs() == []
    import_dcp(other, store, "new", model="app")
    with pytest.raises(ImportRefused, match="new exists in"):
        import_dcp(source, store, "new")


def test_an_import_that_was_interrupted_can_be_repeated(saved, store):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_dcp(saved[0], store, "new", progress=interrupted)
    assert store.checkpoints("new") == []
    made = import_dcp(saved[0], store, "new")
    assert store.checkpoints("new") == [made.checkpoint]


def test_code_that_the_metadata_names_is_not_run(saved, store, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (saved[0] / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ImportRefused, match=r"io\.open is not a type that DCP metadata may contain"):
        import_dcp(saved[0], store, "new")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/hostname", "sub/file.distcp"])
def test_a_file_outside_of_the_directory_is_not_read(saved, store, path):
    file = saved[0] / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for each in metadata.storage_data.values():
        each.relative_path = path
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ImportRefused, match="is not a file in its directory"):
        import_dcp(saved[0], store, "new")


def test_a_directory_that_python_3_13_wrote_is_imported(saved, store):
    file = saved[0] / ".metadata"
    data = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)  # each name on a line
    file.write_bytes(data.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"pathlib._local" in file.read_bytes()
    import_dcp(saved[0], store, "new")


def test_an_export_can_be_imported(saved, store, tmp_path):
    source, model = saved
    made = import_dcp(source, store, "new")
    export(store, "new", made.checkpoint, tmp_path / "again", "dcp")
    again = import_dcp(tmp_path / "again", store, "again")
    found = restore.load(store, "again", again.checkpoint).tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)
