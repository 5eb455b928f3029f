"""Random faults, and operators' orders over the API, both from a seed."""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.soak.processes import Servers, Supervised
from holdfast.client import Client, Conflict, NotFound, ServerError, UnreachableError

SERVER_FAULTS_UNTIL = 0.3
"""Share of the run after which the server runs undisturbed, so that its memory can be judged."""
SERVER_FAULTS, BUCKET_FAULTS = 4, 3
Action = Callable[[], object]
"""Returns False if it was not done; it is tried again."""


class Agenda:
    """What is due at a later time, such as the end of a fault."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def add(self, at: float, action: Action) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), action))

    def run(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            action = heapq.heappop(self._due)[2]
            if action() is False:
                self.add(now + 2, action)

    def settle(self) -> bool:
        """Do all that is left now; return whether nothing is left."""
        left = [action for _, _, action in sorted(self._due) if action() is False]
        self._due = [(0.0, next(self._numbers), action) for action in left]
        return not left


class Faults:
    def __init__(self, jobs: Sequence[Supervised], servers: Servers, agenda: Agenda, rng: random.Random) -> None:
        self._jobs, self._servers, self._agenda, self._rng = jobs, servers, agenda, rng
        self.done: collections.Counter[str] = collections.Counter()

    def plan(self, now: float, seconds: float) -> None:
        """Spread faults of the bucket, and over the first part kills and restarts of the server."""
        for number in range(BUCKET_FAULTS):
            self._agenda.add(now + (number + 0.5) / BUCKET_FAULTS * seconds, self._take_bucket)
        for number in range(SERVER_FAULTS):
            share = (number + self._rng.uniform(0.2, 0.8)) / SERVER_FAULTS * SERVER_FAULTS_UNTIL
            signum = (signal.SIGKILL, signal.SIGTERM)[number % 2]
            self._agenda.add(now + share * seconds, partial(self._stop_server, signum))

    def strike(self, now: float) -> str | None:
        """Have one fault happen; `None` if the job has not trained since its last one."""
        job = self._rng.choice(self._jobs)
        if not job.moves:
            return None
        names = ["SIGKILL of a rank", "SIGKILL of a rank", "SIGTERM of a rank", "disk full"]
        names += ["SIGKILL of a supervisor", "SIGTERM of a supervisor"]
        if job.kind in ("loader", "fork"):
            names += 2 * ["SIGKILL of a helper"]
        name = self._rng.choice(names)
        if name == "disk full":
            self._fill(job, now)
        else:
            number, target = name.split(" of a ")
            pids = {"rank": job.trainers, "supervisor": job.supervisors, "helper": job.helpers}[target]()
            if not pids:
                return None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signal.Signals[number])
        self.done[name] += 1
        job.struck_at = len(job.ledgers[0].steps)
        return f"{job.kind}: {name}"

    def _fill(self, job: Supervised, now: float) -> None:
        file = job.folder / "disk-full"
        file.touch()
        self._agenda.add(now + self._rng.uniform(5, 20), partial(file.unlink, missing_ok=True))

    def _take_bucket(self) -> None:
        self.done["bucket down"] += 1
        self._servers.bucket.kill()
        self._agenda.add(time.monotonic() + self._rng.uniform(5, 30), self._servers.bucket.start)

    def _stop_server(self, number: signal.Signals) -> None:
        self.done[f"{number.name} of the server"] += 1
        self._servers.stop(number)
        self._agenda.add(0, self._servers.start)


class Orders:
    """Operators who change settings, restore and pause."""

    def __init__(self, jobs: Sequence[Supervised], client: Client, agenda: Agenda, rng: random.Random) -> None:
        self._jobs, self._client, self._agenda, self._rng = jobs, client, agenda, rng
        self.done: collections.Counter[str] = collections.Counter()
        self.restores: list[tuple[str, str]] = []
        """(job, id) of each restore request."""

    def give(self, now: float) -> str | None:
        job, rng, edit = self._rng.choice(self._jobs), self._rng, self._client.edit
        orders: dict[str, Callable[[], object]] = {
            "restore": lambda: self._restore(job),
            "pause": lambda: self._pause(job, now),
            "interval": lambda: edit(job.kind, every=rng.choice([5, 20, 50, "3s", None])),
            "budget": lambda: edit(job.kind, budget=rng.choice([0.02, 0.05, 0.2]), every=None),
            "pin": lambda: self._pin(job),
            "value": lambda: self._client.set_value(job.kind, "note", float(rng.randrange(1, 100))),
            "checkpoint": lambda: edit(job.kind, checkpoint_request=True),
        }
        name, outcome = rng.choice(["restore", *orders]), ""
        try:
            orders[name]()
        except (Conflict, NotFound, IndexError):  # such as a restore during a restore
            outcome = ", refused"
        except (ServerError, UnreachableError):
            outcome = ", no answer"
        self.done[name + outcome] += 1
        return None if outcome else f"{job.kind}: {name}"

    def _restore(self, job: Supervised) -> None:
        checkpoint = self._rng.choice(self._client.restorable(job.kind, 20))
        self.restores.append((job.kind, self._client.restore(job.kind, checkpoint=checkpoint.id).id))

    def _pause(self, job: Supervised, now: float) -> None:
        self._client.order_training(job.kind, "pause")
        job.is_paused = True

        def go_on() -> bool:
            try:
                self._client.order_training(job.kind, "continue")
            except Conflict:  # it was not paused any more
                pass
            except (ServerError, UnreachableError):
                return False
            job.is_paused = False
            return True

        self._agenda.add(now + self._rng.uniform(5, 15), go_on)

    def _pin(self, job: Supervised) -> None:
        checkpoints = self._client.restorable(job.kind, 20)
        if pinned := [row for row in checkpoints if row.pinned]:
            self._client.pin(job.kind, pinned[0].id, pinned=False)
        self._client.pin(job.kind, self._rng.choice(checkpoints).id)
