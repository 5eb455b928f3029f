"""Snapshots in the memory of other hosts: what a start takes from where, and what it never takes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.checkpoint import restore
from holdfast.distributed.ranks import Ranks as OneRank
from holdfast.format.manifest import TensorRange
from holdfast.peers.connection import PeerConnection, PeerRefused, ReadMarker, StoreReplica
from holdfast.peers.places import RankPlace
from holdfast.peers.replica_sender import ReplicaSender
from holdfast.peers.tier import open_peer_memory_tier
from holdfast.save.completion_marker import write_marker
from holdfast.save.draft import Draft
from holdfast.save.run import RunState
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.store import open_store
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from holdfast_server.queries.recovery import complete_snapshots
from tests.support.eventually import eventually
from tests.support.multi_rank import launcher as launcher

WORKLOAD = "tests.support.peers_workloads.loses_hosts_and_goes_on"


@pytest.fixture
def hosts(tmp_path):
    """The folder of a supervisor on each of three hosts, and of the ones that replace them."""
    held, folders = [], []
    for name in ("a", "b", "c", "new"):
        folder = tmp_path / f"host-{name}"
        folder.mkdir()
        held.append(SupervisorMemory(folder))
        folders.append(str(folder))
    yield folders
    for each in held:
        each.close()


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(launcher, kind):
    return {
        ranks: launcher.run(ranks, "tests.support.memory_tier_workloads.undisturbed", kind=kind)
        for ranks in (3, 4)
    }


def assert_exact(ended, expected):
    for found, log in zip(ended, expected, strict=True):
        assert found["before"].items() <= log.items()
        assert found["log"].items() <= log.items()
        assert max(found["log"]) == max(log)


@pytest.mark.parametrize("lost", range(3))
def test_when_one_of_three_hosts_is_lost_all_resume_from_what_memory_holds(
    tmp_path, launcher, hosts, kind, expected, lost
):
    a, b, c, new = hosts
    before, after = [a, a, b, c], [new if host == hosts[lost] else host for host in (a, a, b, c)]
    store = str(tmp_path / "store")
    ended = launcher.run(4, WORKLOAD, store=store, before=before, after=after, kind=kind)
    assert [each["start"] for each in ended] == [6] * 4
    assert_exact(ended, expected[4])
    held = {before[rank]: each["held"].snapshots for rank, each in enumerate(ended) if each["held"] is not None}
    assert list(held) == [a, b, c], "the first rank of each host reports for it"
    newest = complete_snapshots(held, 1)[0]
    assert (newest.iteration, newest.needs) == (6, frozenset()), "no host is needed"
    told = ended[0]["told"]
    assert any("resumed from iteration 6 (kept in memory" in text for text in told)
    assert not [text for each in ended for text in each["told"] if "is not used" in text]
    assert restore.verify(open_store(store), "job", "000000000006-1").attempt == 2, "the next attempt saves it"
    for host in after:
        assert not [*(tmp_path / host).glob("*.marker"), *(tmp_path / host).glob("*.claim")]


def test_when_two_of_three_hosts_are_lost_the_store_is_read(tmp_path, launcher, hosts, kind, expected):
    a, b, c, new = hosts
    options = {"before": [a, a, b, c], "after": [a, a, new, new], "kind": kind}
    ended = launcher.run(4, WORKLOAD, store=str(tmp_path / "store"), **options)
    assert [each["start"] for each in ended] == [3] * 4
    assert_exact(ended, expected[4])


WRONG = {
    "flipped": "does not match its digest",
    "truncated": "is shorter than its snapshot",
    "bytes of another iteration": "does not match its digest",
}


@pytest.mark.parametrize("damage", WRONG)
def test_a_damaged_copy_is_named_and_the_next_one_is_used(tmp_path, launcher, hosts, kind, expected, damage):
    """Rank 2's own memory is damaged, so that it and the others take its part from the other host."""
    a, b, _, _ = hosts
    options = {"before": [a, a, b], "after": [a, a, b], "damaged": [(b, 2, damage)], "kind": kind}
    ended = launcher.run(3, WORKLOAD, store=str(tmp_path / "store"), **options)
    assert [each["start"] for each in ended] == [6] * 3
    assert_exact(ended, expected[3])
    (text,) = [text for text in ended[2]["told"] if "is not used" in text]
    assert text.startswith("peers: rank 2's part of the snapshot of iteration 6 in the memory of ")
    assert "digest" in text


@pytest.mark.parametrize("damage", [*WRONG, "marker of another iteration", "no marker"])
def test_where_no_sound_copy_of_a_part_is_left_all_use_the_snapshot_before(
    tmp_path, launcher, hosts, kind, expected, damage
):
    """Host b is lost, and the copy of its part on host a is damaged."""
    a, b, _, new = hosts
    options = {"before": [a, a, b], "after": [a, a, new], "damaged": [(a, 2, damage)], "kind": kind}
    ended = launcher.run(3, WORKLOAD, store=str(tmp_path / "store"), **options)
    assert [each["start"] for each in ended] == [3] * 3
    assert_exact(ended, expected[3])
    if damage in WRONG:
        assert any("no sound copy of rank 2's part is left" in text for text in ended[0]["told"])


