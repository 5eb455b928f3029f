import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from faulty_store import hear, tell
from persisting import JOB, children, faulty, running

from holdfast import hostmemory
from holdfast.persist import fork, memory, process
from holdfast.store import open_store

HERE = Path(__file__).parent


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path)
    store.acquire_attempt(JOB, "first")
    return store


def measured(tmp_path, how):
    faulty(tmp_path, "wait")
    script = [sys.executable, HERE / "forked_memory.py", tmp_path, how]
    return json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout)


def test_training_goes_on_in_its_own_memory_while_a_child_writes(tmp_path):
    found = measured(tmp_path, "left-out")
    assert found["right"]
    assert found["growth"] < 0.1
    assert found["faults"] < 1000


def test_a_plain_fork_would_copy_the_state_page_by_page(tmp_path):
    """So that the test above is known to be able to fail."""
    assert measured(tmp_path, "plain")["growth"] > 0.9


class Live(torch.utils.data.Dataset):
    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.tensor.sum()


def test_workers_that_are_forked_later_see_the_state(store):
    with running(store, "fork", tensors={"w": torch.ones(4 << 20)}) as job:
        assert job.checkpoint().outcome == "durable"
        loader = torch.utils.data.DataLoader(Live(job.tensors["w"]), num_workers=1, multiprocessing_context="fork")
        assert [float(batch) for batch in loader] == [4 << 20] * 4


def test_a_worker_that_is_forked_at_the_same_time_sees_it_too():
    assert subprocess.run([sys.executable, HERE / "fork_beside.py"]).returncode == 0


def test_memory_that_is_gone_by_now_is_passed_over(store):
    with running(store, "fork") as job:
        real = memory.fork_without
        gone = [(0x7000_0000_0000, 1 << 20), (64, 0)]
        job.persister._backends["fork"] = fork.ForkBackend(store)
        fork.memory.fork_without = lambda live: real([*gone, *live])
        try:
            assert job.checkpoint().outcome == "durable"
        finally:
            fork.memory.fork_without = real


def test_only_whole_pages_are_left_out():
    assert list(memory._pages([(4096 * 5 - 8, 4096 * 2 + 16), (4096, 4096), (100, 4096), (8192, 10)])) == [
        (4096 * 5, 4096 * 2),
        (4096, 4096),
    ]


def test_a_python_that_warns_of_forks_with_threads_is_not_heard(store, monkeypatch):
    real = os.fork

    def warns():  # as Python 3.12 does
        pid = 1 if threading.current_thread() is threading.main_thread() else real()
        if pid:
            text = f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to deadlocks"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        return pid

    monkeypatch.setattr(os, "fork", warns)
    with running(store, "fork") as job:
        assert job.checkpoint().outcome == "durable"
        with pytest.raises(DeprecationWarning):  # but those of others are
            warns()


def test_a_pinned_arena_is_left_to_a_thread(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with running(store, "fork") as job:
        job.checkpoint()
        (layout,) = job.snapshots._layouts
        monkeypatch.setattr(layout.arena, "pinned", True)
        assert job.checkpoint().outcome == "durable"
        assert [settled.backend for settled in job.settled] == ["fork", "thread"]
        assert job.persister.reason == (
            "thread: no other can write here; "
            "fork is out: CUDA has pinned the arena's memory, which a child must not touch"
        )


def test_pinned_memory_without_cuda_is_as_good_as_any(store, monkeypatch):
    with running(store, "fork") as job:
        job.checkpoint()
        (layout,) = job.snapshots._layouts
        monkeypatch.setattr(layout.arena, "pinned", True)
        job.checkpoint()
    assert [settled.backend for settled in job.settled] == ["fork", "fork"]


@pytest.mark.parametrize(
    ("backend", "attribute", "value", "why"),
    [
        ("fork", "forkable", False, "has connections or threads that do not survive a fork"),
        ("process", "opener", None, "cannot be opened by another process"),
    ],
)
def test_a_store_may_say_that_it_cannot(store, monkeypatch, backend, attribute, value, why):
    monkeypatch.setattr(type(store), attribute, value, raising=False)
    with running(store, backend) as job:
        assert job.checkpoint().outcome == "durable"
    assert job.settled[0].backend == "thread"
    assert f"{backend} is out: store {store.url} {why}" in job.persister.reason


@pytest.mark.parametrize("room", [fork, process])
def test_a_platform_without_memory_files_has_threads_only(store, monkeypatch, room):
    monkeypatch.delattr(os, "memfd_create")
    hostmemory.can_share.cache_clear()
    try:
        assert "this platform has no" in room.refusal(store)
    finally:
        hostmemory.can_share.cache_clear()


def test_whoever_waits_for_all_children_takes_nothing_from_us(tmp_path):
    """Some launchers reap every child there is; the checkpoint's own word counts then."""
    with running(faulty(tmp_path, "wait"), "fork") as job:
        snapshot = job.take()
        child = int(hear(tmp_path / "reached"))

        def reap():
            with contextlib.suppress(ChildProcessError):  # whoever comes second
                os.waitpid(child, 0)

        reaper = threading.Thread(target=reap)
        reaper.start()
        tell(tmp_path / "go", "on")
        assert snapshot.settled.wait(300)
        reaper.join()
        assert snapshot.outcome == "durable"
        assert children() == []


def test_the_child_comes_second(tmp_path):
    with running(faulty(tmp_path, "wait"), "fork") as job:
        snapshot = job.take()
        child = int(hear(tmp_path / "reached"))
        assert os.getpriority(os.PRIO_PROCESS, child) == 10
        assert Path(f"/proc/{child}/oom_score_adj").read_text() == "500\n"
        lane = next(t for t in threading.enumerate() if t.name == "holdfast-persist")
        # it forks with the interpreter lock in its hands: were it nice, training would wait for its turn
        assert os.getpriority(os.PRIO_PROCESS, lane.native_id) == os.getpriority(os.PRIO_PROCESS, 0)
        tell(tmp_path / "go", "on")
        assert snapshot.settled.wait(300)


def test_a_thread_that_writes_comes_second(tmp_path):
    with running(faulty(tmp_path, "wait"), "thread") as job:
        snapshot = job.take()
        hear(tmp_path / "reached")
        writer = next(t for t in threading.enumerate() if t.name == "holdfast-write")
        assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == 10
        tell(tmp_path / "go", "on")
        assert snapshot.settled.wait(300)
