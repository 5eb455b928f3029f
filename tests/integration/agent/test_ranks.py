"""How ranks come to the same decision, and what they are told where they cannot."""

import signal

import pytest

import holdfast
from benchmarks.ranks.world import JOB
from holdfast.checkpoint import restore
from holdfast.distributed import ranks, side_group
from holdfast.store import LocalStore
from tests.support import rank_communication_workloads

WORLD = 3


def test_a_process_by_itself_decides_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = ranks.join()
    assert (alone.rank, alone.world_size, alone.leads) == (0, 1, True)
    assert alone.decide(lambda: 5, int) == 5
    with pytest.raises(KeyError):
        alone.run_on_all(lambda: rank_communication_workloads.raise_(KeyError("mine")))


def test_a_session_made_before_the_process_group_says_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"rank 1 of 4.*init_process_group before.*or unset both"):
        holdfast.Session("m", store=tmp_path)


def test_one_rank_that_is_started_like_several_is_alone(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks.join().world_size == 1


def test_all_have_the_answer_of_rank_0(launcher):
    assert (
        launcher.run(WORLD, "tests.support.rank_communication_workloads.decide")
        == [[True] * len(rank_communication_workloads.VALUES)] * WORLD
    )


@pytest.mark.parametrize("failing", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_an_error_is_the_same_on_all_ranks_and_names_the_rank(launcher, failing):
    found = launcher.run(WORLD, "tests.support.rank_communication_workloads.errors", failing=failing)
    for kind, error in rank_communication_workloads.ERRORS.items():
        expected = "RemoteError" if kind == "other" else type(error).__name__
        for rank, told in enumerate(found):
            (decided, decided_text), (worked, worked_text) = told[kind]
            assert decided == (type(error).__name__ if rank == 0 else expected)
            own = rank == failing[0]
            assert worked == (type(error).__name__ if own else expected)
            assert own or f"rank {failing[0]}: " in worked_text, worked_text
            if rank != 0 and kind != "no text":
                assert str(error).strip("'") in decided_text


@pytest.mark.parametrize("how", ["dies", "closes"])
@pytest.mark.parametrize("loser", range(WORLD))
def test_all_that_wait_are_told_at_once_that_a_rank_is_gone(launcher, how, loser):
    """Each waits in several threads, for those that are left as well."""
    with launcher.start(WORLD, "tests.support.rank_communication_workloads.lose", loser=loser, how=how) as members:
        for member in members:
            member.hear("ready")
        for member in members:
            member.go_on()
        for member in members:
            if how == "dies" and member.number == loser:
                assert member.wait() == -9
                continue
            assert member.wait() == 0, member.account()
            names, texts = member.result()
            assert names == ["RanksLost"]
            if member.number != loser:
                assert len(texts) == 1, texts
                assert texts[0].startswith("another rank of this job has ended or does not respond"), texts


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_all_that_wait_for_each_other_name_the_rank_at_the_end(launcher, how):
    workload = "tests.support.rank_communication_workloads.wait_in_a_chain"
    with launcher.start(4, workload, how=how) as members:
        for member in members[:3]:
            assert member.wait() == 0, member.account()
            kind, text = member.result()
            assert kind == "RanksLost"
            assert text.startswith("another rank of this job has ended or does not respond: rank 3 ("), text


def test_a_rank_that_is_late_is_named_by_all_that_wait_for_it(launcher):
    workload = "tests.support.rank_communication_workloads.wait_in_a_chain"
    with launcher.start(4, workload, how="late") as members:
        for member in members[:3]:
            member.hear(f"rank {member.number} waits for rank 3 to write a checkpoint")
        members[3].go_on()
        for member in members[:3]:
            assert member.wait() == 0, member.account()
            assert member.result() is None


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_groups_of_processes_commit_over_gloo(launcher, tmp_path, world_size):
    workload = "tests.support.rank_communication_workloads.commit_checkpoints"
    launcher.run(world_size, workload, root=str(tmp_path), count=3)
    store = LocalStore(tmp_path)
    for checkpoint in store.checkpoints(JOB):
        assert restore.verify(store, JOB, checkpoint).world_size == world_size
    assert len(store.checkpoints(JOB)) == 3


def test_an_exchange_ends_where_a_broadcast_has_failed_that_is_not_waited_for(launcher):
    with launcher.start(3, "tests.support.rank_communication_workloads.drop_broadcast") as members:
        assert members[2].wait() == 0
        for said in ("ready", "failed"):
            for member in members[:2]:
                member.hear(said)
            for member in members[:2]:
                member.go_on()
        assert [member.wait() for member in members[:2]] == [0, 0]
        assert [member.result()[0] for member in members[:2]] == ["RanksLost", "RanksLost"]


def test_all_that_wait_are_told_where_gloo_is_stuck(launcher):
    with launcher.start(2, "tests.support.rank_communication_workloads.let_go_while_stuck") as members:
        for member in members:
            member.hear("ready")
        members[0].go_on()
        assert members[0].wait() == 0, "what is stuck holds up no end"
        told = ("RanksLost", "this rank has closed its connections to the other ranks")
        assert members[0].result() == dict.fromkeys(["receive", "send", "gather"], told)
        members[1].go_on()


def test_a_word_that_is_here_is_not_late(launcher):
    assert launcher.run(2, "tests.support.rank_communication_workloads.hear_late") == [5, 5]


@pytest.mark.long
@pytest.mark.parametrize("where", ["join", "gather", "decide"])
def test_waiting_for_the_others_can_be_interrupted(launcher, where):
    with launcher.start(2, "tests.support.rank_communication_workloads.interrupted", where=where) as members:
        members[1].hear("waits")
        members[1].kill(signal.SIGINT)
        assert members[1].wait() == 0
        assert members[1].result() == "interrupted"
        members[0].go_on()


@pytest.mark.parametrize("text", ["", "[pair.cc:1] connect [127.0.0.1]:5: Connection refused. This"])
def test_ranks_that_cannot_connect_are_told_of_the_interface(monkeypatch, text):
    monkeypatch.setattr(side_group.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(side_group.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        side_group.dist, "new_group", lambda **_: rank_communication_workloads.raise_(RuntimeError(text))
    )
    told = "other ranks over gloo.*" + ("Connection refused" if text else "RuntimeError") + ".*GLOO_SOCKET_IFNAME"
    with pytest.raises(holdfast.HoldfastError, match=told):
        side_group.SideGroup()


def test_an_error_of_its_own_is_not_lost_with_a_rank(launcher):
    assert launcher.run(WORLD, "tests.support.rank_communication_workloads.own_error_first") == [
        ("KeyError", "'mine'"),
        None,
        ("KeyError", "'mine'"),
    ]


def test_the_ranks_talk_on_when_the_script_has_destroyed_its_process_group(launcher):
    assert (
        launcher.run(WORLD, "tests.support.rank_communication_workloads.destroy") == [(7, ["0", "1", "2"])] * WORLD
    )


def test_a_long_wait_is_told(launcher):
    with launcher.start(2, "tests.support.rank_communication_workloads.wait_long") as members:
        assert (
            members[1]
            .hear("told ")
            .startswith("rank 1 waits for the other ranks: each of them must create the session")
        )
        members[0].go_on()
        members[1].hear("told rank 1 waits for the other ranks: each must call session.step()")
        members[0].go_on()
        assert [member.wait() for member in members] == [0, 0]
