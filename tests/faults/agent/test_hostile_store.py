"""What can be done to a job by writing to its store, and what not; docs/checkpoint-format.md says the same."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from holdfast.checkpoint import restore
from holdfast.commands.stores.listing import described
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files
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


NAME, DTYPE, SHAPE, GLOBAL_SHAPE, OFFSETS, VIEW = range(6)
"""Places in the entry of a tensor in the structure."""


def number(fields, name="model.0.weight"):
    return [tensor[NAME] for tensor in fields["structure"][0]].index(name)


def weight(fields):
    return fields["structure"][0][number(fields)]


def with_weight(place, value):
    return lambda fields: weight(fields).__setitem__(place, value)


def file(fields):
    return fields["index"]["files"][0]


def placed(*runs):
    """Say which tensors are in the file; the last number is counted from behind."""

    def change(fields):
        count = len(fields["structure"][0])
        fields["index"]["tensors"][PAYLOAD] = [[first, count + last] for first, last in runs]

    return change


def named(name):
    """Give the file another name."""

    def change(fields):
        file(fields).update(name=name)
        fields["index"]["tensors"] = {name: fields["index"]["tensors"][PAYLOAD]}

    return change


def larger(fields):
    """A file of 400 GB, as its manifest says."""
    count, at = 25_000, len(fields["structure"][0]) - 1
    chunks, size_bytes = [fmt.digest(b"")] * count, count * fmt.CHUNK_BYTES
    tensor = fields["structure"][0][at]
    tensor[DTYPE], tensor[SHAPE] = "U8", [size_bytes]
    fields["index"]["chunks"][str(at)] = chunks
    fields["index"]["digests"][at] = fmt.digest_of_chunks(chunks)
    sizes = sum(fmt.ITEM_BYTES[dtype] * math.prod(shape) for _, dtype, shape, *_ in fields["structure"][0])
    file(fields)["size_bytes"] = file(fields)["header_bytes"] + sizes


def header(fields):
    """A file of 2^52 bytes, nearly all of them a header."""
    file(fields).update(header_bytes=2**52, size_bytes=2**52)
    fields["structure"] = [[]]
    fields["index"].update(tensors={}, digests=[], chunks={})
    fields["index"]["state"]["loop"] = {}


def of_state(change):
    return lambda fields: change(fields["index"]["state"])


CONTRADICTIONS = {
    "an unknown dtype": with_weight(DTYPE, "F128"),
    "a shape of too many elements": with_weight(SHAPE, [2**40]),
    "a shape of no machine's word": with_weight(SHAPE, [10**300, 0]),
    "a larger shape": with_weight(SHAPE, [17, 8]),
    "a smaller shape": with_weight(SHAPE, [15, 8]),
    "a negative side": with_weight(SHAPE, [-1]),
    "two negative sides": with_weight(SHAPE, [-16, -8]),
    "a shape without offsets": with_weight(OFFSETS, []),
    "a part of a tensor": with_weight(GLOBAL_SHAPE, [32, 8]),
    "a tensor that is in the file twice": placed([0, -1], [0, -1]),
    "a tensor in no file": placed([1, -1]),
    "tensors before the first": placed([-1, -1]),
    "tensors behind the last": placed([0, 10**12]),
    "a digest too few": lambda fields: fields["index"]["digests"].pop(),
    "no ranks": lambda fields: fields.update(world_size=0),
    "minus one rank": lambda fields: fields.update(world_size=-1),
    "a rank beyond the last": lambda fields: fields["structure"].append([]),
    "an index of a rank beyond the last": lambda fields: fields.update(
        ranks=[{"size_bytes": 0, "digest": "0" * 32, "files": []}]
    ),
    "no index": lambda fields: fields.pop("index"),
    "a structure elsewhere": lambda fields: fields.update(structure={"size_bytes": 1, "digest": "../../x"}),
    "a tensor that is not there": lambda fields: fields["structure"][0].remove(weight(fields)),
    "a tensor without a name": of_state(lambda state: state.update(loop={"$tensor": ["x"]})),
    "a state that is a list": lambda fields: fields["index"].update(state=[]),
    "a state without a position": of_state(lambda state: state.pop("session")),
    "a position that is a number": of_state(lambda state: state.update(session=3)),
    "a state without random numbers": of_state(lambda state: state.pop("rng")),
    "a parent that is no checkpoint": lambda fields: fields.update(parent="../../etc"),
    "a file elsewhere": named("../000000000006-1/rank-0.safetensors"),
    "tensors elsewhere": lambda fields: fields["index"].update(tensors={"/etc/passwd": [[0, 1]]}),
    "the manifest as a file": named("manifest.json"),
    "an index as a file": named("rank-0.index.json"),
    "a file that is named twice": lambda fields: fields["index"]["files"].append(file(fields)),
    "a file larger than memory": larger,
    "a header larger than memory": header,
    "one digest for all bytes": lambda fields: (larger(fields), fields["index"]["chunks"].clear()),
    "a header that is longer": lambda fields: file(fields).update(header_bytes=file(fields)["header_bytes"] + 1),
    "an iteration beyond all names": lambda fields: fields.update(iteration=10**12),
    "a number of no machine's word": lambda fields: fields.update(attempt=-(10**300)),
    "chunks that are no digests": lambda fields: fields["index"].update(chunks={number(fields): ["zz"]}),
    "another kind of digests": lambda fields: fields.update(digest="crc32"),
    "a view of pairs that are none": with_weight(VIEW, "complex128"),
    "a view of bytes that are none": with_weight(VIEW, "float8_e5m2"),
    "a tree of 100,000 levels": None,
}


def groups(state):
    return dict(state["optimizer"]["$pairs"])["param_groups"]


UNFIT = {
    # what only the objects of a session show
    "states of modules that are a number": lambda state: state["model"].update(state=3),
    "metadata of a module that is a word": lambda state: state["model"].update(metadata={"": "x"}),
    "a parameter that is a number": lambda state: state["model"]["state"].update({"0.weight": 1}),
    "a frozen parameter that is a number": lambda state: state["model"].update(frozen=[7]),
    "an optimizer without groups": lambda state: state.update(optimizer={"$pairs": []}),
    "groups of no parameters": lambda state: groups(state)[0].pop("params"),
    "a parameter that no optimizer has": lambda state: groups(state)[0]["params"].__setitem__(0, 99),
    "a state of Python's generator that is none": lambda state: state["rng"].update(python=[3]),
    "a state of torch's generator that is none": lambda state: state["rng"].update(torch="x"),
    "a state of NumPy's generator that is none": lambda state: state["rng"].update(numpy=[]),
    "gradients that are a list": lambda state: state.update(gradients=[1]),
    "a gradient that is a word": lambda state: state.update(gradients={"model": {"0.weight": "x"}}),
}


def contradict(store, name):
    if name == "a tree of 100,000 levels":
        body = b'{"format": 2, "job": "job", "a": ' + b"[" * 100_000
        at(store, fmt.MANIFEST).write_bytes(body + manifest_files.DIGEST_ENTRY % fmt.digest(body).encode())
    else:
        change = CONTRADICTIONS[name] if name in CONTRADICTIONS else of_state(UNFIT[name])
        reseal(at(store, fmt.MANIFEST), change)


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
    os.mkfifo(folder / "00000001.uid.0.000000000001.2.batch")
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

    reseal(at(store, fmt.MANIFEST), lambda fields: fields["index"]["state"]["loop"].update(best_loss=-1.5))
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
    assert sealed({"format": 2})
