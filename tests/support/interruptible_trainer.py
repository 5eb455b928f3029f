"""A training job with pause points at each step of a restore, and a bit-exact ledger.

interruptible_trainer.py LEDGER JOB ENOUGH     train under Holdfast, until there is the file ENOUGH
interruptible_trainer.py LEDGER --alone N      N iterations, without Holdfast and undisturbed
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.support.fault_injection import reach, watch

LEAST_ITERATIONS = 40
EVERY = 5
STEP_SECONDS = 0.01
"""So that there is time for something to happen within a few iterations."""


class Momentum:
    """An optimizer; one of torch's own would import for two seconds what this does not need."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.moments = [torch.zeros_like(parameter) for parameter in self._parameters]

    def step(self) -> None:
        with torch.no_grad():
            for parameter, moment in zip(self._parameters, self.moments, strict=True):
                parameter -= 0.01 * moment.mul_(0.9).add_(parameter.grad)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for moment, loaded in zip(self.moments, state["moments"], strict=True):
            moment.copy_(loaded)


class InterruptibleWork:
    """What is trained: its data, its dropout and its weights all hang on what a restore has to bring back."""

    def __init__(self, seed: int = 7) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
        self.optimizer = Momentum(self.model.parameters())

    def iterate(self) -> torch.Tensor:
        inputs = torch.randn(4, 8)
        loss = (self.model(inputs) - inputs.roll(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def outcome(self, loss: torch.Tensor) -> str:
        """The loss, the weights, the momentum and the random state, to the bit."""
        found = hashlib.blake2b(loss.detach().numpy().tobytes(), digest_size=12)
        for tensor in (*self.model.state_dict().values(), *self.optimizer.moments, torch.get_rng_state()):
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()


class MidRestoreState:
    """Part of the state, between the model and the optimizer: while it is loaded, half of a restore is done."""

    ordered = False

    def state_dict(self) -> dict[str, Any]:
        return {"midway": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if MidRestoreState.ordered:
            reach("applying")


def alone(ledger: int, iterations: int) -> None:
    work = InterruptibleWork()
    for iteration in range(1, iterations + 1):
        os.write(ledger, f"0 0 1 {iteration} {work.outcome(work.iterate())}\n".encode())


def train(ledger: int, job: str, enough: str) -> None:
    import holdfast

    watch_restores()
    work = InterruptibleWork()
    session = holdfast.Session(
        job,
        model=work.model,
        midway=MidRestoreState(),
        optimizer=work.optimizer,
        loop=holdfast.Variables(),
        every=EVERY,
    )
    session.resume()
    lineage = 1
    while session.iteration < LEAST_ITERATIONS or not os.path.exists(enough):
        loss = work.iterate()
        place = f"{os.getpid()} {session.attempt} {session.lineage} {session.iteration + 1}"
        os.write(ledger, f"{place} {work.outcome(loss)}\n".encode())
        if session.lineage != lineage:
            lineage = session.lineage
            reach("first step")
        session.step(loss=loss)
        time.sleep(STEP_SECONDS)
    session.close()


def watch_restores() -> None:
    from holdfast.engine.in_place_restore import InPlaceRestore
    from holdfast.engine.operator import Operator
    from holdfast.engine.startup import Startup
    from holdfast.engine.training import Training
    from holdfast.save.saver import Saver
    from holdfast.store import Lineage
    from holdfast.store.local import LocalStore
    from holdfast.telemetry.reporter import Reporter

    def ordered(*args: Any, **options: Any) -> bool:
        return MidRestoreState.ordered

    def brings_order(operator: Any, desired: Any) -> bool:
        return desired.restore is not None

    watch(Operator, "receive", before="heard", after="delivered", when=brings_order)
    watch(LocalStore, "acquire_attempt", after="attempt begun", when=lambda *_, order=None: order is not None)
    for wanted, point in (("restoring", "taken up"), ("restored", "told")):
        watch(
            Reporter, "order", after=point,
            when=lambda _, order, state, *, at=wanted, **__: order is not None and state == at,
        )  # fmt: skip
    watch(Training, "load", before="verifying", after="verified", when=ordered)
    watch(Saver, "take", after="safety begun", when=ordered)
    watch(InPlaceRestore, "_take_safety", after="safety committed")
    watch(
        LocalStore, "append", before="noting", after="noted",
        when=lambda store, job, record: isinstance(record, Lineage) and record.order is not None,
    )  # fmt: skip
    watch(Training, "apply", after="applied", when=ordered)
    for owner, name in ((InPlaceRestore, "restore"), (Startup, "_restore_for_order")):
        _tell_of_order(owner, name)


def _tell_of_order(owner: Any, name: str) -> None:
    call = getattr(owner, name)

    def carried_out(*args: Any) -> Any:
        MidRestoreState.ordered = True
        try:
            return call(*args)
        finally:
            MidRestoreState.ordered = False

    setattr(owner, name, carried_out)


if __name__ == "__main__":
    written = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if sys.argv[2] == "--alone":
        alone(written, int(sys.argv[3]))
    else:
        train(written, *sys.argv[2:])
