"""A workload in its own folder: run it without faults, with a fault, and once more after the fault."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.store_invariants import leftovers, violations
from tests.support.system_call_tracing import Point, points, traced

ORPHAN_SECONDS = 120.0
"""Time limit in seconds for processes to notice that their trainer has ended."""


@dataclass(slots=True)
class CrashScenario:
    """`workload` runs on a store; `restart` are its options after a crash."""

    folder: Path
    workload: str
    options: dict[str, Any]
    restart: dict[str, Any]
    prepare: Callable[[Path], None] = lambda root: None
    """Prepares the store before the workload starts."""
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def stage(self) -> Path:
        """Create the folder of one trial."""
        folder = self.folder / str(next(self._number))
        folder.mkdir(parents=True)
        self.prepare(folder / "store")
        return folder

    def undisturbed(self, fork_server: ForkServer) -> tuple[list[Point], list[str]]:
        """Run without faults; return the system calls to hit, and the lines received."""
        folder = self.stage()
        with fork_server.spawn(self.workload, folder / "log", root=str(folder / "store"), **self.options) as child:
            child.await_ready()
            with traced(child.kin(), folder / "trace"):
                child.let_go()
                status = child.wait()
        assert status == 0, child.account()
        assert violations(folder / "store", child.told) == []
        assert child.wait_alone(ORPHAN_SECONDS), f"it left processes behind: {child.account()}"
        return points(folder / "trace", folder / "store"), child.told

    def hit(self, fork_server: ForkServer, folder: Path, injection: str) -> ForkedProcess:
        """Run with an injected fault."""
        folder.mkdir(exist_ok=True)
        with fork_server.spawn(self.workload, folder / "log", root=str(folder / "store"), **self.options) as child:
            child.await_ready()
            with traced(child.kin(), folder / "trace", injection):
                child.let_go()
                child.wait()
            child.wait_alone(ORPHAN_SECONDS)
        return child

    def again(self, fork_server: ForkServer, folder: Path) -> ForkedProcess:
        """Restart without faults, as a supervisor does."""
        with fork_server.spawn(self.workload, folder / "log", root=str(folder / "store"), **self.restart) as child:
            child.run()
        return child

    def killed_at(self, fork_server: ForkServer, point: Point) -> tuple[list[str], list[str]]:
        """Kill the workload at `point` and restart it; return the violations and the lines received."""
        folder = self.stage()
        root = folder / "store"
        allowed = 2 + len(leftovers(root))  # of what writes, and of retention, which runs meanwhile
        child = self.hit(fork_server, folder, point.inject("signal=SIGKILL"))
        found = []
        if not (kills := (folder / "trace").read_text().count("killed by SIGKILL")):
            found.append(f"was not hit but ended with {child.status}")
        if child.status not in (0, -9):  # 0: a helper of its own was killed, which training survives
            found.append(f"ended with {child.status}: {child.account()}")
        if child.status == 0:
            allowed += kills - 1
        if not child.all("alone"):
            found.append("left processes behind")
        found += violations(root, child.told, leftovers_allowed=allowed)
        again = self.again(fork_server, folder)
        if again.status != 0:
            return [*found, f"does not start again: {again.account()}"], child.told
        found += violations(root, [*child.told, *again.told])
        if left := leftovers(root):
            found.append(f"leaves {left} after a restart")
        if not found:
            shutil.rmtree(folder)
        return found, [*child.told, *again.told]
