"""Fake connection to a server: tests set the desired state and read what a session has reported."""

from __future__ import annotations

from typing import Any

from holdfast.protocol import wire
from holdfast.protocol.wire import Desired


class FakeServerConnection:
    """Connection that returns the desired state a test has set, and records every report."""

    page = "http://127.0.0.1:1/jobs/job"
    is_fenced = False
    first: Desired | None = None
    """Desired state that a starting session receives."""

    def __init__(self, *, on_desired: Any = None, **_: Any) -> None:
        self.on_desired = on_desired
        self._desired: Desired | None = None
        self.events: list[wire.Event] = []
        self.samples: list[dict[str, Any]] = []
        self.closed = False

    def start(self) -> None: ...

    @property
    def desired(self) -> Desired | None:
        """The desired state; a test that sets it has it delivered, as by a long poll."""
        return self._desired

    @desired.setter
    def desired(self, desired: Desired) -> None:
        self._desired = desired
        self.on_desired(desired)

    def event(self, event: wire.Event) -> None:
        self.events.append(event)

    def sample(self, measured: Any, metrics: dict[str, Any]) -> None:
        self.samples.append(metrics)

    def silence(self) -> None:
        self.closed = True

    def close(self, deadline_seconds: float = 5.0) -> None:
        self.closed = True

    def of(self, kind: type) -> list[Any]:
        """Return the reported events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


class FakeAgentClient:
    """HTTP client whose first desired state is `FakeServerConnection.first`."""

    def __init__(self, server: str, token: str | None) -> None: ...

    def desired(self, job: str, *, limit_seconds: float) -> Desired | None:
        return FakeServerConnection.first

    def close(self) -> None: ...
