"""Workloads for tests of communication between ranks and of actions at an iteration boundary."""

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
import holdfast.session
from benchmarks.ranks.world import LargeJob
from holdfast.distributed import side_group as talk
from holdfast.distributed.side_group import SideGroup
from holdfast.errors import (
    DamagedCheckpoint,
    Fenced,
    HoldfastError,
    IncompatibleCheckpoint,
    NoSuchCheckpoint,
    UnknownFormat,
)
from holdfast.protocol.wire import Desired, OrderStateChange, RestoreOrder
from holdfast.save.two_phase_commit import RankCommit
from holdfast.save.writer import write_checkpoint
from holdfast.store import Lineage
from tests.support.clock import FakeClock, train_by

VALUES = [
    (7, int),
    ("", str),
    ("x" * 100_000, str),
    ([("1-1", True), ("2-1", False)], list[tuple[str, bool]]),
    (("000000000010-2", None), tuple[str, str | None]),
    (Lineage(number=2, iteration=5, parent="a", order=None, attempt=3, created_at=1.5), Lineage),
    ([Lineage(number=1, iteration=0, parent=None, order="o", attempt=1, created_at=0.0)], list[Lineage]),
    (RestoreOrder(id="o", checkpoint="000000000010-1", fence=4), RestoreOrder | None),
    (None, RestoreOrder | None),
]
ERRORS = {
    "os": OSError(errno.ENOSPC, "full", "/a/place"),
    "fenced": Fenced("attempt 3 has started"),
    "damaged": DamagedCheckpoint("rank-1.safetensors", "is cut short"),
    "no such": NoSuchCheckpoint("none there", "000000000010-1"),
    "incompatible": IncompatibleCheckpoint("another model"),
    "unknown format": UnknownFormat("format 9"),
    "holdfast": HoldfastError("something"),
    "value": ValueError("3 is too much"),
    "type": TypeError("a set cannot be stored"),
    "memory": MemoryError("no room"),
    "other": KeyError("typo"),
    "no text": OSError(errno.EIO, "bad \udcff name", "/a/\udcff"),
}


