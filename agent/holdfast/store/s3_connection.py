"""How a bucket is reached, by the usual AWS_* variables: address, credentials, patience. And what goes wrong.

Each error is one sentence that names the server, the bucket and the way out.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.system.io_pool import lower_cpu_priority

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Store

REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS = 15, 20
"""For records and lists, on which a starting job waits."""
TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS = 180, 60
"""For a part of a payload: 16 MiB in the time, however slow the link."""
METADATA_SECONDS = 2.0

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
    """The server's address, without which it is Amazon's own."""
    return next((environment[name].rstrip("/") for name in _ENDPOINTS if environment.get(name)), None)


def server(environment: Mapping[str, str]) -> str:
    """The server, for people."""
    return endpoint(environment) or f"Amazon S3 in {_region(environment)}"


def unsigned(environment: Mapping[str, str]) -> bool:
    """The server asks for no credentials."""
    return _is_true(environment, "AWS_SKIP_SIGNATURE")


def connect(place: Place) -> tuple[S3Store, S3Store]:
    """Clients for requests and for transfers, to be kept; OSError at once when there are no credentials."""
    from obstore.store import S3Store

    environment = os.environ
    _require_credentials(environment, place)
    _start_runtime()
    config: S3Config = {"region": _region(environment)}
    if (address := endpoint(environment)) is not None:
        _require_address(address, place)
        config["endpoint"] = address
    if "AWS_DISABLE_BULK_DELETE" not in environment:
        config["disable_bulk_delete"] = True  # not every server has it, and there is never much to delete
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
        "max_retries": 100,  # the time is what bounds them
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
        sentence = "AWS_ENDPOINT_URL {address!r} is no address: it begins with http:// or https://"
        raise place.error(errno.EINVAL, sentence, address=address)


def _require_credentials(environment: Mapping[str, str], place: Place) -> None:
    missing = [name for name in _KEYS if not environment.get(name)]
    if len(missing) == 1:
        raise place.error(
            errno.EACCES, "{missing} is not set, its other half is: bucket {bucket} needs both", missing=missing[0]
        )
    if any(environment.get(name) for name in _CREDENTIALS) or unsigned(environment):
        return
    # obstore would now ask the machine's metadata service, for as long as it retries a request
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
    """obstore's threads are those of the whole process, and as nice as the thread that first needs them."""

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
    "(or AWS_SKIP_SIGNATURE=true for a server that asks for none)"
)
_SIGNATURE = (
    "{server} does not accept the signature for bucket {bucket}: check AWS_SECRET_ACCESS_KEY, then AWS_REGION "
    "and this machine's clock"
)
_EXPIRED = "{server} does not accept the session token any more: renew AWS_SESSION_TOKEN and its keys"
_DENIED = (
    "{server} denies access to bucket {bucket}: these credentials must be allowed to list it, and to get, put "
    "and delete objects"
)
_NO_BUCKET = "{server} has no bucket {bucket}: create it, or correct the store's address"
_ELSEWHERE = "bucket {bucket} is in another region than {server}: set AWS_REGION"
_FULL = "{server} has no room left in bucket {bucket}: free some, or raise its quota"
_BUSY = "{server} answers {answer} for bucket {bucket}: it is overloaded, full or broken"
_FORGOTTEN = "{server} has forgotten the upload to bucket {bucket} half-way"
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
    "501": (errno.ENOTSUP, "{server} does not know a kind of request that Holdfast makes"),
    "507": (errno.ENOSPC, _FULL),
}
_BY_TEXT = (
    (re.compile(r"//169\.254\.|//\[?fd00:ec2|//sts\."), errno.EACCES, NO_CREDENTIALS),
    (re.compile("no space left|disk full|ENOSPC", re.IGNORECASE), errno.ENOSPC, _FULL),
)
_UNANSWERED = (
    ("dns error", errno.EHOSTUNREACH, "{server} is not known by that name: check AWS_ENDPOINT_URL"),
    ("ConnectionRefused", errno.ECONNREFUSED, "{server} refuses connections: is it running, and on that port?"),
    ("InvalidContentType", errno.EPROTO, "{server} does not speak TLS: should its address begin with http://?"),
    ("ertificate", errno.EPROTO, "{server} has a certificate that is not trusted here: see AWS_CA_BUNDLE"),
    ("TimedOut", errno.ETIMEDOUT, "{server} did not answer in time"),
    ("Timeout", errno.ETIMEDOUT, "{server} did not answer in time"),
)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d+)")


class Unanswered(OSError):
    """No answer, or none to rely on: what was asked for may have been done, may yet be done, or never."""


class NoSuchObject(FileNotFoundError):
    """The bucket is there, the object is not."""


class Place:
    """A prefix in a bucket at a server, as people know them."""

    def __init__(self, bucket: str, prefix: str, server: str) -> None:
        self.bucket, self.prefix, self.server = bucket, prefix, server
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")

    def error(self, number: int, sentence: str, kind: type[OSError] = OSError, **more: str) -> OSError:
        return kind(number, sentence.format(bucket=self.bucket, server=self.server, **more), self.url)

    def explain(self, error: BaseException) -> OSError:
        """What obstore raised, as an OSError of the kind that it is."""
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
        """The server's refusal: an HTTP status, and the document that came with it."""
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


def _last(text: str) -> str:
    """The reason at the end of the first line."""
    return text.partition("\n")[0].rpartition(" - ")[2]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
