"""The driver: one process per contender, of which one runs at a time."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import psutil

from benchmarks.harness import cpu_seconds, peak_memory

from .calling import ContenderExcluded, WorkerProcess
from .registry import CONTENDERS, OURS, ContenderEntry, by_name
from .results import BenchmarkOptions, Results

STATES_IN_MEMORY = {"cpu": 5, "cuda": 3}
"""Free host memory required to start a contender, in sizes of the state, plus 1 GB."""
LEAST_ROUNDS = 3
SLEEP_SECONDS = 1.0
RESTLESS = 0.02
"""Maximum share of a core for a waiting contender."""


class CheckpointBenchmark:
    """One run of all contenders."""

    def __init__(self, plan: BenchmarkOptions) -> None:
        self.plan, self.results = plan, Results()
        self._workers: dict[str, WorkerProcess] = {}
        self._began = time.monotonic()
        (plan.folder / "logs").mkdir()

    def everything(self) -> Results:
        try:
            waiting = list(map(by_name, self.plan.only)) if self.plan.only else list(CONTENDERS)
            waiting.sort(key=lambda entry: entry.name != OURS)  # if memory is short, ours run first
            while waiting:
                waiting = self._take_turns(waiting)
        finally:
            self._end_workers()
        return self.results

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def _take_turns(self, entries: list[ContenderEntry]) -> list[ContenderEntry]:
        """Run all rounds of the contenders that fit into memory; return the others."""
        no_room = self._start(entries)
        if len(no_room) == len(entries):
            for entry in no_room:
                self._leave_out(entry.name, ContenderExcluded("not enough memory"))
            return []
        if no_room:
            names = ", ".join(entry.name for entry in no_room)
            self.say(f"no memory for all at once: {names} have their rounds afterwards")
        share = (len(entries) - len(no_room)) / len(entries)
        self._rounds(until=time.monotonic() + share * (self.plan.until - time.monotonic()))
        self._end_workers()
        return no_room

    def _start(self, entries: list[ContenderEntry]) -> list[ContenderEntry]:
        """Start contenders, unmeasured; return those that do not fit into memory."""
        with ThreadPoolExecutor(self.plan.starts) as pool:
            rooms = pool.map(self._start_one, entries)
            no_room = [entry for entry, room in zip(entries, rooms, strict=True) if not room]
        self._order = [entry.name for entry in entries if entry.name in self._workers]
        if self._order:
            folder = self.plan.folder / "limits"
            self._limits_turn("start", self.results.state_bytes, folder, self.plan.scale.device)
            self._see_that_they_sleep()
        return no_room

    def _see_that_they_sleep(self) -> None:
        before = {name: cpu_seconds(worker.pid) for name, worker in self._workers.items()}
        time.sleep(SLEEP_SECONDS)
        for name, worker in self._workers.items():
            share = (cpu_seconds(worker.pid) - before[name]) / SLEEP_SECONDS
            if share > RESTLESS:
                self.say(f"{name}: RESTLESS, it takes {share:.0%} of a core while others have their turn")

    def _start_one(self, entry: ContenderEntry) -> bool:
        """Return False if there is no memory for it."""
        name, results, scale = entry.name, self.results, self.plan.scale
        if psutil.virtual_memory().available < STATES_IN_MEMORY[scale.device] * scale.state_bytes + 10**9:
            return False
        try:
            worker = self._worker(name, "contender")
            folder = self.plan.folder / _file_name(name)
            state_bytes = worker.call("start", name, asdict(scale), folder)
            if state_bytes is None:
                self._workers.pop(name).end()
                return False
            results.state_bytes = state_bytes
            with peak_memory(worker.pid) as alone:
                worker.call("iterate", 2)
            results.notes[name] = worker.call("prepare")
            with peak_memory(worker.pid) as together:
                max_in_flight = worker.call("one", 2)
        except ContenderExcluded as reason:
            self._leave_out(name, reason)
            return True
        results.samples[name] = {}
        results.memory_bytes[name] = together.bytes - alone.bytes, max_in_flight
        self.say(f"{name}: ready, {(together.bytes - alone.bytes) / 1e6:,.0f} MB for checkpoints")
        return True

    def _rounds(self, until: float) -> None:
        seconds: list[float] = []
        for number in range(1, self.plan.rounds + 1):
            if number > LEAST_ROUNDS and time.monotonic() + max(seconds[-2:]) > until:
                self.say(f"no time is left for round {number}")
                return
            began = time.monotonic()
            self._round(number)
            seconds.append(time.monotonic() - began)

    def _round(self, number: int) -> None:
        order = [*self._order, "limits"]
        random.Random(number).shuffle(order)
        # These figures vary less: every second round is enough.
        turns: list[tuple[Any, ...]] = [("pair", self.plan.k)]
        if number % 2:
            turns += [("every", self.plan.every_iterations)] if self.plan.every_iterations else []
            turns.append(("restore",))
        for name in order:
            if name == "limits":
                self._note(self.results.limits, self._limits_turn("measure") or {})
            elif name in self._workers:
                self._turn(number, name, turns)

    def _limits_turn(self, what: str, *arguments: Any) -> Any:
        try:
            worker = self._workers.get("limits") or self._worker("limits", "limits")
            return worker.call(what, *arguments)
        except ContenderExcluded as reason:
            self._leave_out("limits", reason)
            return None

    def _turn(self, number: int, name: str, turns: list[tuple[Any, ...]]) -> None:
        seen: dict[str, list[float]] = {}
        began = time.monotonic()
        try:
            for what, *arguments in turns:
                if what == "pair" or name != "plain":
                    seen |= self._workers[name].call(what, *arguments)
        except ContenderExcluded as reason:
            self._leave_out(name, reason)
            return
        self._note(self.results.samples[name], seen)
        self.say(
            f"round {number}: {name}: blocked {seen['blocked'][-1]:.4f} s, slowed down by "
            f"{seen['slowdown'][-1]:+.3f} s, durable after {seen['durable'][-1]:.2f} s "
            f"({time.monotonic() - began:.0f} s)"
        )

    @staticmethod
    def _note(samples: dict[str, list[float]], seen: dict[str, list[float]]) -> None:
        for measure, values in seen.items():
            samples.setdefault(measure, []).extend(values)

    def _worker(self, name: str, kind: str) -> WorkerProcess:
        self._workers[name] = WorkerProcess(kind, self.plan.folder / "logs" / f"{_file_name(name)}.log")
        return self._workers[name]

    def _leave_out(self, name: str, reason: ContenderExcluded) -> None:
        self.results.left_out[name] = str(reason)
        self.results.samples.pop(name, None)
        if worker := self._workers.pop(name, None):
            worker.end()
        self.say(f"{name}: LEFT OUT, {reason}")

    def _end_workers(self) -> None:
        with ThreadPoolExecutor(max(1, len(self._workers))) as pool:
            list(pool.map(WorkerProcess.end, self._workers.values()))
        self._workers.clear()


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name)
