from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from holdfast_web.shared.assets import STATIC, VERSION, imports_of, static_url
from tests.support.fake_agent import FakeAgent


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


def test_a_script_is_sent_compressed_and_as_it_is(client: TestClient) -> None:
    answer = client.get(static_url("timeline/main.js"))
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-type"].startswith("text/javascript")
    plain = client.get(static_url("timeline/main.js"), headers={"Accept-Encoding": "identity"})
    assert plain.text == answer.text == (STATIC / "timeline/main.js").read_text()


def test_a_page_names_all_that_its_scripts_import(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(f"/jobs/{agent.job}").text
    scripts = re.findall(r'<script src="/static/[^/"]+/([^"]+)" type="module">', page)
    assert scripts == ["app/main.js", "timeline/main.js"]
    preloaded = set(re.findall(r'<link rel="modulepreload" href="/static/[^/"]+/([^"]+)">', page))
    assert preloaded == {path for script in scripts for path in imports_of(script)}
    assert {"timeline/model.js", "timeline/format.js", "app/live.js"} <= preloaded


def test_a_page_is_at_most_a_hundred_kilobytes_at_first_load(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"/jobs/{agent.job}")
    named = set(re.findall(r'(?:src|href)="/static/[^/"]+/([^"]+)"', answer.text))
    assert {"timeline/main.js", "app/main.js", "vendor/htmx-4.0.1/htmx.min.js", "app.css"} <= named
    sizes = {path: int(client.get(static_url(path)).headers["content-length"]) for path in named}
    assert sum(sizes.values()) + int(answer.headers["content-length"]) <= 100_000, sizes