class LogRecorder(logging.Handler):
    """Records what Holdfast logs in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())
        if record.exc_info:
            self.lines.append(f"fault {record.exc_info[1]!r}")


@contextlib.contextmanager
def listening():
    heard = LogRecorder()
    logging.getLogger("holdfast").addHandler(heard)
    try:
        yield heard.lines
    finally:
        logging.getLogger("holdfast").removeHandler(heard)


def decide(stage):
    """Decide values on rank 0; return whether this rank received each of them."""
    group = SideGroup()
    assert group.leads == (dist.get_rank() == 0)
    found = [group.decide(lambda value=value: answer(group, value), kind) for value, kind in VALUES]
    return [value == expected for value, (expected, _) in zip(found, VALUES, strict=True)]


def answer(group, value):
    assert group.leads, "only rank 0 is asked"
    return value


def errors(stage, failing):
    """By kind of error: how it is raised here, by a decision of rank 0 and by work of the ranks `failing`."""
    group = SideGroup()
    found = {}
    for kind, error in ERRORS.items():
        decided = raised_by(lambda error=error: group.decide(lambda: raise_(error), int))
        worked = raised_by(
            lambda error=error: group.run_on_all(lambda: raise_(error) if group.rank in failing else None)
        )
        found[kind] = decided, worked
    assert group.run_on_all(lambda: 5) == 5
    return found


def raise_(error):
    raise error


def raised_by(work):
    try:
        work()
    except Exception as error:  # what is raised is what a test asks for
        return type(error).__name__, str(error)
    return None


def lose(stage, loser, how):
    """One rank goes while the others wait for it in every way there is; whether all of these end."""
    group = SideGroup()
    outcomes = {}

    def receive(source):
        outcomes[source] = raised_by(lambda: group.receive([source], 5))

    threads = [
        threading.Thread(target=receive, args=(rank,)) for rank in range(group.world_size) if rank != group.rank
    ]
    for thread in threads:
        thread.start()
    group.run_on_all(lambda: None)
    stage.ready()  # a rank may be through with what another, further along the ring, still waits for
    if group.rank == loser:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        group.close()
    else:
        outcomes["main"] = raised_by(lambda: group.run_on_all(lambda: None))
        outcomes["again"] = raised_by(lambda: group.decide(lambda: 1, int))
    for thread in threads:
        thread.join()
    return sorted({name for name, _ in outcomes.values()}), sorted({text for _, text in outcomes.values()})


def wait_in_a_chain(stage, how):
    """Each rank receives from the next one and sends to the one before; the last one dies, stops or is late."""
    talk.WARN_OF_RANK_SECONDS = 0.5 if how == "late" else 60
    talk.GROUP_TIMEOUT_SECONDS = 3 if how == "stops" else 60
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: stage.tell(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    group = SideGroup()
    group.run_on_all(lambda: None)
    last = group.world_size - 1
    if group.rank == last:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        stage.ready()
        group.send([last - 1], 5, b"late")
        return None

    def pass_on():
        (data,) = group.receive([group.rank + 1], 5)
        if not group.leads:
            group.send([group.rank - 1], 5, data)

    return raised_by(pass_on)


def commit_checkpoints(stage, root, count):
    """Commit checkpoints of a few tensors with the other ranks."""
    group, job = SideGroup(), LargeJob(Path(root), dist.get_world_size(), tensors=20)
    if group.leads:
        job.start()
    group.run_on_all(lambda: None)
    commit = RankCommit(group, job.store)

    def write(draft):
        return write_checkpoint(job.store, draft, job.payload(group.rank))

    for job.iteration in range(1, count + 1):
        commit.commit(job.iteration, job.draft(group.rank), None, write)
    group.run_on_all(lambda: None)  # gloo ends an exchange with a rank that has closed


def drop_broadcast(stage):
    """Exchange with rank 1 after a broadcast has failed whose end is not waited for; return what is raised."""
    group = SideGroup()
    group.run_on_all(lambda: None)
    if group.rank == 2:
        group.close()
        return None
    stage.ready()  # until rank 2 has ended: before, a broadcast to it may succeed
    numbers = torch.zeros(9, dtype=torch.int64)
    if group.leads:
        broadcast = group.start_broadcast(numbers)
        while not broadcast.is_completed():
            pass
        stage.tell("failed")
        stage.ready()
        return raised_by(lambda: group.send([1], 5, b"x"))
    stage.tell("failed")
    stage.ready()
    group.start_broadcast(numbers)  # gloo does not send it any more, nor anything after it
    return raised_by(lambda: group.receive([0], 5))


def destroy(stage):
    """Communicate after the script has destroyed its process group."""
    group = SideGroup()
    dist.destroy_process_group()
    agreed = group.decide(lambda: 7, int), [each.decode() for each in group.gather(str(group.rank).encode())]
    if group.leads:
        group.send(range(1, group.world_size), 3, b"")
    else:
        assert group.receive([0], 3) == [b""]
    group.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return agreed


def let_go_while_stuck(stage):
    """Return the errors of waiting threads when the group closes while gloo hangs."""
    talk._disconnect = lambda group, others: threading.Event().wait()
    talk.CLOSE_SECONDS = 0.01
    group = SideGroup()
    outcomes = {}

    def wait_in(name, wait):
        outcomes[name] = raised_by(wait)

    ways = {
        "receive": lambda: group.receive([1 - group.rank], 5),
        "send": lambda: group.send([1 - group.rank], 6, b"x"),
        "gather": lambda: group.gather(b"x"),
    }
    threads = [threading.Thread(target=wait_in, args=way) for way in ways.items()]
    if group.leads:
        for thread in threads:
            thread.start()
        while group._workers._unfinished < 2:
            pass
        group.close()
        for thread in threads:
            thread.join()
    stage.ready()
    return outcomes


def hear_late(stage):
    """Receive a message that arrives just as its timeout is raised."""

    class Late:
        arrived = False

        def is_completed(self):
            return self.arrived

        def wait(self, timeout=None):
            if not self.arrived:
                self.arrived = True
                raise RuntimeError("Operation timed out!")

    group = SideGroup()
    group.wait_for(Late())
    return group.run_on_all(lambda: 5)


def interrupted(stage, where):
    """Interrupt rank 1 with SIGINT while it waits for rank 0."""
    leads = dist.get_rank() == 0
    if where == "join":
        if leads:
            return stage.ready()
        return interrupted_in(SideGroup, stage)
    group = SideGroup()
    if leads:
        return stage.ready()
    waits = {"gather": lambda: group.gather(b""), "decide": lambda: group.decide(lambda: 1, int)}
    outcome = interrupted_in(waits[where], stage)
    group.close()
    return outcome


def interrupted_in(wait, stage):
    threading.Thread(target=tell_once_it_waits, args=(stage, threading.get_ident()), daemon=True).start()
    try:
        wait()
    except KeyboardInterrupt:
        return "interrupted"
    return None


def tell_once_it_waits(stage, thread):
    looks, where = threading.Event(), []
    while not (talk.__file__ in where and where[0] in (threading.__file__, talk.__file__)):
        looks.wait(0.01)
        where = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    stage.tell("waits")


def own_error_first(stage):
    """What fails here while another rank goes says more than that it went."""
    group = SideGroup()
    if group.rank == 1:
        group.close()
        return None
    return raised_by(lambda: group.run_on_all(lambda: raise_(KeyError("mine"))))


def wait_long(stage):
    """Return the notices while another rank is late."""
    talk.WARN_AFTER_SECONDS = 0.01
    told = threading.Event()
    talk.logger.warning = lambda *words: (stage.tell("told", words[0] % words[1:]), told.set())
    if dist.get_rank() == 0:
        stage.ready()
    group = SideGroup()
    group.run_on_all(lambda: None)
    if dist.get_rank() == 0:
        stage.ready()
    group.wait_for(group.start_broadcast(torch.zeros(2, dtype=torch.int64)))
    return told.is_set()


# Of the boundary between two iterations


class IdleJob:
    """A rank that trains nothing: what is looked at is when things happen."""

    def __init__(self, store, **options):
        self.model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.model.weight, dist.get_rank())
        self.loop = holdfast.Variables()
        self.session = holdfast.Session("m", store=store, model=self.model, loop=self.loop, **options)
        self.taken = []
        take = self.session._saver.take

        def noting(*args, **options):
            self.taken.append((self.session.iteration, args[1]))
            return take(*args, **options)

        self.session._saver.take = noting
        self.session.resume()

    def step(self, times=1, *, settled=True):
        for _ in range(times):
            self.session.step()
            if settled:
                self.session.wait(300)


def regularly(stage, store, every, busy):
    """When each rank takes checkpoints, with iterations that are quick, or slow on one rank."""
    job = IdleJob(store, every=every)
    for _ in range(60):
        if busy == dist.get_rank():
            torch.ones(300, 300) @ torch.ones(300, 300)
        job.step()
    job.session.close()
    return job.taken


def timed(stage, store, step_seconds, every, steps):
    """When each rank takes checkpoints, with a clock that only advances on rank 0."""
    job, clock = IdleJob(store, every=every), FakeClock()
    train_by(clock, job.session)
    for _ in range(steps):
        if dist.get_rank() == 0:
            clock.now += step_seconds
        job.step()
    job.session._close("killed")
    return job.taken


def asked(stage, store):
    """When all ranks take the checkpoint that rank 0's script asks for, and another's asks for in vain."""
    job = IdleJob(store, every=10**6)
    job.step(20)
    if dist.get_rank() == 0:
        job.session.checkpoint()
    job.step(200)
    job.session._close("killed")
    return [taken for taken in job.taken if taken[1] == "requested"]


def break_within(stage, store, rank, what):
    """Raise an internal error on one rank; return the checkpoints each rank takes, and the log lines."""
    with listening() as lines:
        job = IdleJob(store, every=4)
        session = job.session
        job.step(8)
        owner, method = {
            "learn": (session._meter, "end_iteration"),
            "prices": (session._meter, "update_controller"),
            "choose": (session._controller, "due"),
            "capture": (session._training, "capture"),
        }[what]
        if dist.get_rank() == rank:
            kept = getattr(owner, method)
            setattr(owner, method, lambda *_, **__: raise_(KeyError("typo")))
        job.step(8)
        if dist.get_rank() == rank:
            setattr(owner, method, kept)
        job.step(80)
        session.close()
    return job.taken, lines, session._saver.history.head


def restore_back(stage, store, fails_on=None):
    """A restore that rank 0's script asks for: (iteration before, after) the step that it takes effect in."""
    job = IdleJob(store, every=3)
    session, jumps = job.session, []
    job.step(20)
    if fails_on == dist.get_rank():
        session._training.check = lambda _: raise_(IncompatibleCheckpoint("does not fit"))
    if dist.get_rank() == 0:
        session.restore(int(session._saver.history.store.checkpoints("m")[0].partition("-")[0]))
    with listening() as lines:
        for _ in range(200):
            before = session.iteration
            job.step()
            if session.iteration != before + 1:
                jumps.append((before, session.iteration))
        session.close()
    return jumps, session.lineage, lines


