"""How a bucket is reached: address, credentials, patience. All of it from the usual AWS_* variables."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.store.bucket_errors import NO_CREDENTIALS, Place

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Store

REQUEST_SECONDS, REQUESTS_RETRIED_SECONDS = 15, 20
"""For records and lists, on which a starting job waits."""
TRANSFER_SECONDS, TRANSFERS_RETRIED_SECONDS = 180, 60
"""For a part of a payload: 16 MiB in the time, however slow the link."""
METADATA_SECONDS = 2.0
NICENESS = 10
"""Training's threads go first where there are fewer cores than work."""

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

        if sys.platform == "linux":  # where niceness belongs to a thread, not to the whole process
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):  # a sandbox without that call
                os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
        obstore.put(MemoryStore(), "first", b"")

    starter = threading.Thread(target=start, name="holdfast-obstore")
    starter.start()
    starter.join()


def _region(environment: Mapping[str, str]) -> str:
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in _TRUE
