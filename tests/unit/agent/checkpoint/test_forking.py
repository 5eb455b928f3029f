from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.forking import Fork, ForkRefused, existing_fork, fork
from holdfast.checkpoint.garbage_collection import carry_out, plan
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.retention import parse_retention
from holdfast.store import Attempt, Ending, Hold, Lineage, LocalStore, Store, open_store
from holdfast.system.files import Files
from tests.support.handmade_checkpoints import commit

POINT = checkpoint_id(20, 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    for iteration in (10, 20, 30):
        commit(tmp_path, {"w": torch.arange(4.0) * iteration}, job="main", iteration=iteration)
    return open_store(tmp_path)


def test_a_fork_begins_a_lineage_of_its_own_at_a_copy_of_the_checkpoint(store: Store) -> None:
    made = fork(store, "main", POINT, "branch")
    assert (made.checkpoint, made.iteration, made.lineage, made.new) == (POINT, 20, 2, True)
    found = restore.verify(store, "branch", POINT)
    assert (found.job, found.origin, found.parent) == ("branch", made.origin, None)
    (lineage,) = store.records("branch", Lineage)
    assert (lineage.number, lineage.iteration, lineage.parent, lineage.origin) == (2, 20, POINT, made.origin)
    assert next(restore.candidates(store, "branch")) == (POINT, True)
    assert [ending.reason for ending in store.records("branch", Ending)] == ["forked"]


def test_the_first_start_of_a_fork_says_what_the_attempt_before_it_was(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    fork(store, "main", POINT, "branch")
    caplog.set_level("INFO", logger="holdfast")
    for job in ("branch", "branch", "new", "new"):
        session = holdfast.Session(job, store=store.url, w=torch.nn.Linear(1, 1))
        session.step()
        session.checkpoint()
        session.step()
        session.close()
    begun = [row.getMessage() for row in caplog.records if ": attempt " in row.getMessage()]
    assert begun[0].startswith("branch: attempt 2 (attempt 1 made the fork) ")
    assert not any("made the fork" in line for line in begun[1:])
    assert begun[1].startswith("branch: attempt 3 ")


def test_the_copy_takes_no_room_and_outlives_the_other_job(store: Store, tmp_path: Path) -> None:
    fork(store, "main", POINT, "branch")
    file = f"{POINT}/rank-0.safetensors"
    assert (tmp_path / "main" / file).samefile(tmp_path / "branch" / file)
    for checkpoint in store.checkpoints("main"):
        store.delete("main", checkpoint, 1)
    assert restore.load(store, "branch", POINT).tensors["w"].tolist() == [0.0, 20.0, 40.0, 60.0]


def test_where_no_second_name_can_be_given_the_bytes_are_copied(tmp_path: Path, store: Store) -> None:
    class Unlinked(Files):
        def link(self, source: Path, target: Path) -> None:
            if source.name.endswith(".safetensors"):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            super().link(source, target)

    fork(LocalStore(tmp_path, Unlinked()), "main", POINT, "branch")
    file = f"{POINT}/rank-0.safetensors"
    assert not (tmp_path / "main" / file).samefile(tmp_path / "branch" / file)
    assert restore.verify(store, "branch", POINT).iteration == 20


def test_forked_twice_it_is_forked_once_also_when_the_other_job_is_gone(store: Store, tmp_path: Path) -> None:
    made = fork(store, "main", POINT, "branch")
    again = fork(store, "main", POINT, "branch")
    assert (again.new, again.checkpoint, again.lineage, again.origin) == (False, POINT, 2, made.origin)
    assert len(store.records("branch", Attempt)) == 1
    for path in sorted((tmp_path / "main").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    known = existing_fork(store, "main", "branch")
    assert isinstance(known, Fork)
    assert known.origin == made.origin


def test_a_name_that_is_taken_is_refused(store: Store, tmp_path: Path) -> None:
    commit(tmp_path, {"w": torch.zeros(1)}, job="taken", iteration=5)
    with pytest.raises(ForkRefused, match="taken is another job in"):
        fork(store, "main", POINT, "taken")
    with pytest.raises(ForkRefused, match="main is the job itself"):
        fork(store, "main", POINT, "main")
    fork(store, "main", POINT, "branch")
    with pytest.raises(ForkRefused, match=f"branch is already a fork of main, from {POINT}"):
        fork(store, "main", checkpoint_id(30, 1), "branch")
    with pytest.raises(ForkRefused, match="branch is already a fork of main"):
        fork(store, "taken", checkpoint_id(5, 1), "branch")
    with pytest.raises(ValueError, match="job name"):
        fork(store, "main", POINT, "../elsewhere")


def test_a_job_that_has_begun_and_taken_no_checkpoint_yet_keeps_its_name(store: Store) -> None:
    store.acquire_attempt("young", "a session")
    with pytest.raises(ForkRefused, match=r"young is another job in .*, started on"):
        fork(store, "main", POINT, "young")


def test_a_job_that_takes_the_name_while_the_checkpoint_is_read_is_not_fenced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = restore.verify

    def slowly(*args: Any, **options: Any) -> Any:
        store.acquire_attempt("young", "a session")
        return verify(*args, **options)

    monkeypatch.setattr(restore, "verify", slowly)
    with pytest.raises(ForkRefused, match="young is another job"):
        fork(store, "main", POINT, "young")
    assert [attempt.uid for attempt in store.records("young", Attempt)] == ["a session"]


def refusing(patched: pytest.MonkeyPatch, kind: type[object], error: BaseException) -> None:
    """Have the store raise an error for records of a kind."""
    real = LocalStore.append

    def append(self: LocalStore, job: str, record: Any) -> None:
        if isinstance(record, kind):
            raise error
        real(self, job, record)

    patched.setattr(LocalStore, "append", append)


@pytest.mark.parametrize("at", [None, Lineage, Ending])
def test_a_fork_that_was_broken_off_is_made_whole_by_the_next_call(
    store: Store, monkeypatch: pytest.MonkeyPatch, at: type[object] | None
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if at is None:
            patched.setattr(LocalStore, "begin", dies)
        else:
            refusing(patched, at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            fork(store, "main", POINT, "branch")
    assert store.records("main", Hold) == []
    fork(store, "main", POINT, "branch")
    assert store.checkpoints("branch") == [POINT]
    assert [each.number for each in store.records("branch", Lineage)] == [2]
    assert next(restore.candidates(store, "branch")) == (POINT, True)


def test_what_was_half_begun_from_one_checkpoint_is_not_finished_from_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        refusing(patched, Lineage, OSError(errno.ENOSPC, "no space left"))
        with pytest.raises(OSError, match="no space left"):
            fork(store, "main", POINT, "branch")
    with pytest.raises(ForkRefused, match="a fork named branch from another checkpoint was begun before"):
        fork(store, "main", checkpoint_id(30, 1), "branch")


def test_two_who_fork_to_one_name_at_once_make_one_fork(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = LocalStore.acquire_attempt

    def overtaken(self: LocalStore, job: str, uid: str, *args: object, **options: object) -> object:
        attempt = acquire(self, job, uid)
        monkeypatch.setattr(LocalStore, "acquire_attempt", acquire)
        fork(open_store(self.root), "main", POINT, "branch")
        return attempt

    monkeypatch.setattr(LocalStore, "acquire_attempt", overtaken)
    with contextlib.suppress(Fenced):
        fork(store, "main", POINT, "branch")
    assert store.checkpoints("branch") == [POINT]
    assert len(store.records("branch", Lineage)) == 1


def test_a_damaged_checkpoint_is_no_beginning(store: Store, tmp_path: Path) -> None:
    payload = tmp_path / "main" / POINT / "rank-0.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        fork(store, "main", POINT, "branch")
    assert (store.checkpoints("branch"), store.records("branch", Attempt)) == ([], [])


def test_retention_waits_with_what_is_being_copied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, seen = restore.verify, []

    def retires_meanwhile(*args: object, **options: object) -> object:
        made = plan(store, "main", parse_retention("last 1"))
        seen.extend(item.name for item in made.items)
        carry_out(store, made)
        return verify(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(restore, "verify", retires_meanwhile)
    fork(store, "main", POINT, "branch")
    assert seen == [checkpoint_id(10, 1)]
    assert [item.name for item in plan(store, "main", parse_retention("last 1")).items] == [POINT]


def test_a_hold_of_somebody_who_died_is_forgotten_after_a_day(store: Store) -> None:
    store.append("main", Hold(uid="dead", checkpoint=POINT, at=1.0))
    assert POINT in [item.name for item in plan(store, "main", parse_retention("last 1")).items]


def test_a_fork_of_a_fork_names_the_one_it_comes_from(store: Store) -> None:
    fork(store, "main", POINT, "branch")
    made = fork(store, "branch", POINT, "twig")
    assert (made.origin.job, made.origin.checkpoint, made.lineage) == ("branch", POINT, 2)
    assert restore.manifest(store, "twig", POINT).origin == made.origin


def test_lineages_of_the_new_job_do_not_meet_those_of_the_old(store: Store, tmp_path: Path) -> None:
    store.append("main", Lineage(number=3, iteration=20, parent=POINT, order=None, attempt=1, created_at=1.0))
    commit(tmp_path, {"w": torch.zeros(2)}, job="main", iteration=25, lineage=3)
    assert fork(store, "main", checkpoint_id(25, 3), "branch").lineage == 4


def test_a_fork_keeps_the_parity_of_its_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, {"w": torch.arange(4.0)}, job="main", iteration=20, parity=ParityCode(2, 1))
    store = open_store(tmp_path)
    fork(store, "main", POINT, "branch")
    path = tmp_path / "branch" / POINT / "rank-0.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])
    assert scrub(store, "branch", POINT, repair=True).state == "repaired"
    assert path.read_bytes() == data
    assert restore.verify(store, "branch", POINT).origin is not None


def test_a_damaged_checkpoint_is_not_forked_although_parity_could_repair_it(tmp_path: Path) -> None:
    commit(tmp_path, {"w": torch.arange(4.0)}, job="main", iteration=20, parity=ParityCode(2, 1))
    path = tmp_path / "main" / POINT / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes long"):
        fork(open_store(tmp_path), "main", POINT, "branch")
