"""Several ranks make one checkpoint durable, or none of them does and all know why."""

import collections
import errno
import itertools
import os
import threading

import msgspec
import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.forking import fork
from holdfast.checkpoint.scrub import scrub
from holdfast.distributed.ranks import RanksLost
from holdfast.errors import IncompleteParts, describe_error
from holdfast.format.manifest import TensorRange
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.run import NotPrepared
from holdfast.save.structures import KnownStructures
from holdfast.save.two_phase_commit import STAGES, RankCommit, commit_alone
from holdfast.save.writer import write_checkpoint
from holdfast.store import LocalStore
from holdfast.system.files import Files

JOB = "job"
LEAD_STEPS = ["begin", "join", "write", "make_durable", "commit", "rename", "last sync"]
"""The last two are system calls, which raise nothing but OSError."""
STEPS = ["join", "write", "make_durable"]
ERRORS = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    MemoryError("no room"),
    KeyError("typo"),
]


class Wires:
    """Ranks in threads of one process: what one sends another receives under the same tag, until they part."""

    def __init__(self, world_size):
        self.world_size, self._changed, self._parted = world_size, threading.Condition(), False
        self._sent = collections.defaultdict(collections.deque)
        self.sizes = collections.defaultdict(list)
        """Sizes of the messages by sender, receiver and stage."""

    def line(self, rank, breaks=None):
        return RankLink(self, rank, breaks)

    def put(self, key, data):
        with self._changed:
            self._require_all()
            self._sent[key].append(data)
            sender, receiver, tag = key
            self.sizes[sender, receiver, tag % STAGES].append(len(data))
            self._changed.notify_all()

    def take(self, key):
        with self._changed:
            self._changed.wait_for(lambda: self._sent[key] or self._parted)
            if not self._sent[key]:
                self._require_all()
            return self._sent[key].popleft()

    def part(self):
        with self._changed:
            self._parted = True
            self._changed.notify_all()

    def _require_all(self):
        if self._parted:
            raise RanksLost("another rank is gone")


class RankLink:
    """One rank's; at the call that it `breaks` at, (method, how many before it), the ranks part."""

    def __init__(self, wires, rank, breaks):
        self.rank, self.world_size, self._wires = rank, wires.world_size, wires
        self._breaks, self.calls = breaks, collections.Counter()

    def send(self, to, tag, data):
        for rank in to:
            self._count("send")
            self._wires.put((self.rank, rank, tag), data)

    def receive(self, sources, tag):
        return [self._receive(rank, tag) for rank in sources]

    def _receive(self, source, tag):
        self._count("receive")
        return self._wires.take((source, self.rank, tag))

    def _count(self, method):
        if self._breaks == (method, self.calls[method]):
            self._wires.part()
            raise RanksLost("this rank is gone")
        self.calls[method] += 1


class StepFailingStore(LocalStore):
    """One rank's, which raises an error at one step."""

    def __init__(self, root, step=None, error=None):
        super().__init__(root, StepFailingFiles(self))
        self._step, self._error = step, error
        self.renamed = False

    def reach(self, step):
        if step == self._step:
            self._step = None
            raise self._error

    def begin(self, *args):
        self.reach("begin")
        return self._watched(super().begin(*args))

    def join(self, *args):
        self.reach("join")
        return self._watched(super().join(*args))

    def _watched(self, writer):
        for step in ("write", "make_durable", "commit"):
            setattr(writer, step, self._before(step, getattr(writer, step)))
        return writer

    def _before(self, step, call):
        def watched(*args, **options):
            self.reach(step)
            return call(*args, **options)

        return watched


class StepFailingFiles(Files):
    def __init__(self, store):
        self._store = store

    def rename(self, source, target):
        self._store.reach("rename")
        super().rename(source, target)
        self._store.renamed = True

    def link(self, source, target):
        self._store.reach("link")
        super().link(source, target)

    def sync_directory(self, path):
        if self._store.renamed:
            self._store.reach("last sync")
        super().sync_directory(path)


