"""Whatever is planted below a store, nothing outside it is changed, removed, or read as part of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.server_link.spool import BatchKey, Spool, spool_directory
from holdfast.store import Attempt, Ending, Hold, Lineage, LocalStore, Pins, open_store
from holdfast.store.records import FOLDERS
from holdfast.testing.small_checkpoints import FILE, FIRST, JOB, OTHER_FILE, SECOND, THIRD, commit, read
from tests.support import private_mounts
from tests.support.tiny_job import Trainer

LEFTOVER, DAMAGED = ".tmp-00000001-x", f"{FIRST}.damaged-00000001-x"
RECORDS = {
    Attempt: "00000007.json", Ending: "00000007.json", Lineage: "000007.json",
    Pins: "00000007-000001.json", Hold: "7.json",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    store.acquire_attempt(JOB, "first")
    commit(store)
    commit(store, SECOND)
    writer = store.begin(JOB, THIRD, 1, 7)
    writer.write(FILE, [b"tensors"])
    (store.root / JOB / LEFTOVER / "inside").mkdir(parents=True)
    return store


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What would be read as a job, a checkpoint, records and reports, if a link to it were followed."""
    outside = tmp_path / "outside"
    other = LocalStore(outside)
    other.acquire_attempt(JOB, "other")
    commit(other)
    for directory in (
        outside,
        outside / JOB,
        outside / JOB / FIRST,
        *(outside / each for each in FOLDERS.values()),
    ):
        directory.mkdir(exist_ok=True)
        for name in (*RECORDS.values(), ".000001.json-0a", ".repair-0a", "manifest.json", FILE, OTHER_FILE):
            (directory / name).write_text("precious")
        (directory / "00000001.other.0.000000000001.2.batch").write_text("precious")
        (directory / "00000001.other.0.000000000001.2.batch.tmp").write_text("precious")
    return outside


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    paths = sorted(directory.rglob("*"))
    return {str(each): (each.stat().st_mode, each.read_bytes() if each.is_file() else b"") for each in paths}


