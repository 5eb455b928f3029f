"""Masks secrets before text leaves the machine, and control characters before it reaches a terminal."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise

MASK = "<hidden>"
LEAST_SECRET_CHARACTERS = 8
"""Shorter values of secret environment variables are not searched for: they occur in ordinary text."""
_WORDS = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "auth")
)
_KEYS = frozenset(("api", "access", "private", "secret", "account", "signing", "encryption"))
"""Words that make a secret of a `key` behind them."""
_NAME = r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key)"
# no unlimited repetition before what must match: a long line would take quadratic time
_PATTERNS = (
    (re.compile(r"(://[^\s:/@]{0,100}):[^\s@/]{1,200}@"), rf"\1:{MASK}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,3}[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abprs]-)[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b"), MASK),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"), MASK),
    # a number, as in "seconds per token: 0.004213", is no secret
    (
        re.compile(
            rf"(?i)({_NAME}[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?|(?<!-)--[\w-]{{0,40}}{_NAME}\s{{1,3}})"
            r"(?![\d.,+-]+(?:\s|$))[^\s\"',;&]{6,}"
        ),
        rf"\1{MASK}",
    ),
)


def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret: `api_key`, `hub.token`, but not `max_tokens`."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    pairs = pairwise(words)
    return not _WORDS.isdisjoint(words) or any(last == "key" and first in _KEYS for first, last in pairs)


def mask_text(text: str) -> str:
    """Mask what looks like a secret, and the values of secret environment variables."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, MASK)
    for pattern, masked in _PATTERNS:
        text = pattern.sub(masked, text)
    return text


def mask_command(words: Iterable[str]) -> str:
    """Return a command line with the values of secret options masked."""
    return shlex.join(_masked_words(words)).replace(f"'{MASK}'", MASK)


def _masked_words(words: Iterable[str]) -> Iterator[str]:
    is_value = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("-"):
            yield MASK
            is_value = False
        elif equals and is_secret(name):
            yield f"{name}={MASK if value else ''}"
        else:
            is_value = word.startswith("-") and is_secret(word)
            yield mask_text(word)


@functools.cache
def _secrets_of_environment() -> tuple[str, ...]:
    # a path, as in SSH_AUTH_SOCK, names a secret and is none
    found = {value for name, value in os.environ.items() if is_secret(name) and not value.startswith("/")}
    # longest first: one may be a part of another
    return tuple(sorted((each for each in found if len(each) >= LEAST_SECRET_CHARACTERS), key=len, reverse=True))


def escaped(text: str) -> str:
    """Escape control characters, line ends and marks that reorder text: a terminal would act on them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