def draft_of(
    rank, world_size, iteration, parity=None, base=False, may_link=True, compress=False, numbers=4, empty=0
):
    """With a `base` that does not change, it is that of the checkpoint before as well; `empty` tensors more."""
    parent = checkpoint_id(iteration - 1, 1) if base and iteration > 1 else None
    slots = [TensorRange("w", "F32", (numbers,), 0, 4 * numbers)]
    if base:
        slots.append(TensorRange("base", "F32", (2 * numbers,), 4 * numbers, 12 * numbers))
    slots += [TensorRange(f"empty.{number}", "F32", (0,), slots[-1].end, slots[-1].end) for number in range(empty)]
    return Draft(
        job=JOB,
        iteration=iteration,
        lineage=1,
        attempt=1,
        kind="scheduled",
        created_at=0.0,
        parent=parent,
        rank=rank,
        world_size=world_size,
        parity=parity,
        may_link=may_link,
        compress=compress,
        slots=slots,
        rank_local={slot.name for slot in slots},
        unchanged={"base"} if base else set(),
        state={"model": {"w": {"$tensor": "w"}}, "place": {"rank": rank, "iteration": iteration}},
    )


class CommitJob:
    """Ranks that share a directory, or `store`."""

    def __init__(self, root, world_size, store=None):
        self.root, self.world_size, self.wires = root, world_size, Wires(world_size)
        self.store, self._shared = store or LocalStore(root), store
        self.store.acquire_attempt(JOB, "first")
        self.stores = {}
        self.known = [KnownStructures() for _ in range(world_size)]
        self.spans = []
        self.make_room = lambda error: False

    def checkpoint(self, iteration=1, *, at=None, number=1):
        """What each rank had of it; `at` says by rank what goes wrong there."""
        found, threads = {}, []
        for rank in range(self.world_size):
            case = (at or {}).get(rank, {})
            part = threading.Thread(target=self._part, args=(found, rank, iteration, number, case), daemon=True)
            part.start()
            threads.append(part)
        for thread in threads:
            thread.join(300)
        assert not [thread for thread in threads if thread.is_alive()], "a rank waits in vain"
        return [found[rank] for rank in range(self.world_size)]

    def _part(self, found, rank, iteration, number, case):
        line = self.wires.line(rank, case.get("breaks"))
        store = self._shared or StepFailingStore(self.root, case.get("step"), case.get("error"))
        names = ("parity", "base", "may_link", "compress", "numbers", "empty")
        kind = {name: case[name] for name in names if name in case}
        draft = draft_of(rank, self.world_size, iteration, **kind)
        numbers = case.get("numbers", 4)
        base = bytes([rank]) * 8 * numbers if case.get("base") else b""
        payload = memoryview(bytes([rank, iteration]) * 2 * numbers + base)
        if case.get("foreign"):
            draft = draft_of(rank, self.world_size, iteration)
            draft.state["model"]["other"] = {"$tensor": "nowhere"}

        def write(draft):
            return write_checkpoint(store, draft, payload)

        try:
            ranks = RankCommit(line, store, self.make_room, self.known[rank])
            if "declined" in case:
                ranks.decline(number, case["declined"])
                found[rank] = NotPrepared(case["declined"])
            else:
                ranks.commit(number, draft, case.get("problem"), write, on_durable=self.spans.extend)
                found[rank] = None
        except Exception as error:  # a thread's edge: whoever asks looks at it
            found[rank] = error

    def assert_whole(self, *iterations):
        assert self.store.checkpoints(JOB) == [checkpoint_id(iteration, 1) for iteration in iterations]
        for iteration in iterations:
            manifest = restore.verify(self.store, JOB, checkpoint_id(iteration, 1))
            assert [file.name for file in manifest.files] == [
                f"rank-{rank}.safetensors" for rank in range(self.world_size)
            ]
            for rank in range(self.world_size):
                loaded = restore.load(self.store, JOB, checkpoint_id(iteration, 1), rank=rank)
                assert bytes(loaded.tensors["w"].numpy().tobytes()) == bytes([rank, iteration]) * 8
                assert loaded.state["place"] == {"rank": rank, "iteration": iteration}

    @property
    def half_done(self):
        return [path.name for path in (self.root / JOB).glob(".tmp-*")]


