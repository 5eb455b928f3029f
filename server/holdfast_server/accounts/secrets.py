"""Secrets that this server makes: 256 bits each, stored as digests, shown once."""

from __future__ import annotations

import hashlib
import hmac
import secrets

TOKEN_MARK, LINK_MARK = "hf_", "hfl_"
"""Prefixes by which people, and scanners of published code, recognize our secrets."""
_PUBLIC_BYTES, _SECRET_BYTES = 5, 32
PREFIX_CHARACTERS = len(TOKEN_MARK) + 2 * _PUBLIC_BYTES
"""Length of the public part of a token, which identifies it and reveals nothing of the rest."""


def new_token() -> str:
    """Return `hf_0123456789_` and 64 hex digits: no character needs quoting in a shell."""
    return f"{TOKEN_MARK}{secrets.token_hex(_PUBLIC_BYTES)}_{secrets.token_hex(_SECRET_BYTES)}"


def new_link() -> str:
    return LINK_MARK + secrets.token_hex(_SECRET_BYTES)


def new_session() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_device(name: str, password_hash: str) -> str:
    """Return a device cookie, which proves that a browser has signed in to this account with its current password.

    It grants no access. The password hash signs it, so that nothing else has to be stored, and a new password
    invalidates it.
    """
    nonce = secrets.token_urlsafe(16)
    return f"{nonce}.{_device_signature(nonce, name, password_hash)}"


def is_device(cookie: str, name: str, password_hash: str) -> bool:
    nonce, _, signature = cookie.partition(".")
    expected = _device_signature(nonce, name, password_hash)
    return hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), expected.encode())


def _device_signature(nonce: str, name: str, password_hash: str) -> str:
    text = f"device {name} {nonce}".encode("utf-8", "surrogatepass")
    return hmac.new(password_hash.encode(), text, hashlib.sha256).hexdigest()


def prefix_of(token: str) -> str:
    return token[:PREFIX_CHARACTERS]


def digest(secret: str) -> bytes:
    """Return the digest to store. A secret of 256 bits cannot be guessed, so it needs no slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
