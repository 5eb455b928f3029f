"""A real training job as a workload: saves, retention and a restore in place."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch._dynamo

import holdfast
import holdfast.engine.startup
import holdfast.session
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.store import open_store
from holdfast.system import io_pool
from tests.support import private_mounts, store_invariants
from tests.support.tiny_job import Trainer

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel

WHOLE = 36
"""Iterations of the whole job: three epochs of twelve."""


def _warm_up() -> None:
    """Have Python import, and torch look up, here and now what they would amidst the faults."""
    for name in holdfast.__all__:
        getattr(holdfast, name)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()


_warm_up()


class _NoticeChannel(logging.Handler):
    """What holdfast tells a person."""

    def __init__(self, stage: WorkloadChannel) -> None:
        super().__init__(logging.WARNING)
        self._stage = stage

    def emit(self, record: logging.LogRecord) -> None:
        self._stage.tell("notice", record.getMessage().replace("\n", " "))


def train(
    stage: WorkloadChannel,
    root: str,
    until: int = 12,
    rewind_at: int | None = None,
    ready_at: int = 0,
    **options: Any,
) -> None:
    """Train to `until`; with `rewind_at`, go back in place to the checkpoint before that iteration.

    The part that matters begins after iteration `ready_at`: a process that writes is up by then.
    """
    torch.set_num_threads(1)
    io_pool.THREADS = 1  # system calls are counted by thread: a second one would take some of them in one run only
    logging.getLogger("holdfast").addHandler(_NoticeChannel(stage))
    logging.getLogger("holdfast").addHandler(logging.StreamHandler())
    rewound = rewind_at is None

    def after(trainer: Trainer) -> None:
        nonlocal rewound
        iteration, loss = trainer.losses[-1]
        stage.tell("loss", iteration, loss.hex())
        if (head := trainer.session._saver.history.head) is not None:
            stage.tell("ground", trainer.session.lineage, parse_checkpoint_id(head)[0])
        if trainer.session.iteration == ready_at and trainer.session.lineage == 1:
            stage.ready()
        if not rewound and trainer.session.iteration == rewind_at and head is not None:
            rewound = True
            trainer.session.restore(parse_checkpoint_id(head)[0])

    if not ready_at:
        stage.ready()
    trainer = Trainer(root, **options)
    if trainer.session.resume() < until:
        trainer.run(until=until, after=after)
    trainer.session.close()
    stage.tell("done", trainer.session.iteration)


def wander(stage: WorkloadChannel, root: str, seed: int, further: int, **options: Any) -> None:
    """Train so many iterations at full speed, checkpoints in the background, and go back in place now and then."""
    holdfast.engine.startup.PATIENCE_SECONDS = (
        1.0  # a store that fails for good is not worth half a minute of each test
    )
    torch.set_num_threads(1)
    logging.getLogger("holdfast").addHandler(_NoticeChannel(stage))
    moments = random.Random(seed)
    stage.ready()
    trainer = Trainer(root, **options)
    session = trainer.session
    stage.tell("resumed", session.lineage, session.resume())
    until = min(session.iteration + further, WHOLE)
    if session.iteration < until:
        for x, y in session.batches(trainer.loader, epochs=3):
            trainer.iterate(x, y)
            iteration, loss = trainer.losses[-1]
            stage.tell("loss", iteration, loss.hex())
            if (head := session._saver.history.head) is not None:
                stage.tell("ground", session.lineage, parse_checkpoint_id(head)[0])
                if moments.random() < 0.03:
                    session.restore(parse_checkpoint_id(head)[0])
            if session.iteration >= until:
                break
    session.close()
    stage.tell("done", session.iteration)


class SmallCheckpointJob:
    """A job whose checkpoints weigh about a megabyte."""

    def __init__(self, root: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session = holdfast.Session(
            "job", store=root, model=self.model, optimizer=self.optimizer, every=1, **options
        )
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(torch.randn(16, 256)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.session.step(loss=loss)
        self.session.wait(300)


def fill(stage: WorkloadChannel, place: str, saves: int, keep: int, times: float) -> None:
    """Train on a disk of so many `times` a checkpoint's size, then on one with room again."""
    torch.set_num_threads(1)
    logging.getLogger("holdfast").addHandler(_NoticeChannel(stage))
    private_mounts.of_my_own()
    stage.ready()
    with private_mounts.memory(Path(place, "roomy"), 64 << 20) as disk:
        roomy = SmallCheckpointJob(disk, keep=keep)
        for _ in range(saves + 1):
            roomy.step()
        size_bytes = _size(disk / "job" / open_store(disk).checkpoints("job")[-1])
        roomy.session.close()
    with private_mounts.memory(Path(place, "full"), int(size_bytes * times)) as disk:
        tight = SmallCheckpointJob(disk, keep=keep)
        for number in range(1, saves + 1):
            tight.step()
            _tell_of(stage, disk, number)
        stage.tell("room again")
        private_mounts.resize(disk, 10 * size_bytes)
        tight.step()
        _tell_of(stage, disk, saves + 1)
        tight.session.close()
    stage.tell("losses", "are the same" if tight.losses == roomy.losses else "differ")


def _tell_of(stage: WorkloadChannel, root: Path, number: int) -> None:
    """What is on a disk after a save."""
    _, iteration = store_invariants.safe(root)
    stage.tell(
        "after", number, iteration, len(open_store(root).checkpoints("job")), len(store_invariants.leftovers(root))
    )


def _size(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def overwrite(stage: WorkloadChannel, root: str, rounds: int, max_in_flight: int) -> None:
    """As soon as a checkpoint has been taken, change everything it is made of, in the order a loop would."""
    torch.set_num_threads(1)
    stage.ready()
    for number in range(1, rounds + 1):
        model, optimizer, session = _large(root, max_in_flight)
        session.resume()
        _train(model, optimizer)
        expected = _everything(model, optimizer)
        session.checkpoint()
        session.step()
        _spoil(model.buffers())
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number)
        optimizer.step()  # waits for the copy, as it does in any loop
        _spoil([*model.parameters(), *_tensors(optimizer)])
        session.wait(300)
        durable = session._saver.history.head
        session._close("killed")
        model, optimizer, session = _large(root, max_in_flight)
        assert (session.resume(), durable) == (number, f"{number:012d}-1"), "the checkpoint was not durable"
        found = _everything(model, optimizer)
        session._close("killed")
        different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        stage.tell("round", number, *(different or ["the same"]))


def _large(root: str, max_in_flight: int) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, holdfast.Session]:
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 512)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = holdfast.Session(
        "job",
        store=root,
        model=model,
        optimizer=optimizer,
        every=10**9,
        keep=2,
        max_in_flight=max_in_flight,
    )
    return model, optimizer, session


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def _spoil(tensors: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.full_like(tensor, 7))


def _everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The digest of each tensor and random state."""
    found = dict(model.state_dict())
    found |= {f"optimizer {i}": tensor for i, tensor in enumerate(_tensors(optimizer))}
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}
    states = {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
    }
    return digests | {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}
