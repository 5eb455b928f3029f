"""Stage `torn`: writes that follow a checkpoint at once, in all the ways that a script has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.checkpoint import restore
from holdfast.format.manifest import digest_tensor
from holdfast.save.run import Run, RunState
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of

from .stages import CaseResult, Cases, Context

PARTS, ITERATIONS = 8, 4
NUMBERS = 8 << 20
"""Per part: 0.5 GB with momentum, whose copy takes longer than a forward and backward pass."""
SMALL_NUMBERS = 1 << 14


class FastTraining:
    """A training whose iterations end before a copy of its state does."""

    def __init__(self, context: Context, name: str) -> None:
        torch.manual_seed(0)
        self.store = context.folder / name.replace(" ", "-")
        numbers = SMALL_NUMBERS if context.small else NUMBERS
        self.size = numbers * torch.float32.itemsize
        self.model = nn.ParameterList(torch.randn(numbers) for _ in range(PARTS)).to(context.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.expected: dict[int, list[str]] = {}
        self.durable: list[Run] = []
        self.torn = 0
        self.session = holdfast.Session(
            "torn", store=self.store, server="", every=1, keep=1000, model=self.model, optimizer=self.optimizer
        )
        self.session.observe(self)

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.TORN:
            self.torn += 1
        elif state is RunState.DURABLE:
            self.durable.append(run)

    def loss(self) -> torch.Tensor:
        return torch.stack([part.square().mean() for part in self.model]).sum()

    def update(self, loss: Callable[[], torch.Tensor], *, keeps_gradients: bool = False) -> None:
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keeps_gradients)

    def end_iteration(self) -> None:
        """Note what a checkpoint of this iteration must hold, and begin it."""
        self.session.wait(60)
        moments = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        tensors = [tensor.detach().cpu() for tensor in [*self.model, *moments]]
        digests = sorted(digest_tensor(bytes_of(tensor))[0] for tensor in tensors)
        self.expected[self.session.iteration + 1] = digests
        self.session.step()

    def train(self, loss: Callable[[], torch.Tensor] | None = None) -> None:
        for _ in range(ITERATIONS):
            self.update(loss or self.loss)
            self.end_iteration()

    def result(self, **values: Any) -> CaseResult:
        """Close the session, and compare each durable checkpoint with the state of its iteration."""
        self.session.close()
        wrong = [run.draft.iteration for run in self.durable if not self._is_right(run)]
        found = {"durable": len(self.durable), "torn_and_discarded": self.torn, "wrong": len(wrong), **values}
        return CaseResult(found, not wrong, f"wrong checkpoints of iterations {wrong}" if wrong else "")

    def _is_right(self, run: Run) -> bool:
        if run.draft.iteration not in self.expected:
            return True  # the final one
        manifest = restore.verify(open_store(self.store), "torn", run.id)
        large = [each for each in manifest.tensors if each.end - each.start == self.size]
        saved = sorted(each.digest or "" for each in large if ".grad." not in each.name)
        return saved == self.expected[run.draft.iteration]


def updates(context: Context) -> CaseResult:
    training = FastTraining(context, "updates")
    training.train()
    return training.result()


def data_writes(context: Context) -> CaseResult:
    """Write some elements in the middle of a tensor, past the version counter, right after a checkpoint began."""
    training = FastTraining(context, "data")
    for number in range(ITERATIONS):
        training.update(training.loss)
        training.end_iteration()
        if number < ITERATIONS - 1:
            part = training.model[PARTS - 1]
            part.data[part.numel() // 2 : part.numel() // 2 + 64] += 1.0
    return training.result()


def own_stream(context: Context) -> CaseResult:
    training = FastTraining(context, "stream")
    stream: Any = torch.cuda.Stream() if context.device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        training.train()
    return training.result()


def compiled(context: Context) -> CaseResult:
    training = FastTraining(context, "compile")
    loss = torch.compile(training.loss, backend="eager" if context.small else "inductor")
    training.train(loss)
    return training.result()


def graph(context: Context, *, waits: bool) -> CaseResult:
    """Replay updates: no hook is called then, and no version counter changes."""
    if context.device != "cuda":
        return CaseResult({}, note="needs CUDA")
    training = FastTraining(context, f"graph {waits}")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as the documentation of torch says: some iterations before the capture
        for _ in range(2):
            training.update(training.loss)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        training.update(training.loss, keeps_gradients=True)
    for _ in range(ITERATIONS):
        if waits:
            training.session.wait_copied()
        captured.replay()
        training.end_iteration()
    at_once = sum(run.at_once for run in training.durable)
    return training.result(copied_at_once=at_once)


CASES: Cases = {
    "updates": updates,
    "writes through .data": data_writes,
    "stream of the script": own_stream,
    "CUDA graph": partial(graph, waits=False),
    "CUDA graph, wait_copied": partial(graph, waits=True),
    "torch.compile": compiled,
}
