"""Whatever happens to the bytes of a checkpoint, nothing else than what was written is ever restored."""

import random
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.protocol import wire
from holdfast.store import open_store
from holdfast.telemetry.reporter import Reporter
from tests.support.edited_manifests import decode_manifest, encode_manifest
from tests.support.tiny_job import Trainer

NEWEST, BEFORE = "000000000009-1", "000000000006-1"
PAYLOAD = "rank-0.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "s"
    Trainer(store).run(until=10).crash()
    assert open_store(store).checkpoints("job")[-2:] == [BEFORE, NEWEST]
    return store


class Victim:
    """The newest checkpoint's files in memory, and on disk as a mutation leaves them."""

    def __init__(self, store):
        self.root, self.store = store, open_store(store)
        self.sound = {name: self.path(name).read_bytes() for name in (PAYLOAD, fmt.MANIFEST)}
        self.other = {name: self.path(name, BEFORE).read_bytes() for name in self.sound}
        self.tensors = restore.manifest(self.store, "job", NEWEST).tensors

    def path(self, name, checkpoint=NEWEST):
        return Path(self.root) / "job" / checkpoint / name

    def write(self, files):
        for name, data in files.items():
            with self.path(name).open("r+b") as file:  # in place: ext4 flushes a file that is written anew
                file.write(data)
                file.truncate()


@pytest.fixture(scope="module")
def victim(trained, tmp_path_factory):
    store = tmp_path_factory.mktemp("victim") / "s"
    shutil.copytree(trained, store)
    return Victim(store)


def flip(data, at, bit):
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def flipped_bit(name):
    def mutate(rng, victim):
        data = victim.sound[name]
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        return {name: flip(data, at, bit)}, f"bit {bit} of byte {at} of {name}"

    return mutate


def flipped_bit_of_a_number(rng, victim):
    """In what is restored as it stands there: a learning rate, an iteration, a position in the data."""
    data = victim.sound[fmt.MANIFEST]
    digits = [at for at, byte in enumerate(data) if byte in b"0123456789"]
    at, bit = rng.choice(digits), rng.randrange(4)
    return {fmt.MANIFEST: flip(data, at, bit)}, f"bit {bit} of the digit at {at}"


def truncated(rng, victim):
    name = rng.choice(list(victim.sound))
    length = rng.choice([0, rng.randrange(len(victim.sound[name])), len(victim.sound[name]) - 1])
    return {name: victim.sound[name][:length]}, f"{name} cut to {length} bytes"


def appended(rng, victim):
    name = rng.choice(list(victim.sound))
    more = rng.choice([b" ", b"\n", b"\0", rng.randbytes(rng.randrange(1, 5000)), victim.sound[name]])
    return {name: victim.sound[name] + more}, f"{len(more)} bytes behind {name}"


def swapped_tensors(rng, victim):
    data = bytearray(victim.sound[PAYLOAD])
    while True:
        a, b = rng.sample(victim.tensors, 2)
        size = min(a.end - a.start, b.end - b.start)
        first, second = data[a.start : a.start + size], data[b.start : b.start + size]
        if first != second:
            break
    data[a.start : a.start + size], data[b.start : b.start + size] = second, first
    return {PAYLOAD: bytes(data)}, f"{a.name} swapped with {b.name}"


def lost_stretch(rng, victim):
    """What a disk or a file system that loses a write leaves there: zeros, or what was there before."""
    name = rng.choice(list(victim.sound))
    data, before = bytearray(victim.sound[name]), victim.other[name]
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([16, 512, 4096]))
    data[start:end] = rng.choice([bytes(end - start), before[start:end].ljust(end - start, b"\0")])
    return {name: bytes(data)}, f"bytes {start} to {end} of {name} are not the new ones"


def swapped_file(rng, victim):
    names = rng.choice([[PAYLOAD], [fmt.MANIFEST], [PAYLOAD, fmt.MANIFEST]])
    return {name: victim.other[name] for name in names}, f"{names} are those of the checkpoint before"


MUTATIONS = [
    (flipped_bit(PAYLOAD), 350),
    (flipped_bit(fmt.MANIFEST), 350),
    (flipped_bit_of_a_number, 150),
    (truncated, 100),
    (appended, 60),
    (swapped_tensors, 60),
    (lost_stretch, 100),
    (swapped_file, 10),
]


