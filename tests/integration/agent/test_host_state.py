"""Host state in forked children, beside other ranks, workers, libraries and kills."""

import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import holdfast
from holdfast.store import open_store

WORLD = 2
WORKLOADS = "tests.support.host_state_workloads"


@pytest.mark.parametrize("killed", [None, 0, 1])
def test_all_ranks_have_a_checkpoint_or_none_has(launcher, tmp_path, killed):
    first, *others = launcher.run(WORLD, f"{WORKLOADS}.train", root=str(tmp_path / "store"), killed=killed)
    states = [(iteration, is_durable) for iteration, is_durable, _ in first]
    assert all([each[:2] for each in outcomes] == states for outcomes in others)
    assert len(states) >= 3
    assert [is_durable for _, is_durable in states] == [
        number != 1 or killed is None for number in range(len(states))
    ]
    assert all(is_durable or "forked process" in reason for _, is_durable, reason in first)
    resumed = launcher.run(WORLD, f"{WORKLOADS}.resume", root=str(tmp_path / "store"))
    newest = int(open_store(tmp_path / "store").checkpoints("job")[-1].partition("-")[0])
    assert newest >= states[-1][0]
    assert resumed == [(newest, [rank + 0.0, rank + 1.0, rank + 2.0, rank + 3.0]) for rank in range(WORLD)]


@pytest.mark.parametrize("written", ["all", "part"])
@pytest.mark.parametrize("moment", ["before the write", "within the write", "after the write"])
def test_a_killed_trainer_leaves_no_child_and_no_half_checkpoint(tmp_path, moment, written):
    store = tmp_path / "store"
    command = [sys.executable, "-m", WORKLOADS, store, moment, written]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        line = trainer.stdout.readline()
        assert trainer.wait(60) == -signal.SIGKILL
    try:
        child = os.pidfd_open(int(line))
    except ProcessLookupError:
        pass
    else:
        if moment == "within the write":
            signal.pidfd_send_signal(child, signal.SIGCONT)
        assert select.select([child], [], [], 60)[0], "the child outlives its parent"
        os.close(child)
    assert open_store(store).checkpoints("job") == ["000000000001-1"]
    variables = holdfast.Variables(buffer=np.zeros((2048, 1024), np.float32))
    model = torch.nn.Linear(4, 4)
    with holdfast.Session(
        "job", store=store, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), variables=variables
    ) as session:
        assert session.resume() == 1
    assert (variables.buffer == 1).all()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index))


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_forks_beside_workers_allocations_and_threads(tmp_path, count):
    """Any lock may be held at a fork: of the allocator, of OpenMP, of a queue of the loader's workers."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    variables = holdfast.Variables(buffer=np.zeros((1100, 1024), np.float32))
    ends, beside = threading.Event(), torch.ones(300, 300)

    def allocate():
        while not ends.is_set():
            [bytearray(size) for size in range(1, 300_000, 10_000)]
            np.ones((200, 200)) @ np.ones((200, 200))
            beside @ beside

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for each in threads:
        each.start()
    loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2)
    durable = 0
    try:
        with holdfast.Session(
            "job", store=tmp_path, every=10**6, keep=2, model=model, optimizer=optimizer, variables=variables,
            host_state="fork",
        ) as session:  # fmt: skip
            batches = session.batches(loader, epochs=None)
            for number in range(count):
                model(next(batches)).sum().backward()
                optimizer.step()
                variables.buffer[number % 1100] = number
                session.checkpoint()
                session.step()
                variables.buffer[number % 1100] = -1
                durable += sum(outcome.is_durable for outcome in session.wait(120))
                variables.buffer[number % 1100] = number
    finally:
        ends.set()
        for each in threads:
            each.join()
    del batches, loader  # ends the workers
    assert durable == count
    found = holdfast.Variables(buffer=np.zeros((1100, 1024), np.float32))
    with holdfast.Session("job", store=tmp_path, model=model, optimizer=optimizer, variables=found) as session:
        assert session.resume() == count
    assert (found.buffer == variables.buffer).all()