def test_what_each_rank_took_is_told_by_rank_0_the_slowest_first(tmp_path, monkeypatch):
    took = {0: 0.2, 1: 0.5, 2: 0.1}
    monkeypatch.setattr("holdfast.save.rank_votes._seconds", lambda written: (0.1, 0.01, took[written.rank]))
    job = CommitJob(tmp_path, 3)
    job.checkpoint()
    told = [(each.rank, each.snapshot_seconds, each.stall_seconds, each.persist_seconds) for each in job.spans]
    assert told == [(1, 0.1, 0.01, 0.5), (0, 0.1, 0.01, 0.2), (2, 0.1, 0.01, 0.1)]


def test_of_a_checkpoint_that_failed_nothing_is_told_of_ranks(tmp_path):
    job = CommitJob(tmp_path, 2)
    job.checkpoint(at={1: {"problem": NotPrepared("the copy failed")}})
    assert job.spans == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_all_have_written_is_a_checkpoint(tmp_path, world_size):
    job = CommitJob(tmp_path, world_size)
    assert job.checkpoint() == [None] * world_size
    job.assert_whole(1)
    assert job.half_done == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_a_parity_file_from_which_its_part_is_repaired(tmp_path, world_size):
    job = CommitJob(tmp_path, world_size)
    assert (
        job.checkpoint(at={rank: {"parity": ParityCode(2, 1)} for rank in range(world_size)})
        == [None] * world_size
    )
    job.assert_whole(1)
    for rank in range(world_size):
        path = job.store.path(JOB, checkpoint_id(1, 1)) / f"rank-{rank}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert restore.load(job.store, JOB, checkpoint_id(1, 1), rank=rank).repaired
    found = scrub(job.store, JOB, checkpoint_id(1, 1), repair=True)
    assert {each.file for each in found.files} == {f"rank-{rank}.safetensors" for rank in range(world_size)}
    assert found.state == "repaired"
    job.assert_whole(1)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
ALL_FULL = [
    {0: {"step": "begin", "error": FULL}},
    {0: {"step": "write", "error": QUOTA}},
    {0: {"step": "commit", "error": FULL}},
    {1: {"step": "join", "error": FULL}},
    {2: {"step": "make_durable", "error": QUOTA}},
    {rank: {"step": "write", "error": FULL} for rank in range(3)},
]


@pytest.mark.parametrize("at", ALL_FULL)
def test_where_rank_0_makes_room_all_ranks_write_again(tmp_path, at):
    job, calls = CommitJob(tmp_path, 3), []
    job.make_room = lambda error: calls.append(error) or True
    assert job.checkpoint(at=at) == [None] * 3
    assert len(calls) == 1
    job.assert_whole(1)
    assert job.half_done == []


@pytest.mark.parametrize("at", ALL_FULL)
def test_where_no_room_can_be_made_it_ends_for_all(tmp_path, at):
    job, calls = CommitJob(tmp_path, 3), []
    job.make_room = lambda error: calls.append(error)
    assert all(job.checkpoint(at=at))
    assert len(calls) == 1
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "other", [{"step": "write", "error": OSError(errno.EIO, "broken")}, {"problem": NotPrepared("torn")}]
)
def test_no_room_is_made_for_a_checkpoint_that_fails_for_another_reason_as_well(tmp_path, rank, other):
    job = CommitJob(tmp_path, 3)
    job.make_room = lambda error: pytest.fail("nothing may be removed")
    ended = job.checkpoint(at={rank: {"step": "write", "error": FULL}, 2: other})
    assert all(ended)
    assert job.store.checkpoints(JOB) == []


def test_a_rank_that_declines_ends_what_begins_again(tmp_path):
    job = CommitJob(tmp_path, 3)
    job.make_room = lambda error: True
    ended = job.checkpoint(at={0: {"step": "begin", "error": FULL}, 2: {"declined": "it has no copy"}})
    assert "rank 2: it has no copy" in str(ended[0])
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])


