"""A job of several ranks whose value operators change again and again, and which dies again and again."""

import contextlib
import json
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.engine import live_values, startup
from holdfast.errors import NoSuchCheckpoint
from holdfast.protocol.values import ValueChange, ValueReport
from holdfast.protocol.wire import Desired
from holdfast.store import RecordedValue, local, open_store
from tests.support.fake_server_connection import FakeAgentClient, FakeServerConnection
from tests.support.fault_injection import die

LOW, HIGH = 0.0, 1000.0


class Operators:
    """What a server keeps: the changes that operators have made, and which of them an agent has reported."""

    def __init__(self, path):
        self._made, self._reported, self._applied = (Log(path, name) for name in ("made", "reported", "applied"))

    def change(self, change):
        self._made.append([change.id, change.value, change.lineage])

    @property
    def open(self):
        closed = {change for (change,) in self._reported.lines}
        return tuple(
            ValueChange(id=change, name="scale", value=value, lineage=lineage)
            for change, value, lineage in self._made.lines
            if change not in closed
        )

    @property
    def made(self):
        return len(self._made.lines)

    @property
    def applied(self):
        return len({change for (change,) in self._applied.lines})

    def take_reports(self, events):
        """Close the changes that these events, which are removed, name."""
        for event in events:
            if isinstance(event, ValueReport) and event.change is not None:
                self._reported.append([event.change])
                if not event.refused:
                    self._applied.append([event.change])
        events.clear()


class Log:
    """Lines that outlive the process that wrote them, read once."""

    def __init__(self, path, name):
        self._path = Path(path, name)
        self.lines = lines(self._path)

    def append(self, line):
        append(self._path, line)
        self.lines.append(line)


def append(path, line):
    """Append a line that a kill right after this leaves behind."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(stage, place, seed, changes, *, to_the_end):
    """Train until a rank dies, or all changes are in force; note the value of each iteration."""
    chance, rank = random.Random(seed), dist.get_rank()
    live_values.AHEAD_SECONDS = chance.choice([0.0, 0.01])
    startup.ServerConnection, startup.AgentClient = FakeServerConnection, FakeAgentClient
    dying, dies_after, recorded = chance.randrange(2), chance.randrange(5, 160), chance.randrange(1, 12)
    if not to_the_end and rank == 0:
        die_at_record(chance.choice(["before", "after", None]), recorded)
    torch.manual_seed(1)
    model, loop = torch.nn.Linear(2, 2), holdfast.Variables()
    options = {"store": f"{place}/store", "every": 9, "server": "http://127.0.0.1:1"}
    session = holdfast.Session("job", model=model, loop=loop, **options)
    start, operators, goes_on = session.resume(), Operators(place), torch.ones(1)
    while goes_on.item():
        value = session.value("scale", 1.0, low=LOW, high=HIGH)
        dist.barrier()  # no rank trains without the others
        append(Path(place, f"used-{rank}"), [session.attempt, session.lineage, session.iteration + 1, value])
        if rank == 0:
            act(session, operators, chance, changes)
        if not to_the_end and rank == dying and session.iteration - start >= dies_after:
            die()
        session.step()
        goes_on.fill_(not to_the_end or operators.applied < changes or bool(operators.open))
        dist.broadcast(goes_on, 0)
    session.close()


def act(session, operators, chance, changes):
    """Change the value, or restore a checkpoint, or do nothing; what is open is delivered again at times."""
    link = session._reporter.link
    operators.take_reports(link.events)
    if operators.applied < changes and len(operators.open) < 2 and chance.random() < 0.5:
        value = chance.choice([None, round(chance.uniform(LOW, HIGH), 3)])
        operators.change(ValueChange(id=os.urandom(8).hex(), name="scale", value=value, lineage=session.lineage))
    elif operators.applied < changes and operators.made % 12 == 0 and chance.random() < 0.1:
        known = open_store(session.store).checkpoints("job")
        with contextlib.suppress(NoSuchCheckpoint):  # retention may have just removed it
            if known:
                session.restore(int(chance.choice(known)[:12]))
    link.desired = Desired(version=operators.made + 1, values=operators.open)


def die_at_record(when, number):
    """Die before or after a change is recorded for the `number`th time."""
    original, left = local.LocalStore.append, [number]

    def append_record(self, job, record):
        left[0] -= isinstance(record, RecordedValue)
        is_reached = isinstance(record, RecordedValue) and left[0] == 0
        if is_reached and when == "before":
            die()
        original(self, job, record)
        if is_reached and when == "after":
            die()

    local.LocalStore.append = append_record
