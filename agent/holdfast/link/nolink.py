"""What a session talks to when there is no server."""

from __future__ import annotations

from holdfast.link.outbox import Measured
from holdfast.protocol import Desired, Event


class NoLink:
    """The methods of `Link`, doing nothing."""

    heard = False
    fenced = False
    desired: Desired | None = None
    page: str | None = None

    def start(self) -> None: ...

    def first_desired(self, timeout_seconds: float) -> Desired | None:
        return None

    def sample(self, measured: Measured, metrics: dict[str, float]) -> None: ...

    def event(self, event: Event) -> None: ...

    def silence(self) -> None: ...

    def close(self, deadline_seconds: float = 5.0) -> None: ...
