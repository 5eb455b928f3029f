"""Servers that stand for Google Cloud Storage and for Azure Blob Storage.

For Azure it is Azurite, Microsoft's own emulator, which checks the signature of each request. There is none for
the XML interface of Google Cloud Storage, which obstore uses: it is that of S3 with other headers, so a proxy
changes these for moto, and checks what would not be the same.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import os
import re
import shutil
import time
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support.object_servers import BUCKET, Moto, ObjectServer, ProxiedRequest, S3FaultProxy, running

TOKEN = "a-token-of-the-tests"
ACCOUNT = "devstoreaccount1"
# Azurite's own, in its documentation
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(__file__).parents[2] / ".venv/azurite/node_modules/.bin/azurite-blob"
_HEADERS = {"x-goog-copy-source": "x-amz-copy-source"}
# moto accepts any, and shows only public objects without one
_AUTHORIZED = {"authorization": "AWS moto:any"}
VARIABLES = re.compile(r"(AWS|AZURE|GOOGLE|GCE)_")


class GoogleServer(S3FaultProxy):
    """Google's XML interface in front of moto: see `to_s3`."""

    def __init__(self, moto: str) -> None:
        super().__init__(moto)
        self.rules.append(self.to_s3)

    def to_s3(self, request: ProxiedRequest) -> None:
        """Accept a request as Google does, and translate it.

        A request without the bearer token is refused, and so is one with a header or a parameter of S3 alone. What
        is not there cannot be deleted. A condition on generation 0 means that there is no object.
        """
        headers = {name.lower(): value for name, value in request.headers.items()}
        if headers.pop("authorization", "") != f"Bearer {TOKEN}":
            request.answer = (401, "AuthenticationRequired")
            return
        foreign = [name for name in headers if name.startswith("x-amz-") or name in ("if-none-match", "if-match")]
        if foreign or "X-Amz-" in request.path:
            request.answer = (400, "InvalidArgument")
            return
        if (generation := headers.pop("x-goog-if-generation-match", None)) is not None:
            if generation != "0":
                request.answer = (400, "InvalidArgument")
            headers["if-none-match"] = "*"
        request.headers = {_HEADERS.get(name, name): value for name, value in headers.items()}
        request.headers |= _AUTHORIZED
        if request.method == "DELETE" and "uploadId=" not in request.path and not self._exists(request.path):
            request.answer = (404, "NoSuchKey")

    def _exists(self, path: str) -> bool:
        connection = http.client.HTTPConnection(self.target.removeprefix("http://"))
        with contextlib.closing(connection):
            connection.request("HEAD", path, headers=_AUTHORIZED)
            return connection.getresponse().status == 200


class Azurite(ObjectServer):
    """Checks signatures, enforces If-None-Match, answers 206; completes each copy before it answers."""

    def command(self, port: str) -> list[str]:
        program = shutil.which("azurite-blob") or str(AZURITE)
        return [
            program, "--blobHost", "127.0.0.1", "--blobPort", port, "--location", str(self.directory), "--silent",
            "--disableTelemetry",
        ]  # fmt: skip

    def make_container(self) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed = f"PUT{12 * chr(10)}{lines}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{_signature(signed)}"
        address = f"{self.address}/{ACCOUNT}/{BUCKET}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers)).close()


def shared_access_signature() -> str:
    """A token that gives access to the container for an hour, and to nothing else."""
    fields = {
        "sp": "racwdl",
        "se": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)),
        "sv": "2020-12-06",
        "sr": "c",
    }
    place = f"/blob/{ACCOUNT}/{BUCKET}"
    signed = [fields["sp"], "", fields["se"], place, "", "", "", fields["sv"], "c", *[""] * 7]
    return urlencode(fields | {"sig": _signature("\n".join(signed))})


def _signature(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")).decode()


@pytest.fixture(scope="session")
def google(moto: Moto) -> Iterator[GoogleServer]:
    with GoogleServer(moto.address) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Azurite; without it the tests are skipped, or fail where HOLDFAST_REQUIRE_AZURITE=1."""
    if not shutil.which("azurite-blob") and not AZURITE.exists():
        what = "NOTHING IS TRIED ON AZURE: there is no azurite-blob; `tools/prerequisites azurite` installs it"
        (pytest.fail if os.environ.get("HOLDFAST_REQUIRE_AZURITE") == "1" else pytest.skip)(what)
    with running(Azurite(tmp_path_factory.mktemp("azurite"))) as server:
        assert isinstance(server, Azurite)
        server.make_container()
        yield server


def google_variables(address: str) -> dict[str, str]:
    return {"GOOGLE_BASE_URL": address, "GOOGLE_BEARER_TOKEN": TOKEN}


def azure_variables(address: str) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
    }


def use(monkeypatch: pytest.MonkeyPatch, scheme: str, address: str) -> str:
    """The URL of an empty store at a server of ours; `gs` or `az`."""
    for name in list(os.environ):
        if VARIABLES.match(name):
            monkeypatch.delenv(name)
    for name, value in {"gs": google_variables, "az": azure_variables}[scheme](address).items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://{BUCKET}/{uuid.uuid4().hex}/checkpoints"
