"""Snapshots of several ranks in memory that a supervisor holds: which of them make a checkpoint together."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.distributed.ranks import Ranks as OneRank
from holdfast.errors import DamagedCheckpoint, HoldfastError, IncompleteParts
from holdfast.memory_tier.complete_snapshot import complete, complete_snapshots_in
from holdfast.memory_tier.tier import open_memory_tier
from holdfast.save.completion_marker import markers_of
from holdfast.save.host_buffers import Arena
from holdfast.save.run import NotPrepared
from holdfast.save.shared_buffers import SLOT_COUNT, SharedBuffer, SupervisorMemory, claim
from holdfast.save.snapshotter import Snapshotter
from holdfast.save.writer import CheckpointFiles
from holdfast.state.registry import CapturedState
from holdfast.store import open_store
from holdfast.supervisor.crash_commit import rescue
from holdfast.system import supervisor_channel
from holdfast.system.supervisor_channel import PublishedAttempt
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support import persist_job
from tests.support.persist_job import JOB
from tests.support.supervisor_memory import flip, folder, lineage_of

__all__ = ["folder"]

WORLD = 3


class DeadMultiRankAttempt:
    """An attempt of several ranks, of which some have left sealed parts in memory."""

    def __init__(self, folder, tmp_path, world_size=WORLD):
        self.folder, self.store, self.world_size = folder, open_store(tmp_path / "store"), world_size
        self.begin("dead")
        self.store.append(JOB, lineage_of(1, self.attempt))

    def begin(self, uid):
        self.uid, self.attempt = uid, self.store.acquire_attempt(JOB, uid).number

    def leave(self, iteration, ranks=range(WORLD), *, folder="there", lineage=1, **changes):
        """What these ranks have sealed of a checkpoint."""
        for rank in ranks:
            (slot,) = claim(self.folder, [], 1)
            snapshots = Snapshotter(arenas=[Arena(slot)])
            captured = CapturedState(**self._captured(rank, iteration) | changes)
            run = persist_job.copied(
                snapshots, captured, iteration, lineage=lineage, attempt=self.attempt, uid=self.uid, rank=rank,
                world_size=self.world_size, folder=folder,
            )  # fmt: skip
            CheckpointFiles(None, run.draft, run.arena.bytes(run.size_bytes), run.marker).tensors.result()
            snapshots.close()
            slot.release()

    def _captured(self, rank, iteration):
        shared = torch.full((5, rank + 1), float(iteration))
        tensors = {f"model.{rank}": shared, "noise": torch.full((4,), float(rank))}
        trees = {"model": {str(each): {"$tensor": f"model.{each}"} for each in range(self.world_size)}}
        return {
            "trees": trees | {"noise": {"$tensor": "noise"}}, "tensors": tensors, "deferred": set(tensors),
            "rank_local": {"noise"}, "must_match": {"data": f"{iteration} batches"},
        }  # fmt: skip

    def slot(self, iteration, rank):
        markers = markers_of(self.folder, JOB)
        found = next(s for s in markers if (s.draft.iteration, s.draft.rank) == (iteration, rank))
        return SharedBuffer(self.folder, found.number)

    @property
    def trained(self):
        return PublishedAttempt(
            job=JOB, uid=self.uid, attempt=self.attempt, lineage=1, store=self.store.url, server=None
        )  # fmt: skip

    def rescue(self):
        return rescue(self.folder, self.trained)

    def publish_attempt(self):
        """As its rank 0 did when it began."""
        supervisor_channel.publish_attempt(self.trained)


@pytest.fixture
def dead(folder, tmp_path):
    return DeadMultiRankAttempt(folder, tmp_path)


def test_what_all_ranks_have_sealed_is_rescued_as_an_ordinary_checkpoint(dead):
    dead.leave(3)
    saved = dead.rescue()
    assert (saved.draft.id, saved.before) == ("000000000003-1", 0)
    manifest = restore.verify(dead.store, JOB, saved.draft.id)
    assert (manifest.attempt, manifest.world_size) == (dead.attempt, WORLD)
    assert saved.size_bytes == sum(file.size_bytes for file in manifest.files)
    for rank in range(WORLD):
        loaded = restore.load(dead.store, JOB, saved.draft.id, rank=rank)
        assert loaded.tensors["noise"].tolist() == [rank] * 4
        assert loaded.tensors["model.1"].tolist() == [[3.0, 3.0]] * 5
    assert dead.rescue() is None, "it is durable by now"


@pytest.mark.parametrize("missing", range(WORLD))
def test_a_checkpoint_that_one_rank_has_not_sealed_is_none(dead, missing):
    dead.leave(6, [rank for rank in range(WORLD) if rank != missing])
    assert dead.rescue() is None
    assert dead.store.checkpoints(JOB) == []


def test_the_newest_that_is_complete_is_rescued(dead):
    dead.leave(3)
    dead.leave(6, folder="elsewhere")
    dead.leave(9, [0, 2], folder="nowhere")
    assert dead.rescue().draft.iteration == 6


@pytest.mark.parametrize("rank", range(WORLD))
def test_where_one_rank_s_bytes_are_damaged_the_one_before_is_rescued(dead, rank):
    dead.leave(3)
    dead.leave(6)
    flip(dead.slot(6, rank), 8)
    assert dead.rescue().draft.iteration == 3
    flip(dead.slot(3, rank), 8)
    assert dead.rescue() is None, "one that is durable wins"


def test_where_all_there_is_is_damaged_nothing_is_written(dead):
    dead.leave(3)
    flip(dead.slot(3, 1), 8)
    with pytest.raises(DamagedCheckpoint):
        dead.rescue()
    assert dead.store.checkpoints(JOB) == []
    assert not list((dead.store.root / JOB).glob(".tmp-*"))


@pytest.mark.parametrize("change", ["uid", "attempt", "folder", "world_size", "id"])
def test_parts_of_two_checkpoints_are_never_mixed(folder, tmp_path, change):
    dead = DeadMultiRankAttempt(folder, tmp_path)
    dead.leave(3, [0, 1])
    match change:
        case "uid":
            dead.uid = "another"
        case "attempt":
            dead.begin(dead.uid)
        case "world_size":
            dead.world_size += 1
    dead.leave(*((4,) if change == "id" else (3,)), [2], folder="elsewhere" if change == "folder" else "there")
    assert len(markers_of(folder, JOB)) == WORLD
    assert complete_snapshots_in(folder, JOB) == []
    dead.uid = "dead"
    assert dead.rescue() is None
    assert dead.store.checkpoints(JOB) == []


def test_two_tries_of_one_iteration_stay_apart(dead, folder):
    dead.leave(3, [0, 1], folder="first")
    dead.leave(3, folder="second")
    dead.leave(3, [2], folder="third")
    (sealed,) = complete_snapshots_in(folder, JOB)
    assert {marker.draft.folder for marker in sealed.markers} == {"second"}


def test_ranks_that_were_not_at_the_same_data_make_nothing(dead):
    dead.leave(6, [0, 1])
    dead.leave(6, [2], must_match={"data": "5 batches"})
    with pytest.raises(NotPrepared):
        dead.rescue()
    assert dead.store.checkpoints(JOB) == []


def test_parts_that_do_not_make_a_whole_are_not_committed(dead):
    dead.leave(6, [0, 1])
    dead.leave(6, [2], tensors={"noise": torch.zeros(4)}, deferred={"noise"})
    with pytest.raises(IncompleteParts, match=r"model\.2"):
        dead.rescue()
    assert dead.store.checkpoints(JOB) == []
    assert not list((dead.store.root / JOB).glob(".tmp-*"))


def test_a_part_that_is_there_twice_counts_once_and_two_different_ones_make_nothing(dead, folder):
    dead.leave(3)
    dead.leave(3, [1])  # as a host that held it for the rank has it when the rank runs there
    (sealed,) = complete_snapshots_in(folder, JOB)
    assert [marker.draft.rank for marker in sealed.markers] == list(range(WORLD))
    dead.leave(3, [1], must_match={"data": "4 batches"})
    assert complete_snapshots_in(folder, JOB) == []


def test_in_whatever_order_seals_are_found_ranks_have_their_own(dead, folder):
    dead.leave(3)
    for markers in itertools.permutations(markers_of(folder, JOB)):
        (sealed,) = complete(markers)
        assert [marker.draft.rank for marker in sealed.markers] == list(range(WORLD))
        assert [SharedBuffer(folder, number) for number in sealed.numbers] == [
            dead.slot(3, r) for r in range(WORLD)
        ]


def test_an_attempt_that_begins_while_a_rescue_writes_fences_it(dead, tmp_path, monkeypatch):
    dead.leave(3)
    write = type(dead.store.begin(JOB, "000000000001-1", dead.attempt, 1)).write

    def overtaken(writer, *args, **options):
        write(writer, *args, **options)
        if writer.folder and args[0].startswith("rank-1."):
            open_store(tmp_path / "store").acquire_attempt(JOB, "next")

    monkeypatch.setattr("holdfast.store.local.LocalWriter.write", overtaken)
    with pytest.raises(HoldfastError, match="attempt"):
        dead.rescue()
    assert dead.store.checkpoints(JOB) == []


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(launcher, kind):
    """What a job does that nothing disturbs, by rank."""
    return launcher.run(2, "tests.support.memory_tier_workloads.undisturbed", kind=kind)


def _exact(ended, expected):
    """Both starts did, on all ranks, what the undisturbed job does."""
    for found, log in zip(ended, expected, strict=True):
        assert found["before"].items() <= log.items()
        assert found["log"].items() <= log.items()
        assert sorted(found["before"] | found["log"]) == sorted(log)


def test_several_ranks_go_on_from_memory_to_the_bit_and_save_it(folder, tmp_path, launcher, kind, expected):
    ended = launcher.run(
        2,
        "tests.support.memory_tier_workloads.ends_and_goes_on",
        store=str(tmp_path / "store"),
        folder=str(folder),
        kind=kind,
    )
    _exact(ended, expected)
    assert [(each["start"], each["saved"]) for each in ended] == [(6, "000000000006-1")] * 2
    assert "(kept in memory by `holdfast run`; not durable yet, being written)" in ended[0]["told"][0]
    store = open_store(tmp_path / "store")
    assert restore.verify(store, "job", "000000000006-1").attempt == 2
    assert not [*folder.glob("*.marker"), *folder.glob("*.claim")]


@pytest.mark.parametrize("damage", [0, 1])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_where_one_rank_s_bytes_are_damaged_all_go_on_from_the_one_before(
    folder, tmp_path, launcher, kind, expected, damage, max_in_flight
):
    """With one slot that is in the store, with two it is in memory as well."""
    options = {"store": str(tmp_path / "store"), "folder": str(folder), "kind": kind}
    ended = launcher.run(
        2,
        "tests.support.memory_tier_workloads.ends_and_goes_on",
        damage=damage,
        max_in_flight=max_in_flight,
        **options,
    )
    _exact(ended, expected)
    assert [each["start"] for each in ended] == [3, 3]
    assert "iteration 6 in memory is not used" in ended[0]["told"][0]
    from_memory = [told for told in ended[0]["told"] if "kept in memory" in told]
    assert len(from_memory) == max_in_flight - 1
    assert all("also durable" in told for told in from_memory)


@pytest.mark.parametrize("fails", [0, 1])
def test_where_one_rank_cannot_save_what_it_went_on_from_all_train_on(
    folder, tmp_path, launcher, kind, expected, fails
):
    options = {"store": str(tmp_path / "store"), "folder": str(folder), "kind": kind}
    ended = launcher.run(2, "tests.support.memory_tier_workloads.ends_and_goes_on", fails=fails, **options)
    _exact(ended, expected)
    assert [(each["start"], each["saved"]) for each in ended] == [(6, "000000000003-1")] * 2
    store = open_store(tmp_path / "store")
    iterations = [restore.verify(store, "job", each).iteration for each in store.checkpoints("job")]
    assert 6 not in iterations
    assert (iterations[0], iterations[-1]) == (3, max(expected[0])), "those that come after it are taken"


@pytest.mark.parametrize("which", ["one each", "one of them", "none"])
def test_ranks_that_share_no_supervisor_keep_nothing_in_memory(tmp_path, folder, launcher, which):
    other = tmp_path / "other"
    other.mkdir()
    held = SupervisorMemory(other)
    folders = {"one each": [str(folder), str(other)], "one of them": [str(folder), ""], "none": ["", ""]}[which]
    (told, first), (_, second) = launcher.run(
        2, "tests.support.memory_tier_workloads.apart", store=str(tmp_path / "store"), folders=folders
    )
    assert not any([*first, *second])
    about = [text for text in told if text.startswith("memory: ")]
    if which == "none":
        assert about == []
    else:
        (text,) = about
        assert "do not run under one supervisor" in text
    assert not [*folder.glob("*.claim"), *other.glob("*.claim")]
    held.close()


class AgreeingRanks(OneRank):
    """One of several, of which all others are as it says."""

    def __init__(self, rank, others):
        self.rank, self.world_size, self._others = rank, len(others) + 1, others

    def gather(self, data):
        return [data, *(each or data for each in self._others)]


@pytest.fixture
def tier(folder, tmp_path, monkeypatch):
    """Rank 0's, of the next start of so many ranks."""
    monkeypatch.setenv(supervisor_channel.VARIABLE, str(folder))
    told = []

    def made(world_size=WORLD, max_in_flight=1):
        reporter = Reporter(JOB, TrainingPosition())
        reporter.notice = lambda level, code, message: told.append(message)
        made.told = told
        return open_memory_tier(JOB, "next", max_in_flight, AgreeingRanks(0, [None] * (world_size - 1)), reporter)

    return made


