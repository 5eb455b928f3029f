"""Updates that follow a checkpoint at once: what becomes durable is the state of its iteration.

`make cuda-check` runs these tests, and those of exact resume, on a CUDA device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint import restore
from holdfast.format.manifest import digest_tensor
from holdfast.save.run import Run, RunState
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of
from tests.support.exact_job import DEVICE

PARTS, NUMBERS = 8, (8 << 20 if DEVICE == "cuda" else 1 << 18)
"""On a device 0.5 GB with momentum, whose copy takes longer than a forward and backward pass."""
ITERATIONS = 6


class Runs:
    """The runs of a session, as a listener sees them."""

    def __init__(self) -> None:
        self.torn: list[Run] = []
        self.durable: list[Run] = []

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.TORN:
            self.torn.append(run)
        elif state is RunState.DURABLE:
            self.durable.append(run)


class FastJob:
    """A training whose iterations end before a copy of its state does."""

    def __init__(self, store: Path, seed: int = 0, begins: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.ParameterList(torch.randn(NUMBERS) for _ in range(PARTS)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.runs = Runs()
        self._store = store
        if begins:
            self.begin()

    def begin(self) -> None:
        self.session = holdfast.Session(
            "job", store=self._store, every=1, keep=1000,
            model=self.model, optimizer=self.optimizer, loop=holdfast.Variables(),
        )  # fmt: skip
        self.session.observe(self.runs)

    def iterate(self, *, keeps_gradients: bool = False) -> None:
        sum(part.square().mean() for part in self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keeps_gradients)

    def end_iteration(self) -> list[str]:
        """Return the digests of the state that a checkpoint of this iteration must hold."""
        self.session.wait(300)  # so that each iteration has one
        state = self.digests()
        self.session.step()
        return state

    def digests(self) -> list[str]:
        moments = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        tensors = [tensor.detach().cpu() for tensor in [*self.model, *moments]]
        return sorted(digest_tensor(bytes_of(tensor))[0] for tensor in tensors)


def saved(store: Path, checkpoint: str) -> list[str]:
    manifest = restore.verify(open_store(store), "job", checkpoint)
    size = NUMBERS * torch.float32.itemsize
    large = [each for each in manifest.tensors if each.end - each.start == size]
    return sorted(each.digest for each in large if ".grad." not in each.name)


def test_checkpoints_hold_the_state_of_their_iteration_though_updates_follow_at_once(tmp_path):
    job, expected = FastJob(tmp_path), {}
    with job.session:
        for iteration in range(1, ITERATIONS + 1):
            job.iterate()
            expected[iteration] = job.end_iteration()
    assert job.runs.torn == []
    assert [run.draft.iteration for run in job.runs.durable] == list(expected)
    for run in job.runs.durable:
        assert saved(tmp_path, run.id) == expected[run.draft.iteration], f"iteration {run.draft.iteration}"
    if DEVICE == "cuda":
        assert any(run.copy.device_copy_seconds for run in job.runs.durable), "none was first copied on the device"


def test_a_restore_in_place_and_a_resume_give_the_bits_of_the_checkpoint(tmp_path):
    job = FastJob(tmp_path)
    with job.session:
        job.iterate()
        expected = job.end_iteration()
        job.iterate()
        job.end_iteration()
        addresses = [part.data_ptr() for part in job.model]
        job.session.restore(1)
        job.iterate()
        job.session.step()
        assert job.session.iteration == 1
        assert job.digests() == expected
        assert [part.data_ptr() for part in job.model] == addresses
        job.iterate()
        newest = job.end_iteration()
    resumed = FastJob(tmp_path, seed=1)
    with resumed.session:
        assert resumed.session.resume() == 2
        assert resumed.digests() == newest


def test_a_write_before_the_update_never_makes_a_wrong_checkpoint(tmp_path):
    job, expected = FastJob(tmp_path), {}
    with job.session:
        for iteration in range(1, ITERATIONS + 1):
            job.iterate()
            expected[iteration] = job.end_iteration()
            if iteration < ITERATIONS:  # the final checkpoint holds what is written after the last iteration
                with torch.no_grad():
                    job.model[PARTS - 1].add_(1.0)
    if DEVICE == "cuda":
        assert job.runs.torn, "the write went undetected"
    for run in job.runs.durable:
        assert saved(tmp_path, run.id) == expected[run.draft.iteration], f"iteration {run.draft.iteration}"


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_captured_first", [False, True])
def test_updates_that_a_cuda_graph_replays_mix_no_iterations(is_captured_first, waits, tmp_path):
    job, expected = FastJob(tmp_path, begins=not is_captured_first), {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as the documentation of torch says: some iterations before the capture
        for _ in range(2):
            job.iterate()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.iterate(keeps_gradients=True)
    if is_captured_first:
        job.begin()
    with job.session:
        for iteration in range(1, ITERATIONS + 1):
            if waits:
                job.session.wait_copied()
            graph.replay()
            expected[iteration] = job.end_iteration()
        reason = job.session._training.obstacle_to_restore()
    assert job.runs.torn == []
    assert [run.draft.iteration for run in job.runs.durable] == list(expected)
    for run in job.runs.durable:
        assert saved(tmp_path, run.id) == expected[run.draft.iteration], f"iteration {run.draft.iteration}"
    assert [run.at_once for run in job.runs.durable] == [not waits] * ITERATIONS
    if not is_captured_first:
        assert "CUDA graph" in reason
