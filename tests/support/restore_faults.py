"""Restores of real jobs in which a process is killed, or the network fails, at a chosen step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from holdfast.checkpoint import restore
from holdfast.client import Client, Order, ServerError, UnreachableError
from holdfast.store import Lineage, open_store
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.fork_server import ForkServer
from tests.support.interruptible_trainer import EVERY
from tests.support.job_processes import environment
from tests.support.network_fault_proxy import NetworkFaultProxy

T = TypeVar("T")
HERE = Path(__file__).parent
Struck = Literal["agent", "supervisor", "server", "cut", "hold"]
"""Process to kill, or network fault."""
Way = Literal["in place", "at a start", "while waiting"]
"""When the order reaches the job: in its loop, at a start, or while its supervisor waits for a request."""
BEFORE = 25
"""Number of iterations before the order."""
MENDED_AFTER = 15
"""Number of iterations until a killed server or a cut network is restored, ..."""
MENDED_SECONDS = 2.0
"""... or seconds, if no trainer runs meanwhile."""


class RestoreFaultCase(NamedTuple):
    point: str
    struck: Struck
    way: Way = "in place"
    fate: Literal["", "cancelled", "expired", "damaged"] = ""
    """Other event that ends the order."""


class TrainingLedgerLine(NamedTuple):
    """One line of a ledger: one iteration."""

    pid: int
    attempt: int
    lineage: int
    iteration: int
    outcome: str


def read(ledger: Path) -> list[TrainingLedgerLine]:
    text = ledger.read_text() if ledger.exists() else ""
    words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [TrainingLedgerLine(*map(int, each[:4]), each[4]) for each in words if len(each) == 5]  # type: ignore[arg-type]


def undisturbed(folder: Path, iterations: int) -> dict[int, str]:
    """Return the outcomes of an undisturbed run, by iteration."""
    ledger = folder / "alone"
    command = [sys.executable, str(HERE / "interruptible_trainer.py"), str(ledger), "--alone", str(iterations)]
    subprocess.run(command, env=environment(folder), check=True)
    return {line.iteration: line.outcome for line in read(ledger)}


@dataclass
class RestoreOutcome:
    case: RestoreFaultCase
    order: Order
    lines: list[TrainingLedgerLine]
    times: int
    """Number of times the order was carried out, from the records in the store."""
    wrong: list[str] = field(default_factory=list)


class _FaultTrigger(socketserver.ThreadingTCPServer):
    """Waits until a process reaches the pause point, then injects the fault once."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__(("127.0.0.1", 0), _FaultRequestHandler)
        self.strike, self.turn, self.done = strike, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _FaultRequestHandler(socketserver.StreamRequestHandler):
    server: _FaultTrigger

    def handle(self) -> None:
        with self.server.turn:
            if not self.server.done.is_set():
                self.server.strike()
                self.server.done.set()
        with contextlib.suppress(OSError):  # it was the one
            self.wfile.write(b".")


