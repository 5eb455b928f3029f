"""What the services that obstore knows have in common: connections, time limits, and errors in one sentence each.

A service is a subclass of `HttpPlace`, with the names of its environment variables and of its errors.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from holdfast.store.bucket import NoSuchObject, Place, Unanswered
from holdfast.system.io_pool import lower_cpu_priority
from holdfast.system.masking import mask_text

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from holdfast.store.bucket import Client

logger = logging.getLogger("holdfast")
REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS = 15, 20
"""Timeouts of requests for records and lists, which delay a start."""
TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS = 180, 60
"""Timeouts of a part of a payload: 16 MiB on a slow network."""
METADATA_SECONDS = 2.0
METADATA = "http://169.254.169.254"
_TRUE = ("1", "true", "yes", "on")

Sentence = tuple[int, str]
"""An `errno`, and what to say."""
DENIED = (
    "{server} denies access to {bucket}: the credentials need permission to list it, and to get, put "
    "and delete objects"
)
NO_BUCKET = "{server} has no {bucket}: create it, or correct the address of the store"
FULL = "{server} has no space left in {bucket}: free some, or raise its quota"
_BUSY = "{server} answers {answer} for {bucket}: it is overloaded, full or failing"
_FORGOTTEN = "{server} no longer knows the upload to {bucket}"
_OTHER = "{server} and {bucket}: {reason}"
_ODD = "{server} answers {answer} for {bucket}"
_BY_STATUS = {
    "403": (errno.EACCES, DENIED),
    "501": (errno.ENOTSUP, "{server} does not support a request that Holdfast needs"),
    "507": (errno.ENOSPC, FULL),
}
_METADATA_HOSTS = re.compile(r"//169\.254\.|//\[?fd00:ec2|//sts\.|//metadata\.google")
_TOKEN_REQUEST = "performing token request"  # noqa: S105  # no secret
_FULL_TEXT = re.compile("no space left|disk full|ENOSPC", re.IGNORECASE)
_UNANSWERED = (
    ("dns error", errno.EHOSTUNREACH, "the host name of {server} cannot be resolved: check {address_variable}"),
    ("ConnectionRefused", errno.ECONNREFUSED, "{server} refuses connections: check that it runs, and its port"),
    ("InvalidContentType", errno.EPROTO, "{server} does not use TLS: its address may need to begin with http://"),
    ("ertificate", errno.EPROTO, "the certificate of {server} is not trusted: set {certificates_variable}"),
    ("TimedOut", errno.ETIMEDOUT, "{server} did not answer in time"),
    ("Timeout", errno.ETIMEDOUT, "{server} did not answer in time"),
)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"(?:non-2xx status code: |\(code: )(\d{3})")


class HttpPlace(Place):
    """A prefix in a bucket of a service."""

    address_variables: ClassVar[tuple[str, ...]]
    """The variables with the address of a server other than the service's own; the first that is set counts."""
    address_variable: ClassVar[str]
    """The one of them that messages name."""
    certificates_variable: ClassVar[str] = "SSL_CERT_FILE"
    credentials: ClassVar[tuple[str, ...]]
    """Variables that say how to get credentials."""
    skip_variable: ClassVar[str]
    """The variable that has requests sent without credentials."""
    no_credentials: ClassVar[str]
    rejected: ClassVar[str] = DENIED
    """What to say when the service accepts no credentials of the ones that are set."""
    codes: ClassVar[Mapping[str, Sentence]]
    statuses: ClassVar[Mapping[str, Sentence]] = {}

    @abstractmethod
    def client(self, address: str | None, **options: Any) -> Client:
        """Return a client of obstore."""

    def require_credentials(self, environment: Mapping[str, str]) -> None:
        """Raise an OSError when there can be none: obstore would search for them until its time is over."""
        if not self.has_credentials(environment):
            raise self.error(errno.EACCES, self.no_credentials)

    def has_credentials(self, environment: Mapping[str, str]) -> bool:
        return any(environment.get(name) for name in self.credentials) or is_true(environment, self.skip_variable)

    def connect(self) -> tuple[Client, Client]:
        """Return the clients for requests and for transfers. OSError when there are no credentials."""
        from obstore.exceptions import BaseError

        environment = os.environ
        self.require_credentials(environment)
        start_runtime()
        address = self.address(environment)
        if address is not None:
            self._require_address(address)
        options = self._client_options(environment)

        def client(seconds: float, retried_seconds: float) -> Client:
            limited = options | {"timeout": timedelta(seconds=seconds)}
            return self.client(address, client_options=limited, retry_config=_retries(retried_seconds))

        try:
            return (
                client(REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS),
                client(TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS),
            )
        except BaseError as error:
            sentence = "the settings of {bucket} at {server} cannot be used: {reason}"
            raise self.error(errno.EINVAL, sentence, reason=_last(str(error))) from None

    @classmethod
    def address(cls, environment: Mapping[str, str]) -> str | None:
        """Return the address of the server; None for the service's own."""
        return next(
            (environment[name].rstrip("/") for name in cls.address_variables if environment.get(name)), None
        )

    def read_from_whole(self, client: Client, name: str, start: int, target: memoryview) -> None:
        raise self.error(errno.ENOTSUP, "{server} does not support ranges, which Holdfast needs")

    def error(self, number: int, sentence: str, kind: type[OSError] = OSError, **more: str) -> OSError:
        more = {
            "address_variable": self.address_variable,
            "certificates_variable": self.certificates_variable,
        } | more
        return super().error(number, sentence, kind, **more)

    def explain(self, error: BaseException) -> OSError:
        """Convert an error of obstore to an OSError."""
        from obstore.exceptions import NotSupportedError

        text = str(error)
        status = first(_STATUS, text)
        if isinstance(error, NotSupportedError):
            status = "501"
        if isinstance(error, FileNotFoundError):
            status = "404"
        if status:
            return self.answered(status, text)
        return self.unanswered(text) if "HTTP error" in text else self.error(errno.EIO, _OTHER, reason=_last(text))

    def answered(self, status: str, text: str) -> OSError:
        """Convert an HTTP status and the body of the response to an OSError."""
        code = first(_CODE, text)
        if code in self.codes:
            return self.error(*self.codes[code])
        if _METADATA_HOSTS.search(text):
            return self.error(errno.EACCES, self.no_credentials)
        if _TOKEN_REQUEST in text:
            return self.error(errno.EACCES, self.rejected)
        if _FULL_TEXT.search(text):
            return self.error(errno.ENOSPC, FULL)
        if status == "401":
            return self.error(errno.EACCES, self.rejected)
        if status in (statuses := {**_BY_STATUS, **self.statuses}):
            return self.error(*statuses[status])
        if code == "NoSuchUpload":
            return self.error(errno.EIO, _FORGOTTEN, Unanswered)
        if status == "404":
            return self.error(errno.ENOENT, "{server} has no such object in {bucket}", NoSuchObject)
        if status.startswith("5") or status == "429" or code == "SlowDown":
            return self.error(errno.EAGAIN, _BUSY, Unanswered, answer=f"{status} {code}".strip())
        return self.error(errno.EIO, _ODD, answer=f"{status} {code}".strip())

    def unanswered(self, text: str) -> OSError:
        for mark, number, sentence in _UNANSWERED:
            if mark in text:
                return self.error(number, sentence, Unanswered)
        return self.error(errno.EIO, _OTHER, Unanswered, reason=_last(text))

    def _require_address(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            sentence = "{address_variable} {address!r} is not a URL: it must begin with http:// or https://"
            raise self.error(errno.EINVAL, sentence, address=address)

    def _client_options(self, environment: Mapping[str, str]) -> ClientConfig:
        options: ClientConfig = {
            "connect_timeout": timedelta(seconds=5),
            "allow_http": (self.address(environment) or "").startswith("http://"),
        }
        if path := environment.get(self.certificates_variable):
            try:
                with open(path, "rb") as file:
                    options["root_certificate"] = file.read()
            except OSError as error:
                sentence = "{certificates_variable} {path!r} cannot be read: {reason}"
                raise self.error(errno.EINVAL, sentence, path=path, reason=str(error.strerror)) from error
        return options


def answers(address: str) -> bool:
    """Return whether a metadata service accepts connections."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def start_runtime() -> None:
    """Start the threads of obstore, which inherit the CPU priority of the thread that first uses it."""

    def start() -> None:
        import obstore
        from obstore.store import MemoryStore

        lower_cpu_priority()
        obstore.put(MemoryStore(), "first", b"")

    starter = threading.Thread(target=start, name="holdfast-obstore")
    starter.start()
    starter.join()


def is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in _TRUE


def first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


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


def _last(text: str) -> str:
    """Return the reason at the end of the first line."""
    return mask_text(text.partition("\n")[0].rpartition(" - ")[2])
