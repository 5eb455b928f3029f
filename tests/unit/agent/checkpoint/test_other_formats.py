"""What another version of Holdfast has written is neither used, nor called damaged, nor removed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast.checkpoint import garbage_collection, restore
from holdfast.checkpoint.scrub import scrub
from holdfast.commands.stores.listing import described
from holdfast.errors import UnknownFormat
from holdfast.retention import Retention
from holdfast.save.completion_marker import has_other_version, read_marker, write_marker
from holdfast.save.draft import Draft
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.server_link.spool import BatchKey, Spool
from holdfast.store import open_store
from tests.support.edited_manifests import reseal
from tests.support.handmade_checkpoints import commit
from tests.support.tiny_job import Trainer

NEWEST = "000000000009-1"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    Trainer(tmp_path / "s").run(until=10).crash()
    return tmp_path / "s"


def write_other_format(store: Path, checkpoint: str, job: str = "job") -> None:
    reseal(store / job / checkpoint / "manifest.json", lambda fields: fields.update(format=1))


def content(store: Path) -> dict[str, str]:
    files = (path for path in store.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_start_over_another_format_is_refused_before_anything_changes(trained: Path) -> None:
    write_other_format(trained, NEWEST)
    before = content(trained)
    with pytest.raises(UnknownFormat, match=r"format 1; this Holdfast reads format 2.*give the job another"):
        Trainer(trained)
    assert content(trained) == before
    other = Trainer(trained, job="another")
    assert other.session.resume() == 0
    other.crash()


def test_it_is_not_called_damaged_and_stays(trained: Path) -> None:
    write_other_format(trained, NEWEST)
    before, store = content(trained), open_store(trained)
    assert described(store, "job", NEWEST).state == "unreadable"
    found = scrub(store, "job", NEWEST, repair=True)
    assert (found.state, found.files) == ("unreadable", [])
    assert "this Holdfast reads format 2" in str(found.reason)
    with pytest.raises(UnknownFormat):
        restore.verify(store, "job", NEWEST)
    assert content(trained) == before


def test_gc_removes_it_only_by_name(tmp_path: Path) -> None:
    for iteration in range(1, 6):
        commit(tmp_path, {"w": torch.zeros(4)}, iteration=iteration)
    write_other_format(tmp_path, "000000000002-1")
    store = open_store(tmp_path)
    planned = garbage_collection.plan(store, "job", Retention(last=1))
    assert [item.name for item in planned.items] == [f"{iteration:012d}-1" for iteration in (1, 3, 4)]
    planned = garbage_collection.plan(store, "job", Retention(last=1), drop=["000000000002-1"])
    assert "000000000002-1" in [item.name for item in planned.items]


def test_retention_keeps_it_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path / "s", retention="last 2")
    others = ["000000000003-1"]

    def write_once(trainer: Trainer) -> None:
        if trainer.session.iteration == 3:
            write_other_format(tmp_path / "s", others[0])

    trainer.run(until=19, after=write_once).crash()
    left = open_store(tmp_path / "s").checkpoints("job")
    assert left == [*others, "000000000015-1", "000000000018-1"]
    assert caplog.text.count("another version of Holdfast wrote 000000000003-1") == 1


def draft(job: str = "job") -> Draft:
    return Draft(
        job=job, iteration=1, lineage=1, attempt=1, kind="scheduled", created_at=0.0, parent=None, world_size=1
    )


def test_a_marker_of_another_version_is_ignored_and_kept(tmp_path: Path) -> None:
    slot = SharedBuffer(tmp_path, 0)
    write_marker(slot.marker, draft())
    found = read_marker(slot)
    assert found is not None
    assert found.draft == draft()
    assert not has_other_version(slot)
    old = msgspec.msgpack.encode(draft())
    slot.marker.write_bytes(hashlib.sha256(old).digest()[:16] + old)
    assert read_marker(slot) is None
    assert has_other_version(slot)
    assert slot.marker.exists()


def test_reports_of_another_version_are_kept_and_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "job" / "spool"
    folder.mkdir(parents=True)
    other = folder / "00000001.old.0.000000000001.batch"
    other.write_bytes(b"of another version")
    caplog.set_level("INFO", "holdfast")
    spool, key = Spool(folder), BatchKey(2, "uid", 0, "control", 1)
    assert spool.write(key, b"a batch")
    assert spool.left_by_others("newer", 0) == [key]
    assert other.read_bytes() == b"of another version"
    assert caplog.text.count("1 unsent reports") == 1


def test_a_session_is_the_public_way_to_the_refusal(trained: Path) -> None:
    write_other_format(trained, NEWEST)
    with pytest.raises(holdfast.UnknownFormat):
        holdfast.Session("job", store=trained, model=torch.nn.Linear(1, 1))
