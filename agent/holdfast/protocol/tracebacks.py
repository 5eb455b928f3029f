"""The exception that a trainer's output ends with."""

from __future__ import annotations

import re
from collections.abc import Sequence

# These patterns meet foreign text: each takes linear time, since it limits what can repeat before what must match.
_PREFIX = re.compile(r"\[[\w.]{0,100}\d\]:\s?")
_TRACEBACK = re.compile(rf"(?P<prefix>(?:{_PREFIX.pattern})?)\s*(?:\| )?Traceback \(most recent call last\):\s*")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")


def exception_in(lines: Sequence[str]) -> int | None:
    """Return the position of the line that names the exception of the last traceback, before that of a launcher.

    Lines of ranks begin with a prefix, as in `[rank0]: `; the lines of a traceback are those with its prefix.
    """
    found: int | None = None
    begun: set[str] = set()
    """Prefixes of tracebacks of which the exception has not come yet."""
    for position, line in enumerate(lines):
        if (begins := _TRACEBACK.fullmatch(line)) is not None:
            begun.add(begins["prefix"])
            continue
        own = prefix[0] if (prefix := _PREFIX.match(line)) is not None else ""
        for prefix_of_traceback in {own, ""} & begun:
            text = line[len(prefix_of_traceback) :]
            if text.startswith((" ", "\t")):
                continue
            if _EXCEPTION.match(text):
                begun.discard(prefix_of_traceback)
                found = found if found is not None and is_of_launcher(line) else position
            elif not prefix_of_traceback and not own:
                begun.discard("")
    return found


def is_of_launcher(line: str) -> bool:
    """Return whether a line names the exception of a launcher, which follows that of the trainer."""
    return "ChildFailedError" in line


def exception_text(line: str) -> str:
    """Return the message of a line that `exception_in` found, with its type if the message is one word or none."""
    named = _PREFIX.sub("", line, count=1).strip()
    kind, _, message = named.partition(":")
    message = message.strip()
    return message if " " in message else named.removeprefix(kind[: kind.rfind(".") + 1])
