"""Ranks with a replay buffer of their own, which a fork writes; and a trainer that is killed beside its child."""

from __future__ import annotations

import array
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.save import forked_image, host_state

ROWS = 2048
ITERATIONS = 8


def train(stage: Any, root: str, killed: int | None = None) -> list[Any]:
    """Take checkpoints, of which the child of rank `killed` loses the second; return the outcomes."""
    rank = dist.get_rank()
    model, session, variables = _job(root)
    fork, outcomes, forks = forked_image.fork_image, [], itertools.count(1)
    session.resume()

    def killing(*args: Any) -> forked_image.ForkedImage:
        image = fork(*args)
        if next(forks) == 2 and rank == killed:
            os.kill(image.pid, signal.SIGKILL)
        return image

    host_state.fork_image = killing
    for _ in range(ITERATIONS):
        variables.buffer[session.iteration] = rank + session.iteration
        model(torch.ones(2, 4)).sum().backward()
        session.step()
        outcomes += [(each.iteration, each.is_durable, each.reason) for each in session.wait(120)]
    session.close()
    return outcomes


def resume(stage: Any, root: str) -> tuple[int, list[float]]:
    """Return the iteration, and the first elements of this rank's buffer."""
    _, session, variables = _job(root)
    iteration = session.resume()
    session.close()
    return iteration, variables.buffer[:4, 0].tolist()


def _job(root: str) -> tuple[torch.nn.Module, holdfast.Session, holdfast.Variables]:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    variables = holdfast.Variables(buffer=np.zeros((ROWS, 1024), np.float32))
    session = holdfast.Session(
        "job", store=root, every=1, model=model, optimizer=optimizer, variables=variables, host_state="fork"
    )
    return model, session, variables


def train_until_killed(store: str, moment: str, written: str) -> None:
    """Take one checkpoint, then be killed beside the child of the second at a moment; say the child's number.

    The second writes all of the buffer, or a part of it, which the child gives to this process.
    """
    variables = holdfast.Variables(buffer=np.zeros((ROWS, 1024), np.float32))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = holdfast.Session(
        "job", store=store, every=10**6, model=model, optimizer=optimizer, variables=variables, host_state="fork"
    )
    ask = forked_image.ForkedImage._ask

    def die(image: forked_image.ForkedImage) -> None:
        print(image.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(
        image: forked_image.ForkedImage,
        what: bytes,
        number: int,
        integers: Sequence[int],
        reply_bytes: int,
        fd: int | None = None,
    ) -> memoryview:
        if session.iteration < 2 or what == forked_image.HASH:
            return ask(image, what, number, integers, reply_bytes, fd)
        assert what == (forked_image.WRITE if written == "all" else forked_image.READ)
        if moment == "before the write":
            die(image)
        if moment == "within the write":
            os.kill(image.pid, signal.SIGSTOP)
            request = forked_image._REQUEST.pack(what, number, len(integers))
            forked_image.socket.send_fds(image._connection, [request], [] if fd is None else [fd])
            image._connection.sendall(array.array("q", integers))
            die(image)
        found = ask(image, what, number, integers, reply_bytes, fd)
        die(image)
        return found

    forked_image.ForkedImage._ask = dying  # type: ignore[method-assign]
    session.resume()
    for number in (1, 2):
        variables.buffer[: ROWS if number == 1 or written == "all" else ROWS // 50] = number
        model(torch.ones(1, 4)).sum().backward()
        session.checkpoint()
        session.step()
        session.wait(60)


if __name__ == "__main__":
    train_until_killed(*sys.argv[1:])
