"""Ranges from servers that answer 200 where 206 is meant, which obstore refuses. rclone's is one.

The requests are signed by obstore and made by the standard library. Slower, and only used where it must be.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.errors import DamagedCheckpoint
from holdfast.store import connection
from holdfast.store.bucket_errors import Place

if TYPE_CHECKING:
    from obstore.store import S3Store

SIGNED_FOR = timedelta(minutes=15)
SKIP_BYTES = 1 << 20


class PlainRanges:
    def __init__(self, place: Place, client: S3Store) -> None:
        self._place, self._client = place, client

    def read(self, name: str, start: int, target: memoryview) -> None:
        """As `Bucket.read`, for one request."""
        request = urllib.request.Request(  # noqa: S310  # the address is the operator's own
            self._address(name), headers={"Range": f"bytes={start}-{start + len(target) - 1}"}
        )
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=connection.TRANSFER_SECONDS, context=self._context
            ) as response:
                if not response.headers.get("Content-Range"):
                    _skip(response, start)  # the whole object, from its beginning
                got = _fill(response, target)
                if got < len(target) and response.length:
                    raise http.client.IncompleteRead(b"", response.length)  # cut off, which readinto hides
        except urllib.error.HTTPError as error:
            raise self._place.answered(str(error.code), error.read().decode(errors="replace")) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._place.unanswered(repr(error)) from error
        if got < len(target):
            raise DamagedCheckpoint(f"{self._place.url}/{name}", f"ends at byte {start + got:,}")

    def _address(self, name: str) -> str:
        if connection.unsigned(os.environ):
            key = "/".join(part for part in (self._place.bucket, self._place.prefix, name) if part)
            return f"{connection.endpoint(os.environ)}/{quote(key)}"
        import obstore

        return obstore.sign(self._client, "GET", name, SIGNED_FOR)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)


def _skip(response: http.client.HTTPResponse, size: int) -> None:
    while size and (skipped := response.read(min(size, SKIP_BYTES))):
        size -= len(skipped)


def _fill(response: http.client.HTTPResponse, target: memoryview) -> int:
    got = 0
    while got < len(target) and (count := response.readinto(target[got:])):
        got += count
    return got