def test_another_number_of_ranks_loads_from_the_store(dead, tier):
    dead.leave(3)
    dead.publish_attempt()
    dead.store.acquire_attempt(JOB, "next")
    for world_size in (2, 4):
        other = tier(world_size)
        assert other.candidates(dead.store, []) == []
        other.release()
    (found,) = tier().candidates(dead.store, [])
    assert (found.id, found.numbers) == ("000000000003-1", [dead.slot(3, rank).number for rank in range(WORLD)])


def test_what_ranks_that_are_no_more_have_left_is_given_back_and_no_rank_s_own(dead, tier, folder):
    dead.leave(3)
    held = {rank: os.open(dead.slot(3, rank).memory, os.O_RDWR) for rank in range(WORLD)}
    rank_0, rank_1, rank_2 = (dead.slot(3, rank) for rank in range(WORLD))
    own = tier(2)
    assert [arena.slot for arena in own.arenas] == [rank_0]
    claim(folder, [rank_1.number], 1)
    own.free_unclaimed()
    assert [slot.marker.exists() for slot in (rank_0, rank_1, rank_2)] == [True, True, False]
    assert [os.fstat(fd).st_blocks > 0 for fd in held.values()] == [True, True, False]
    for fd in held.values():
        os.close(fd)


def test_where_there_are_too_few_slots_for_all_ranks_none_has_any_and_the_job_is_told(folder, tier):
    least = tier(2, SLOT_COUNT + 1)
    least.report_start([])
    assert [arena.slot for arena in least.arenas] == [None] * (SLOT_COUNT + 1)
    assert tier.told == [
        "snapshots will not survive a crash, because the supervisor has fewer than "
        f"{2 * SLOT_COUNT + 2} free buffers ({SLOT_COUNT + 1} for each of 2 ranks)"
    ]
    assert not list(folder.glob("*.claim"))


