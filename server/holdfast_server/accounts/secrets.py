"""Secrets that this server makes: 256 bits each, kept as digests, shown once."""

from __future__ import annotations

import hashlib
import hmac
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


def new_device(name: str, password_hash: str) -> str:
    """A device cookie: it shows that a browser signed in to this account with its present password.

    It opens nothing. The stored hash is the key of its signature, so that nothing more has to be stored, and a new
    password makes it void.
    """
    nonce = secrets.token_urlsafe(16)
    return f"{nonce}.{_device_signature(nonce, name, password_hash)}"


def is_device(cookie: str, name: str, password_hash: str) -> bool:
    nonce, _, signature = cookie.partition(".")
    right = _device_signature(nonce, name, password_hash)
    return hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), right.encode())


def _device_signature(nonce: str, name: str, password_hash: str) -> str:
    text = f"device {name} {nonce}".encode("utf-8", "surrogatepass")
    return hmac.new(password_hash.encode(), text, hashlib.sha256).hexdigest()


def prefix_of(token: str) -> str:
    return token[:PREFIX_CHARACTERS]


def digest(secret: str) -> bytes:
    """What is stored. A secret of 256 bits cannot be guessed, so that it needs no slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
