"""Connections to a bucket of an S3-compatible server, configured by the usual AWS_* variables."""

from __future__ import annotations

import errno
import http.client
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from holdfast.errors import DamagedCheckpoint
from holdfast.store import http_place
from holdfast.store.http_place import FULL, METADATA, NO_BUCKET, HttpPlace, answers, is_true

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

    from holdfast.store.bucket import Client

logger = logging.getLogger("holdfast")
SIGNED_FOR = timedelta(minutes=15)
SKIP_BYTES = 1 << 20

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_SIGNATURE = (
    "{server} rejects the signature for {bucket}: check AWS_SECRET_ACCESS_KEY, then AWS_REGION "
    "and the clock of this machine"
)
_EXPIRED = "{server} rejects the session token as expired or invalid: renew AWS_SESSION_TOKEN and its keys"
_ELSEWHERE = "{bucket} is in another region than {server}: set AWS_REGION"


class S3Place(HttpPlace):
    """A prefix in a bucket of an S3-compatible server."""

    most_copied_bytes = 5 << 30
    address_variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    address_variable = "AWS_ENDPOINT_URL"
    certificates_variable = "AWS_CA_BUNDLE"
    credentials = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    skip_variable = "AWS_SKIP_SIGNATURE"
    no_credentials = (
        "no credentials for {bucket} at {server}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
        "(or AWS_SKIP_SIGNATURE=true for a server that needs none)"
    )
    codes: ClassVar = {
        "NoSuchBucket": (errno.ENOENT, NO_BUCKET),
        "InvalidAccessKeyId": (errno.EACCES, "{server} does not know the access key: check AWS_ACCESS_KEY_ID"),
        "SignatureDoesNotMatch": (errno.EACCES, _SIGNATURE),
        "RequestTimeTooSkewed": (errno.EACCES, _SIGNATURE),
        "ExpiredToken": (errno.EACCES, _EXPIRED),
        "InvalidToken": (errno.EACCES, _EXPIRED),
        "AuthorizationHeaderMalformed": (errno.EINVAL, _ELSEWHERE),
        "PermanentRedirect": (errno.EINVAL, _ELSEWHERE),
        "QuotaExceeded": (errno.ENOSPC, FULL),
        "XMinioStorageFull": (errno.ENOSPC, FULL),
    }
    statuses: ClassVar = {"301": (errno.EINVAL, _ELSEWHERE)}

    def __init__(self, bucket: str, prefix: str) -> None:
        server = self.address(os.environ) or f"Amazon S3 in {_region(os.environ)}"
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"), bucket, prefix, server)

    def require_credentials(self, environment: Mapping[str, str]) -> None:
        missing = [name for name in _KEYS if not environment.get(name)]
        if len(missing) == 1:
            raise self.error(
                errno.EACCES,
                "{missing} is not set: {bucket} needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                missing=missing[0],
            )
        super().require_credentials(environment)

    def has_credentials(self, environment: Mapping[str, str]) -> bool:
        metadata = environment.get("AWS_METADATA_ENDPOINT") or METADATA
        return super().has_credentials(environment) or (
            not is_true(environment, "AWS_EC2_METADATA_DISABLED") and answers(metadata)
        )

    def client(self, address: str | None, **options: Any) -> S3Store:
        from obstore.store import S3Store

        config: S3Config = {"region": _region(os.environ)}
        if address is not None:
            config["endpoint"] = address
        if "AWS_DISABLE_BULK_DELETE" not in os.environ:
            # not supported by every server, and few objects are deleted at a time
            config["disable_bulk_delete"] = True
        return S3Store(self.bucket, prefix=self.prefix or None, config=config, **options)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)

    def read_from_whole(self, client: Client, name: str, start: int, target: memoryview) -> None:
        """Read from a server that answers 200 instead of 206, such as `rclone serve s3`; obstore refuses these.

        obstore signs the request, and the standard library makes it, which is slower.
        """
        request = urllib.request.Request(  # noqa: S310  # the address comes from the operator
            self._url(client, name), headers={"Range": f"bytes={start}-{start + len(target) - 1}"}
        )
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=http_place.TRANSFER_SECONDS, context=self._tls
            ) as response:
                if not response.headers.get("Content-Range"):
                    _skip(response, start)  # the response is the whole object
                got = _fill(response, target)
                if got < len(target) and response.length:
                    # cut off, which readinto does not report
                    raise http.client.IncompleteRead(b"", response.length)
        except urllib.error.HTTPError as error:
            raise self.answered(str(error.code), error.read().decode(errors="replace")) from error
        except (OSError, http.client.HTTPException) as error:
            raise self.unanswered(repr(error)) from error
        if got < len(target):
            raise DamagedCheckpoint(f"{self.url}/{name}", f"ends at byte {start + got:,}")

    def copy_by_parts(self, source: str, target: str, size_bytes: int) -> bool:
        from holdfast.store.s3_copy_by_parts import S3Requests, copy_by_parts

        region = _region(os.environ)
        address = self.address(os.environ) or f"https://s3.{region}.amazonaws.com"
        requests = S3Requests(
            f"{address}/{self.bucket}", region, self._tls, http_place.TRANSFER_SECONDS, os.environ
        )
        if not requests.has_keys:  # others, such as roles, are known to obstore alone
            return False
        prefix = f"{self.prefix}/" if self.prefix else ""
        try:
            copy_by_parts(requests, prefix + source, prefix + target, size_bytes)
        except (OSError, http.client.HTTPException) as error:
            logger.debug("%s: the server cannot copy %s by parts: %s", self.url, source, error)
            return False
        return True

    def _url(self, client: Client, name: str) -> str:
        if is_true(os.environ, self.skip_variable):
            key = "/".join(part for part in (self.bucket, self.prefix, name) if part)
            return f"{self.address(os.environ)}/{quote(key)}"
        import obstore

        return obstore.sign(client, "GET", name, SIGNED_FOR)


def _region(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"


def _skip(response: http.client.HTTPResponse, size: int) -> None:
    while size and (skipped := response.read(min(size, SKIP_BYTES))):
        size -= len(skipped)


def _fill(response: http.client.HTTPResponse, target: memoryview) -> int:
    got = 0
    while got < len(target) and (count := response.readinto(target[got:])):
        got += count
    return got
