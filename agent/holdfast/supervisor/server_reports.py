"""What the supervisor reports to the server of the attempt that it watches, if that attempt has one.

The connection is imported with the first report: it takes memory, which a starting trainer may need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.protocol.wire import SupervisorReport
from holdfast.system import supervisor_files

if TYPE_CHECKING:
    from holdfast.supervisor.supervisor_link import StateReporter, SupervisorReporter


class ServerReports:
    """Notices, and what the supervisor does after a start has ended.

    Args:
        folder: the supervisor's folder, in which the trainer publishes its attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reporter: SupervisorReporter | None = None
        self._states: StateReporter | None = None
        self._last: SupervisorReport | None = None

    def notify(
        self, level: Literal["info", "warning", "error"], code: str, *messages: str, iteration: int
    ) -> None:
        """Report notices for the job's timeline."""
        attempt = supervisor_files.published_attempt(self._folder)
        if attempt is not None and attempt.server:
            self._connected().notify(attempt, iteration, level, code, *messages)

    def state(self, report: SupervisorReport, *, iteration: int) -> None:
        """Report what the supervisor does now, in the background."""
        attempt = supervisor_files.published_attempt(self._folder)
        if attempt is None or not attempt.server:
            return
        from holdfast.supervisor.supervisor_link import StateReporter

        if self._states is None:
            self._states = StateReporter(self._folder, self._connected())
        self._last = report
        self._states.report(attempt, iteration, report)

    def wait_ended(self, *, iteration: int) -> None:
        """Report that the supervisor no longer waits for a restore request."""
        self.notify(
            "info",
            "wait_ended",
            "The supervisor ended: it no longer waits for a restore request",
            iteration=iteration,
        )
        if self._last is not None and self._last.waits:
            self.state(msgspec.structs.replace(self._last, waits=False), iteration=iteration)

    def settle(self, seconds: float) -> None:
        """Wait until the server has accepted the newest state, for a limited time."""
        if self._states is not None:
            self._states.settle(seconds)

    def _connected(self) -> SupervisorReporter:
        from holdfast.supervisor.supervisor_link import SupervisorReporter

        if self._reporter is None:
            self._reporter = SupervisorReporter()
        return self._reporter