def mutations(victim):
    for number, (mutate, count) in enumerate(MUTATIONS):
        for seed in range(count):
            rng = random.Random(f"{number}, {seed}")
            while True:
                files, what = mutate(rng, victim)
                if any(victim.sound[name] != data for name, data in files.items()):
                    break  # else nothing was damaged: a lost stretch may have been zeros before
            yield files, what


def refused(victim):
    """The file that is named as damaged; None for a checkpoint that loads."""
    try:
        restore.load(victim.store, "job", NEWEST)
    except DamagedCheckpoint as error:
        return error.file


def test_no_damage_is_ever_restored(victim):
    assert refused(victim) is None
    wrong, count = [], 0
    for files, what in mutations(victim):
        victim.write(files)
        if (named := refused(victim)) not in (PAYLOAD, f"{NEWEST}/{fmt.MANIFEST}"):
            wrong.append(f"{what}: {named}")
        count += 1
        victim.write(victim.sound)
    assert wrong == []
    assert count >= 1000
    assert refused(victim) is None


@pytest.mark.parametrize("sample", range(0, 1180, 118))
def test_a_session_falls_back_and_says_which_file_and_why(trained, tmp_path, sample, caplog, monkeypatch):
    events = []
    monkeypatch.setattr(Reporter, "event", lambda reporter, event: events.append(event))
    shutil.copytree(trained, tmp_path / "s")
    victim = Victim(tmp_path / "s")
    files, what = list(mutations(victim))[sample]
    victim.write(files)
    with pytest.raises(DamagedCheckpoint) as caught:
        restore.load(victim.store, "job", NEWEST)
    trainer = Trainer(tmp_path / "s")
    assert trainer.session.resume() == 6, what
    trainer.crash()
    (told,) = [e for e in events if isinstance(e, wire.Checkpoint) and e.state == "damaged"]
    assert (told.id, told.reason) == (NEWEST, str(caught.value))
    assert f"checkpoint {NEWEST} is damaged and passed over: {caught.value}" in caplog.text


def test_the_chunk_of_a_large_tensor_is_told(tmp_path, caplog):
    def session():
        model = torch.nn.Linear(2048, 2560)  # 21 MB: two digests
        return holdfast.Session("job", store=tmp_path / "s", every=1, model=model, incremental=False)

    first = session()
    for _ in range(2):
        first.resume()
        first.step()
        first.wait(300)
    first._close("SIGKILL")
    store = open_store(tmp_path / "s")
    (tensor,) = (t for t in restore.manifest(store, "job", "000000000002-1").tensors if t.name == "model.weight")
    payload = tmp_path / "s" / "job" / "000000000002-1" / PAYLOAD
    payload.write_bytes(flip(payload.read_bytes(), tensor.start + fmt.CHUNK_BYTES, 0))
    second = session()
    assert second.resume() == 1
    second._close("SIGKILL")
    chunk = f"bytes {tensor.start + fmt.CHUNK_BYTES:,} to {tensor.end:,} of the file does not match its digest"
    assert f"000000000002-1 is damaged and passed over: {PAYLOAD}: tensor model.weight, {chunk}" in caplog.text


def reseal(manifest_path, change):
    """Change a manifest as somebody who can write to a store can: it verifies."""
    manifest = decode_manifest(manifest_path.read_bytes())
    change(manifest.state)
    manifest_path.write_bytes(encode_manifest(manifest))


@pytest.mark.parametrize("value", [{"$dtype": "save"}, "save", None], ids=str)
def test_a_crafted_checkpoint_calls_no_function_of_torch(tmp_path, value, caplog):
    victim = tmp_path / "a file of the user's"
    victim.write_text("precious")

    def resumed():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        session = holdfast.Session("job", store=tmp_path / "s", scheduler=scheduler, every=1)
        return scheduler, session, session.resume()

    scheduler, session, _ = resumed()
    with session:
        for metric in (2.0, 1.0):
            scheduler.step(metric)
            session.step()
            session.wait(300)
    newest = f"{2:012d}-1"
    store = open_store(tmp_path / "s")
    assert store.checkpoints("job")[-1] == newest

    def craft(state):
        state["scheduler"]["$pairs"] += [["_is_better", value], ["best", str(victim)]]

    reseal(tmp_path / "s" / "job" / newest / fmt.MANIFEST, craft)
    restore.verify(store, "job", newest)
    scheduler, session, iteration = resumed()
    with session:
        scheduler.step(0.5)
    assert iteration == 1
    assert scheduler.best == 0.5
    assert "state.scheduler" in caplog.text
    assert victim.read_text() == "precious"
