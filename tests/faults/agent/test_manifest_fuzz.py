"""Mutated manifests whose digests match: each is refused, or loads exactly what its digests cover.

Refused means: as damaged when it is read, or as damaged or unfit by the objects of a session, before anything is
applied to them.
"""

import collections
import contextlib
import copy
import os
import random
import shutil
import time

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint, UnknownFormat
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of
from tests.support.edited_manifests import fields_of, sealed
from tests.support.tiny_job import Trainer

NEWEST = "000000000009-1"
VALUES = [
    None, True, False, 0, 1, -1, 2, 7, 4096, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**300, -(2**63), -(10**300),
    0.5, 1e308, "", "a", "F32", "F128", "U8", "complex128", "float8_e5m2", "rank-0.safetensors", "manifest.json",
    "../x", "/etc/passwd", "\0", "é", "0" * 32, [], [0], [-1], [1, 2, 3], [2**40], [[]], {},
    {"$tensor": "model.0.weight"}, {"$tensor": "x"}, {"$tensor": []}, {"$absent": True}, {"$unknown": 1},
]  # fmt: skip
KEYS = ["x", "$tensor", "$pairs", "model", "rank", "view", "chunks", "1"]
WORDS = [b"9", b"[", b"{", b'"', b",", b"-", b"1e999", b"\\ud800", b"\xff", b"null", b"0" * 400]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    store = tmp_path_factory.mktemp("trained") / "s"
    Trainer(store).run(until=10).crash()
    return store


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One that would resume from it."""
    trainer = Trainer(tmp_path_factory.mktemp("resuming") / "s")
    yield trainer.session
    trainer.crash()


def places(tree):
    """(container, key) of everything in a tree."""
    left, found = [tree], []
    while left:
        item = left.pop()
        entries = item.items() if isinstance(item, dict) else enumerate(item)
        for key, value in entries:
            found.append((item, key))
            if isinstance(value, dict | list):
                left.append(value)
    return found


def mutate_value(rng, fields):
    holder, key = rng.choice(places(fields))
    value = holder[key]
    near = [value + 1, value - 1, -value, value * 2] if type(value) is int else []
    holder[key] = rng.choice(near) if near and rng.random() < 0.5 else copy.deepcopy(rng.choice(VALUES))


def remove(rng, fields):
    holder, key = rng.choice(places(fields))
    del holder[key]


def repeat(rng, fields):
    holder, key = rng.choice(places(fields))
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    else:
        holder[rng.choice(KEYS)] = copy.deepcopy(holder[key])


def exchange(rng, fields):
    (one, key), (other, other_key) = rng.choices(places(fields), k=2)
    one[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(one[key])


def nest(rng, fields):
    holder, key = rng.choice(places(fields))
    for _ in range(rng.choice([1, 10, 100, 400])):
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}


def of_tensors(rng, fields):
    """Where it matters most."""
    index = fields["index"]
    tensor = rng.choice(fields["structure"][0])
    holder = rng.choice([tensor, tensor, index["digests"], index["chunks"], *index["tensors"].values()])
    keys = ["0", "1", "7"] if isinstance(holder, dict) else range(len(holder))
    holder[rng.choice(keys)] = copy.deepcopy(rng.choice(VALUES))


FIELDS = [mutate_value, mutate_value, of_tensors, remove, repeat, exchange]


def changed_bytes(rng, data):
    """The same as text: mutated, cut, repeated, and sealed anew more often than not."""
    body = bytearray(data[: -manifest_files._ENTRY_BYTES])
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(body))
        kind = rng.randrange(4)
        if kind == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            body[at : at + rng.randrange(1, 40)] = b""
        elif kind == 2:
            body[at:at] = rng.choice(WORDS)
        else:
            body[at:at] = body[at : at + rng.randrange(1, 200)]
    seal = manifest_files.DIGEST_ENTRY % fmt.digest(bytes(body)).encode()
    return bytes(body) + (seal if rng.random() < 0.8 else data[-manifest_files._ENTRY_BYTES :])


def mutation(rng, fields, data):
    if rng.random() < 0.25:
        return changed_bytes(rng, data)
    mutated = copy.deepcopy(fields)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # what an earlier one has left may have no place for it
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            rng.choice(FIELDS)(rng, mutated)
        if not places(mutated):
            break
    # last, and once: what is nested deeper cannot be copied here, nor written as JSON
    if places(mutated) and rng.random() < 0.1:
        nest(rng, mutated)
    return sealed(mutated)


def outcome(session, store, payload):
    """How a load ends; AssertionError for one that gives other bytes than the manifest's digests cover."""
    try:
        loaded = restore.load(store, "job", NEWEST)
    except (DamagedCheckpoint, UnknownFormat) as error:
        return type(error).__name__
    except IncompatibleCheckpoint as error:
        assert "this torch has no dtype" in str(error)  # noqa: PT017  # any other is not the manifest's to decide
        return "IncompatibleCheckpoint"
    entries = {tensor.name: tensor for tensor in loaded.manifest.tensors}
    assert loaded.tensors.keys() == entries.keys()
    for name, tensor in loaded.tensors.items():
        entry = entries[name]
        assert fmt.digest_tensor(memoryview(payload)[entry.start : entry.end])[0] == entry.digest
        found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert bytes(bytes_of(found)) == payload[entry.start : entry.end]
    try:
        session._training.check(loaded.manifest)
    except (DamagedCheckpoint, IncompatibleCheckpoint) as error:
        return f"{type(error).__name__} of a session's objects"
    return "loaded"


def fuzz(session, trained, folder, count, seed):
    """Outcomes, and how often each was seen."""
    store = open_store(shutil.copytree(trained, folder / "s"))
    path = store.root / "job" / NEWEST
    data, payload = (path / fmt.MANIFEST).read_bytes(), (path / "rank-0.safetensors").read_bytes()
    fields, seen = fields_of(data), collections.Counter()
    for number in range(count):
        rng = random.Random(f"{seed}, {number}")
        (path / fmt.MANIFEST).write_bytes(mutation(rng, fields, data))
        try:
            seen[outcome(session, store, payload)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of HOLDFAST_TEST_SEED={seed}: {error!r}") from error
    return seen


def test_no_mutated_manifest_does_more_than_be_refused(session, trained, fast_path):
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", 1))
    print(f"HOLDFAST_TEST_SEED={seed}")
    seen = fuzz(session, trained, fast_path, 1_000, seed)
    assert min(seen["DamagedCheckpoint"], seen["loaded"]) > 50


@pytest.mark.long
def test_none_of_100_000_mutated_manifests_does(session, trained, fast_path):
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"\nHOLDFAST_TEST_SEED={seed}")
    started = time.monotonic()
    seen = fuzz(session, trained, fast_path, 100_000, seed)
    print(f"{dict(seen)} in {time.monotonic() - started:.0f} s")
    assert seen.total() == 100_000
