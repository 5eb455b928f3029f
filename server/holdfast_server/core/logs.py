"""Logging of the server as text or JSON lines, without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Literal, TextIO

from holdfast_server.core import request_id

Format = Literal["human", "json"]
Level = Literal["debug", "info", "warning", "error"]

_SECRETS = re.compile(
    r"(?i)(bearer\s+|(?:token|password|secret|key)[\"']?\s*[=:]\s*[\"']?|://[^/\s:@]*:)([^\s\"'@,;&]{4,})"
)
"""Text that looks like a secret, which an error message of a library may contain."""
_OURS = re.compile(r"hfl?_[A-Za-z0-9_-]{8,}")
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0)) if code not in (9, 10)}
_FIELDS = ("method", "route", "status", "duration_ms", "client")


def set_up(form: Format, level: Level, stream: TextIO | None = None) -> None:
    """Configure logging of the process, to standard error unless another stream is given."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Human())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "holdfast_server"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    if level != "debug":
        # these log each statement and each request
        for name in ("sqlalchemy", "alembic", "asyncio", "httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)


def clean(text: str) -> str:
    """Remove secrets and control characters, which could move a terminal's cursor or start a new line."""
    text = _OURS.sub("hf_…", _SECRETS.sub(r"\1…", text))
    return text.translate(_CONTROL)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clean(record.getMessage()),
        }
        if name := request_id.request_id():
            line["request_id"] = name
        line |= {field: getattr(record, field) for field in _FIELDS if getattr(record, field, None) is not None}
        if record.exc_info:
            line["error"] = clean(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = request_id.request_id()
        shown = f" [{name[:8]}]" if name else ""
        message = clean(record.getMessage()).replace("\n", "\n  ")
        line = f"{_moment(record.created)} {record.levelname.lower()}{shown} {message}"
        if record.exc_info:
            line += "\n  " + clean(self.formatException(record.exc_info)).replace("\n", "\n  ")
        return line


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"
