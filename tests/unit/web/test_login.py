from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app

TOKEN = "correct horse"
HTML = {"Accept": "text/html"}


@pytest.fixture
def guarded(empty_database: str) -> Iterator[TestClient]:
    settings = ServerSettings(database=empty_database, token=TOKEN)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:7117", follow_redirects=False) as client:
        yield client


def test_the_browser_is_asked_once_and_goes_on_to_where_it_was_going(guarded: TestClient) -> None:
    asked = guarded.get("/?search=gpt", headers=HTML)
    assert asked.status_code == 303
    page = guarded.get(asked.headers["location"])
    assert 'name="next" value="/?search=gpt"' in page.text
    answer = guarded.post("/login", data={"token": TOKEN, "next": "/?search=gpt"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?search=gpt")
    assert guarded.get("/", headers=HTML).status_code == 200


def test_a_wrong_token_is_refused_beside_the_field(guarded: TestClient) -> None:
    answer = guarded.post("/login", data={"token": "wrong", "next": "/"})
    assert answer.status_code == 401
    assert "Wrong shared secret." in answer.text
    assert "set-cookie" not in answer.headers


def test_no_token_is_shown_from_a_wrong_one(guarded: TestClient) -> None:
    assert "Enter the shared secret." in guarded.post("/login", data={"token": " "}).text


@pytest.mark.parametrize("elsewhere", ["//evil.example", "https://evil.example", "/\\evil.example", "jobs"])
def test_no_one_is_sent_to_another_site(guarded: TestClient, elsewhere: str) -> None:
    answer = guarded.post("/login", data={"token": TOKEN, "next": elsewhere})
    assert answer.headers["location"] == "/"


def test_the_cookie_is_out_of_reach_of_scripts(guarded: TestClient) -> None:
    cookie = guarded.post("/login", data={"token": TOKEN}).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
