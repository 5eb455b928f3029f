"""People: the first one, passwords, signing in and out, roles, and what takes them away again."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Lock

import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from holdfast_server import models
from holdfast_server.accounts import passwords, people, rate_limits, sign_ins
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.core.errors import (
    InvalidCredentials,
    LinkExpired,
    NotPossible,
    PasswordQueueFull,
    TooManySignInAttempts,
    WeakPassword,
)
from holdfast_server.core.principal import Role
from holdfast_server.http.auth_middleware import COOKIE, DEVICE_COOKIE, HOST_PREFIX
from holdfast_server.records import audit
from tests.support.accounts_server import BASE_URL, OTHER, OURS, OWN, PASSWORD, AccountsServer, browser_at
from tests.support.eventually import eventually
from tests.support.postgres import ON_SQLITE

FORM = {"Accept": "text/html"}


def setup_link(stage: AccountsServer) -> str:
    return people.setup_link(stage.db, who="test", now=stage.clock())


def set_up(stage: AccountsServer, link: str, name: str = "Ada"):
    return stage.client.post("/setup", data={"code": link, "name": name, "password": PASSWORD}, headers=OURS)


def session_in(reply) -> dict[str, str]:
    """The headers of the browser that was given this answer."""
    return {"Cookie": reply.headers["set-cookie"].partition(";")[0]} | OURS


# ---- the first one --------------------------------------------------------------------------


def test_the_setup_link_makes_the_first_admin_and_nobody_else(stage: AccountsServer):
    link = setup_link(stage)
    first = set_up(stage, link)
    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert stage.client.get("/settings/people", headers=session_in(first)).status_code == 200
    again = set_up(stage, link, "mallory")
    assert (again.status_code, "no longer works" in again.text) == (422, True)
    assert [row.name for row in people.list_people(stage.db)] == ["ada"]
    assert setup_link(stage) is None


def test_a_newer_link_replaces_the_older(stage: AccountsServer):
    older, newer = setup_link(stage), setup_link(stage)
    assert set_up(stage, older).status_code == 422
    assert set_up(stage, newer).status_code == 303


def test_a_setup_link_ends_after_an_hour(stage: AccountsServer, clock):
    link = setup_link(stage)
    clock.now += people.SETUP_LINK_SECONDS + 1
    assert set_up(stage, link).status_code == 422


@pytest.mark.parametrize("link", ["", "hfl_", "hfl_" + "0" * 64, "\ud800", "' OR 1=1 --"])
def test_what_is_no_link_sets_nothing_up(stage: AccountsServer, link):
    setup_link(stage)
    with pytest.raises(LinkExpired):
        people.create_first_admin(stage.db, link, "ada", PASSWORD, now=stage.clock())
    assert people.list_people(stage.db) == []


def test_a_link_to_a_password_sets_no_server_up(stage: AccountsServer):
    stage.person("bob")
    link = people.reset_link(stage.db, "bob", who="test", now=stage.clock())
    with pytest.raises(LinkExpired):
        people.create_first_admin(stage.db, link, "ada", PASSWORD, now=stage.clock())
    with pytest.raises(LinkExpired):
        people.choose_password(stage.db, setup_link(stage), PASSWORD, now=stage.clock())


def test_before_the_first_one_the_page_says_where_the_link_is(stage: AccountsServer):
    page = stage.client.get("/login").text
    assert "holdfast user setup-link" in page
    assert "Password" not in page


def test_the_secret_of_a_link_is_not_in_the_database(stage: AccountsServer):
    link = setup_link(stage)
    assert link.removeprefix("hfl_") not in dump(stage)


def dump(stage: AccountsServer) -> str:
    """Everything in the database, as text."""

    def work(session):
        rows = [repr(tuple(row)) for table in models.Base.metadata.sorted_tables
                for row in session.execute(table.select()).all()]  # fmt: skip
        return "\n".join(rows)

    return stage.read(work)


# ---- passwords ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weak",
    ["", "1234567", "password", "PASSWORD1", "12345678", "aaaaaaaaaa", "abababababab", "ada-lovelace", "x" * 1025],
)
def test_what_is_guessed_first_is_no_password(weak):
    with pytest.raises(WeakPassword):
        passwords.check(weak, "ada-lovelace")


@pytest.mark.parametrize(
    "strong", ["8 chars!", "correct horse battery staple", "пароль-с-буквами", "x7" * 500 + "y"]
)
def test_long_odd_and_foreign_ones_are(strong):
    passwords.check(strong, "ada")


def test_it_is_kept_as_argon2id_and_checked_as_it_was_typed(stage: AccountsServer):
    stage.person_with_password("ada")
    stored = stage.read(lambda session: session.get(models.PersonRecord, "ada")).password
    assert stored.startswith("$argon2id$")
    assert PASSWORD not in dump(stage)
    assert passwords.verify(PASSWORD, stored)
    assert not passwords.verify(PASSWORD + " ", stored)
    assert not passwords.verify(PASSWORD.upper(), stored)


def test_an_unknown_name_costs_the_same_check_as_a_known_one(stage: AccountsServer, monkeypatch):
    stage.person_with_password("ada")
    stage.person("bob")  # has no password yet
    checked = []
    real = passwords.hasher.verify
    monkeypatch.setattr(passwords.hasher, "verify", lambda *asked: checked.append(asked[1]) or real(*asked))
    for name in ("ada", "bob", "nobody-at-all"):
        reply = stage.sign_in(name, "a wrong password")
        assert (reply.status_code, "Wrong name or password." in reply.text) == (401, True)
    assert len(checked) == 3
    assert len({stored.rpartition("$")[0].rpartition("$")[0] for stored in checked}) == 1, "other costs"


# ---- signing in -----------------------------------------------------------------------------


def test_signing_in_and_out(stage: AccountsServer):
    stage.person_with_password("ada", admin=True)
    reply = stage.sign_in(" ADA ", next="/audit?who=ada")
    assert (reply.status_code, reply.headers["location"]) == (303, "/audit?who=ada")
    browser = session_in(reply)
    assert stage.client.get("/", headers=browser | FORM).status_code == 200
    out = stage.client.post("/logout", headers=browser)
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert f'{COOKIE}=""' in out.headers["set-cookie"]
    assert stage.client.get("/", headers=browser).status_code == 401


def test_the_cookie_is_out_of_reach(stage: AccountsServer):
    stage.person_with_password("ada")
    cookie = stage.sign_in("ada").headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert {"HttpOnly", "Path=/", "SameSite=lax", "Max-Age=604800"} <= set(cookie.split("; "))
    assert "Domain" not in cookie
    https = stage.client.post(
        "https://127.0.0.1:7117/login",
        data={"name": "ada", "password": PASSWORD},
        headers={"Origin": "https://127.0.0.1:7117"},
    )
    cookie = https.headers["set-cookie"]
    assert cookie.startswith(f"{HOST_PREFIX}{COOKIE}=")
    assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert https.headers["strict-transport-security"].startswith("max-age=")


def test_over_https_only_the_cookie_that_no_other_site_can_set_counts(stage: AccountsServer):
    """A sibling domain can set a plain cookie, and so sign somebody in to an account of its own."""
    secret = stage.cookie(stage.person("ada"))["Cookie"].partition("=")[2]

    def status(address: str, name: str) -> int:
        return stage.client.get(f"{address}/api/v1/jobs", headers={"Cookie": f"{name}={secret}"}).status_code

    https = "https://127.0.0.1:7117"
    assert [status(https, COOKIE), status(https, HOST_PREFIX + COOKIE)] == [401, 200]
    assert [status(BASE_URL, COOKIE), status(BASE_URL, HOST_PREFIX + COOKIE)] == [200, 401]


@ON_SQLITE
@pytest.mark.parametrize(
    "elsewhere",
    ["//evil.example", "https://evil.example", "/\\evil.example", "jobs", "javascript:alert(1)",
     "/\t/evil.example", "/\r\nSet-Cookie: x=y", ""],
)  # fmt: skip
def test_nobody_is_sent_to_another_site(stage: AccountsServer, elsewhere):
    stage.person_with_password("ada")
    assert stage.sign_in("ada", next=elsewhere).headers["location"] == "/"


def test_a_session_that_somebody_planted_is_not_taken_over(stage: AccountsServer):
    stage.person_with_password("ada")
    planted = {"Cookie": f"{COOKIE}=planted-by-mallory"} | OURS
    reply = stage.client.post("/login", data={"name": "ada", "password": PASSWORD}, headers=planted)
    assert "planted-by-mallory" not in reply.headers["set-cookie"]
    assert stage.client.get("/", headers=planted).status_code == 401


def test_signing_in_again_ends_the_session_that_the_browser_had(stage: AccountsServer):
    stage.person_with_password("ada")
    before = session_in(stage.sign_in("ada"))
    reply = stage.client.post("/login", data={"name": "ada", "password": PASSWORD}, headers=before)
    assert stage.client.get("/", headers=before).status_code == 401
    assert stage.client.get("/", headers=session_in(reply)).status_code == 200


def test_a_session_ends_when_nobody_comes_and_after_a_week_in_any_case(stage: AccountsServer, clock):
    stage.person("ada")
    resting, busy = stage.cookie("ada"), stage.cookie("ada")
    started = clock.now
    while clock.now - started + 11 * 3600 < sign_ins.LASTS_SECONDS:
        clock.now += 11 * 3600
        assert stage.client.get("/", headers=busy).status_code == 200
    assert stage.client.get("/", headers=resting).status_code == 401
    clock.now = started + sign_ins.LASTS_SECONDS + 1
    assert stage.client.get("/", headers=busy).status_code == 401


def test_somebody_sees_their_browsers_and_signs_one_out(stage: AccountsServer):
    stage.person("ada")
    here, there, others = stage.cookie("ada"), stage.cookie("ada"), stage.cookie(stage.person("bob"))
    page = stage.client.get("/settings", headers=here).text
    (other,) = set(re.findall(r"/settings/sessions/(\w+)/end", page)) - {"end"}
    assert stage.client.post(f"/settings/sessions/{other}/end", headers=others | OURS).status_code == 404
    assert stage.client.get("/", headers=there).status_code == 200
    assert stage.client.post(f"/settings/sessions/{other}/end", headers=here | OURS).status_code == 303
    assert stage.client.get("/", headers=there).status_code == 401
    there = stage.cookie("ada")
    assert stage.client.post("/settings/sessions/end", headers=here | OURS).status_code == 303
    told = [stage.client.get("/", headers=browser).status_code for browser in (here, there, others)]
    assert told == [200, 401, 200]


def test_another_password_signs_the_other_browsers_out(stage: AccountsServer):
    stage.person_with_password("ada")
    here, there = stage.cookie("ada"), stage.cookie("ada")
    wrong = stage.client.post(
        "/settings/password", data={"present": "no", "password": "another sentence"}, headers=here | OURS
    )
    assert (wrong.status_code, "Wrong name or password" in wrong.text) == (401, True)
    weak = stage.client.post(
        "/settings/password", data={"present": PASSWORD, "password": "password"}, headers=here | OURS
    )
    assert weak.status_code == 422
    done = stage.client.post(
        "/settings/password", data={"present": PASSWORD, "password": "another sentence"}, headers=here | OURS
    )
    assert done.status_code == 200
    assert [stage.client.get("/", headers=browser).status_code for browser in (here, there)] == [200, 401]
    assert stage.sign_in("ada").status_code == 401
    assert stage.sign_in("ada", "another sentence").status_code == 303


def test_a_link_to_a_new_password_works_once_and_for_a_day(stage: AccountsServer, clock):
    stage.person_with_password("ada")
    there = stage.cookie("ada")
    link = people.reset_link(stage.db, "ada", who="test", now=clock())
    reply = stage.client.post("/reset", data={"code": f" {link} ", "password": "another sentence"}, headers=OURS)
    assert reply.status_code == 303
    assert stage.client.get("/", headers=there).status_code == 401
    assert stage.client.get("/", headers=session_in(reply)).status_code == 200
    again = stage.client.post("/reset", data={"code": link, "password": "yet another one"}, headers=OURS)
    assert again.status_code == 422
    late = people.reset_link(stage.db, "ada", who="test", now=clock())
    clock.now += people.RESET_LINK_SECONDS + 1
    assert (
        stage.client.post("/reset", data={"code": late, "password": "yet another"}, headers=OURS).status_code
        == 422
    )


def test_no_link_gives_a_password_to_somebody_of_the_identity_provider(stage: AccountsServer):
    stage.person("ada")
    stage.person_with_password("bob")
    root = stage.cookie(stage.person("root", admin=True)) | OURS
    early = people.reset_link(stage.db, "ada", who="test", now=stage.clock())

    def issue(session):
        for name in ("ada", "bob"):
            person = session.get(models.PersonRecord, name)
            person.issuer, person.subject = "https://id.example", name

    stage.write(issue)
    with pytest.raises(NotPossible, match="identity provider"):
        people.reset_link(stage.db, "ada", who="test", now=stage.clock())
    asked = stage.client.post("/settings/people/ada/link", headers=root)
    assert (asked.status_code, "identity provider" in asked.text) == (409, True)
    used = stage.client.post("/reset", data={"code": early, "password": PASSWORD}, headers=OURS)
    assert (used.status_code, "identity provider" in used.text) == (422, True)
    assert [stage.sign_in(name).status_code for name in ("ada", "bob")] == [401, 401]


# ---- guessing -------------------------------------------------------------------------------


def tries(stage: AccountsServer, name: str, address: str = "10.0.0.9") -> None:
    rate_limits.take_attempt(stage.db, name, address, now=stage.clock())


def test_a_name_has_a_few_tries_from_one_address_and_earns_more(stage: AccountsServer, clock):
    for _ in range(8):
        tries(stage, "ada")
    with pytest.raises(TooManySignInAttempts) as refused:
        tries(stage, "ada")
    assert refused.value.retry_seconds == pytest.approx(30.0)
    tries(stage, "bob")
    tries(stage, "ada", "10.0.0.99")
    clock.now += 30
    tries(stage, "ada")
    with pytest.raises(TooManySignInAttempts):
        tries(stage, "ada")


def test_a_name_has_a_limit_over_all_addresses(stage: AccountsServer, clock):
    for number in range(100):
        tries(stage, "ada", f"10.0.{number}.1")
    with pytest.raises(TooManySignInAttempts) as refused:
        tries(stage, "ada", "10.1.0.1")
    assert refused.value.retry_seconds == pytest.approx(10.0)
    tries(stage, "bob", "10.1.0.1")
    clock.now += 10
    tries(stage, "ada", "10.1.0.1")


def use_up_name(stage: AccountsServer, name: str = "ada") -> None:
    with suppress(TooManySignInAttempts):
        for number in count(1):
            tries(stage, name, f"10.1.{number}.1")


def use_up_address(stage: AccountsServer, address: str) -> None:
    with suppress(TooManySignInAttempts):
        for number in count():
            tries(stage, f"person-{number}", address)


def at(stage: AccountsServer, address: str) -> TestClient:
    return browser_at(stage.client, address)


def sign_in(browser: TestClient, password: str = PASSWORD) -> int:
    return browser.post("/login", data={"name": "ada", "password": password}).status_code


def test_wrong_guesses_do_not_lock_the_owner_out(stage: AccountsServer):
    stage.person_with_password("ada")
    mallory = at(stage, "10.0.0.9")
    assert [sign_in(mallory, f"guess number {number}") for number in range(9)] == [401] * 8 + [429]
    assert sign_in(mallory) == 429, "nor is the right one told from there"
    assert sign_in(at(stage, "10.0.0.1")) == 303


def test_a_browser_that_signed_in_before_has_tries_of_its_own(stage: AccountsServer):
    stage.person_with_password("ada")
    known = at(stage, "10.0.0.1")
    assert sign_in(known) == 303
    known.post("/logout")
    use_up_name(stage)
    use_up_address(stage, "10.0.0.1")
    assert sign_in(at(stage, "10.0.0.1")) == 429
    assert sign_in(known) == 303
    assert [sign_in(known, f"guess number {number}") for number in range(9)] == [401] * 8 + [429]


@pytest.mark.parametrize("change", ["the name", "the signature", "the password"])
def test_a_device_cookie_is_good_for_its_account_and_password_only(stage: AccountsServer, change):
    stage.person_with_password("ada")
    stage.person_with_password("bob")
    browser = at(stage, "10.0.0.1")
    owner = "bob" if change == "the name" else "ada"
    assert browser.post("/login", data={"name": owner, "password": PASSWORD}).status_code == 303
    cookie = browser.cookies[DEVICE_COOKIE]
    if change == "the signature":
        browser.cookies.clear()
        browser.cookies.set(DEVICE_COOKIE, f"{cookie[:-1]}{'0' if cookie[-1] != '0' else '1'}")
    elif change == "the password":
        people.change_password(stage.db, "ada", "another sentence", keep=None, now=stage.clock())
    use_up_name(stage)
    assert sign_in(browser, "another sentence" if change == "the password" else PASSWORD) == 429


def test_a_device_cookie_opens_nothing(stage: AccountsServer):
    stage.person_with_password("ada")
    browser = at(stage, "10.0.0.1")
    assert sign_in(browser) == 303
    device = browser.cookies[DEVICE_COOKIE]
    for name in (DEVICE_COOKIE, COOKIE):
        assert at(stage, "10.0.0.1").get("/", headers={"Cookie": f"{name}={device}"}).status_code == 401


def test_changing_the_password_is_limited_in_the_same_way(stage: AccountsServer):
    stage.person_with_password("ada")
    here = at(stage, "10.0.0.1")
    assert sign_in(here) == 303
    use_up_name(stage)
    changed = here.post("/settings/password", data={"present": PASSWORD, "password": "another sentence"})
    assert changed.status_code == 200
    here.post("/logout")
    assert sign_in(here, "another sentence") == 303, "the browser knows the account by its new password"
    wrong = [
        here.post("/settings/password", data={"present": f"guess {number}", "password": "another sentence"})
        for number in range(9)
    ]
    assert [reply.status_code for reply in wrong] == [401] * 8 + [429]
    assert wrong[-1].headers["retry-after"] == "30"


def test_an_address_that_a_proxy_made_up_is_no_address(stage: AccountsServer):
    stage.person_with_password("ada", admin=True)
    for address in ("<b>10.0.0.1", "unknown", "10.0.0.1:80:90", "", "localhost"):
        assert sign_in(at(stage, address)) == 303
    assert sign_in(at(stage, "fe80::1%<b>")) == 303
    page = at(stage, "10.0.0.1").get("/audit", headers=stage.cookie("ada")).text
    assert "fe80::1" in page
    assert "&lt;b&gt;" not in page
    use_up_address(stage, "unknown")
    assert [sign_in(at(stage, address), "a guess") for address in ("<i>1", "<i>2")] == [429, 429]


def test_so_many_passwords_are_checked_at_once_and_no_more(stage: AccountsServer, monkeypatch):
    """Each takes a quarter of a second, one after the other: who waited behind all of them would wait too long."""
    stage.person_with_password("ada")
    queued, turn = [], Lock()
    monkeypatch.setattr(passwords, "_one_at_a_time", turn)
    with ThreadPoolExecutor(passwords.MOST_QUEUED) as threads:
        with turn:
            queued = [threads.submit(passwords.verify, "a guess", None) for _ in range(passwords.MOST_QUEUED)]
            eventually(lambda: len(passwords._queued) == passwords.MOST_QUEUED)
            with pytest.raises(PasswordQueueFull):
                sign_ins.with_password(
                    stage.db, "ada", PASSWORD, Visitor(address="10.0.0.1", browser=""), now=stage.clock()
                )
        assert not any(guess.result() for guess in queued)
    for _ in range(8):
        tries(stage, "ada", "10.0.0.1")  # the refusal took none of the visitor's tries
    assert sign_in(at(stage, "10.0.0.2")) == 303


def test_a_busy_server_says_when_to_come_back(stage: AccountsServer, monkeypatch):
    stage.person_with_password("ada")
    link = people.reset_link(stage.db, "ada", who="test", now=stage.clock())
    monkeypatch.setattr(passwords, "MOST_QUEUED", 0)
    told = [
        stage.sign_in("ada"),
        stage.client.post("/reset", data={"code": link, "password": "another sentence"}, headers=OURS),
    ]
    assert [(reply.status_code, reply.headers["retry-after"]) for reply in told] == [(503, "4")] * 2
    monkeypatch.undo()
    reply = stage.client.post("/reset", data={"code": link, "password": "another sentence"}, headers=OURS)
    assert reply.status_code == 303, "the link is not used up"


def test_an_address_has_tries_too_whatever_names_it_brings(stage: AccountsServer):
    for number in range(40):
        tries(stage, f"person-{number}")
    with pytest.raises(TooManySignInAttempts):
        tries(stage, "somebody else")
    tries(stage, "somebody else", "10.0.0.10")


def test_a_network_of_addresses_that_one_machine_has_is_one_address(stage: AccountsServer):
    for number in range(40):
        tries(stage, f"person-{number}", f"2001:db8:1:2::{number:x}")
    with pytest.raises(TooManySignInAttempts):
        tries(stage, "somebody else", "2001:db8:1:2:ffff::1")
    tries(stage, "somebody else", "2001:db8:1:3::1")
    for number in range(40):
        tries(stage, f"other-{number}", f"::ffff:10.0.0.{number}")


def test_the_page_says_how_long_to_wait_and_checks_no_password_meanwhile(stage: AccountsServer, monkeypatch):
    stage.person("ada")
    for _ in range(8):
        tries(stage, "ada", "unknown")

    def never(*_):
        raise AssertionError("checked")

    monkeypatch.setattr(passwords, "verify", never)
    reply = stage.sign_in("Ada")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "30")
    assert "wait 30 s" in reply.text


def test_who_remembers_at_last_has_all_tries_again(stage: AccountsServer):
    stage.person_with_password("ada")
    browser = at(stage, "10.0.0.1")
    for _ in range(7):
        tries(stage, "ada", "10.0.0.1")
    assert sign_in(browser) == 303
    for _ in range(8):
        tries(stage, "ada", "10.0.0.1")


def test_what_has_ended_is_taken_out(stage: AccountsServer, clock):
    tries(stage, "ada")
    setup_link(stage)
    stage.person("ada")
    stage.cookie("ada")
    kinds = (models.RateLimitRecord, models.OneTimeLinkRecord, models.SignInRecord)

    def counts() -> list[int]:
        def work(session):
            return [session.scalar(select(func.count()).select_from(kind)) for kind in kinds]

        return stage.read(work)

    sign_ins.delete_expired(stage.db, clock())
    assert counts() == [3, 2, 1]
    clock.now += 30 * 86400
    sign_ins.delete_expired(stage.db, clock())
    assert counts() == [0, 0, 0]


def test_the_end_of_the_log_is_told_to_the_servers_own(stage: AccountsServer, caplog):
    caplog.set_level("INFO", "holdfast_server.records.audit")
    stage.person("ada")
    audit.log_head(stage.db, 0.0)
    found = stage.read(audit.verify)
    assert f"{found.rows}:{found.head}" in caplog.text


# ---- roles ----------------------------------------------------------------------------------


def test_an_admin_of_a_project_gives_roles_in_it_and_nowhere_else(stage: AccountsServer):
    stage.project(OWN)
    stage.project(OTHER)
    ada = stage.cookie(stage.person("ada", Role.admin)) | OURS
    stage.person("bob")
    given = stage.client.post(
        f"/settings/projects/{OWN}/members", data={"person": "Bob", "role": "viewer"}, headers=ada
    )
    assert given.status_code == 303
    elsewhere = stage.client.post(
        f"/settings/projects/{OTHER}/members", data={"person": "bob", "role": "viewer"}, headers=ada
    )
    assert elsewhere.status_code == 404
    (bob,) = [row for row in people.list_people(stage.db) if row.name == "bob"]
    assert bob.roles == {OWN: "viewer"}
    for wrong in (
        {"person": "nobody-here", "role": "viewer"},
        {"person": "bob", "role": "emperor"},
        {"person": "bob"},
    ):
        reply = stage.client.post(f"/settings/projects/{OWN}/members", data=wrong, headers=ada)
        assert reply.status_code in (404, 422), wrong
    taken = stage.client.post(
        f"/settings/projects/{OWN}/members", data={"person": "bob", "role": "none"}, headers=ada
    )
    assert taken.status_code == 303
    assert [row.roles for row in people.list_people(stage.db) if row.name == "bob"] == [{}]


def test_rights_that_are_taken_end_at_once(stage: AccountsServer):
    stage.project(OWN, "a-job")
    bob = stage.cookie(stage.person("bob", Role.viewer))
    assert stage.client.get("/api/v1/jobs/a-job", headers=bob).status_code == 200
    people.set_role(stage.db, "bob", OWN, None, who="test", now=stage.clock())
    assert stage.client.get("/api/v1/jobs/a-job", headers=bob).status_code == 404
    people.remove(stage.db, "bob", who="test", now=stage.clock())
    assert stage.client.get("/api/v1/jobs", headers=bob).status_code == 401


def test_the_last_admin_stays(stage: AccountsServer):
    root = stage.cookie(stage.person("root", admin=True)) | OURS
    taken = stage.client.post("/settings/people/root/admin", data={"admin": "false"}, headers=root)
    assert "the only server admin" in taken.text
    with pytest.raises(NotPossible):
        people.remove(stage.db, "root", who="test", now=stage.clock())
    stage.person("second", admin=True)
    taken = stage.client.post("/settings/people/root/admin", data={"admin": "false"}, headers=root)
    assert taken.status_code == 303
    assert stage.client.get("/settings/people", headers=root).status_code == 403


def test_people_are_added_with_a_link_that_is_shown_once(stage: AccountsServer):
    root = stage.cookie(stage.person("root", admin=True)) | OURS
    page = stage.client.post("/settings/people", data={"name": "Grace@Example.com"}, headers=root).text
    link = re.search(rf"{re.escape(BASE_URL)}/reset#(hfl_\w+)", page)[1]
    assert link not in stage.client.get("/settings/people", headers=root).text
    reply = stage.client.post("/reset", data={"code": link, "password": PASSWORD}, headers=OURS)
    assert reply.status_code == 303
    assert stage.sign_in("grace@example.com").status_code == 303


def test_a_person_is_added_with_a_role(stage: AccountsServer):
    stage.project(OWN)
    root = stage.cookie(stage.person("root", admin=True)) | OURS
    assert f"<option>{OWN}</option>" in stage.client.get("/settings/people", headers=root).text
    form = {"name": "grace", "role": "viewer", "project": OWN}
    assert stage.client.post("/settings/people", data=form, headers=root).status_code == 200
    for wrong in ({"role": "owner"}, {"project": "nowhere"}):
        reply = stage.client.post("/settings/people", data=form | {"name": "ada"} | wrong, headers=root)
        assert reply.status_code in (404, 422), wrong
    found = {row.name: row.roles for row in people.list_people(stage.db)}
    assert found == {"root": {}, "grace": {OWN: "viewer"}}


@ON_SQLITE
@pytest.mark.parametrize(
    "name", ["", "two words", "operator", "<b>", "../etc", "x" * 101, "-dash", "Ünder", "a\nb"]
)
def test_what_cannot_be_a_name_is_said_beside_the_field(stage: AccountsServer, name):
    root = stage.cookie(stage.person("root", admin=True)) | OURS
    reply = stage.client.post("/settings/people", data={"name": name}, headers=root)
    assert reply.status_code == 422
    assert [row.name for row in people.list_people(stage.db)] == ["root"]


def test_a_name_is_taken_once(stage: AccountsServer):
    stage.person("ada")
    with pytest.raises(NotPossible):
        stage.person("ADA")


def test_all_of_it_is_in_the_log_and_no_secret_is(stage: AccountsServer):
    stage.project(OWN)
    set_up(stage, setup_link(stage))
    stage.person_with_password("bob", Role.viewer)
    stage.sign_in("bob")
    visitor = sign_ins.Visitor(address="10.0.0.1", browser="x")
    with pytest.raises(InvalidCredentials):
        sign_ins.with_password(stage.db, "my-password-typed-here", "x", visitor, now=stage.clock())
    people.remove(stage.db, "bob", who="ada", now=stage.clock())
    rows = stage.read(lambda session: audit.entries(session, audit.AuditQuery(), limit=100))
    told = {row.action for row in rows}
    assert told >= {
        "server.setup_link", "server.setup", "person.add", "person.role", "person.reset_link", "person.password",
        "person.sign_in", "person.sign_in_failed", "person.remove", "project.add",
    }  # fmt: skip
    text = repr(rows)
    assert "hfl_" not in text
    assert PASSWORD not in text
    assert "my-password-typed-here" not in text


def test_without_accounts_the_page_says_how_to_have_them(client):
    page = client.get("/settings")
    assert (page.status_code, "holdfast serve --accounts" in page.text) == (200, True)
    assert client.get("/settings/keys").status_code == 409
    assert client.post("/api/v1/tokens", json={"name": "x", "scopes": ["read"]}).status_code == 409
