import os
import signal

import pytest
from faulty_store import hear
from persisting import JOB, faulty, running

from holdfast.persist import Choice
from holdfast.store import open_store

COSTS = {"thread": 0.041, "process": 0.012}


def run(choice, costs=COSTS, *, persists=None, checkpoints=12):
    """Checkpoints that cost what they cost; the backends that wrote them."""
    used = []
    for _ in range(checkpoints):
        used.append(choice.current)
        choice.measured(used[-1], costs[used[-1]], (persists or {}).get(used[-1], 0.5))
    return used


def test_a_backend_that_was_asked_for_is_used():
    choice = Choice("process", {})
    assert set(run(choice, checkpoints=20)) == {"process"}
    assert choice.reason == "process: as set"


def test_an_unknown_one_is_refused_by_name():
    with pytest.raises(ValueError, match="persist backend 'threads': use auto, thread, process"):
        Choice("threads", {})


def test_auto_tries_each_in_turn_and_takes_the_cheapest():
    choice = Choice("auto", {})
    assert choice.reason == "thread, process are tried in turn"
    assert run(choice, checkpoints=8) == ["thread", "process"] * 4
    assert choice.current == "process"
    assert choice.reason == "process: a checkpoint costs training 12 ms, 41 ms with thread"


def test_the_first_checkpoint_of_each_says_nothing():
    choice = Choice("auto", {})
    run(choice, {"thread": 0.01, "process": 5.0}, checkpoints=2)
    run(choice, {"thread": 0.1, "process": 0.01}, checkpoints=6)
    assert choice.current == "process"


def test_one_odd_measurement_decides_nothing():
    choice = Choice("auto", {})
    run(choice, checkpoints=6)
    run(choice, {"thread": 0.041, "process": 9.0}, checkpoints=2)
    assert choice.current == "process"


@pytest.mark.parametrize("thread", [0.011, 0.0119, 0.0115])
def test_of_those_that_cost_about_the_same_the_simplest_wins(thread):
    choice = Choice("auto", {})
    run(choice, {"thread": thread, "process": 0.010})
    assert choice.current == "thread"
    assert "(the simplest of those that cost about the same)" in choice.reason


def test_unless_another_is_durable_much_sooner():
    choice = Choice("auto", {})
    run(choice, {"thread": 0.01, "process": 0.01}, persists={"thread": 3.0, "process": 1.0})
    assert choice.current == "process"
    assert "(durable sooner than with thread)" in choice.reason


def test_costs_lost_in_noise_are_told_as_nothing():
    choice = Choice("auto", {})
    run(choice, {"thread": -0.001, "process": 0.5})
    assert choice.reason.startswith("thread: a checkpoint costs training 0 ms, 500 ms with process")


def test_one_that_breaks_is_dropped_with_its_reason():
    choice = Choice("auto", {})
    run(choice, checkpoints=1)
    assert choice.current == "process"
    choice.failed("process", "the process that wrote it was killed by SIGSEGV")
    assert set(run(choice, checkpoints=30)) == {"thread"}
    assert choice.reason.endswith("; process is out: the process that wrote it was killed by SIGSEGV")


def test_one_that_breaks_after_it_was_chosen_makes_way_for_the_others():
    choice = Choice("auto", {})
    run(choice)
    choice.failed("process", "gone")
    assert run(choice, checkpoints=8) == ["thread"] * 8


def test_one_that_was_asked_for_stays_when_it_breaks():
    choice = Choice("process", {})
    choice.failed("process", "gone")
    assert choice.current == "process"


def test_a_thread_is_never_out():
    choice = Choice("auto", {"process": "no memory files"})
    assert choice.current == "thread"
    assert choice.reason == "thread: no other can write here; process is out: no memory files"
    choice.failed("thread", "whatever")
    assert choice.current == "thread"


def test_what_cannot_be_had_is_said_and_a_thread_writes():
    choice = Choice("process", {"process": "no memory files"})
    assert choice.current == "thread"
    assert choice.reason == "thread: no other can write here; process is out: no memory files"


def test_the_last_candidate_is_chosen_without_being_tried():
    choice = Choice("auto", {})
    choice.refused("process", "no")
    assert choice.current == "thread"
    assert choice.reason == "thread: no other can write here; process is out: no"


def test_when_the_chosen_one_becomes_much_dearer_all_are_tried_again():
    choice = Choice("auto", {})
    run(choice)
    dearer = COSTS | {"process": 0.1}
    used = run(choice, dearer, checkpoints=30)
    before = used.index("thread")
    assert 5 <= before <= 9  # a few dear ones may be a neighbour's doing
    assert used[before : before + 8] == ["thread", "process"] * 4
    assert choice.current == "thread"


def test_a_little_dearer_is_no_reason():
    choice = Choice("auto", {})
    run(choice)
    assert set(run(choice, COSTS | {"process": 0.025}, checkpoints=20)) == {"process"}


def test_a_late_measurement_of_another_is_no_harm():
    choice = Choice("auto", {})
    run(choice)
    choice.measured("thread", 0.0, 0.0)
    assert choice.current == "process"


def test_a_persister_left_to_choose_writes_with_each_and_stays_with_the_cheapest(tmp_path):
    store = open_store(tmp_path)
    store.acquire_attempt(JOB, "first")
    with running(store, "auto") as job:
        for _ in range(14):
            assert job.checkpoint().outcome == "durable"
            last = job.settled[-1]
            job.persister.measured(last.backend, COSTS[last.backend], last.seconds)
        used = [settled.backend for settled in job.settled]
        assert used == ["thread", "process"] * 4 + ["process"] * 6
        assert job.persister.backend == "process"
        assert job.persister.reason.startswith("process: a checkpoint costs training 12 ms")


def test_a_persister_left_to_choose_does_without_one_whose_process_died(tmp_path):
    with running(faulty(tmp_path, "wait"), "auto") as job:
        job.persister.measured("thread", 0.1, 0.1)  # so that a process is next
        snapshot = job.take()
        os.kill(int(hear(tmp_path / "reached")), signal.SIGKILL)
        assert snapshot.settled.wait(300)
        assert [job.checkpoint().outcome for _ in range(2)] == ["durable", "durable"]
        assert "process" not in [settled.backend for settled in job.settled[1:]]
        assert job.persister.reason.endswith("process is out: the process that wrote it was killed by SIGKILL")
