from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from fake_agent import FakeAgent
from starlette.testclient import TestClient

from holdfast_web.assets import content, static_url
from holdfast_web.bundles import NotBundled, bundle


def test_a_file_under_its_content_hash_is_kept_for_ever(client: TestClient) -> None:
    answer = client.get(static_url("app.css"))
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/css")


def test_a_file_without_a_hash_or_with_an_old_one_is_asked_for_again(client: TestClient) -> None:
    for query in ("", "?v=000000000000"):
        assert client.get(f"/static/app.css{query}").headers["cache-control"] == "no-cache"


def test_no_file_outside_the_folder_is_served(client: TestClient) -> None:
    assert client.get("/static/..%2Fassets.py").status_code == 404
    assert client.get("/static/nothing.js").status_code == 404


def test_every_file_that_a_page_names_is_there(client: TestClient) -> None:
    for page in ("/", "/login"):
        for path in re.findall(r'"(/static/[^"]+)"', client.get(page).text):
            answer = client.get(path)
            assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), path


def test_a_script_comes_with_all_that_it_imports_in_one_compressed_answer(client: TestClient) -> None:
    answer = client.get(static_url("timeline/main.js"))
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-type"].startswith("text/javascript")
    assert not re.search(r"^(import|export) ", answer.text, re.MULTILINE)
    for part in ("class Timeline", "class CurveLane", "function modelOf"):
        assert answer.text.count(part) == 1
    plain = client.get(static_url("timeline/main.js"), headers={"Accept-Encoding": "identity"})
    assert plain.text == answer.text
    assert client.get("/static/timeline/main.js").text.count("import {") > 10


def test_a_page_brings_at_most_fifty_kilobytes_of_scripts(client: TestClient, agent: FakeAgent) -> None:
    scripts = re.findall(r'<script src="(/static/[^"?]+)\?v=[^"]+"', client.get("/jobs/char-gpt").text)
    paths = [path.removeprefix("/static/") for path in scripts]
    assert {"timeline/main.js", "app/main.js", "vendor/htmx-4.0.1/htmx.min.js"} <= set(paths)
    assert sum(len(gzip.compress(content(path), 9)) for path in [*paths, "timeline/picture.js"]) <= 50_000


def test_scripts_that_import_each_other_in_a_circle_or_another_form_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\n\nexport const a = 1;\n')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";\n\nexport const b = 1;\n')
    with pytest.raises(NotBundled, match="imports itself"):
        bundle(tmp_path / "a.js")
    (tmp_path / "b.js").write_text("export default 1;\n")
    with pytest.raises(NotBundled, match="another form"):
        bundle(tmp_path / "a.js")
