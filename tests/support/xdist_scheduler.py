"""Tests shared out to workers by their files, where a worker may die.

pytest-xdist 3.8's own way gives the files that a dead worker was through with out again, as work without a test:
the worker that gets one hangs, and the run with it (pytest-dev/pytest-xdist#1378). It also
repeats the test that the worker died of (#1371).
"""

from __future__ import annotations

import contextlib

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ENOUGH = 2
"""A worker keeps its last test until it knows of another one, or of the end."""


class FileScheduler(LoadFileScheduling):
    def remove_node(self, node: WorkerController) -> str | None:
        """Reassign the tests of a worker that ended; return the test that killed it, if any."""
        files = self.assigned_work.pop(node)
        died_of = next((test for tests in files.values() for test, done in tests.items() if not done), None)
        if died_of is None:
            return None
        files[self._split_scope(died_of)][died_of] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died_of

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # one in place of a dead one that does not know the tests yet
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < ENOUGH:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Leave the work with a worker that has died unnoticed: it is given out again when that is noticed."""
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)
