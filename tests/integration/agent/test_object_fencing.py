"""The argument in `holdfast.store.object_keys`, put to the test: every order in which requests can be served.

The store is the real one. Its bucket is a dictionary, and before each request an actor hands over to whoever is
to be served next, so that an order is a list of choices which can be enumerated, or drawn with a seed.
"""

import contextlib
import random

import greenlet
import pytest

from holdfast.errors import Fenced
from holdfast.format.manifest import MANIFEST
from holdfast.store import Lineage
from holdfast.store.bucket import NoSuchObject
from holdfast.store.objects import ObjectStore
from holdfast.store.s3_connection import S3Place

JOB = "job"
FILE = "rank-0.safetensors"
OLD, FIRST, SECOND, THIRD = (f"{iteration:012d}-1" for iteration in range(4))


class DictionaryBucket:
    """What `holdfast.store.bucket` does, over a dictionary, one request at a time and without If-None-Match."""

    def __init__(self, world, place):
        self.objects, self.place, self._put = world.objects, place, world.put
        self._hand_over, self._long_lists = world.hand_over, world.long_lists

    def sizes(self, prefix):
        self._hand_over()
        found = self._listed(prefix)
        if self._long_lists:  # such a list is several requests
            self._hand_over()
            half = sorted(found)[len(found) // 2 :][:1]
            found = {n: s for n, s in found.items() if [n] < half} | {
                n: s for n, s in self._listed(prefix).items() if [n] >= half
            }
        return found

    def _listed(self, prefix):
        return {name: len(data) for name, data in self.objects.items() if name.startswith(prefix)}

    def get(self, name):
        self._hand_over()
        if name not in self.objects:
            raise NoSuchObject(name)
        return self.objects[name]

    def put_new(self, name, data):
        self._hand_over()
        self.objects[name] = data
        self._put(name)

    def upload(self, name, parts, pace):
        self.put_new(name, b"".join(parts))

    def require_size(self, name, size_bytes, found):
        if found != size_bytes:
            raise OSError(f"{name} has {found} of {size_bytes} bytes")

    def delete(self, names):
        for name in names:
            self._hand_over()
            self.objects.pop(name, None)

    def wait(self, at_most_seconds):
        """Time passes only as requests are served."""


class FencingSimulation:
    """A bucket, the actors that use it, and what each was promised."""

    def __init__(self, *, long_lists=False):
        self.objects, self.attempts, self.long_lists = {}, [], long_lists
        self.promised = set()
        """Reported durable."""
        self.relied_on = set()
        """Found by the newest attempt when it began."""
        self.ruled_out = set()
        """What an older attempt was to put, and the newest one did not find when it began."""
        self.late = set()
        """Put when a newer attempt had noted what counts."""
        self._actors, self._dead, self._server = [], [], None

    def store(self):
        return ObjectStore(DictionaryBucket(self, S3Place("bucket", "prefix")))

    def add(self, actor, *args, store=None):
        store = store or self.store()
        self._actors.append(greenlet.greenlet(lambda: actor(self, store, *args)))

    def serve(self, choose):
        """Serve one request after the other until nobody has any; `choose(n)` says whose, or None: one dies."""
        self._server, alive = greenlet.getcurrent(), self._actors
        for actor in alive:
            actor.switch()  # up to its first request
        while alive:
            choice = choose(len(alive))
            if choice is None:
                self._dead.append(alive.pop())  # kept, since what it would do must never be done
            else:
                alive[choice].switch()
            alive = [actor for actor in alive if not actor.dead]
        self._server = None

    def hand_over(self):
        if self._server is not None:
            self._server.switch()

    def put(self, name):
        newest = max((int(n.split("/")[2][:8]) for n in self.objects if n.endswith(".seen.json")), default=0)
        if name.endswith(MANIFEST) and int(name.split("/")[2][:8]) < newest:
            self.late.add(name.split("/")[1])

    def check(self):
        """Nothing that was promised or relied on is gone, now and for the next attempt."""
        assert len(set(self.attempts)) == len(self.attempts)
        for store in (self.store(), self.store()):
            found = everything(store)
            assert self.promised <= found, "what was reported durable is gone"
            assert self.relied_on <= found, "what an attempt went on from is gone"
            assert not self.ruled_out & found, "what an attempt did not find is there"
            for checkpoint in store.checkpoints(JOB):
                store.open_file(JOB, checkpoint, FILE)
            store.acquire_attempt(JOB, f"next-{id(store)}")


def everything(store):
    return {*store.checkpoints(JOB), *(lineage.number for lineage in store.records(JOB, Lineage))}


def prepared(store, checkpoint, attempt):
    writer = store.begin(JOB, checkpoint, attempt, 7)
    writer.write(FILE, [b"tensors"])
    return writer


def commit(world, store, checkpoint, attempt):
    writer = None
    try:
        writer = prepared(store, checkpoint, attempt)
        writer.commit(b"{}")
        world.promised.add(checkpoint)
    except Fenced:
        if writer is not None:
            writer.abort()


def started(**options):
    """A job whose first attempt has a checkpoint."""
    world = FencingSimulation(**options)
    store = world.store()
    store.acquire_attempt(JOB, "first")
    prepared(store, OLD, 1).commit(b"{}")
    world.promised.add(OLD)
    return world


def add_writer(world):
    """One that has everything written but the manifest."""
    store = world.store()
    world.add(writing, prepared(store, FIRST, 1), store=store)


def writing(world, store, writer):
    try:
        writer.commit(b"{}")
        world.promised.add(FIRST)
    except Fenced:
        writer.abort()


def beginning_a_lineage(world, store, number, attempt):
    try:
        lineage = Lineage(number=number, iteration=0, parent=None, order=None, attempt=attempt, created_at=1.0)
        store.append(JOB, lineage)
        world.promised.add(number)
    except (Fenced, FileExistsError):
        pass


def starting(world, store, uid):
    """Becomes an attempt, and goes on from what it finds; that counts as long as it is not fenced itself."""
    attempt = store.acquire_attempt(JOB, uid).number
    world.attempts.append(attempt)
    found = everything(store)
    if store.latest_attempt(JOB) == attempt:
        world.relied_on |= found
        world.ruled_out |= {FIRST, 1} - found
    return attempt


def looking(world, store):
    """As an operator does, at any time."""
    for _ in range(4):
        assert not world.late & set(store.checkpoints(JOB)), "what came too late is shown"


def training(world, store, uid, checkpoint, lineage):
    """As a job does: starts, begins a lineage, writes a checkpoint."""
    attempt = starting(world, store, uid)
    beginning_a_lineage(world, store, lineage, attempt)
    commit(world, store, checkpoint, attempt)


def orders(run):
    """Every order of serving, each by running it anew: the last choice that has another is taken next."""
    path, count = [], 0
    while True:
        taken = []

        def choose(options, path=path, taken=taken):
            choice = path[len(taken)] if len(taken) < len(path) else 0
            taken.append((choice, options))
            return choice

        run(choose)
        count += 1
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        path = [choice for choice, _ in taken]
        path[-1] += 1


def test_a_commit_and_a_new_attempt_meet_in_every_order():
    ends = set()

    def run(choose):
        world = started()
        add_writer(world)
        world.add(starting, "second")
        world.serve(choose)
        world.check()
        ends.add((FIRST in world.promised, FIRST in world.relied_on))

    assert orders(run) > 500
    assert ends == {(True, True), (False, True), (False, False)}


def claiming(world, store, uid):
    with contextlib.suppress(OSError):  # others do the same at the same time
        world.attempts.append(store._claim(JOB, uid, 1, None).number)


def test_three_attempts_begin_in_every_order_and_no_two_get_a_number(monkeypatch):
    monkeypatch.setattr("holdfast.store.objects.CLAIMS", 1)
    got = set()

    def run(choose):
        world = FencingSimulation()
        for uid in ("a", "b", "c"):
            world.add(claiming, uid)
        world.serve(choose)
        world.check()
        got.add(tuple(world.attempts))

    assert orders(run) > 100
    assert {(), (1,), (1, 2, 3)} <= got


@pytest.mark.parametrize("block", range(10))
def test_attempts_that_stall_and_die_anywhere_lose_nothing_that_was_promised(block):
    for seed in range(block * 200, block * 200 + 200):
        world = started(long_lists=seed % 2)
        add_writer(world)
        world.add(beginning_a_lineage, 1, 1)
        world.add(looking)
        world.add(training, "second", SECOND, 2)
        world.add(training, "third", THIRD, 3)
        try:
            world.serve(few_switches(random.Random(seed)))
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def few_switches(order):
    """One is served for a while, then another: each stalls long at a few points. Some die."""
    served = 0

    def choose(count):
        nonlocal served
        if order.random() < 0.005:
            return None
        if served >= count or order.random() < 0.2:
            served = order.randrange(count)
        return served

    return choose