def test_a_part_that_is_gone_since_rank_0_saw_it_is_refused(dead, tier):
    dead.leave(3)
    dead.publish_attempt()
    dead.store.acquire_attempt(JOB, "next")
    own = tier()
    (found,) = own.candidates(dead.store, [])
    dead.slot(3, 2).remove_marker()
    with pytest.raises(DamagedCheckpoint, match="no longer has completion markers of all ranks"):
        own.load(found, None)


def test_a_rank_verifies_what_it_needs_of_the_others_parts_and_nothing_else_of_them(dead, tier):
    dead.leave(3)
    dead.publish_attempt()
    dead.store.acquire_attempt(JOB, "next")
    own = tier()
    (found,) = own.candidates(dead.store, [])
    theirs = next(marker for marker in markers_of(dead.folder, JOB) if marker.draft.rank == 2)
    starts = {slot.name: slot.start for slot in theirs.draft.slots}
    flip(dead.slot(3, 2), starts["noise"])
    loaded = own.load(found, None)
    assert loaded.tensors["noise"].tolist() == [0.0] * 4, "rank 0's, not that which is damaged"
    assert loaded.tensors["model.2"].tolist() == [[3.0] * 3] * 5
    loaded.tensors["model.2"].fill_(7)
    flip(dead.slot(3, 2), starts["noise"])
    assert own.load(found, None).tensors["model.2"].tolist() == [[3.0] * 3] * 5, "what is written goes to a copy"
    flip(dead.slot(3, 2), starts["model.2"])
    with pytest.raises(DamagedCheckpoint, match=r"model\.2"):
        own.load(found, None)
