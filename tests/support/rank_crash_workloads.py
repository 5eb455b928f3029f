"""One rank of a job in which each trains a small model of its own: those left can go on without the others.

What a rank has learned after an iteration depends on nothing but its number and the iteration's: whatever went
before, it has to come to the same.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
import holdfast.session
from holdfast.distributed.ranks import RanksLost
from holdfast.distributed.side_group import SideGroup
from holdfast.engine.in_place_restore import InPlaceRestore
from holdfast.engine.rank_coordination import DistributedCoordinator
from holdfast.engine.training import Training
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.history import History
from holdfast.save.persister import Persister
from holdfast.store import Lineage, local, open_store
from holdfast.system.files import Files
from holdfast.torch_internals import default_store
from tests.support.fault_injection import die

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel

STAGES = ("begun", "vote", "end")
PLACES: dict[str, tuple[type, str]] = {
    "begin": (local.LocalStore, "begin"),
    "join": (local.LocalStore, "join"),
    "write": (local.LocalWriter, "write"),
    "settle": (local.LocalWriter, "make_durable"),
    "commit": (local.LocalWriter, "commit"),
    "sync": (Files, "sync"),
    "rename": (Files, "rename"),
    "send": (SideGroup, "send"),
    "receive": (SideGroup, "receive"),
    "load": (Training, "load"),
    "check": (Training, "check"),
    "apply": (Training, "apply"),
    "safety": (InPlaceRestore, "_take_safety"),
    "lineage": (History, "begin_lineage"),
    "note": (local.LocalStore, "append"),
    "end": (DistributedCoordinator, "end"),
    "finish": (Persister, "close"),
    "part": (SideGroup, "close"),
}
"""Calls before or after which a fault can be placed. Messages between ranks carry their stage: "send vote"."""


class FaultTrap:
    """Triggers a fault once at a place, after it was armed."""

    def __init__(self, place: str, spring: Callable[[], None]) -> None:
        self.place, self._spring, self.armed = place, spring, False

    def set(self) -> None:
        for name, (owner, method) in PLACES.items():
            setattr(owner, method, self._watched(name, getattr(owner, method)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **options: Any) -> Any:
            if name == "note" and not isinstance(args[2], Lineage):
                return call(*args, **options)
            what = f"{name} {STAGES[args[2] % 3]}" if name in ("send", "receive") else name
            self._reach(f"before {what}")
            result = call(*args, **options)
            self._reach(f"after {what}")
            return result

        return watched

    def _reach(self, place: str) -> None:
        if self.armed and place == self.place:
            self.armed = False
            self._spring()


def nothing() -> None:
    """For a case that is all in its phase."""


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def io_error() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "somewhere")


def raise_in_loop() -> None:
    raise KeyError("a fault of the script")


SPRINGS = {f.__name__: f for f in (die, nothing, no_space, io_error, raise_in_loop)}


class _NoticeForwarder(logging.Handler):
    def __init__(self, stage: WorkloadChannel) -> None:
        super().__init__(logging.WARNING)
        self._stage = stage

    def emit(self, record: logging.LogRecord) -> None:
        self._stage.tell("notice", record.levelname, record.getMessage().replace("\n", " "))
        if record.exc_info:
            self._stage.tell("fault", repr(record.exc_info[1]).replace("\n", " "))


class CrashingTrainer:
    def __init__(self, root: str, *, ddp: bool = False, **options: Any) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(self.rank)
        self.model: torch.nn.Module = torch.nn.Linear(8, 8)
        if ddp:  # with something for each rank to write, of what is the same on all
            layers = [self.model, *(torch.nn.Linear(8, 8) for _ in range(2))]
            self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = holdfast.Session(
            "job",
            store=root,
            model=self.model,
            optimizer=self.optimizer,
            loop=holdfast.Variables(),
            **options,
        )

    def iterate(self) -> None:
        generator = torch.Generator().manual_seed(1000 * self.session.iteration + self.rank)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.session.step()

    def state(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        for state in self.optimizer.state.values():
            for tensor in state.values():
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:12]


def chatter(stage: WorkloadChannel, rank: int, after: int, vote_bytes: int) -> list[str]:
    """Two lanes and a main thread talk without end; rank `rank` dies after so much of it. How that ended."""
    group, talked, ends = SideGroup(), itertools.count(1), []
    meeting = default_store()  # files, so that the death of a rank that is through does not end another's wait
    meeting.set(f"connected {group.rank}", b"")
    meeting.wait([f"connected {each}" for each in range(group.world_size)])

    def talks() -> None:
        if next(talked) == after and group.rank == rank:
            die()

    def steer() -> None:
        talks()
        group.wait_for(group.start_broadcast(torch.zeros(8, dtype=torch.int64)))

    def vote(lane: int) -> None:
        others = range(1, group.world_size) if group.leads else [0]
        for stage_number in range(3):
            talks()
            if group.leads != (stage_number == 1):
                group.send(others, 3 * lane + stage_number, bytes(vote_bytes if stage_number == 1 else 5))
            else:
                group.receive(others, 3 * lane + stage_number)

    def repeat(talk: Callable[[], None]) -> None:
        try:
            while True:
                talk()
        except RanksLost as error:
            ends.append(str(error))

    lanes = [threading.Thread(target=repeat, args=(functools.partial(vote, lane),)) for lane in range(2)]
    for lane in lanes:
        lane.start()
    repeat(steer)
    for lane in lanes:
        lane.join()
    return ends


def train(
    stage: WorkloadChannel,
    root: str,
    until: int,
    every: int = 2,
    phase: str = "",
    rank: int = -1,
    place: str = "",
    spring: str = "die",
    arm_after: int = 4,
    rewind_at: int | None = None,
    ready_at: int | None = None,
    options: dict[str, Any] | None = None,
) -> int:
    """Train to iteration `until`; rank `rank` springs its trap at `place`, in `phase`."""
    logging.getLogger("holdfast").addHandler(_NoticeForwarder(stage))
    logging.getLogger("holdfast").addHandler(logging.StreamHandler())

    def stop() -> None:
        stage.tell("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)

    trap = FaultTrap(place, stop if spring == "stop" else SPRINGS[spring])
    if dist.get_rank() == rank and place:
        trap.set()
    trap.armed = phase == "resume"
    trainer = CrashingTrainer(root, every=every, **(options or {}))
    session = trainer.session
    stage.tell("resumed", session.resume())
    rewound = False
    if phase == "early" and trainer.rank == rank:
        until -= 5
    with session:
        while session.iteration < until:
            if session.iteration == arm_after and phase in ("checkpoint", "haste"):
                trap.armed = True
            if session.iteration == ready_at:
                stage.ready()
            trainer.iterate()
            stage.tell("state", session.iteration, trainer.state())
            if session.iteration < arm_after + (6 if phase == "checkpoint" else 0):
                session.wait(300)
            if session.iteration == arm_after and trainer.rank == rank:
                if phase == "loop":
                    SPRINGS[spring]()
                if phase == "twice":
                    session.step()
                    until += 1
            if session.iteration == rewind_at and not rewound:
                rewound = True
                session.wait(300)
                trap.armed = phase == "rewind"
                if trainer.rank == 0:
                    first = open_store(root).checkpoints("job")[0]
                    session.restore(parse_checkpoint_id(first)[0])
        trap.armed |= phase == "close"  # one set in haste may not have been reached
        if (
            phase == "destroyed"
        ):  # as many scripts do at their end; make a new group, because the launcher destroys it again
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stage.tell("head", session._saver.history.head)
    stage.tell("done", session.iteration)
    return session.iteration