class RestoreFaultScenario:
    """One job with its server, its supervisor and the network between them."""

    def __init__(
        self, case: RestoreFaultCase, fork_server: ForkServer, folder: Path, job: str, database: Path
    ) -> None:
        self.case, self.job, self.folder = case, job, folder
        self._fork_server, self._database = fork_server, database
        self._ledger, self._log, self._enough = folder / "ledger", folder / "log", folder / "enough"
        self.store = open_store(folder / "store")
        self._stack = contextlib.ExitStack()
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self._mended = False
        self._striker = _FaultTrigger(self._strike)
        self._stack.callback(self._striker.close)
        self._serve("0")
        self._wire = NetworkFaultProxy(self._url)
        self._stack.callback(self._wire.close)
        self._client = self._stack.enter_context(Client(self._url, timeout_seconds=PATIENCE_SECONDS, retries=0))
        self._supervise()

    # ---- processes

    def _serve(self, port: str) -> None:
        """Start a server on the given port, with the same database."""
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        arguments = ["--db", str(self._database), "--port", port]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **self._where}
        birth = self._fork_server.spawn(
            "tests.support.interruptible_server.live", log, arguments=arguments, environment=env
        )
        self._server = self._stack.enter_context(birth)
        eventually(lambda: self._is_up(log), "the server to say where it is")
        _, where, rest = log.read_text().partition("http://127.0.0.1:")
        self._url = where + rest.split()[0]

    def _is_up(self, log: Path) -> bool:
        self._server.listen()
        assert not self._server.all("exit "), log.read_text()
        return log.exists() and "(press Ctrl-C to stop)" in log.read_text()

    def _supervise(self) -> None:
        stay = "always" if self.case.way == "while waiting" else "never"
        trainer = [
            sys.executable,
            str(HERE / "interruptible_trainer.py"),
            str(self._ledger),
            self.job,
            str(self._enough),
        ]
        run = [sys.executable, str(HERE / "interruptible_supervisor.py"), "run", "--stay", stay, "--", *trainer]
        env = environment(self.folder / "store", self._wire.url) | self._where
        with open(self._log, "ab") as output:
            self._supervisors.append(subprocess.Popen(run, stdout=output, stderr=subprocess.STDOUT, env=env))

    @property
    def _where(self) -> dict[str, str]:
        return {"STRIKE_AT": self.case.point, "STRIKE_PORT": str(self._striker.port)}

    @property
    def _trainers(self) -> list[int]:
        """Process ids of all trainers started so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [int(line.split("process ")[1].split(",")[0]) for line in lines if ": process " in line]

    def _strike(self) -> None:
        match self.case.struck:
            case "agent":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._trainers[-1], signal.SIGKILL)
            case "supervisor":
                self._supervisors[-1].kill()
            case "server":
                os.kill(self._server.pid, signal.SIGKILL)
            case "cut":
                self._wire.cut()
            case "hold":
                self._wire.hold()

    def _mend(self) -> None:
        """Repair the fault as a scheduler or an operator does."""
        match self.case.struck:
            case "supervisor":
                self._supervisors[-1].wait()
                self._supervise()
            case "server":
                self._server.wait()
                self._pass_by()
                self._serve(self._url.rpartition(":")[2])
            case "cut" | "hold":
                self._pass_by()
                self._wire.mend()
        self._mended = True

    def _pass_by(self) -> None:
        goal, deadline = len(self.lines) + MENDED_AFTER, time.monotonic() + MENDED_SECONDS
        eventually(lambda: len(self.lines) >= goal or time.monotonic() > deadline, "time to pass")

    # ---- run

    @property
    def lines(self) -> list[TrainingLedgerLine]:
        return read(self._ledger)

    def run(self) -> RestoreOutcome:
        try:
            self._wait(lambda: len(self.lines) >= BEFORE, f"{BEFORE} iterations")
            if self.case.way == "while waiting":
                self._enough.touch()
                self._wait(
                    lambda: "waiting for a restore request" in self._log.read_text(), "the supervisor to wait"
                )
            target = self._target()
            if self.case.fate == "damaged":
                self._damage(target)
            order = self._ordered(target)
            self._wait(lambda: self._mended and not self._now(order).open, "the order's end, and the strike")
            self._enough.touch()
            if self.case.way == "while waiting":
                self._wait(self._waits, "the job to end again")
                self._supervisors[-1].terminate()
            status = self._supervisors[-1].wait(PATIENCE_SECONDS)
            return self._judged(self._now(order), status)
        except BaseException:
            print(f"--- {self.case}\n{self._log.read_text()[-6000:]}")
            raise

    def _waits(self) -> bool:
        """Whether the supervisor waits again, after the last start for an order."""
        said = self._log.read_text()
        return said.rfind("waiting for a restore request") > max(
            said.rfind("requested: starting"), said.rfind(": process ")
        )

    def _wait(self, happened: Callable[[], bool], what: str) -> None:
        def happened_by_now() -> bool:
            if self._striker.done.is_set() and not self._mended:
                self._mend()
            return happened()

        eventually(happened_by_now, what)

    def _target(self) -> str:
        """An early checkpoint, once the server knows one."""
        known: list[str] = []

        def is_known() -> bool:
            with contextlib.suppress(ServerError):  # it has not heard of the job yet
                rows = self._client.checkpoints(self.job, limit=500)
                known.extend(row.id for row in reversed(rows) if row.restorable and row.iteration >= 2 * EVERY)
            return bool(known)

        eventually(is_known, "a checkpoint that the server knows")
        return known[0]

    def _ordered(self, target: str) -> Order:
        """Place the order, with repeated requests if needed: the key makes them one order."""
        if self.case.way == "at a start":
            os.kill(self._trainers[-1], signal.SIGSTOP)
        if self.case.point == "before delivery":
            self._strike()
        brief = 1.0 if self.case.fate == "expired" else None
        order = self._asked(
            lambda: self._client.restore(self.job, checkpoint=target, key="click", expires_seconds=brief)
        )
        if self.case.way == "at a start":
            os.kill(self._trainers[-1], signal.SIGKILL)
        if self.case.fate == "cancelled":
            self._asked(lambda: self._client.cancel_restore(self.job, order.id))
        if self.case.fate == "expired":
            eventually(lambda: self._now(order).state == "expired", "the order to expire")
        if self.case.point == "before delivery":
            self._striker.done.set()
        return order

    def _damage(self, checkpoint: str) -> None:
        for path in (self.folder / "store" / self.job / checkpoint).glob("rank-*"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    def _now(self, order: Order) -> Order:
        return self._asked(lambda: self._client.order(self.job, order.id))

    def _asked(self, ask: Callable[[], T]) -> T:
        answers: list[T] = []

        def answered() -> bool:
            with contextlib.suppress(UnreachableError):
                answers.append(ask())
            return bool(answers)

        self._wait(answered, "the server to answer")
        return answers[0]

    def close(self) -> None:
        for supervisor in self._supervisors:
            supervisor.kill()
            supervisor.wait()
        for pid in self._trainers:
            with contextlib.suppress(OSError):
                if str(self._ledger).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._stack.close()

    # ---- checks

    def _judged(self, order: Order, status: int) -> RestoreOutcome:
        lines = self.lines
        begun = [lineage for lineage in self.store.records(self.job, Lineage) if lineage.order == order.id]
        ended = RestoreOutcome(self.case, order, lines, len(begun))
        if status != 0:
            ended.wrong.append(f"the supervisor ended with {status}")
        if len(begun) != (order.state == "restored"):
            ended.wrong.append(f"it was carried out {len(begun)} times, and is {order.state}")
        if order.state != "restored" and not (order.reason or order.state == "cancelled"):
            ended.wrong.append(f"it is {order.state}, without a reason")
        told = [(order.new_lineage, order.iteration, order.safety_checkpoint)] if order.state == "restored" else []
        if told != [(lineage.number, lineage.iteration, lineage.left) for lineage in begun]:
            ended.wrong.append(f"the server reports {told}, but the store has {begun}")
        for checkpoint in self.store.checkpoints(self.job):
            if self.case.fate != "damaged":
                restore.verify(self.store, self.job, checkpoint)
        ended.wrong += list(self._jumps(lines, begun[0].number if begun else 0, order.iteration))
        return ended

    def _jumps(self, lines: Sequence[TrainingLedgerLine], restored: int, target: int) -> Iterator[str]:
        """Yield each jump between iterations that the order does not explain."""
        attempts: dict[int, list[TrainingLedgerLine]] = {}
        for line in lines:
            attempts.setdefault(line.attempt, []).append(line)
        for own in attempts.values():
            for before, after in itertools.pairwise(own):
                goes_on = after.lineage == before.lineage and after.iteration == before.iteration + 1
                restores = after.lineage == restored > before.lineage and after.iteration == target + 1
                if not (goes_on or restores):
                    yield f"{after} comes after {before}"
        for before, after in itertools.pairwise(attempts[number][0] for number in sorted(attempts)):
            if after.lineage < before.lineage:
                yield f"attempt {after.attempt} went on from what was left: {after}"
        if restored and max(line.lineage for line in lines) != restored:
            yield f"no iteration was trained on lineage {restored}"
