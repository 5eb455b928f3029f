from __future__ import annotations

from starlette.testclient import TestClient

from holdfast_web.assets import static_url


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
    import re

    for page in ("/", "/login"):
        for path in re.findall(r'"(/static/[^"]+)"', client.get(page).text):
            answer = client.get(path)
            assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), path
