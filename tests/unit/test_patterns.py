"""Every regular expression takes linear time, whatever text it meets: a quadratic one stops a server."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

import holdfast
import holdfast_server
import holdfast_web

CHARACTERS, MOST_CHARACTERS = 20_000, 10**6
MOST_SECONDS = 5.0
"""Processor time: a linear pattern takes a hundredth of it for CHARACTERS, a quadratic one many times as long."""
PIECES = [
    "a", "A", "9", "0", "_", "-", " ", "\t", "\n", ".", "/", ":", "=", "@", "[", "'", '"', "\x1b[", "\x1b]",
    "\u0662", "aA0/", "a.", "9.", "9,", "a ", "9 ", "\t ", "--", "--a", "://", "://a:", "://a:b", "[9",
    "[a9]: ", "eyJ", "eyJa", "eyJa.", "eyJ-", "sk-", "SG.", "hf_", "hf_9", "token=", "token: '", "password",
    "password=", 'password="a', "--token ", "--password ", "cookie: a", "authorization: a ", "bearer ",
    "-----BEGIN PRIVATE KEY-----", "best 1 by ", "1+", "1h", "1h ", "Traceback ", "a::", "(", "{a", "<Code>",
    "0-1.damaged-",
]  # fmt: skip
"""Each is repeated, alone and with an end that no pattern expects."""
SEARCHES = r"\.(?:sub|subn|search|findall|finditer|split)\b"


def modules() -> Iterator[ModuleType]:
    for package in (holdfast, holdfast_server, holdfast_web):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # integrations need packages that may be missing, and meet no foreign text
            if not found.name.startswith("holdfast.integrations") and "__main__" not in found.name:
                yield importlib.import_module(found.name)


def patterns_in(value: object) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        if isinstance(value.pattern, str):
            yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from patterns_in(each)
    elif isinstance(value, dict):
        yield from patterns_in(list(value.values()))


def all_patterns() -> dict[str, tuple[re.Pattern[str], bool]]:
    """Return the patterns by their place, and whether they are searched for in a text."""
    found: dict[str, tuple[re.Pattern[str], bool]] = {}
    for module in modules():
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            use = rf"\b{name}{SEARCHES}" if isinstance(value, re.Pattern) else rf"\bin {name}:"
            searched = re.search(use, source) is not None
            for number, pattern in enumerate(patterns_in(value)):
                found[f"{module.__name__}.{name}[{number}]"] = (pattern, searched)
    return found


PATTERNS = all_patterns()


def test_the_patterns_are_found() -> None:
    assert len(PATTERNS) > 40
    for expected in (
        "masking._PATTERNS",
        "tracebacks._TRACEBACK",
        "output_relay._ESCAPES",
        "units._TIME_OF_PARTS",
    ):
        assert any(expected in place for place in PATTERNS), expected


@pytest.mark.parametrize("place", PATTERNS)
def test_a_pattern_takes_linear_time(place: str) -> None:
    pattern, searched = PATTERNS[place]
    texts = [piece * (CHARACTERS // len(piece)) + end for piece in PIECES for end in ("", "\x00")]
    texts += [
        every * (MOST_CHARACTERS // len(every))
        for every in ("".join(PIECES), "".join(reversed(PIECES)), "a", "[9")
    ]
    for text in texts:
        began = time.process_time()
        pattern.fullmatch(text)
        pattern.match(text)
        if searched:
            pattern.sub("", text)
        assert time.process_time() - began < MOST_SECONDS, f"{pattern.pattern!r} with {text[:40]!r}"
