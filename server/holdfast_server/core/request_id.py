"""The name of the request that is being answered: in its answer, in each line of the log, and in the audit log."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = "X-Request-ID"
_SANE = re.compile(r"[A-Za-z0-9._:-]{8,64}")
"""What somebody else's name for a request may look like: nothing that a log or a page could stumble over."""

current: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Empty outside of a request."""
    return current.get()


def begin(given: str) -> str:
    """Take the name that a proxy gave, or make one, for the task that this is called in."""
    name = given if _SANE.fullmatch(given) else uuid.uuid4().hex
    current.set(name)
    return name
