"""What can be done to a job by writing to its store, and what not; docs/checkpoint-format.md says the same."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from holdfast.checkpoint import restore
from holdfast.commands.stores.listing import described
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.store import open_store
from tests.support.edited_manifests import reseal, sealed
from tests.support.tiny_job import Trainer

NEWEST, BEFORE = "000000000009-1", "000000000006-1"
PAYLOAD = "rank-0.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    store = tmp_path_factory.mktemp("trained") / "s"
    Trainer(store).run(until=10).crash()
    assert open_store(store).checkpoints("job")[-2:] == [BEFORE, NEWEST]
    return store


@pytest.fixture
def store(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "s")


def at(store, name, checkpoint=NEWEST):
    return store / "job" / checkpoint / name


def weight(fields):
    return next(tensor for tensor in fields["tensors"] if tensor["name"] == "model.0.weight")


def last(fields):
    return max(fields["tensors"], key=lambda tensor: tensor["end"])


def shaped(*shape):
    return lambda fields: weight(fields).update(shape=shape, global_shape=shape, offsets=[0] * len(shape))


def larger(fields):
    """A file of 400 GB, as its manifest says."""
    count = 25_000
    tensor, chunks = last(fields), [fmt.digest(b"")] * count
    size_bytes = count * fmt.CHUNK_BYTES
    fields["files"][0]["size_bytes"] = end = tensor["start"] + size_bytes
    tensor.update(dtype="U8", shape=[size_bytes], global_shape=[size_bytes], offsets=[0], end=end)
    tensor.update(chunks=chunks, digest=fmt.digest_of_chunks(chunks))


def header(fields):
    """A file of 2^52 bytes, nearly all of them a header."""
    fields["files"][0].update(header_bytes=2**52, size_bytes=2**52)
    fields["tensors"], fields["state"]["loop"] = [], {}


CONTRADICTIONS = {
    "an unknown dtype": lambda fields: weight(fields).update(dtype="F128"),
    "a shape of too many elements": shaped(2**40),
    "a shape of no machine's word": shaped(10**300, 0),
    "a larger shape": shaped(17, 8),
    "a smaller shape": shaped(15, 8),
    "a negative side": shaped(-1),
    "two negative sides": shaped(-16, -8),
    "a shape without offsets": lambda fields: weight(fields).update(offsets=[]),
    "a part of a tensor": lambda fields: weight(fields).update(global_shape=[32, 8]),
    "bytes before the tensors": lambda fields: weight(fields).update(start=0, end=16 * 8 * 4),
    "bytes behind the end": lambda fields: weight(fields).update(start=10**9, end=10**9 + 16 * 8 * 4),
    "no ranks": lambda fields: fields.update(world_size=0),
    "minus one rank": lambda fields: fields.update(world_size=-1),
    "a rank beyond the last": lambda fields: weight(fields).update(rank=1),
    "states of a rank beyond the last": lambda fields: fields.update(rank_states={"1": {}}),
    "a tensor that is not there": lambda fields: fields["tensors"].remove(weight(fields)),
    "a tensor without a name": lambda fields: fields["state"].update(loop={"$tensor": ["x"]}),
    "a state that is a list": lambda fields: fields.update(state=[]),
    "a state without a position": lambda fields: fields["state"].pop("session"),
    "a position that is a number": lambda fields: fields["state"].update(session=3),
    "a state without random numbers": lambda fields: fields["state"].pop("rng"),
    "a parent that is no checkpoint": lambda fields: fields.update(parent="../../etc"),
    "a file elsewhere": lambda fields: fields["files"][0].update(name="../000000000006-1/rank-0.safetensors"),
    "a tensor elsewhere": lambda fields: weight(fields).update(file="/etc/passwd"),
    "the manifest as a file": lambda fields: fields["files"][0].update(name="manifest.json"),
    "a file that is named twice": lambda fields: fields["files"].append(fields["files"][0]),
    "a file larger than memory": larger,
    "a header larger than memory": header,
    "one digest for all bytes": lambda fields: (larger(fields), last(fields).update(chunks=None)),
    "a gap between two tensors": lambda fields: last(fields).update(start=last(fields)["start"] + 1),
    "an iteration beyond all names": lambda fields: fields.update(iteration=10**12),
    "a number of no machine's word": lambda fields: fields.update(attempt=-(10**300)),
    "chunks that are no digests": lambda fields: weight(fields).update(chunks=["zz"]),
    "another kind of digests": lambda fields: fields.update(digest="crc32"),
    "a view of pairs that are none": lambda fields: weight(fields).update(view="complex128"),
    "a view of bytes that are none": lambda fields: weight(fields).update(view="float8_e5m2"),
    "a tree of 100,000 levels": None,
}


def groups(fields):
    return dict(fields["state"]["optimizer"]["$pairs"])["param_groups"]


UNFIT = {
    # what only the objects of a session show
    "states of modules that are a number": lambda fields: fields["state"]["model"].update(state=3),
    "metadata of a module that is a word": lambda fields: fields["state"]["model"].update(metadata={"": "x"}),
    "a parameter that is a number": lambda fields: fields["state"]["model"]["state"].update({"0.weight": 1}),
    "a frozen parameter that is a number": lambda fields: fields["state"]["model"].update(frozen=[7]),
    "an optimizer without groups": lambda fields: fields["state"].update(optimizer={"$pairs": []}),
    "groups of no parameters": lambda fields: groups(fields)[0].pop("params"),
    "a parameter that no optimizer has": lambda fields: groups(fields)[0]["params"].__setitem__(0, 99),
    "a state of Python's generator that is none": lambda fields: fields["state"]["rng"].update(python=[3]),
    "a state of torch's generator that is none": lambda fields: fields["state"]["rng"].update(torch="x"),
    "a state of NumPy's generator that is none": lambda fields: fields["state"]["rng"].update(numpy=[]),
    "gradients that are a list": lambda fields: fields["state"].update(gradients=[1]),
    "a gradient that is a word": lambda fields: fields["state"].update(gradients={"model": {"0.weight": "x"}}),
}


def contradict(store, name):
    if name == "a tree of 100,000 levels":
        body = b'{"format": 1, "job": "job", "a": ' + b"[" * 100_000
        at(store, fmt.MANIFEST).write_bytes(body + fmt.DIGEST_ENTRY % fmt.digest(body).encode())
    else:
        reseal(at(store, fmt.MANIFEST), (CONTRADICTIONS | UNFIT)[name])


@pytest.mark.parametrize("name", CONTRADICTIONS | UNFIT)
def test_a_start_passes_over_a_checkpoint_that_contradicts_itself_though_its_digests_match(store, name, caplog):
    contradict(store, name)
    trainer = Trainer(store)
    assert trainer.session.resume() == 6
    trainer.crash()
    assert f"{NEWEST} is damaged and passed over" in caplog.text


NOT_SEEN_IN_A_MANIFEST = (
    "a state without a position",
    "a position that is a number",
    "a state without random numbers",
)


@pytest.mark.parametrize("name", [name for name in CONTRADICTIONS if name not in NOT_SEEN_IN_A_MANIFEST])
def test_verifying_reports_a_checkpoint_that_contradicts_itself(store, name):
    contradict(store, name)
    with pytest.raises(DamagedCheckpoint):
        restore.verify(open_store(store), "job", NEWEST)
    if name != "a file larger than memory":
        assert described(open_store(store), "job", NEWEST).state == "damaged"


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("put", [pipe, endless])
@pytest.mark.parametrize("name", [PAYLOAD, fmt.MANIFEST])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_passed_over(store, put, name, caplog):
    put(at(store, name))
    trainer = Trainer(store)
    assert trainer.session.resume() == 6
    trainer.crash()
    assert ("is not a regular file" if put is pipe else "is a symbolic link") in caplog.text
    assert described(open_store(store), "job", NEWEST).state == (
        "damaged" if name == fmt.MANIFEST else "committed"
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("put", [pipe, endless])
@pytest.mark.parametrize("name", ["lineages/000001.json", "attempts/00000001.json", "endings/00000001.json"])
def test_a_pipe_or_a_device_in_the_place_of_a_record_ends_no_start(store, put, name):
    path = store / "job" / name
    path.touch()
    put(path)
    trainer = Trainer(store).run(until=12)
    trainer.crash()
    assert [iteration for iteration, _ in trainer.losses] == [10, 11, 12]
    assert open_store(store).checkpoints("job")[-1].startswith("000000000012-")


@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_the_lock_costs_checkpoints_and_no_training(store, caplog):
    pipe(store / "job" / ".lock")
    trainer = Trainer(store).run(until=12).crash()
    assert [iteration for iteration, _ in trainer.losses] == [10, 11, 12]
    assert "checkpoints start when it is" in caplog.text


@pytest.mark.timeout(120)
def test_a_pipe_among_the_reports_for_a_server_is_left_alone(store):
    from holdfast.server_link.spool import Spool

    folder = store / "job" / "spool"
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "00000001.uid.0.000000000001.batch")
    assert Spool(folder).left_by_others("other", 0) == []


@pytest.mark.parametrize("parent", ["", "latest", "../x", "1-1", 5, [], {}])
def test_a_lineage_with_a_parent_that_is_no_checkpoint_ends_no_start(store, parent):
    path = store / "job" / "lineages" / "000001.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "parent": parent}))
    trainer = Trainer(store)
    assert trainer.session.resume() == 9
    trainer.crash()


def test_a_checkpoint_that_says_what_can_be_is_taken_at_its_word(store):
    """No digest is a signature: whoever can write to a store chooses what is trained on from there."""

    reseal(at(store, fmt.MANIFEST), lambda fields: fields["state"]["loop"].update(best_loss=-1.5))
    trainer = Trainer(store)
    assert trainer.session.resume() == 9
    assert trainer.loop.best_loss == -1.5
    trainer.crash()


def test_to_look_at_a_checkpoint_imports_nothing_that_could_run_what_it_holds(store):
    probe = (
        "import sys\n"
        "from holdfast.checkpoint import restore\n"
        "from holdfast.store import open_store\n"
        f"restore.verify(open_store({str(store)!r}), 'job', {NEWEST!r})\n"
        "assert not {'torch', 'pickle'} & sys.modules.keys() - before, sys.modules.keys()\n"
    )
    probe = probe.replace("import sys\n", "import sys\nbefore = set(sys.modules)\n", 1)
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_what_is_sealed_anew_is_read_as_it_was(store):
    """Else these tests would show nothing."""
    reseal(at(store, fmt.MANIFEST), lambda fields: None)
    assert restore.load(open_store(store), "job", NEWEST).manifest.iteration == 9
    assert sealed({"format": 1})