CASES = [
    (world_size, rank, step, error)
    for world_size in (1, 2, 4)
    for rank in range(world_size)
    for step, error in itertools.product(LEAD_STEPS if rank == 0 else STEPS, ERRORS)
    if step not in ("rename", "last sync") or isinstance(error, OSError)
]


@pytest.mark.parametrize(("world_size", "rank", "step", "error"), CASES)
def test_one_that_fails_leaves_nothing_and_all_are_told_which_it_was(tmp_path, world_size, rank, step, error):
    job = CommitJob(tmp_path, world_size)
    ended = job.checkpoint(at={rank: {"step": step, "error": error}})
    assert ended[rank] is error
    for other, outcome in enumerate(ended):
        if other != rank:
            assert isinstance(outcome, NotPrepared)
            assert str(outcome) == f"rank {rank}: {describe_error(error)}"
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])
    assert job.checkpoint(2, number=2) == [None] * world_size
    job.assert_whole(2)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("torn", [False, True])
def test_a_rank_with_nothing_to_write_ends_it_for_all(tmp_path, rank, torn):
    job = CommitJob(tmp_path, 3)
    ended = job.checkpoint(at={rank: {"problem": NotPrepared("it is torn", torn=torn)}})
    for other, outcome in enumerate(ended):
        where = "" if other == rank else f"rank {rank}: "
        assert (str(outcome), outcome.torn) == (f"{where}it is torn", torn)
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])
    assert job.checkpoint(2, number=2) == [None] * 3


@pytest.mark.parametrize("declining", [{0}, {1}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_ranks_that_decline_end_it_for_all(tmp_path, declining):
    job = CommitJob(tmp_path, 3)
    ended = job.checkpoint(at={rank: {"declined": "no memory"} for rank in declining})
    for rank, outcome in enumerate(ended):
        assert isinstance(outcome, NotPrepared)
        if rank not in declining:
            assert str(outcome) == f"rank {min(declining)}: no memory"
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])
    assert job.checkpoint(2, number=2) == [None] * 3
    job.assert_whole(2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_that_make_no_whole_are_not_committed(tmp_path, rank):
    job = CommitJob(tmp_path, 3)
    ended = job.checkpoint(at={rank: {"foreign": True}})
    assert isinstance(ended[0], IncompleteParts)
    assert {str(outcome) for outcome in ended} == {
        f"tensor nowhere: 'model' of rank {rank} refers to it, but it is not stored"
    }
    assert (job.store.checkpoints(JOB), job.half_done) == ([], [])
    assert job.checkpoint(2, number=2) == [None] * 3


BREAKS = [(0, "send", 0), (0, "send", 1), (0, "receive", 0), (0, "receive", 1), (0, "send", 2), (0, "send", 3),
          (1, "receive", 0), (1, "send", 0), (1, "receive", 1), (2, "receive", 0), (2, "send", 0),
          (2, "receive", 1)]  # fmt: skip


@pytest.mark.parametrize(("rank", "method", "before"), BREAKS)
def test_where_ranks_part_no_other_waits_and_there_is_all_or_nothing(tmp_path, rank, method, before):
    job = CommitJob(tmp_path, 3)
    ended = job.checkpoint(at={rank: {"breaks": (method, before)}})
    committed = ended[0] is None
    assert committed == (checkpoint_id(1, 1) in job.store.checkpoints(JOB))
    job.assert_whole(*([1] if committed else []))
    assert any(isinstance(outcome, RanksLost) for outcome in ended) or (rank, method) == (0, "send")
    job.store.acquire_attempt(JOB, "second")
    assert job.half_done == []


def test_several_at_the_same_time_are_kept_apart(tmp_path):
    job, found = CommitJob(tmp_path, 3), {}

    def take(number):
        at = {1: {"step": "write", "error": ERRORS[0]}} if number == 3 else {}
        found[number] = job.checkpoint(number, number=number, at=at)

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[number] for number in (1, 2, 4, 5)] == [[None] * 3] * 4
    assert found[3][1] is ERRORS[0]
    job.assert_whole(1, 2, 4, 5)
    assert job.half_done == []