def replace_by_link(path: Path, target: Path) -> None:
    """Put a link in the place of what is there, which is moved away."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"was-{path.name}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


PLACES = [
    "", LEFTOVER, f"{LEFTOVER}/link", f"{LEFTOVER}/inside/link", DAMAGED, FIRST, THIRD, f"{FIRST}/manifest.json",
    f"{FIRST}/{FILE}", f"{FIRST}/.repair-0a", ".lock", "spool", "spool/00000001.mine.0.000000000001.2.batch.tmp",
    "spool/00000001.mine.0.000000000001.2.batch", *FOLDERS.values(),
    *(f"{FOLDERS[kind]}/{name}" for kind, name in RECORDS.items()),
]  # fmt: skip
TARGETS: dict[str, Callable[[Path], Path]] = {
    "a directory": lambda outside: outside,
    "a job": lambda outside: outside / JOB,
    "a checkpoint": lambda outside: outside / JOB / FIRST,
    "records": lambda outside: outside / "attempts",
    "a file": lambda outside: outside / FILE,
    "a new name": lambda outside: outside / "new",
    "itself": lambda outside: Path("00000001"),
}


def actions(store: LocalStore) -> Iterator[Callable[[], object]]:
    """Everything that is done with a store."""
    attempt = max(1, store_attempt(store))
    spool = spool_directory(store.url, JOB)
    key = BatchKey(1, "mine", 0, "control", 1)
    yield lambda: [store.checkpoints(job) for job in store.jobs()]
    for checkpoint in (FIRST, THIRD):
        yield lambda checkpoint=checkpoint: read(store, checkpoint)
    for kind in FOLDERS:
        yield lambda kind=kind: store.records(JOB, kind)
    for record in (
        Lineage(number=3, iteration=0, parent=None, order=None, attempt=attempt, created_at=1.0),
        Ending(attempt=attempt, reason="finished", iterations=1, at=1.0),
        Pins(attempt=attempt, checkpoints=(), at=1.0),
        Hold(uid="7", checkpoint=FIRST, at=1.0),
    ):
        yield lambda record=record: store.append(JOB, record)
    yield lambda: store.remove_record(JOB, "holds/7.json")
    yield lambda: store.file_replacer(JOB, FIRST).replace(FILE, [b"repaired"])
    yield lambda: copied(store, attempt)
    yield lambda: commit(store, THIRD, attempt)
    yield lambda: commit(store, FIRST, attempt, replace=True)
    for checkpoint in (FIRST, THIRD):
        yield lambda checkpoint=checkpoint: store.delete(JOB, checkpoint, attempt)
    yield lambda: [store.remove_leftover(JOB, each.name) for each in store.leftovers(JOB)]
    yield lambda: store.acquire_attempt(JOB, "second")
    yield lambda: Spool(spool).left_by_others("mine", 0)
    yield lambda: Spool(spool).read(key) == b"precious" and pytest.fail("read outside")
    yield lambda: Spool(spool).write(key, b"report")
    yield lambda: Spool(spool).remove(key)


def store_attempt(store: LocalStore) -> int:
    with contextlib.suppress(OSError):
        return store.latest_attempt(JOB)
    return 1


def copied(store: LocalStore, attempt: int) -> None:
    writer = store.begin(JOB, f"{4:012d}-1", attempt, 7)
    try:
        writer.copy_file(JOB, FIRST, FILE)
        writer.commit(b"{}")
    except BaseException:
        writer.abort()
        raise


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_outside_a_store_is_changed_through_a_link_in_it(
    store: LocalStore, outside: Path, place: str, target: str
) -> None:
    before = contents(outside)
    replace_by_link(store.root / JOB / place, TARGETS[target](outside))
    for number, act in enumerate(actions(store)):
        with contextlib.suppress(OSError, HoldfastError):
            act()
        assert contents(outside) == before, f"by action {number}"
    for read_as in store.root.rglob("*"):
        assert read_as.is_symlink() or not read_as.is_file() or b"precious" not in read_as.read_bytes()


@pytest.mark.parametrize("name", [LEFTOVER, DAMAGED, FIRST])
def test_a_link_is_removed_as_itself(store: LocalStore, outside: Path, name: str) -> None:
    before = contents(outside)
    path = store.root / JOB / name
    replace_by_link(path, outside)
    if name == FIRST:
        store.delete(JOB, FIRST, 1)
    else:
        store.acquire_attempt(JOB, "second")
    assert not os.path.lexists(path)
    assert contents(outside) == before


@pytest.mark.parametrize("replaced", ["directory", "file"])
def test_what_a_link_refers_to_is_damage_and_not_read(store: LocalStore, outside: Path, replaced: str) -> None:
    path = store.root / JOB / FIRST
    replace_by_link(
        path if replaced == "directory" else path / FILE, outside / ("" if replaced == "directory" else FILE)
    )
    assert store.checkpoints(JOB) == [FIRST, SECOND], "it is named, and not passed over in silence"
    with pytest.raises(DamagedCheckpoint, match="is a symbolic link, which is not followed inside a store"):
        read(store)
    assert read(store, SECOND) == b"tensors"


def test_a_link_is_not_handed_on_to_the_next_checkpoint(store: LocalStore, outside: Path) -> None:
    replace_by_link(store.root / JOB / FIRST / FILE, outside / FILE)
    with pytest.raises(DamagedCheckpoint, match="is a symbolic link"):
        copied(store, 1)
    assert store.checkpoints(JOB) == [FIRST, SECOND]


def test_the_root_of_a_store_may_be_a_link(store: LocalStore, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(store.root)
    linked = open_store(link)
    attempt = linked.acquire_attempt(JOB, "second").number
    commit(linked, THIRD, attempt)
    linked.delete(JOB, FIRST, attempt)
    assert linked.checkpoints(JOB) == store.checkpoints(JOB) == [SECOND, THIRD]


def test_a_directory_swapped_for_a_link_while_it_is_written_or_repaired(store: LocalStore, outside: Path) -> None:
    before = contents(outside)
    writer = store.begin(JOB, THIRD, 1, 7)
    repair = store.file_replacer(JOB, FIRST)
    replace_by_link(store.root / JOB / writer.folder, outside)
    replace_by_link(store.root / JOB / FIRST, outside)
    for act in (
        lambda: writer.write("rank-2.safetensors", [b"tensors"]),
        lambda: writer.make_durable(),
        lambda: writer.commit(b"{}"),
        lambda: repair.replace(FILE, [b"repaired"]),
        lambda: repair.replace("new", [b"repaired"]),
    ):
        with pytest.raises((OSError, HoldfastError), match=r"symbolic link|replaced during its repair"):
            act()
    writer.abort()
    assert contents(outside) == before
    assert not os.path.lexists(store.root / JOB / writer.folder), "the link itself goes"


def test_a_file_that_is_a_hard_link_keeps_its_contents(store: LocalStore, outside: Path) -> None:
    before = contents(outside)
    for path in (store.root / JOB / FIRST / FILE, store.root / JOB / LEFTOVER / "inside" / "file"):
        path.unlink(missing_ok=True)
        os.link(outside / FILE, path)
    store.file_replacer(JOB, FIRST).replace(FILE, [b"repaired"])
    assert (read(store), contents(outside)) == (b"repaired", before)
    store.delete(JOB, FIRST, 1)
    store.acquire_attempt(JOB, "second")
    assert contents(outside) == before


@pytest.mark.parametrize(
    "name", [b".tmp-00000001-\n", b".tmp-00000001-\xff", b".tmp-00000001--rf", b"1-1.damaged-1-*"]
)
def test_odd_names_are_removed_as_they_are(store: LocalStore, name: bytes) -> None:
    path = os.fsencode(store.root / JOB) + b"/" + name
    os.mkdir(path)
    with open(path + b"/a\xff\n", "w"):
        pass
    store.acquire_attempt(JOB, "second")
    assert not os.path.lexists(path)
    assert store.checkpoints(JOB) == [FIRST, SECOND]


def test_a_leftover_that_is_no_directory_and_a_deep_one_are_removed_as_far_as_possible(store: LocalStore) -> None:
    job = store.root / JOB
    (job / ".tmp-00000001-file").touch()
    deep = os.open(job / LEFTOVER, os.O_RDONLY)
    for _ in range(3000):  # deeper than a path may be long
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    assert {each.name for each in store.leftovers(JOB)} == set()
    store.acquire_attempt(JOB, "second")
    assert not (job / ".tmp-00000001-file").exists()
    subprocess.run(["rm", "-rf", str(job / LEFTOVER)], check=True)


MOUNTS = f"""
import os, sys
from pathlib import Path
from tests.support import private_mounts
from holdfast.testing.small_checkpoints import JOB, SECOND
from holdfast.store import open_store
root, outside = map(Path, sys.argv[1:])
private_mounts.of_my_own()
job = root / JOB
for place in ({LEFTOVER!r}, ".tmp-00000001-nested/inside", SECOND):
    (job / place).mkdir(parents=True, exist_ok=True)
    private_mounts._run("mount", "--bind", str(outside), str(job / place))