def test_another_number_of_ranks_resumes_from_memory_too(tmp_path, launcher, hosts, kind):
    a, b, c, new = hosts
    store = str(tmp_path / "store")
    trained = launcher.run(4, "tests.support.peers_workloads.trains", store=store, hosts=[a, a, b, c], kind=kind)
    sent, states = trained[0]
    assert sent > 0
    resumed = launcher.run(3, "tests.support.peers_workloads.resumes", store=store, hosts=[a, b, new], kind=kind)
    for start, state, _ in resumed:
        assert (start, state) == (sent, states[sent])
    told = resumed[0][2]
    assert any(f"resumed from iteration {sent} (kept in memory" in text for text in told)
    kept = open_store(store)
    assert [restore.verify(kept, "job", each).world_size for each in kept.checkpoints("job")][-1] == 3


class RanksLike(OneRank):
    """Rank 0 of several; `others` is what the other ones announce, by default the same."""

    def __init__(self, world_size, **others):
        self.world_size, self._others = world_size, others

    def gather(self, data):
        if not self._others:
            return [data] * self.world_size
        other = msgspec.structs.replace(msgspec.msgpack.decode(data, type=RankPlace), **self._others)
        return [data, *[msgspec.msgpack.encode(other)] * (self.world_size - 1)]


@pytest.fixture
def tier(hosts, monkeypatch):
    """A tier of rank 0, and what it told the user."""
    monkeypatch.setenv(supervisor_channel.VARIABLE, hosts[0])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def made(ranks):
        told, reporter = [], Reporter("job", TrainingPosition())
        reporter.notice = lambda level, code, message: told.append(message)
        return open_peer_memory_tier("job", "uid", 1, ranks, reporter), told

    return made


def test_on_one_host_the_setting_has_no_effect_and_says_so(tier):
    alone, told = tier(OneRank())
    alone.report_start([])
    assert told == ["peers=1 has no effect: the job has one rank"]
    assert [arena.slot is not None for arena in alone.arenas] == [True]
    alone.release()


def test_a_host_without_a_supervisor_is_named(tier):
    made, told = tier(RanksLike(2, machine="other", host="node-7", unusable="no supervisor holds memory there"))
    made.report_start([])
    assert told == [
        "snapshots will not survive a crash, because of rank 1 on node-7: no supervisor holds memory there"
    ]
    assert [arena.slot for arena in made.arenas] == [None]
    assert made.sender is None


def test_while_a_snapshot_of_another_host_is_received_the_tier_says_so(tier, tmp_path):
    made, _ = tier(RanksLike(2, machine="other"))
    place = made._places[0]
    draft = Draft(
        job="job", iteration=1, lineage=1, attempt=1, kind="scheduled", created_at=0.0, parent=None, world_size=2,
        rank=1, slots=[TensorRange("w", "F32", (2,), 0, 8)],
    )  # fmt: skip
    write_marker(tmp_path / "marker", draft)
    assert not made.is_receiving
    with contextlib.closing(PeerConnection.open(place.address, place.port, place.token)) as connection:
        connection.send(StoreReplica(marker=(tmp_path / "marker").read_bytes(), size_bytes=draft.size_bytes))
        connection.receive_reply()  # now it waits for the bytes
        assert made.is_receiving
        assert not made.is_sending
    eventually(lambda: not made.is_receiving, "the end of the transfer")
    made.release()


def test_who_does_not_know_the_token_stores_and_reads_nothing(tier, hosts):
    made, _ = tier(RanksLike(2, machine="other"))
    place = made._places[0]
    for token in (bytes(16), place.token):
        with contextlib.closing(PeerConnection.open(place.address, place.port, token)) as connection:
            connection.send(ReadMarker(number=0))
            with pytest.raises((OSError, PeerRefused)) as refused:
                connection.receive_reply()
            assert isinstance(refused.value, PeerRefused) is (token == place.token), "it holds no snapshot"
    made.release()


def test_a_snapshot_that_a_lost_connection_stopped_is_sent_again():
    tried, told = [], []

    class Unlucky(ReplicaSender):
        def _send(self, run):
            tried.append(run.id)
            if len(tried) == 1:
                raise TimeoutError("timed out")
            return True

    reporter = Reporter("job", TrainingPosition())
    reporter.notice = lambda level, code, message: told.append(message)
    sender = Unlucky(RankPlace(host="b", machine="b", supervisor=None), 1, reporter)
    run = SimpleNamespace(id="000000000003-1", draft=SimpleNamespace(kind="scheduled", iteration=3))
    sender.run_changed(run, RunState.WRITING)
    eventually(lambda: sender.sent_iteration == 3, "the second try")
    sender.close()
    assert tried == ["000000000003-1"] * 2
    assert told == [
        "the snapshot of iteration 3 was not sent to rank 1 on b: timed out. If this host is lost, the job "
        "resumes from an older one, or from the store"
    ]
