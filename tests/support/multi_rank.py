"""Jobs of several ranks: processes forked from one that has everything imported, with a gloo group between them.

    def mean(stage, number):  # in a module `sums` that tests can import
        tensor = torch.tensor([number + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item() / dist.get_world_size()

    def test_mean(crowd):
        assert crowd.run(3, "sums.mean", number=2) == [3, 3, 3]

Ranks that are to be watched, held up or killed say where they are with `stage.tell(...)` and `stage.ready()`:

    with crowd.start(3, "tests.support.trainer.train") as ranks:
        ranks[0].hear("iteration 5")
        ranks[1].kill()
        assert [rank.wait() for rank in ranks] == [1, -9, 1]
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import importlib
import os
import pickle
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which every optimizer imports, in seconds
import torch.distributed as dist

from tests.support.fork_server import Hatchling, Nursery, Stage

PATIENCE_SECONDS = 300.0
"""As a nursery's."""
GLOO_HAS_NOT_MET = "Gloo connectFullMesh failed"
"""Once in thousands of meetings on a busy machine, before anything of a workload has begun."""
PF_EXITING = 4


class Crowd:
    """Starts ranks in milliseconds: those of `modules` are imported once, any other by each rank."""

    def __init__(self, *modules: str) -> None:
        self._nursery = Nursery("tests.support.multi_rank", *modules)

    def run(self, world_size: int, workload: str, /, **options: Any) -> list[Any]:
        """What `workload`, a `module.function`, has returned on each rank, called with its stage and `options`.

        Raises:
            ChildProcessError: a rank raised or was killed; the text is what the first of them said.
            TimeoutError: not all have ended in time.
        """
        try:
            return self._run(world_size, workload, **options)
        except ChildProcessError as error:
            if GLOO_HAS_NOT_MET not in str(error):
                raise
            return self._run(world_size, workload, **options)

    def _run(self, world_size: int, workload: str, /, **options: Any) -> list[Any]:
        with self.start(world_size, workload, **options) as ranks:
            _await_all(ranks)
            return [rank.result() for rank in ranks]

    @contextlib.contextmanager
    def start(self, world_size: int, workload: str, /, **options: Any) -> Iterator[list[Rank]]:
        """The ranks, on their way; whatever is left of them at the end is killed."""
        with _turn, contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crowd-")))
            common = {"world_size": world_size, "place": str(place), "workload": workload, "options": options}
            ranks = []
            for number in range(world_size):
                birth = self._nursery.hatch(
                    "tests.support.multi_rank.live", place / f"{number}.log", rank=number, **common
                )
                ranks.append(Rank(number, stack.enter_context(birth), place))
            yield ranks

    def close(self) -> None:
        self._nursery.close()


class _Turn:
    """Of this process, among those that run tests at the same time: ranks of several jobs, more than there are
    processors, spend their time waiting for each other."""

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), 0
        self._file = Path(tempfile.gettempdir()) / "holdfast-crowd.lock"

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._handle = self._file.open("w")
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            self._held += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._held -= 1
            if not self._held:
                self._handle.close()


_turn = _Turn()


class Rank:
    """One process of a crowd, as a test sees it."""

    def __init__(self, number: int, hatchling: Hatchling, place: Path) -> None:
        self.number, self.pid = number, hatchling.pid
        self._hatchling, self._place = hatchling, place
        self.fileno, self.go_on = hatchling.fileno, hatchling.let_go

    @property
    def status(self) -> int | None:
        """Its exit status, the negative number of a signal; None while it is not known to have ended."""
        ended = self._hatchling.all("exit ")
        return int(ended[0]) if ended else None

    def said(self, prefix: str) -> list[str]:
        """The rest of each line said up to now that begins with `prefix`."""
        return self._hatchling.all(prefix)

    def listen(self) -> None:
        """Wait for it to say more, or to end."""
        self._hatchling.listen(PATIENCE_SECONDS)

    def hear(self, prefix: str) -> str:
        """Wait for a line that begins with `prefix`; its rest. ChildProcessError when it ends without."""
        self._listen_until(lambda: bool(self.said(prefix)) or self.status is not None, prefix)
        if not (found := self.said(prefix)):
            raise ChildProcessError(f"it did not say {prefix!r}; {self.account()}")
        return found[0]

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        self._listen_until(lambda: self.status is not None, "its end")
        assert self.status is not None
        return self.status

    def result(self) -> Any:
        """What its workload has returned; for one that ended well."""
        return pickle.loads(_result(self._place, self.number).read_bytes())

    def kill(self, number: int = signal.SIGKILL) -> None:
        """It alone, not what it started; does not wait."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_dying(self) -> bool:
        """Dead, or so far gone that others may have seen it, though nobody has said so yet. Waits for its end."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            fields = ["X"]
        if fields[0] in "ZX" or int(fields[6]) & PF_EXITING:
            self.wait()
        return self.status is not None

    def account(self) -> str:
        """For people: how it ended, and what it says of that."""
        if raised := self.said("raised "):
            return f"rank {self.number} raised:\n{base64.b64decode(raised[0]).decode()}"
        return f"rank {self.number}, status {self.status}: {self._hatchling.account()}"

    def _listen_until(self, heard: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not heard():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what!r}; {self.account()}")
            self._hatchling.listen(max(0.0, deadline - time.monotonic()))


@pytest.fixture(scope="session")
def crowd() -> Iterator[Crowd]:
    crowd = Crowd("tests.support.reducing")
    yield crowd
    crowd.close()


def _await_all(ranks: list[Rank]) -> None:
    """Until all have ended well, or one has not: the others may then wait for it in vain."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if failed := [rank for rank in ranks if rank.said("raised ") or rank.status]:
            killed = [rank for rank in ranks if rank not in failed and rank.is_dying() and rank.status]
            raise ChildProcessError("\n".join(rank.account() for rank in (*killed, *failed)))
        if not (going := [rank for rank in ranks if rank.status is None]):
            return
        if not (heard := select.select(going, [], [], max(0.0, deadline - time.monotonic()))[0]):
            accounts = "\n".join(rank.account() for rank in going)
            raise TimeoutError(f"not all have ended after {PATIENCE_SECONDS:g} s:\n{accounts}")
        heard[0].listen()


def live(stage: Stage, rank: int, world_size: int, place: str, workload: str, options: dict[str, Any]) -> None:
    """What a rank does."""
    torch.set_num_threads(1)
    module, _, function = workload.rpartition(".")
    meeting, patience = f"file://{place}/meeting", datetime.timedelta(seconds=PATIENCE_SECONDS)
    try:
        work = getattr(importlib.import_module(module), function)
        dist.init_process_group("gloo", meeting, timeout=patience, world_size=world_size, rank=rank)
        _result(Path(place), rank).write_bytes(pickle.dumps(work(stage, **options)))
    except BaseException:  # told before this process ends, so that it is heard before what others say of that
        stage.tell("raised", base64.b64encode(traceback.format_exc().encode()).decode())
        raise
    dist.destroy_process_group()


def _result(place: Path, rank: int) -> Path:
    return place / f"{rank}.pickle"
