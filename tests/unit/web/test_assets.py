from __future__ import annotations

import gzip
import re

import pytest
from starlette.testclient import TestClient

from holdfast_server.core.compression import decompress
from holdfast_web.shared.assets import STATIC, VERSION, static_url
from tests.support.fake_agent import FakeAgent
from tools.bundle import DIGEST, digest

TIMELINE = "built/timeline/main.js"


def test_a_file_under_the_version_is_kept_for_ever(client: TestClient) -> None:
    answer = client.get(static_url("app.css"))
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/css")


@pytest.mark.parametrize("version", ["", "000000000000/"])
def test_a_file_without_a_version_or_of_an_old_one_is_asked_for_again(client: TestClient, version: str) -> None:
    answer = client.get(f"/static/{version}app.css")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    again = client.get(f"/static/{version}app.css", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_no_file_outside_the_folder_is_served(client: TestClient) -> None:
    for path in ("..%2Fassets.py", f"{VERSION}/..%2F..%2Fassets.py", "nothing.js", f"{VERSION}/nothing.js"):
        assert client.get(f"/static/{path}").status_code == 404


def test_every_file_that_a_page_names_is_there(client: TestClient) -> None:
    for page in ("/", "/login"):
        for path in re.findall(r'"(/static/[^"]+)"', client.get(page).text):
            answer = client.get(path)
            assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), path


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_a_script_is_sent_compressed_and_as_it_is(client: TestClient, encoding: str) -> None:
    unpack = {"zstd": lambda packed: decompress(packed, 2**20), "gzip": gzip.decompress}[encoding]
    with client.stream("GET", static_url(TIMELINE), headers={"Accept-Encoding": encoding}) as answer:
        packed = b"".join(answer.iter_raw())
    assert (answer.headers["content-encoding"], answer.headers["vary"]) == (encoding, "Accept-Encoding")
    assert answer.headers["content-type"].startswith("text/javascript")
    plain = client.get(static_url(TIMELINE), headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == unpack(packed) == (STATIC / TIMELINE).read_bytes()


def test_the_bundle_is_up_to_date() -> None:
    assert DIGEST.read_text().strip() == digest(), "a script or style has changed: run `make bundle`"


def test_a_page_loads_scripts_that_import_nothing(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(f"/jobs/{agent.job}").text
    scripts = re.findall(r'<script src="/static/[^/"]+/([^"]+)" type="module">', page)
    assert scripts == ["built/app/main.js", TIMELINE]
    for script in scripts:
        assert "import" not in (STATIC / script).read_text(), script


def test_a_page_is_at_most_eighty_kilobytes_without_the_timeline(client: TestClient, agent: FakeAgent) -> None:
    """With the first answer of the timeline, which has up to 20 kB, it is at most a hundred."""
    headers = {"Accept-Encoding": "gzip"}
    answer = client.get(f"/jobs/{agent.job}", headers=headers)
    named = set(re.findall(r'(?:src|href)="/static/[^/"]+/([^"]+)"', answer.text))
    assert {TIMELINE, "built/app/main.js", "vendor/htmx-4.0.1/htmx.min.js", "built/app.css"} <= named
    sizes = {path: int(client.get(static_url(path), headers=headers).headers["content-length"]) for path in named}
    assert sum(sizes.values()) + int(answer.headers["content-length"]) <= 80_000, sizes
