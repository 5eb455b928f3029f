"""Each way to write files, in each kind of store, cut at every point by a power cut, a kill or an error."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import restore
from holdfast.errors import HoldfastError
from holdfast.format.parity_file import ParityCode
from holdfast.store import Store, open_store
from holdfast.store.local import LocalStore
from holdfast.store.objects import ObjectStore
from tests.support import object_servers
from tests.support.crash_features import FEATURES, JOB, small_blocks
from tests.support.simulated_files import FailingFiles, SimulatedProcessDeath, crash_states, plant

pytest.importorskip("numpy")

CODE = ParityCode(2, 1)
PARITY = {"alone": None, "parity": CODE}
KILLS = [(feature, parity) for feature in FEATURES for parity in PARITY]
IN_A_BUCKET = [("plain", "parity"), ("links", "alone"), ("incremental", "alone")]
"""What is cut in a bucket by the tests that are not long."""
ERRING = [("plain", CODE), ("links", None), ("planes", CODE), ("incremental", None)]
ERRORS = [errno.EIO, errno.ENOSPC, errno.EMLINK, errno.EXDEV]
CALLS = ["link", "create", "write", "sync", "rename", "sync_directory"]
LINKING = ("links", "planes", "incremental", "new base")
LEAST_STATES, LEAST_KILLS = 40, {"plain": 30, "links": 30, "planes": 30, "incremental": 60, "new base": 50}
"""A matrix that cuts at fewer points does not see what it should."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


@pytest.mark.parametrize("name", FEATURES)
def test_no_power_cut_lists_a_checkpoint_that_is_not_whole_or_loses_one(
    begun: Any, memory: Path, name: str
) -> None:
    feature, (store, files) = FEATURES[name], begun()
    promised: list[tuple[int, set[str]]] = [(len(files.log), set())]
    feature.train(store, lambda listed: promised.append((len(files.log), set(listed))))
    newest = restore.manifest(store, JOB, max(store.checkpoints(JOB)))
    assert any(file.written_by for file in newest.files) == (name in LINKING)
    seen, place = dict[str, set[str]](), memory / "after"
    for point in range(promised[0][0], len(files.log) + 1):
        kept = [listed for at, listed in promised if at <= point][-1]
        for tree in crash_states(files, point):
            if (key := repr(tree)) not in seen:
                shutil.rmtree(place, ignore_errors=True)
                plant(tree, place)
                seen[key] = set(feature.require_sound(LocalStore(place / "store")))
            assert kept <= seen[key]
    assert len(seen) > LEAST_STATES


@pytest.mark.parametrize(("name", "parity"), KILLS)
def test_a_killed_commit_or_removal_leaves_sound_checkpoints_and_the_next_attempt_goes_on(
    begun: Any, name: str, parity: str
) -> None:
    feature, code = FEATURES[name], PARITY[parity]
    for number in itertools.count(1):
        store, files = begun()
        promised: list[set[str]] = [set()]
        files.dies_at, files.changes = number, 0
        try:
            feature.train(store, _promise(promised), code)
        except SimulatedProcessDeath:
            files.revive()
        else:
            break
        _require_next_attempt(store, name, promised[-1], code)
        assert not list((store.root / JOB).glob(".tmp-*"))
    assert number > LEAST_KILLS[name]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("name", "parity"), ERRING)
def test_an_error_of_any_call_leaves_sound_checkpoints(
    memory: Path, name: str, parity: ParityCode | None, call: str, error: int
) -> None:
    feature, wholes = FEATURES[name], None
    for nth in itertools.count(1):
        root = memory / f"{nth}"
        sound = LocalStore(root)
        sound.acquire_attempt(JOB, "uid")
        files = FailingFiles((call,), nth, error)
        with contextlib.suppress(OSError, HoldfastError):
            feature.train(LocalStore(root, files), parity=parity)
        there = feature.require_sound(sound)
        if call == "link" and files.failed:
            wholes = there if wholes is None else wholes
            assert there == wholes, "what cannot be linked is written"
        if not files.failed:
            assert wholes in (None, there)
            break
    assert nth > 2 or (call == "link" and name not in LINKING)


class DyingBucket:
    """Ends the simulated process at the `dies_at`-th change of a bucket: before the server has it, or after."""

    def __init__(self, store: ObjectStore, dies_at: int, *, arrives: bool) -> None:
        self._left, self._arrives, self.is_dead = dies_at, arrives, False
        for name in ("put_new", "upload", "copy", "delete"):
            setattr(store.bucket, name, self._counted(getattr(store.bucket, name)))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self.is_dead or self._left == 0:
                if not self.is_dead and self._arrives:
                    self.is_dead = True
                    change(*args, **options)
                self.is_dead = True
                raise SimulatedProcessDeath
            return change(*args, **options)

        return counted


@pytest.fixture
def buckets(moto: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[str]]:
    """Addresses of empty stores."""
    url = object_servers.use(monkeypatch, moto.address)
    return lambda: (f"{url}/{number}" for number in itertools.count())


@pytest.mark.parametrize("arrives", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("name", "parity"),
    [pytest.param(*each, marks=[pytest.mark.long] if each not in IN_A_BUCKET else []) for each in KILLS],
)
def test_a_process_killed_at_any_change_of_a_bucket_leaves_sound_checkpoints(
    buckets: Any, name: str, parity: str, arrives: bool
) -> None:
    feature, code = FEATURES[name], PARITY[parity]
    for number, url in enumerate(buckets(), 1):
        store = open_store(url)
        store.acquire_attempt(JOB, "uid")
        assert isinstance(store, ObjectStore)
        promised: list[set[str]] = [set()]
        dying = DyingBucket(store, number, arrives=arrives)
        with contextlib.suppress(SimulatedProcessDeath):
            feature.train(store, _promise(promised), code)
        if not dying.is_dead:
            break
        _require_next_attempt(open_store(url), name, promised[-1], code)
    assert number > 7


def _promise(promised: list[set[str]]) -> Callable[[list[str]], None]:
    return lambda listed: promised.append(set(listed))


def _require_next_attempt(store: Store, name: str, promised: set[str], code: ParityCode | None) -> None:
    """Check what a crash left, and have a new attempt go on from it."""
    feature = FEATURES[name]
    there = feature.require_sound(store)
    assert promised <= set(there)
    attempt, newest = store.acquire_attempt(JOB, "next").number, max(there, default=None)
    added = feature.go_on(store, attempt, newest, code)
    assert feature.require_sound(store) == [*there, *added]
    first, second = ([file.written_by for file in restore.manifest(store, JOB, each).files] for each in added)
    assert any(first) == (newest is not None and name in ("links", "planes")), "it links files of the parent again"
    assert any(second) == (name in LINKING)
