"""Several checkpoints under way in a real session, and never more than there may be."""

import re
import threading

from holdfast import store as stores
from holdfast.store import LocalStore
from tests.support.process_inspection import our_threads, record_preexisting_processes_and_threads
from tests.support.small_session import iterate, session_of

HELD = 3


class OverlappingCommits:
    """Commits that wait until so many wait together, as those of a store that answers late would overlap."""

    def __init__(self, monkeypatch, together):
        self.together, self.most, self._now = together, 0, 0
        self._changed = threading.Condition()
        begin = LocalStore.begin

        def held(store, *args):
            writer = begin(store, *args)
            commit = writer.commit

            def late(*args, **options):
                with self._changed:
                    self._now += 1
                    self.most = max(self.most, self._now)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self.most >= self.together, 30)
                try:
                    commit(*args, **options)
                finally:
                    with self._changed:
                        self._now -= 1

            writer.commit = late
            return writer

        monkeypatch.setattr(stores.LocalStore, "begin", held)


def test_an_ordered_interval_has_as_many_under_way_as_there_are_slots(tmp_path, monkeypatch):
    held = OverlappingCommits(monkeypatch, HELD)
    model, optimizer, session = session_of(tmp_path, max_in_flight=HELD)
    with session:
        session.resume()
        while held.most < HELD:
            iterate(model, optimizer, session)
        assert session._saver.under_way <= HELD
        session.wait(300)
    assert held.most == HELD
    iterations = [int(name.partition("-")[0]) for name in LocalStore(tmp_path).checkpoints("m")]
    assert iterations == sorted(iterations)


def test_checkpoints_start_few_threads_which_stay_and_are_named(tmp_path):
    record_preexisting_processes_and_threads()
    seen = set()
    model, optimizer, session = session_of(tmp_path, max_in_flight=2, keep=2)
    with session:
        for _ in range(60):
            iterate(model, optimizer, session)
            seen |= set(our_threads(pool=True))
        session.wait(300)
    assert seen >= {"holdfast-copy", "holdfast-write-0"}
    expected = re.compile(r"holdfast-(copy|write-[01]|io-[0-7])")
    assert [name for name in seen if not expected.fullmatch(name)] == []