store = open_store(root)
attempt = store.acquire_attempt(JOB, "second").number
removals = [lambda each=each: store.remove_leftover(JOB, each.name) for each in store.leftovers(JOB)]
for remove in (*removals, lambda: store.delete(JOB, SECOND, attempt)):
    try:
        remove()
    except OSError as error:
        print(error)
"""


def test_what_is_mounted_in_a_store_is_not_emptied(store: LocalStore, outside: Path) -> None:
    if reason := private_mounts.why_not("tmpfs"):
        pytest.skip(f"{reason}: no directory was mounted in a store")
    before = contents(outside)
    command = [sys.executable, "-c", MOUNTS, str(store.root), str(outside)]
    run = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "something in it is mounted" in run.stdout
    assert "busy" in run.stdout
    assert contents(outside) == before


@pytest.mark.parametrize("place", [f"job/{FIRST}", f"job/{FIRST}/manifest.json", f"job/{FIRST}/{FILE}"])
def test_a_start_names_a_checkpoint_that_is_a_link_and_resumes_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    Trainer(tmp_path / "s").run(until=7).crash()
    path = tmp_path / "s" / place.replace(FIRST, "000000000006-1")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    trainer = Trainer(tmp_path / "s")
    assert trainer.session.resume() == 3
    trainer.crash()
    assert "000000000006-1 is damaged and passed over" in caplog.text
    assert "is a symbolic link, which is not followed inside a store" in caplog.text


def test_a_job_that_is_a_link_is_refused_by_name_with_the_way_out(
    tmp_path: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(outside)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "job").symlink_to(outside / JOB)
    trainer = Trainer(tmp_path / "s")
    with pytest.raises(OSError, match=r"is a symbolic link.* or mount that there: .*/s/job"):
        trainer.session.resume()
    trainer.crash()
    assert f"{tmp_path}/s/job is a symbolic link" in caplog.text
    assert "does not answer" not in caplog.text
    assert contents(outside) == before
