"""Connections to a bucket, configured by the usual AWS_* variables, and their errors.

Each error is one sentence that names the server, the bucket and the remedy.
"""

from __future__ import annotations

import errno
import http.client
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from holdfast.errors import DamagedCheckpoint
from holdfast.store.bucket import NoSuchObject, Place, Unanswered
from holdfast.system.io_pool import lower_cpu_priority

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Store

    from holdfast.store.bucket import Client

REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS = 15, 20
"""Timeouts of requests for records and lists, which delay a start."""
TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS = 180, 60
"""Timeouts of a part of a payload: 16 MiB on a slow network."""
METADATA_SECONDS = 2.0
SIGNED_FOR = timedelta(minutes=15)
SKIP_BYTES = 1 << 20

_METADATA = "http://169.254.169.254"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_TRUE = ("1", "true", "yes", "on")


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the address of the server; None for Amazon S3."""
    return next((environment[name].rstrip("/") for name in _ENDPOINTS if environment.get(name)), None)


def server(environment: Mapping[str, str]) -> str:
    """Return the name of the server for messages."""
    return endpoint(environment) or f"Amazon S3 in {_region(environment)}"


def unsigned(environment: Mapping[str, str]) -> bool:
    """Return whether requests are sent without credentials."""
    return _is_true(environment, "AWS_SKIP_SIGNATURE")


def connect(place: Place) -> tuple[S3Store, S3Store]:
    """Return the clients for requests and for transfers. OSError when there are no credentials."""
    from obstore.store import S3Store

    environment = os.environ
    _require_credentials(environment, place)
    _start_runtime()
    config: S3Config = {"region": _region(environment)}
    if (address := endpoint(environment)) is not None:
        _require_address(address, place)
        config["endpoint"] = address
    if "AWS_DISABLE_BULK_DELETE" not in environment:
        config["disable_bulk_delete"] = (
            True  # not supported by every server, and few objects are deleted at a time
        )
    options = _client_options(environment, place)

    def client(seconds: float, retried_seconds: float) -> S3Store:
        return S3Store(
            place.bucket,
            prefix=place.prefix or None,
            config=config,
            client_options=options | {"timeout": timedelta(seconds=seconds)},
            retry_config=_retries(retried_seconds),
        )

    return (
        client(REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS),
        client(TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS),
    )


def _client_options(environment: Mapping[str, str], place: Place) -> ClientConfig:
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=5),
        "allow_http": (endpoint(environment) or "").startswith("http://"),
    }
    if path := environment.get("AWS_CA_BUNDLE"):
        try:
            with open(path, "rb") as file:
                options["root_certificate"] = file.read()
        except OSError as error:
            sentence = "AWS_CA_BUNDLE {path!r} cannot be read: {reason}"
            raise place.error(errno.EINVAL, sentence, path=path, reason=str(error.strerror)) from error
    return options


def _retries(seconds: float) -> RetryConfig:
    return {
        "max_retries": 100,  # bounded by the time
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=200),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


def _require_address(address: str, place: Place) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        sentence = "AWS_ENDPOINT_URL {address!r} is not a URL: it must begin with http:// or https://"
        raise place.error(errno.EINVAL, sentence, address=address)


def _require_credentials(environment: Mapping[str, str], place: Place) -> None:
    missing = [name for name in _KEYS if not environment.get(name)]
    if len(missing) == 1:
        raise place.error(
            errno.EACCES,
            "{missing} is not set: bucket {bucket} needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            missing=missing[0],
        )
    if any(environment.get(name) for name in _CREDENTIALS) or unsigned(environment):
        return
    # obstore would query the metadata service of the machine, and retry for the whole timeout
    if _is_true(environment, "AWS_EC2_METADATA_DISABLED") or not _answers(environment):
        raise place.error(errno.EACCES, NO_CREDENTIALS)


def _answers(environment: Mapping[str, str]) -> bool:
    address = urlsplit(environment.get("AWS_METADATA_ENDPOINT") or _METADATA)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def _start_runtime() -> None:
    """Start the threads of obstore, which inherit the CPU priority of the thread that first uses it."""

    def start() -> None:
        import obstore
        from obstore.store import MemoryStore

        lower_cpu_priority()
        obstore.put(MemoryStore(), "first", b"")

    starter = threading.Thread(target=start, name="holdfast-obstore")
    starter.start()
    starter.join()


def _region(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in _TRUE


NO_CREDENTIALS = (
    "no credentials for bucket {bucket} at {server}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    "(or AWS_SKIP_SIGNATURE=true for a server that needs none)"
)
_SIGNATURE = (
    "{server} rejects the signature for bucket {bucket}: check AWS_SECRET_ACCESS_KEY, then AWS_REGION "
    "and the clock of this machine"
)
_EXPIRED = "{server} rejects the session token as expired or invalid: renew AWS_SESSION_TOKEN and its keys"
_DENIED = (
    "{server} denies access to bucket {bucket}: the credentials need permission to list it, and to get, put "
    "and delete objects"
)
_NO_BUCKET = "{server} has no bucket {bucket}: create it, or correct the address of the store"
_ELSEWHERE = "bucket {bucket} is in another region than {server}: set AWS_REGION"
_FULL = "{server} has no space left in bucket {bucket}: free some, or raise its quota"
_BUSY = "{server} answers {answer} for bucket {bucket}: it is overloaded, full or failing"
_FORGOTTEN = "{server} no longer knows the upload to bucket {bucket}"
_OTHER = "{server} and bucket {bucket}: {reason}"
_ODD = "{server} answers {answer} for bucket {bucket}"

_BY_CODE = {
    "NoSuchBucket": (errno.ENOENT, _NO_BUCKET),
    "InvalidAccessKeyId": (errno.EACCES, "{server} does not know the access key: check AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (errno.EACCES, _SIGNATURE),
    "RequestTimeTooSkewed": (errno.EACCES, _SIGNATURE),
    "ExpiredToken": (errno.EACCES, _EXPIRED),
    "InvalidToken": (errno.EACCES, _EXPIRED),
    "AuthorizationHeaderMalformed": (errno.EINVAL, _ELSEWHERE),
    "PermanentRedirect": (errno.EINVAL, _ELSEWHERE),
    "QuotaExceeded": (errno.ENOSPC, _FULL),
    "XMinioStorageFull": (errno.ENOSPC, _FULL),
}
_BY_STATUS = {
    "301": (errno.EINVAL, _ELSEWHERE),
    "401": (errno.EACCES, _DENIED),
    "403": (errno.EACCES, _DENIED),
    "501": (errno.ENOTSUP, "{server} does not support a request that Holdfast needs"),
    "507": (errno.ENOSPC, _FULL),
}
_BY_TEXT = (
    (re.compile(r"//169\.254\.|//\[?fd00:ec2|//sts\."), errno.EACCES, NO_CREDENTIALS),
    (re.compile("no space left|disk full|ENOSPC", re.IGNORECASE), errno.ENOSPC, _FULL),
)
_UNANSWERED = (
    ("dns error", errno.EHOSTUNREACH, "the host name of {server} cannot be resolved: check AWS_ENDPOINT_URL"),
    ("ConnectionRefused", errno.ECONNREFUSED, "{server} refuses connections: check that it runs, and its port"),
    ("InvalidContentType", errno.EPROTO, "{server} does not use TLS: its address may need to begin with http://"),
    ("ertificate", errno.EPROTO, "the certificate of {server} is not trusted: set AWS_CA_BUNDLE"),
    ("TimedOut", errno.ETIMEDOUT, "{server} did not answer in time"),
    ("Timeout", errno.ETIMEDOUT, "{server} did not answer in time"),
)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d+)")


class S3Place(Place):
    """A prefix in a bucket of an S3-compatible server."""

    def __init__(self, bucket: str, prefix: str) -> None:
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"), bucket, prefix, server(os.environ))

    def connect(self) -> tuple[S3Store, S3Store]:
        return connect(self)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)

    def read_from_whole(self, client: Client, name: str, start: int, target: memoryview) -> None:
        """Read from a server that answers 200 instead of 206, such as `rclone serve s3`; obstore refuses these.

        obstore signs the request, and the standard library makes it, which is slower.
        """
        request = urllib.request.Request(  # noqa: S310  # the address comes from the operator
            self._address(client, name), headers={"Range": f"bytes={start}-{start + len(target) - 1}"}
        )
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=TRANSFER_SECONDS, context=self._tls
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

    def _address(self, client: Client, name: str) -> str:
        if unsigned(os.environ):
            key = "/".join(part for part in (self.bucket, self.prefix, name) if part)
            return f"{endpoint(os.environ)}/{quote(key)}"
        import obstore

        return obstore.sign(client, "GET", name, SIGNED_FOR)

    def explain(self, error: BaseException) -> OSError:
        """Convert an error of obstore to an OSError."""
        from obstore.exceptions import NotSupportedError

        text = str(error)
        status = _first(_STATUS, text)
        if isinstance(error, NotSupportedError):
            status = "501"
        if isinstance(error, FileNotFoundError):
            status = "404"
        if status:
            return self.answered(status, text)
        return self.unanswered(text) if "HTTP error" in text else self.error(errno.EIO, _OTHER, reason=_last(text))

    def answered(self, status: str, text: str) -> OSError:
        """Convert an HTTP status and the body of the response to an OSError."""
        code = _first(_CODE, text)
        if code in _BY_CODE:
            return self.error(*_BY_CODE[code])
        for pattern, number, sentence in _BY_TEXT:
            if pattern.search(text):
                return self.error(number, sentence)
        if status in _BY_STATUS:
            return self.error(*_BY_STATUS[status])
        if code == "NoSuchUpload":
            return self.error(errno.EIO, _FORGOTTEN, Unanswered)
        if status == "404":
            return self.error(errno.ENOENT, "{server} has no such object in bucket {bucket}", NoSuchObject)
        if status.startswith("5") or code == "SlowDown":
            return self.error(errno.EAGAIN, _BUSY, Unanswered, answer=f"{status} {code}".strip())
        return self.error(errno.EIO, _ODD, answer=f"{status} {code}".strip())

    def unanswered(self, text: str) -> OSError:
        for mark, number, sentence in _UNANSWERED:
            if mark in text:
                return self.error(number, sentence, Unanswered)
        return self.error(errno.EIO, _OTHER, Unanswered, reason=_last(text))


def _skip(response: http.client.HTTPResponse, size: int) -> None:
    while size and (skipped := response.read(min(size, SKIP_BYTES))):
        size -= len(skipped)


def _fill(response: http.client.HTTPResponse, target: memoryview) -> int:
    got = 0
    while got < len(target) and (count := response.readinto(target[got:])):
        got += count
    return got


def _last(text: str) -> str:
    """Return the reason at the end of the first line."""
    return text.partition("\n")[0].rpartition(" - ")[2]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
