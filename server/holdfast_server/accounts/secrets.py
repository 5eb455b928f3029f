"""Secrets that this server makes: 256 bits each, kept as digests, shown once."""

from __future__ import annotations

import hashlib
import secrets

TOKEN_MARK, LINK_MARK = "hf_", "hfl_"
"""So that people, and scanners of what was published by mistake, know one when they see it."""
_PUBLIC_BYTES, _SECRET_BYTES = 5, 32
PREFIX_CHARACTERS = len(TOKEN_MARK) + 2 * _PUBLIC_BYTES
"""Of a token: what it is found and named by. It says nothing of the rest."""


def new_token() -> str:
    """`hf_0123456789_` and 64 digits: no character that a terminal or a shell would stumble over."""
    return f"{TOKEN_MARK}{secrets.token_hex(_PUBLIC_BYTES)}_{secrets.token_hex(_SECRET_BYTES)}"


def new_link() -> str:
    return LINK_MARK + secrets.token_hex(_SECRET_BYTES)


def new_session() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def prefix_of(token: str) -> str:
    return token[:PREFIX_CHARACTERS]


def digest(secret: str) -> bytes:
    """What is stored. A secret of 256 bits cannot be guessed, so that it needs no slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
