"""Id of the current request, for its response, the log lines and the audit log."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar

HEADER = "X-Request-ID"
_SANE = re.compile(r"[A-Za-z0-9._:-]{8,64}")
"""Request ids that a proxy may set: safe to write to logs and pages."""

current: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Return the id of the current request; empty outside of a request."""
    return current.get()


def begin(given: str) -> str:
    """Set the id of the current task's request: the one that a proxy gave, or a new one."""
    # no secret, and the system's random numbers would make the event loop wait for another thread
    name = given if _SANE.fullmatch(given) else f"{random.getrandbits(128):032x}"
    current.set(name)
    return name
