"""A local disk in front of a bucket: what is copied when, and what a start finds where."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.draining import DrainResult, drain
from holdfast.checkpoint.scrub import scrub
from holdfast.engine import draining
from holdfast.store import Attempt, Lineage, bucket, http_place, open_store, open_tiers
from holdfast.store.local import LocalStore, LocalWriter
from holdfast.store.records import HaltNote, newest_halt
from holdfast.store.tiers import TwoHistories
from tests.support import object_servers
from tests.support.clock import FakeClock
from tests.support.eventually import eventually
from tests.support.object_servers import Rclone, running
from tests.support.tiny_job import Trainer


@pytest.fixture
def far(rclone, monkeypatch):
    return object_servers.use(monkeypatch, rclone.address)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(http_place, "REQUESTS_RETRIED_SECONDS", 0.2)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(draining, "RETRY_SECONDS", 0.0)


def drained(near, far, **options):
    return Trainer(near, drain=far, **{"drain_every": 2} | options)


def after_copies(far, most=4):
    """Wait after each checkpoint until its copy, if one is due, has arrived."""
    behind = open_store(far)

    def wait(trainer):
        done = trainer.session.iteration // 3
        if trainer.session.iteration % 3 == 0 and done % 2 == 0:
            newest = f"{trainer.session.iteration:012d}-"
            eventually(lambda: any(each.startswith(newest) for each in behind.checkpoints("job")), newest)

    return wait


def iterations(store):
    return [int(checkpoint[:12]) for checkpoint in open_store(store).checkpoints("job")]


def test_every_second_checkpoint_and_the_last_are_copied_and_each_tier_keeps_its_own(tmp_path, far):
    near = tmp_path / "near"
    trainer = drained(near, far, retention="last 2", drain_retention="last 3").run(25, after=after_copies(far))
    trainer.session.close()
    assert iterations(near) == [24, 25]
    assert iterations(far) == [18, 24, 25]
    for checkpoint in open_store(far).checkpoints("job"):
        restore.verify(open_store(far), "job", checkpoint)


def test_a_machine_without_the_directory_goes_on_from_the_bucket_exactly(tmp_path, far):
    whole = Trainer(tmp_path / "whole").run(until=20).crash().losses
    drained(tmp_path / "near", far).run(until=14, after=after_copies(far)).crash()
    shutil.rmtree(tmp_path / "near")
    resumed = drained(tmp_path / "near", far).run(until=20)
    assert resumed.losses == whole[12:]
    assert resumed.session.attempt == 2
    assert [each.number for each in open_store(tmp_path / "near").records("job", Attempt)] == [1, 2]
    resumed.crash()


def test_a_start_takes_the_newest_of_both(tmp_path, far):
    drained(tmp_path / "near", far).run(until=16, after=after_copies(far)).crash()
    resumed = drained(tmp_path / "near", far)
    assert resumed.session.resume() == 15  # in the directory alone
    resumed.crash()


def test_training_starts_while_the_bucket_is_away_and_is_copied_once_it_is_back(
    tmp_path, monkeypatch, caplog, impatient
):
    caplog.set_level(logging.INFO)
    with running(Rclone(tmp_path / "bucket")) as server:
        far = object_servers.use(monkeypatch, server.address)
        drained(tmp_path / "near", far).run(until=7, after=after_copies(far)).crash()
        server.kill()
        trainer = drained(tmp_path / "near", far, drain_every=1).run(until=13)
        assert trainer.losses[0][0] == 7
        assert "does not answer" in caplog.text
        eventually(lambda: "was not copied to" in caplog.text, "the notice of the copy that failed")
        server.start()
        trainer.run(until=19)
        trainer.session.close()
        assert "checkpoints are copied to" in caplog.text
        assert iterations(far)[-1] == 19
        assert [each.number for each in open_store(far).records("job", Lineage)] == [1]
        assert [each.number for each in open_store(far).records("job", Attempt)][-1] == trainer.session.attempt
        assert caplog.text.count("was not copied to") == 1


def copy_here(tries):
    """Copy as the process of a copy does, without the seconds in which it starts and waits for an answer."""

    def copy(queue, checkpoint):
        result = DrainResult()
        try:
            result.sent_bytes = drain(open_store(queue._store.url), queue._job, checkpoint)
        except OSError as error:
            result.problem = str(error)
        tries.append(checkpoint)
        copy.queue = queue
        return result

    return copy


def test_an_hour_without_the_bucket_loses_nothing_and_is_reported_once(tmp_path, monkeypatch, caplog, impatient):
    clock, tries = FakeClock(), []
    copy = copy_here(tries)
    monkeypatch.setattr(draining, "RETRY_SECONDS", 30.0)
    monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(draining.DrainQueue, "_copy", copy)

    def two_minutes_pass(trainer):
        newest = f"{trainer.session.iteration:012d}-1"
        # until a try has ended, its end has the time that it is by then
        eventually(lambda: newest in tries and not copy.queue._is_running, f"a try to copy {newest}")
        clock.wait(120)

    near, options = tmp_path / "near", {"every": 1, "drain_every": 1}
    with running(Rclone(tmp_path / "bucket")) as server:
        far = object_servers.use(monkeypatch, server.address)
        trainer = drained(near, far, **options).run(until=4, after=two_minutes_pass)
        there = iterations(far)
        server.kill()
        trainer.run(until=34, after=two_minutes_pass)  # an hour
        assert iterations(near)[-1] == 34
        server.start()
        assert iterations(far) == there
        trainer.run(until=35, after=two_minutes_pass).crash()
        assert iterations(far) == [*there, 35]
        tiers = open_tiers(open_store(near), far)
        for checkpoint in tiers.checkpoints("job"):
            restore.verify(tiers, "job", checkpoint)
    assert caplog.text.count("was not copied to") == 1


def test_a_full_local_disk_costs_no_copy_and_lists_nothing_that_is_not_there(tmp_path, far, monkeypatch):
    near = tmp_path / "near"
    whole = Trainer(tmp_path / "whole").run(until=20).crash().losses
    trainer = drained(near, far, drain_every=1).run(until=7, after=after_copies(far))

    def is_full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(LocalWriter, "write", is_full)
        trainer.run(until=13)
    eventually(lambda: iterations(far)[-1:] == [6], "the copy of what was durable")
    assert iterations(near)[-1] == 6
    tiers = open_tiers(open_store(near), far)
    for checkpoint in tiers.checkpoints("job"):
        restore.verify(tiers, "job", checkpoint)
    trainer.crash()
    shutil.rmtree(near)
    resumed = drained(near, far, drain_every=1).run(until=20)
    assert resumed.losses == whole[6:]
    resumed.session.close()
    assert iterations(far)[-1] == 20


def test_a_machine_that_knows_nothing_of_the_job_does_not_start_it_anew_without_the_bucket(
    tmp_path, monkeypatch, impatient
):
    monkeypatch.setattr("holdfast.engine.startup.PATIENCE_SECONDS", 0.5)
    with running(Rclone(tmp_path / "bucket")) as server:
        far = object_servers.use(monkeypatch, server.address)
        server.kill()
        trainer = drained(tmp_path / "near", far)
        with pytest.raises(OSError, match="refuses connections"):
            trainer.session.resume()
        trainer.crash()


def test_two_machines_that_both_trained_on_are_told_apart_before_anything_is_changed(
    tmp_path, monkeypatch, impatient
):
    with running(Rclone(tmp_path / "bucket")) as server:
        far = object_servers.use(monkeypatch, server.address)
        drained(tmp_path / "first", far).run(until=7, after=after_copies(far)).crash()
        server.kill()
        drained(tmp_path / "first", far, seed=3).run(until=13).crash()
        server.start()
        drained(tmp_path / "second", far).run(until=13, after=after_copies(far)).crash()
        there = iterations(far)
        before = sorted(path.name for path in (tmp_path / "first" / "job").iterdir())
        with pytest.raises(TwoHistories, match=r"two histories conflict.*move .*/first/job away"):
            drained(tmp_path / "first", far)
        assert iterations(far) == there
        assert sorted(path.name for path in (tmp_path / "first" / "job").iterdir()) == before


def test_a_machine_that_was_replaced_copies_no_more_and_says_so(tmp_path, far, caplog):
    trainer = drained(tmp_path / "near", far).run(until=7, after=after_copies(far))
    open_store(far).acquire_attempt("job", "elsewhere")
    there = iterations(far)
    trainer.run(until=16)
    trainer.session.close()
    assert iterations(far) == there
    assert caplog.text.count("no more are copied") == 1
    assert trainer.session.iteration == 16


@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
def test_damage_on_the_local_disk_is_read_from_the_bucket_and_repaired_from_it(tmp_path, far, caplog, file):
    caplog.set_level(logging.INFO)
    near = tmp_path / "near"
    whole = drained(near, far).run(until=13, after=after_copies(far)).crash().losses
    damaged = near / "job" / "000000000012-1" / file
    damaged.write_bytes(damaged.read_bytes()[:-100] + bytes(100))
    resumed = drained(near, far).run(until=13)
    assert resumed.losses[0] == whole[12]
    assert f"000000000012-1 was repaired in memory: {file}" in caplog.text
    resumed.crash()
    tiers = open_tiers(open_store(near), far)
    assert scrub(tiers, "job", "000000000012-1").state == "repairable"
    assert scrub(tiers, "job", "000000000012-1", repair=True).state == "repaired"
    restore.verify(open_store(near), "job", "000000000012-1")


def damage(store, checkpoint, file="rank-0.safetensors"):
    """Change a byte of a file, in a directory or a bucket."""
    with store.open_file("job", checkpoint, file) as opened:
        data = bytearray(opened.size_bytes)
        opened.read_into(0, memoryview(data))
    data[-1] ^= 1
    if isinstance(store, LocalStore):
        (store.root / "job" / checkpoint / file).write_bytes(data)
    else:
        (folder,) = (each for each in store.survey("job").folders if each.checkpoint == checkpoint)
        store.bucket.upload(f"job/{folder.path}/{file}", [data], None)


@pytest.mark.parametrize("is_replaced", [False, True], ids=["both copies are damaged", "only the bucket is left"])
def test_parity_that_was_drained_repairs_what_was_damaged_after_it(tmp_path, far, caplog, is_replaced):
    """A copy in the bucket that is damaged as well repairs nothing: the parity beside the payload does."""
    caplog.set_level(logging.INFO)
    near, checkpoint = tmp_path / "near", "000000000012-1"
    whole = drained(near, far, parity="4+1").run(until=13, after=after_copies(far)).crash().losses
    behind = open_store(far)
    damage(behind, checkpoint)
    if is_replaced:
        shutil.rmtree(near)
    else:
        damage(open_store(near), checkpoint)
    resumed = drained(near, far, parity="4+1").run(until=13)
    assert resumed.losses[0] == whole[12]
    assert f"{checkpoint} was repaired in memory: rank-0.safetensors" in caplog.text
    resumed.crash()
    for store in [behind] if is_replaced else [open_store(near), behind]:
        assert scrub(store, "job", checkpoint, repair=True).state == "repaired"
        restore.verify(store, "job", checkpoint)


def test_a_pause_is_known_on_another_machine(tmp_path, far):
    here = open_tiers(open_store(tmp_path / "here"), far)
    attempt = here.acquire_attempt("job", "first").number
    here.append("job", HaltNote(attempt=attempt, state="paused", by="ana", order=None, iteration=7, at=1.0))
    here.share_records("job")
    there = open_tiers(open_store(tmp_path / "there"), far)
    there.acquire_attempt("job", "second")
    assert newest_halt(there, "job") == newest_halt(here, "job")


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("step", range(6))
def test_a_copy_that_ends_at_any_step_leaves_no_checkpoint_without_its_payload(tmp_path, far, monkeypatch, step):
    near = tmp_path / "near"
    Trainer(near, parity="4+1").run(until=7).crash()
    tiers, steps = open_tiers(open_store(near), far), iter(range(100))
    real = bucket.Bucket.upload, bucket.Bucket.put_new

    def interrupted(call):
        def of_bucket(*arguments, **options):
            if next(steps) == step:
                raise Interrupted
            return call(*arguments, **options)

        return of_bucket

    with monkeypatch.context() as patched:
        patched.setattr(bucket.Bucket, "upload", interrupted(real[0]))
        patched.setattr(bucket.Bucket, "put_new", interrupted(real[1]))
        with pytest.raises(Interrupted):
            drain(tiers, "job", "000000000006-1")
    behind = open_store(far)
    for checkpoint in behind.checkpoints("job"):
        restore.verify(behind, "job", checkpoint)
    drain(open_tiers(open_store(near), far), "job", "000000000006-1")
    restore.verify(open_store(far), "job", "000000000006-1")


def test_files_that_an_earlier_copy_has_are_not_sent_again(tmp_path, far):
    import torch

    model = torch.nn.ModuleDict({"frozen": torch.nn.Linear(600, 600), "head": torch.nn.Linear(600, 1)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    session = holdfast.Session("job", store=tmp_path / "near", every=1, model=model, optimizer=optimizer)
    session.resume()
    for _ in range(4):
        model["head"](torch.ones(600)).sum().backward()
        optimizer.step()
        session.step()
        session.wait()
    session.close()
    tiers = open_tiers(open_store(tmp_path / "near"), far)
    sent = [drain(tiers, "job", checkpoint) for checkpoint in tiers.checkpoints("job")[-2:]]
    assert sent[1] < sent[0] / 10


def test_what_makes_no_sense_as_tiers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is the store itself"):
        Trainer(tmp_path, drain=tmp_path)
    with pytest.raises(ValueError, match="only a directory is drained"):
        Trainer("s3://bucket/prefix/run", drain=tmp_path)
    with pytest.raises(ValueError, match="drain_every='often'"):
        Trainer(tmp_path, drain=tmp_path / "far", drain_every="often")


def test_a_directory_is_drained_to_a_directory_by_its_path(tmp_path: Path):
    trainer = Trainer(tmp_path / "near", drain=tmp_path / "far", drain_every=1).run(until=4)
    trainer.session.close()
    assert iterations(tmp_path / "far")[-1] == 4
    assert open_store(trainer.session.store).url == trainer.session.store


def test_a_start_finds_the_copies_where_copying_is_switched_off(tmp_path, far, monkeypatch):
    drained(tmp_path / "near", far).run(until=7, after=after_copies(far)).crash()
    there = iterations(far)
    shutil.rmtree(tmp_path / "near")
    monkeypatch.setenv("HOLDFAST_DISABLE", "drain")
    resumed = drained(tmp_path / "near", far, drain_every=1).run(until=10)
    assert resumed.losses[0][0] == 7
    resumed.session.close()
    assert iterations(far) == there


def test_a_disk_of_each_host_is_refused_in_words(tmp_path):
    writer = open_tiers(open_store(tmp_path / "near"), tmp_path / "far")
    writer.acquire_attempt("job", "uid")
    folder = writer.begin("job", "000000000001-1", 1, 10).folder
    other = open_tiers(open_store(tmp_path / "other"), tmp_path / "far")
    with pytest.raises(OSError, match="give a directory that all hosts share"):
        other.join("job", "000000000001-1", 1, folder, 10)
