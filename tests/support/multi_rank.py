"""Jobs of several ranks: processes of a fork server that form a gloo process group.

    def mean(stage, number):  # in a module `sums` that tests can import
        tensor = torch.tensor([number + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item() / dist.get_world_size()

    def test_mean(launcher):
        assert launcher.run(3, "sums.mean", number=2) == [3, 3, 3]

A rank that a test watches, holds or kills reports its progress with `stage.tell(...)` and `stage.ready()`:

    with launcher.start(3, "tests.support.ledger_trainer.train") as ranks:
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

from tests.support.fork_server import ForkedProcess, ForkServer, WorkloadChannel

PATIENCE_SECONDS = 300.0
"""Timeout in seconds for one step, as in `fork_server`."""
GLOO_HAS_NOT_MET = "Gloo connectFullMesh failed"
"""Error text of a rare gloo connection failure on a busy machine, before the workload starts."""
PF_EXITING = 4


class RankLauncher:
    """Starts ranks in milliseconds. `modules` are imported once, any other workload module by each rank."""

    def __init__(self, *modules: str) -> None:
        self._fork_server = ForkServer("tests.support.multi_rank", *modules)

    def run(self, world_size: int, workload: str, /, **options: Any) -> list[Any]:
        """Run `workload`, a `module.function`, with `options` on each rank; return the results by rank.

        Raises:
            ChildProcessError: a rank raised or was killed; the text is that of the first.
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
        """Start the ranks; kill those that still run at the end."""
        with _turn, contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launcher-")))
            common = {"world_size": world_size, "place": str(place), "workload": workload, "options": options}
            ranks = []
            for number in range(world_size):
                birth = self._fork_server.spawn(
                    "tests.support.multi_rank.live", place / f"{number}.log", rank=number, **common
                )
                ranks.append(Rank(number, stack.enter_context(birth), place))
            yield ranks

    def close(self) -> None:
        self._fork_server.close()


class _Turn:
    """Lock between test processes: only one runs a job of several ranks at a time.

    More ranks than processors spend their time waiting for each other.
    """

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), 0
        self._file = Path(tempfile.gettempdir()) / "holdfast-launcher.lock"

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
    """One rank, as the test that started it sees it."""

    def __init__(self, number: int, process: ForkedProcess, place: Path) -> None:
        self.number, self.pid = number, process.pid
        self._process, self._place = process, place
        self.fileno, self.go_on = process.fileno, process.let_go

    @property
    def status(self) -> int | None:
        """Exit status, or the negative number of a signal; `None` until the rank has ended."""
        ended = self._process.all("exit ")
        return int(ended[0]) if ended else None

    def said(self, prefix: str) -> list[str]:
        """Return the rest of each line received so far that begins with `prefix`."""
        return self._process.all(prefix)

    def listen(self) -> None:
        """Wait for more lines or the end of the process."""
        self._process.listen(PATIENCE_SECONDS)

    def hear(self, prefix: str) -> str:
        """Wait for a line that begins with `prefix` and return its rest.

        Raises:
            ChildProcessError: the rank ended without sending it.
        """
        self._listen_until(lambda: bool(self.said(prefix)) or self.status is not None, prefix)
        if not (found := self.said(prefix)):
            raise ChildProcessError(f"it did not say {prefix!r}; {self.account()}")
        return found[0]

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit status."""
        self._listen_until(lambda: self.status is not None, "its end")
        assert self.status is not None
        return self.status

    def result(self) -> Any:
        """Return the result of the workload of a rank that ended without error."""
        return pickle.loads(_result(self._place, self.number).read_bytes())

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank alone, not to its descendants; do not wait."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_dying(self) -> bool:
        """Whether the rank has ended or is ending; in that case, wait for its exit status."""
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
        return f"rank {self.number}, status {self.status}: {self._process.account()}"

    def _listen_until(self, heard: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not heard():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what!r}; {self.account()}")
            self._process.listen(max(0.0, deadline - time.monotonic()))


@pytest.fixture(scope="session")
def launcher() -> Iterator[RankLauncher]:
    launcher = RankLauncher("tests.support.ddp_bucket_workloads")
    yield launcher
    launcher.close()


def _await_all(ranks: list[Rank]) -> None:
    """Wait until all have ended or one has failed: the others may then wait for it forever."""
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


def live(
    stage: WorkloadChannel, rank: int, world_size: int, place: str, workload: str, options: dict[str, Any]
) -> None:
    """Run a workload as one rank of a gloo process group."""
    torch.set_num_threads(1)
    module, _, function = workload.rpartition(".")
    meeting, patience = f"file://{place}/meeting", datetime.timedelta(seconds=PATIENCE_SECONDS)
    try:
        work = getattr(importlib.import_module(module), function)
        dist.init_process_group("gloo", meeting, timeout=patience, world_size=world_size, rank=rank)
        _result(Path(place), rank).write_bytes(pickle.dumps(work(stage, **options)))
    except BaseException:
        # report before this process ends: the test must see it before the errors that follow on other ranks
        stage.tell("raised", base64.b64encode(traceback.format_exc().encode()).decode())
        raise
    dist.destroy_process_group()


def _result(place: Path, rank: int) -> Path:
    return place / f"{rank}.pickle"