def afresh(stage, store):
    """A loop that neither resumes nor draws batches."""
    model = torch.nn.Linear(2, 2)
    session = holdfast.Session("m", store=store, every=1, model=model)
    for _ in range(10):
        session.step()
    session.close()
    return session.iteration, session._saver.history.head


class EventRecorder:
    """Rank 0's link to the server, which records what is reported."""

    is_fenced = False

    def __init__(self):
        self.events = []

    def event(self, event):
        self.events.append(event)

    def sample(self, measured, metrics): ...

    def close(self): ...


def ordered(stage, store):
    """An operator's orders, one after the other: what became of them, at which iteration, on each rank."""
    job = IdleJob(store, every=10**6)
    session, server = job.session, EventRecorder()
    leads, jumps, told = dist.get_rank() == 0, [], {}
    if leads:
        session._reporter.connect(server)
    job.step(20)
    for number in range(3):
        order = None
        if number == 2:
            first = session._saver.history.store.checkpoints("m")[0]
            order = RestoreOrder(id="o", checkpoint=first, fence=1)
        if leads:
            session._operator.receive(
                Desired(version=1 + number, checkpoint_request=1, every=7 if number else None, restore=order)
            )
        for _ in range(150):
            before = session.iteration
            job.step()
            if session.iteration != before + 1:
                jumps.append((before + 1, session.iteration))
    for event in server.events:
        if isinstance(event, OrderStateChange):
            told[event.state] = event.iteration
    session._close("killed")
    return job.taken, jumps, told