def test_each_rank_shares_the_file_of_its_own_base(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    job = CommitJob(tmp_path, 3)
    at = {rank: {"base": True} for rank in range(3)}
    for iteration in (1, 2, 3):
        assert job.checkpoint(iteration, at=at, number=iteration) == [None] * 3
    first, _, third = job.store.checkpoints(JOB)
    files = {file.name: file.written_by for file in restore.manifest(job.store, JOB, third).files}
    assert files == {f"rank-{rank}.safetensors": None for rank in range(3)} | {
        f"rank-{rank}.{first}.safetensors": first for rank in range(3)
    }
    for checkpoint in job.store.checkpoints(JOB)[:2]:
        job.store.delete(JOB, checkpoint, 1)
    restore.verify(job.store, JOB, third)
    for rank in range(3):
        found = restore.load(job.store, JOB, third, rank=rank).tensors
        assert found["base"].numpy().tobytes() == bytes([rank] * 32)
        assert found["w"].numpy().tobytes() == bytes([rank, 3]) * 8


def test_after_damage_that_rank_0_knows_of_no_rank_links_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    job = CommitJob(tmp_path, 2)
    at = {rank: {"base": True} for rank in range(2)}
    job.checkpoint(1, at=at)
    job.checkpoint(2, at={0: {"base": True, "may_link": False}, 1: {"base": True}}, number=2)
    files = restore.manifest(job.store, JOB, checkpoint_id(2, 1)).files
    assert [file.written_by for file in files] == [None] * 4


@pytest.mark.parametrize("step", ["link", *STEPS])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_with_shared_files_leaves_the_checkpoint_before(tmp_path, monkeypatch, rank, step):
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    job = CommitJob(tmp_path, 2)
    at = {rank: {"base": True} for rank in range(2)}
    job.checkpoint(1, at=at)
    failing = {"step": step, "error": OSError(errno.EIO, "the device failed"), "base": True}
    job.checkpoint(2, at=at | {rank: failing}, number=2)
    job.checkpoint(3, at=at, number=3)
    assert job.store.checkpoints(JOB)[0] == checkpoint_id(1, 1)
    for checkpoint in job.store.checkpoints(JOB):
        restore.verify(job.store, JOB, checkpoint)
    assert job.half_done == []


def votes(job):
    """Sizes of the last votes, by rank."""
    return [job.wires.sizes[rank, 0, 1][-1] for rank in range(1, job.world_size)]


def structure_of(job, iteration, rank=1):
    paths = job.store.path(JOB, checkpoint_id(iteration, 1)).glob(f"rank-{rank}.structure-*.json")
    (path,) = (path for path in paths if "-copy-" not in path.name)
    return path


def test_a_structure_is_sent_and_written_once_and_then_named_by_its_digest(tmp_path):
    job = CommitJob(tmp_path, 3)
    at = {rank: {"empty": 200, "base": True} for rank in range(3)}
    assert job.checkpoint(1, at=at) == [None] * 3
    assert min(votes(job)) > 200 * len("empty.000")
    assert job.checkpoint(2, at=at, number=2) == [None] * 3
    assert max(votes(job)) < 600
    assert all(structure_of(job, 2, rank).samefile(structure_of(job, 1, rank)) for rank in range(3))
    job.store.delete(JOB, checkpoint_id(1, 1), 1)
    assert job.checkpoint(3, at=at, number=3) == [None] * 3
    assert max(votes(job)) < 600
    manifest = restore.verify(job.store, JOB, checkpoint_id(3, 1))
    assert len(manifest.tensors) == 3 * 202


def test_only_a_rank_whose_part_has_changed_sends_it_again(tmp_path):
    job = CommitJob(tmp_path, 3)
    at = {rank: {"empty": 200} for rank in range(3)}
    job.checkpoint(1, at=at)
    job.checkpoint(2, at=at | {2: {"empty": 201}}, number=2)
    assert [size < 600 for size in votes(job)] == [True, False]
    are_same = [structure_of(job, 2, rank).name == structure_of(job, 1, rank).name for rank in range(3)]
    assert are_same == [True, True, False]
    job.checkpoint(3, at=at | {2: {"empty": 201}}, number=3)
    assert [size < 600 for size in votes(job)] == [True, True]
    job.assert_whole(1, 2, 3)


def test_a_part_that_no_longer_makes_a_whole_is_found_when_it_changes(tmp_path):
    job = CommitJob(tmp_path, 3)
    assert job.checkpoint(1) == [None] * 3
    error, *_ = job.checkpoint(2, at={1: {"foreign": True}}, number=2)
    assert "tensor nowhere: 'model' of rank 1 refers to it, but it is not stored" in str(error)
    assert job.checkpoint(3, number=3) == [None] * 3
    job.assert_whole(1, 3)


LOSSES = {
    "short": lambda job, patch: structure_of(job, 1).write_bytes(b"[]"),
    "gone": lambda job, patch: structure_of(job, 1).unlink(),
    "no links": lambda job, patch: patch.setattr(Files, "link", refused),
}


def refused(*_):
    raise OSError(errno.EPERM, "no links here")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_structure_that_cannot_be_linked_is_written_again(tmp_path, monkeypatch, loss):
    job, at = CommitJob(tmp_path, 2), {rank: {"base": True} for rank in range(2)}
    job.checkpoint(1, at=at)
    LOSSES[loss](job, monkeypatch)
    assert job.checkpoint(2, at=at, number=2) == [None] * 2
    assert restore.verify(job.store, JOB, checkpoint_id(2, 1)).world_size == 2
    assert structure_of(job, 2).stat().st_nlink == 1


def test_after_damage_a_structure_is_written_again(tmp_path):
    job, at = CommitJob(tmp_path, 2), {rank: {"base": True} for rank in range(2)}
    job.checkpoint(1, at=at)
    job.checkpoint(2, at=at | {0: {"base": True, "may_link": False}}, number=2)
    assert [structure_of(job, 2, rank).stat().st_nlink for rank in range(2)] == [1, 1]


def test_parts_of_the_manifest_are_repaired_from_their_copies(tmp_path):
    job, checkpoint = CommitJob(tmp_path, 3), checkpoint_id(1, 1)
    job.checkpoint(at={rank: {"parity": ParityCode(2, 1)} for rank in range(3)})
    folder = job.store.path(JOB, checkpoint)
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "rank-1.index.json").unlink()
    structure_of(job, 1).write_bytes(b"[]")
    damaged = {"rank-1.index.json", structure_of(job, 1).name}
    assert {each.partition(":")[0] for each in restore.load(job.store, JOB, checkpoint).repaired} == damaged
    found = scrub(job.store, JOB, checkpoint, repair=True)
    assert ({each.file for each in found.files}, found.state) == (damaged, "repaired")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound


def test_a_fork_of_several_ranks_needs_nothing_of_the_other_job(tmp_path):
    job, checkpoint = CommitJob(tmp_path, 3), checkpoint_id(1, 1)
    job.checkpoint(at={rank: {"parity": ParityCode(2, 1)} for rank in range(3)})
    fork(job.store, JOB, checkpoint, "other")
    job.store.delete(JOB, checkpoint, 1)
    assert scrub(job.store, "other", checkpoint).state == "sound"
    for rank in range(3):
        loaded = restore.load(job.store, "other", checkpoint, rank=rank)
        assert loaded.state["place"] == {"rank": rank, "iteration": 1}


def test_room_is_also_needed_for_what_a_forked_child_writes(tmp_path):
    class FullStore(LocalStore):
        def begin(self, job, checkpoint, attempt, size_bytes):
            raise OSError(f"{size_bytes} bytes are too many")

    draft = msgspec.structs.replace(draft_of(0, 1, 1), image_bytes=1000)
    with pytest.raises(OSError, match="1016 bytes"):
        commit_alone(FullStore(tmp_path), [draft], lambda unwritten: unwritten)
