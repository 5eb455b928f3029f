"""Thousands of ranks in one process: threads that talk over a network that counts, delays, reorders and loses.

One rank runs at a time, until it waits for a message. So a run of a seed is always the same, however many
ranks there are, and a world in which all wait in vain ends with an error that names them:

    world = SimulatedWorld(256, random.Random(1), deaths={7: 3})
    outcomes = world.run(lambda link: RankCommit(link, store).commit(1, draft, None, write))

A rank that has lost another one closes its connections as well, as over gloo.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.distributed.ranks import RanksLost
from holdfast.system.files import Files

STACK_BYTES = 512 << 10
MOST_LATE = 200
"""Most turns of ranks by which a message is late."""


class RankDied(BaseException):
    """This rank is dead: nothing it does has an effect any more."""


class SimulatedWorld:
    """The ranks of a job, and what they have sent each other.

    Args:
        chance: chooses which rank runs, which message is late, and whether one to a lost rank fails; without it,
            ranks run in turn.
        deaths: by rank, the number of messages and file operations after which it dies.
        late: share of the messages that are late.
        slow: ranks that run only while no other can.
    """

    def __init__(
        self,
        world_size: int,
        chance: random.Random | None = None,
        *,
        deaths: Mapping[int, int] | None = None,
        late: float = 0.0,
        slow: frozenset[int] = frozenset(),
    ) -> None:
        self.world_size = world_size
        self.received: dict[int, list[int]] = collections.defaultdict(list)
        """Sizes of the messages that each rank has received."""
        self.late_messages = 0
        self.lost: set[int] = set()
        """Ranks that have died or closed their connections."""
        self.dead: set[int] = set()
        self._chance, self._left, self._late_share, self._slow = chance, dict(deaths or {}), late, slow
        self._mail: dict[tuple[int, int, int], collections.deque[bytes]] = collections.defaultdict(
            collections.deque
        )
        """Messages that have arrived, by sender, receiver and tag."""
        self._late: list[tuple[int, tuple[int, int, int], bytes]] = []
        self._turn = 0
        self._ready: collections.deque[int] = collections.deque()
        self._waiting: dict[int, tuple[int, int, int]] = {}
        self._batons = [threading.Semaphore(0) for _ in range(world_size)]
        self._done = threading.Event()
        self._stuck: list[int] = []

    def run(self, work: Callable[[SimulatedLink], Any]) -> list[Any]:
        """Run `work` on every rank; return what it returned or raised, by rank, and `RankDied` of a dead one."""
        outcomes: list[Any] = [RankDied() if rank in self.dead else None for rank in range(self.world_size)]

        def take_part(rank: int) -> None:
            self._batons[rank].acquire()
            try:
                outcomes[rank] = work(SimulatedLink(self, rank))
            except BaseException as error:  # of a rank: the caller compares it
                outcomes[rank] = error
            self._hand_on()

        self._done.clear()
        before = threading.stack_size(STACK_BYTES)
        try:
            threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in self._living()]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._ready.extend(self._living())
        self._hand_on()
        self._done.wait()
        for thread in threads:
            thread.join()
        assert not self._stuck, f"ranks {self._stuck[:8]} wait in vain"
        return outcomes

    def count(self, rank: int) -> None:
        """Count an operation of a rank, which dies at the one that is planned."""
        if rank in self.dead:
            raise RankDied
        if rank in self._left:
            self._left[rank] -= 1
            if self._left[rank] < 0:
                self.dead.add(rank)
                self._late = [each for each in self._late if each[1][0] != rank]
                self.lose(rank)
                raise RankDied

    def lose(self, rank: int) -> None:
        """Close the connections of a rank: whoever waits for it is told."""
        self.lost.add(rank)
        for other, key in list(self._waiting.items()):
            if key[0] == rank:
                self._wake(other)

    def put(self, key: tuple[int, int, int], data: bytes) -> None:
        if key[1] in self.lost:
            if self._chance is None or self._chance.random() < 0.5:
                raise RanksLost(f"rank {key[1]} is gone")
            return  # sent before the loss was noticed
        if self._chance is not None and self._chance.random() < self._late_share:
            self.late_messages += 1
            self._late.append((self._turn + self._chance.randrange(1, MOST_LATE), key, data))
        else:
            self._deliver(key, data)

    def take(self, key: tuple[int, int, int]) -> bytes:
        sender, rank, _ = key
        while not self._mail[key]:
            if sender in self.lost and not any(each[1] == key for each in self._late):
                self.lose(rank)
                raise RanksLost(f"rank {sender} is gone")
            self._waiting[rank] = key
            self._hand_on()
            self._batons[rank].acquire()
        data = self._mail[key].popleft()
        if not self._mail[key]:
            del self._mail[key]
        self.received[rank].append(len(data))
        return data

    def give_way(self, rank: int) -> None:
        """Let another rank run first, perhaps."""
        if self._chance is not None:
            self._ready.append(rank)
            self._hand_on()
            self._batons[rank].acquire()

    def _living(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.dead]

    def _deliver(self, key: tuple[int, int, int], data: bytes) -> None:
        self._mail[key].append(data)
        if self._waiting.get(key[1]) == key:
            self._wake(key[1])

    def _wake(self, rank: int) -> None:
        del self._waiting[rank]
        self._ready.append(rank)

    def _hand_on(self) -> None:
        """Let the next rank run."""
        self._turn += 1
        due = [each for each in self._late if each[0] <= self._turn]
        while True:
            for each in due:
                self._late.remove(each)
                self._deliver(*each[1:])
            if self._ready or not self._late:
                break
            due = [min(self._late)]
        if self._ready:
            self._batons[self._next()].release()
        elif self._waiting:  # they would wait for ever: let them end
            self._stuck += self._waiting
            for rank in self._stuck:
                self.lose(rank)
            self._hand_on()
        else:
            self._done.set()

    def _next(self) -> int:
        if self._chance is None:
            return self._ready.popleft()
        self._ready.rotate(-self._chance.randrange(len(self._ready)))
        for _ in range(len(self._ready)):
            if self._ready[0] not in self._slow:
                break
            self._ready.rotate(-1)
        return self._ready.popleft()


class SimulatedLink:
    """A rank's connections to the others: a `RankChannel`."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world, self.rank, self.world_size = world, rank, world.world_size

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None:
        with self._operation():
            for rank in to:
                self._world.count(self.rank)
                self._world.put((self.rank, rank, tag), data)
                self._world.give_way(self.rank)

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]:
        with self._operation():
            return [self._receive(rank, tag) for rank in sources]

    def _receive(self, source: int, tag: int) -> bytes:
        self._world.count(self.rank)
        return self._world.take((source, self.rank, tag))

    @contextlib.contextmanager
    def _operation(self) -> Any:
        if self.rank in self._world.lost:
            self._world.count(self.rank)  # one that is dead stays dead
            raise RanksLost("this rank has closed its connections to the other ranks")
        try:
            yield
        except RanksLost:
            self._world.lose(self.rank)
            raise


class MortalFiles(Files):
    """The system calls of one rank, none of which has an effect once it is dead."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found) or name == "close":
            return found
        self._world.count(self._rank)
        return found
