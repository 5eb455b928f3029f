"""Who may ask for what: every route is in the table, every cell of role × route × project is as it is meant."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.testclient import TestClient

from holdfast_server.api import responses
from holdfast_server.api.endpoints import EndpointTable, Router
from holdfast_server.core import access
from holdfast_server.core.principal import ANONYMOUS, OPERATOR, Principal, Role
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.access_log import RequestMiddleware
from holdfast_server.http.auth_middleware import AuthMiddleware, credentials_of
from holdfast_web import create_app
from tests.support.accounts_server import OTHER, OURS, OWN, AccountsServer
from tests.support.endpoint_table import ENDPOINTS
from tests.support.postgres import ON_BOTH
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

LET_THROUGH = 299
TABLE = ENDPOINTS.access


def test_the_table_lists_every_route_once():
    assert len(TABLE) == len(ENDPOINTS.routes) >= 150
    for (method, path), rule in sorted(TABLE.items(), key=lambda row: row[0][::-1]):
        print(f"{method:6} {path:70} {rule}")


def test_a_server_with_a_route_without_a_rule_does_not_start():
    app = create_app(ServerSettings(database="unused"))
    app.add_api_route("/forgotten", lambda: "secret", methods=["DELETE"])
    with pytest.raises(RuntimeError, match=r"/forgotten.* has no access rule"), TestClient(app):
        pass


def test_an_endpoint_without_a_rule_cannot_be_declared():
    with pytest.raises(TypeError, match="access"):
        Router().endpoint("GET", "/forgotten")  # type: ignore[call-arg]


def test_two_endpoints_of_one_path_are_refused():
    router = Router()
    for _ in range(2):
        router.endpoint("GET", "/twice", access=access.VIEW)(lambda: None)
    with pytest.raises(ValueError, match="GET /twice"):
        EndpointTable(router.endpoints)


@pytest.mark.parametrize(("method", "path"), sorted(TABLE))
def test_each_endpoint_is_found_by_its_path(method, path):
    filled = re.sub(r"{(\w+)}", r"some-\1", path) + ("/app.css" if path == "/static" else "")
    found = ENDPOINTS.find(method, filled)
    assert (found.path, found.rule) == (path, TABLE[method, path])
    assert found.route.method == method
    assert found.job == ("some-job" if "{job}" in path else None)
    assert found.project == ("some-project" if "{project}" in path else None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/v1/jobs"),
        ("GET", "/api/v1/ingest"),
        ("GET", "/jobs/a/b/c/d"),
        ("GET", "/staticx"),
        ("GET", "//"),
        ("GET", "/jobs/x/"),
        ("GET", "/jobs//live"),
        ("TRACE", "/"),
        ("OPTIONS", "/api/v1/jobs"),
        ("get", "/"),
    ],
)
def test_what_is_not_in_the_table_is_found_nowhere(method, path):
    assert ENDPOINTS.find(method, path) is None


def test_a_path_without_parameters_is_found_as_its_route_would_match_it():
    for endpoint in ENDPOINTS.endpoints:
        if "{" not in endpoint.path:
            found = ENDPOINTS.find(endpoint.method, endpoint.path)
            scope = {"type": "http", "method": endpoint.method, "path": endpoint.path}
            assert (found.route, (Match.FULL, found.changes)) == (endpoint, endpoint.matches(scope))


# ---- the whole matrix -----------------------------------------------------------------------

PEOPLE = ("nobody", "outsider", "viewer", "operator", "admin", "server admin")
KEYS = ("report key", "read key", "control key", "admin key", "report key of the job", "read key of the job")
EVERYWHERE = ("read key of every project", "admin key of every project")
CAST = PEOPLE + KEYS + EVERYWHERE

ROLE_OF = {
    "viewer": Role.viewer, "operator": Role.operator, "admin": Role.admin,
    "read key": Role.viewer, "control key": Role.operator, "admin key": Role.admin,
    "read key of the job": Role.viewer,
}  # fmt: skip
"""In the project of their own; all others have none there."""


def expected(rule: access.AccessRule, who: str, own: bool) -> str:
    """The decision by the documented rules, computed independently of the code."""
    if rule.audience == "public":
        return "allow"
    if who == "nobody":
        return "sign in"
    everywhere = {"server admin": Role.admin, "admin key of every project": Role.admin,
                  "read key of every project": Role.viewer}  # fmt: skip
    person, of_the_job = who in PEOPLE, who.endswith("of the job")
    role = everywhere.get(who) or (ROLE_OF.get(who) if own else None)
    most = everywhere.get(who) or (None if of_the_job else ROLE_OF.get(who))
    reporter = who.startswith("report key")
    match rule.audience:
        case "report":
            return "allow" if reporter else "forbid"
        case "person":
            return "allow" if person else "forbid"
        case "lists":
            return "allow" if person or most is not None else "forbid"
        case "any project":
            return "allow" if most is not None and most >= rule.role else "forbid"
        case "server":
            return "allow" if who in ("server admin", "admin key of every project") else "forbid"
        case "project":
            role = None if of_the_job else role
            return "hide" if role is None else "allow" if role >= rule.role else "forbid"
    if reporter and rule.agents and (own or not of_the_job):
        return "allow"  # the route answers for a job of another project as for one that does not exist
    if reporter and own:
        return "forbid"
    return "hide" if role is None else "allow" if role >= rule.role else "forbid"


STATUS = {"allow": LET_THROUGH, "sign in": 401, "forbid": 403, "hide": 404}


def behind_the_middleware(stage: AccountsServer) -> TestClient:
    """The real middleware in front of one route that answers everything."""

    async def answer(_: Request) -> Response:
        return Response(status_code=LET_THROUGH)

    methods = sorted({method for method, _ in TABLE})
    app = Starlette(
        routes=[Route("/{rest:path}", answer, methods=methods)],
        middleware=[Middleware(RequestMiddleware), Middleware(AuthMiddleware, refuse=responses.refuse)],
    )
    app.state.services = stage.client.app.state.services
    client = TestClient(app, base_url="http://127.0.0.1:7117", follow_redirects=False)
    client.portal = stage.client.portal  # the database belongs to the loop that the server runs in
    return client


@pytest.fixture
def cast(stage: AccountsServer) -> dict[str, dict[str, str]]:
    """Headers that authenticate each of them."""
    stage.project(OWN, f"job-of-{OWN}")
    stage.project(OTHER, f"job-of-{OTHER}")
    job = f"job-of-{OWN}"
    return {
        "nobody": {},
        "outsider": stage.cookie(stage.person("outsider")),
        "viewer": stage.cookie(stage.person("viewer", Role.viewer)),
        "operator": stage.cookie(stage.person("operators", Role.operator)),
        "admin": stage.cookie(stage.person("admin", Role.admin)),
        "server admin": stage.cookie(stage.person("root", admin=True)),
        "report key": stage.bearer("report"),
        "read key": stage.bearer("read"),
        "control key": stage.bearer("control"),
        "admin key": stage.bearer("admin"),
        "report key of the job": stage.bearer("report", job=job),
        "read key of the job": stage.bearer("read", job=job),
        "read key of every project": stage.bearer("read", project=None),
        "admin key of every project": stage.bearer("admin", project=None),
    }


def cells(routes):
    """Yield (method, path, project, who) with the expected decision."""
    for method, path in routes:
        for project in (OWN, OTHER):
            for who in CAST:
                yield (method, path, project, who), expected(TABLE[method, path], who, project == OWN)


def test_the_whole_matrix(stage: AccountsServer, cast):
    """Decided as by the middleware, for every client as the authentication backend identifies it."""
    common = {"type": "http", "scheme": "http", "app": stage.client.app}
    scopes = {who: common | {"headers": _raw(headers)} for who, headers in cast.items()}
    auth, now = stage.client.app.state.services.auth, stage.clock()
    known = {who: stage.ask(auth.authenticate, credentials_of(scope), now=now) for who, scope in scopes.items()}
    wrong = []
    for (method, path, project, who), meant in cells(TABLE):
        named = path.replace("{job}", f"job-of-{project}").replace("{project}", project)
        found = ENDPOINTS.find(method, re.sub(r"{\w+}", "x", named) + ("/app.css" if path == "/static" else ""))
        answer = access.decide(found, known[who], project if "{job}" in path else None)
        if answer != meant:
            wrong.append((method, path, project, who, answer, meant))
    assert wrong == []


def test_each_rule_is_enforced_by_the_middleware(stage: AccountsServer, cast):
    one_each = {rule: route for route, rule in TABLE.items()}
    assert len(one_each) >= 10
    assert _answered_otherwise(stage, cast, one_each.values()) == []


@pytest.mark.long
def test_the_whole_matrix_is_enforced_by_the_middleware(stage: AccountsServer, cast):
    assert _answered_otherwise(stage, cast, TABLE) == []


def _answered_otherwise(stage, cast, routes):
    app = behind_the_middleware(stage)
    wrong = []
    for (method, path, project, who), meant in cells(routes):
        filled = path.replace("{job}", f"job-of-{project}").replace("{project}", project)
        filled = re.sub(r"{\w+}", "x", filled) + ("/app.css" if path == "/static" else "")
        answer = app.request(method, filled, headers=cast[who]).status_code
        if answer != STATUS[meant]:
            wrong.append((method, path, project, who, answer, meant))
    return wrong


def _raw(headers):
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def test_an_agents_key_reaches_nothing_but_reports_and_what_is_wanted_of_its_jobs():
    key = Principal(kind="key", name="key", scopes=frozenset({"report"}), project=OWN)
    reached = {
        (method, path)
        for (method, path), rule in TABLE.items()
        if rule.audience != "public"
        and access.decide(access.RouteMatch(path, rule, "a-job", OWN), key, OWN if "{job}" in path else None)
        == "allow"
    }
    assert reached == {("POST", "/api/v1/ingest"), ("GET", "/api/v1/jobs/{job}/desired")}


def test_everybody_may_do_little_and_change_nothing():
    public = {route for route, rule in TABLE.items() if rule.audience == "public"}
    assert {path for method, path in public if method != "GET"} == {"/login", "/setup", "/reset"}
    assert public == {route for route, rule in TABLE.items() if _allowed(rule, ANONYMOUS)}


def test_a_server_without_accounts_lets_its_operator_do_everything():
    assert all(_allowed(rule, OPERATOR) for rule in TABLE.values())


def _allowed(rule: access.AccessRule, asker: Principal) -> bool:
    return access.decide(access.RouteMatch("", rule, "job", OWN), asker, OWN) == "allow"


# ---- how refusals look ----------------------------------------------------------------------


@ON_BOTH
def test_a_job_of_another_project_looks_like_one_that_is_not_there(stage: AccountsServer, cast):
    theirs = stage.client.get(f"/api/v1/jobs/job-of-{OTHER}", headers=cast["admin"])
    nobodys = stage.client.get("/api/v1/jobs/no-such-job", headers=cast["admin"])
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["message"].replace(f"job-of-{OTHER}", "X") == nobodys.json()["message"].replace(
        "no-such-job", "X"
    )
    page = stage.client.get(f"/jobs/job-of-{OTHER}", headers=cast["admin"] | {"Accept": "text/html"})
    assert (page.status_code, "Page not found" in page.text) == (404, True)
    assert 'href="/settings"' in page.text, "the page has the navigation of the person who asked"


@ON_BOTH
def test_what_is_wanted_of_a_job_says_not_even_that_it_is_there(stage: AccountsServer, cast):
    for job in (f"job-of-{OTHER}", "no-such-job"):
        assert stage.client.get(f"/api/v1/jobs/{job}/desired", headers=cast["viewer"]).status_code == 404


@ON_BOTH
@pytest.mark.parametrize("query", ["", "?after=-1&wait=0.01", "?after=0&wait=0.01", "?after=3&wait=0.01"])
def test_what_is_wanted_of_a_job_of_another_project_is_what_is_wanted_of_one_that_is_nowhere(
    stage: AccountsServer, cast, query
):
    theirs = f"/api/v1/jobs/job-of-{OTHER}"
    edit = {"json": {"paused": True}, "headers": cast["server admin"] | OURS | {"If-Match": '"0"'}}
    assert stage.client.patch(f"{theirs}/desired", **edit).status_code == 200
    asked = [
        stage.client.get(f"{path}/desired{query}", headers=cast["report key"])
        for path in (theirs, "/api/v1/jobs/no-such-job")
    ]
    answer, nowhere = [(reply.status_code, reply.content, _plain(reply.headers)) for reply in asked]
    assert answer == nowhere
    assert answer[0] in (200, 204)
    summary = stage.client.get(theirs, headers=cast["server admin"]).json()
    assert summary["delivered_version"] == 0


def _plain(headers):
    return {name: value for name, value in headers.items() if name not in ("x-request-id", "date")}


@ON_BOTH
def test_an_agent_is_told_that_another_project_has_the_name(stage: AccountsServer, cast, fresh_agent):
    batch = {"job": f"job-of-{OTHER}", "uid": "u", "attempt": 1, "rank": 0, "sequence": 0, "sent_at": 1.0,
             "iteration": 0, "lineage": 1}  # fmt: skip
    reply = stage.client.post("/api/v1/ingest", json=batch, headers=cast["report key"])
    assert (reply.status_code, reply.json()["error"]) == (404, "unknown_job")
    assert "a job of another project has that name" in reply.json()["message"]


@ON_BOTH
def test_lists_hold_the_jobs_of_ones_own_projects(stage: AccountsServer, cast):
    def names(who: str) -> list[str]:
        return [job["job"] for job in stage.client.get("/api/v1/jobs", headers=cast[who]).json()["jobs"]]

    assert names("viewer") == names("read key") == [f"job-of-{OWN}"]
    assert names("outsider") == []
    assert sorted(names("server admin")) == sorted(names("read key of every project"))
    assert len(names("server admin")) == 2
    figures = stage.client.get("/metrics", headers=cast["read key"]).text
    assert f"job-of-{OWN}" in figures
    assert f"job-of-{OTHER}" not in figures
    page = stage.client.get("/", headers=cast["viewer"]).text
    assert f"job-of-{OWN}" in page
    assert f"job-of-{OTHER}" not in page


def test_who_may_look_and_not_touch_is_told_so(stage: AccountsServer, cast):
    reply = stage.client.post(
        f"/api/v1/jobs/job-of-{OWN}/restores", json={"iteration": 1}, headers=cast["viewer"] | OURS
    )
    assert (reply.status_code, reply.json()["error"]) == (403, "forbidden")
    assert "role" in reply.json()["message"]
    reply = stage.client.get("/api/v1/jobs", headers=cast["report key"])
    assert (reply.status_code, "report" in reply.json()["message"]) == (403, True)


GOES_FAR = [
    ("GET", f"/jobs/job-of-{OWN}/restore"),
    ("POST", f"/jobs/job-of-{OWN}/restores"),
    ("POST", f"/api/v1/jobs/job-of-{OWN}/restores"),
    ("POST", "/settings/keys"),
    ("POST", "/api/v1/tokens"),
    ("POST", "/settings/people"),
    ("POST", "/settings/people/bob/admin"),
    ("POST", "/settings/people/bob/remove"),
    ("POST", "/settings/people/bob/link"),
    ("POST", f"/settings/projects/{OWN}/members"),
    ("PATCH", f"/api/v1/projects/{OWN}/retention"),
    ("PATCH", f"/api/v1/jobs/job-of-{OWN}/numbers"),
    ("GET", f"/jobs/job-of-{OWN}/delete"),
]


@pytest.mark.parametrize(("method", "path"), GOES_FAR)
def test_what_goes_far_takes_a_password_that_was_typed_lately(stage: AccountsServer, clock, method, path):
    stage.project(OWN, f"job-of-{OWN}")
    browser = stage.cookie(stage.person_with_password("ada", Role.admin, admin=True)) | OURS
    clock.now += access.RECENT_PASSWORD_SECONDS
    assert stage.client.request(method, path, headers=browser).status_code not in (401, 403)
    clock.now += 1
    refused = stage.client.request(method, path, headers=browser)
    assert (refused.status_code, refused.json()["error"]) == (401, "sign_in_again")
    page = {"HX-Request": "true", "HX-Current-URL": f"http://127.0.0.1:7117/jobs/job-of-{OWN}?points=9"}
    dialog = stage.client.request(method, path, headers=browser | page)
    assert (dialog.status_code, dialog.headers["hx-redirect"]) == (
        401,
        f"/login?again=true&next=/jobs/job-of-{OWN}%3Fpoints%3D9",
    )
    form = stage.client.request(method, path, headers=browser | {"Accept": "text/html"})
    assert (form.status_code, form.headers["location"]) == (303, "/login?again=true&next=/")
    assert "within the last hour" in stage.client.get(form.headers["location"]).text
    again = {"Cookie": stage.sign_in("ada").headers["set-cookie"].partition(";")[0]} | OURS
    assert stage.client.request(method, path, headers=again).status_code not in (401, 403)


def test_everything_else_goes_by_the_sign_in_there_is_and_keys_go_by_themselves(stage: AccountsServer, clock):
    stage.project(OWN, f"job-of-{OWN}")
    browser = stage.cookie(stage.person_with_password("ada", Role.admin)) | OURS
    elsewhere = stage.cookie(stage.person("through-the-provider", Role.admin)) | OURS
    key = stage.bearer("control")
    clock.now += 2 * access.RECENT_PASSWORD_SECONDS
    pause = {"json": {"paused": True}, "headers": browser | {"If-Match": '"0"'}}
    assert stage.client.patch(f"/api/v1/jobs/job-of-{OWN}/desired", **pause).status_code == 200
    for headers in (elsewhere, key):
        reply = stage.client.post(f"/api/v1/jobs/job-of-{OWN}/restores", json={"iteration": 1}, headers=headers)
        assert (reply.status_code, reply.json()["error"]) == (404, "no_such_checkpoint")


@ON_BOTH
def test_only_an_agent_shows_that_it_has_a_version(stage: AccountsServer, cast):
    path = f"/api/v1/jobs/job-of-{OWN}"
    edit = {"json": {"paused": True}, "headers": cast["operator"] | OURS | {"If-Match": '"0"'}}
    assert stage.client.patch(f"{path}/desired", **edit).status_code == 200

    def has_after(who: str) -> int:
        waited = stage.client.get(f"{path}/desired?after=1&wait=0.01", headers=cast[who])
        assert waited.status_code == 204
        return stage.client.get(path, headers=cast["viewer"]).json()["delivered_version"]

    others = ("viewer", "operator", "server admin", "read key", "control key", "admin key of every project")
    assert [has_after(who) for who in others] == [0] * len(others)
    assert has_after("report key") == 1


def test_a_method_that_a_path_does_not_know_is_told_which_it_knows(stage: AccountsServer, cast):
    reply = stage.client.delete("/api/v1/jobs", headers=cast["server admin"] | OURS)
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET")
    assert stage.client.delete("/api/v1/jobs").status_code == 401


@ON_BOTH
def test_a_job_that_moves_takes_its_rights_along(stage: AccountsServer, cast):
    from holdfast_server.accounts import job_projects, projects

    state = stage.client.app.state
    state.services = replace(state.services, job_projects=job_projects.JobProjects(stage.db))
    projects.move_job(stage.db, f"job-of-{OTHER}", OWN, who="test", now=stage.clock())
    assert stage.client.get(f"/api/v1/jobs/job-of-{OTHER}", headers=cast["viewer"]).status_code == 200