def relaunched(stage, store):
    """An order for a script that cannot be taken back, under a supervisor: how and where each rank ends."""
    job = IdleJob(store, every=10**6, restorable_in_place=False)
    leads, folder = dist.get_rank() == 0, os.path.join(store, "supervision")
    if leads:
        os.makedirs(folder, exist_ok=True)
        os.environ["HOLDFAST_SUPERVISION"] = folder  # rank 0's word counts
        job.session._reporter.connect(EventRecorder())
    job.step(20)
    job.session.checkpoint()
    job.step(100)
    if leads:
        first = job.session._saver.history.store.checkpoints("m")[0]
        wanted = RestoreOrder(id="o", checkpoint=first, fence=1)
        job.session._operator.receive(Desired(version=2, restore=wanted))
    status = None
    try:
        job.step(200)
    except SystemExit as ended:
        status = ended.code
    job.session._close("finished")
    os.environ.pop("HOLDFAST_SUPERVISION", None)
    return status, job.session.iteration, job.taken


def break_apart(stage, store):
    """A rank dies within a restore in place that has broken half-way on the others: what ends their loops."""
    job = IdleJob(store, every=3)
    session = job.session
    job.step(20)
    dies = dist.get_rank() == 1
    session._training.apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL) if dies else raise_(KeyError("half"))
    if dist.get_rank() == 0:
        session.restore(int(session._saver.history.store.checkpoints("m")[0].partition("-")[0]))
    return raised_by(lambda: job.step(200))
