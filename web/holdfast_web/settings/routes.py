"""The pages under /settings: a person's own account, keys, people, projects."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from holdfast.units import parse_positive_seconds
from holdfast_server.accounts import people, projects, sign_ins, tokens
from holdfast_server.accounts.auth_backends import SharedSecretAuth
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import (
    ANY_PROJECT_ADMIN,
    PERSON,
    PROJECT_ADMIN,
    PROJECT_GRANT,
    SERVER_ADMIN,
    SERVER_GRANT,
    AccessRule,
)
from holdfast_server.core.errors import InvalidSetting, NotPossible, RequestRefused
from holdfast_server.core.principal import SCOPES, Role
from holdfast_server.http.dependencies import Asker, Config, Db, Now
from holdfast_server.http.services import services_of
from holdfast_web.accounts.routes import public_address, remember_device, sentence, visitor
from holdfast_web.settings import views
from holdfast_web.shared.routing import Text, headers_of

NO_ACCOUNTS = "This server has no accounts. Start it with `holdfast serve --accounts`."


async def _require_accounts(request: Request) -> None:
    if request.url.path != "/settings" and not services_of(request.app).auth.has_accounts:
        raise NotPossible(NO_ACCOUNTS)


router = Router("/settings", dependencies=[Depends(_require_accounts)])


def _refused(page: views.SettingsPage, refusal: RequestRefused, **typed: Any) -> Response:
    """Answer with the page as it is now, the text that was typed, and the reason of the refusal."""
    shown = replace(page, refused=sentence(refusal), **typed)
    return shown.response(refusal.status, headers_of(refusal))


# ---- you ------------------------------------------------------------------------------------


@router.endpoint("GET", "", access=PERSON)
def you(request: Request, db: Db, asker: Asker, now: Now) -> Response:
    auth = services_of(request.app).auth
    if not auth.has_accounts:
        return views.NoAccountsPage(shared=isinstance(auth, SharedSecretAuth)).response()
    return views.you_page(db, asker, now).response()


@router.endpoint("POST", "/password", access=PERSON, threads="accounts")
def change_password(
    request: Request, db: Db, asker: Asker, now: Now, present: Text = "", password: Text = ""
) -> Response:
    try:
        sign_ins.check_password(db, asker.name, present, visitor(request), now=now)
        people.change_password(db, asker.name, password, keep=asker.sign_in_id, now=now)
    except RequestRefused as refusal:
        return _refused(views.you_page(db, asker, now), refusal)
    done = "Your password was changed, and your other browsers are signed out."
    response = replace(views.you_page(db, asker, now), done=done).response()
    remember_device(request, response, sign_ins.new_device(db, asker.name))
    return response


@router.endpoint("POST", "/sessions/end", access=PERSON)
def end_other_sessions(db: Db, asker: Asker, now: Now) -> Response:
    sign_ins.end_others(db, asker, now=now)
    return RedirectResponse("/settings#browsers", 303)


@router.endpoint("POST", "/sessions/{sign_in}/end", access=PERSON)
def end_session(sign_in: str, db: Db, asker: Asker, now: Now) -> Response:
    sign_ins.end(db, asker, sign_in, now=now)
    return RedirectResponse("/settings#browsers", 303)


# ---- keys -----------------------------------------------------------------------------------


@router.endpoint("GET", "/keys", access=PERSON)
def list_keys(db: Db, asker: Asker, now: Now) -> Response:
    return views.keys_page(db, asker, now).response()


@router.endpoint("POST", "/keys", access=AccessRule(audience="person", recent_password=True))
def create_key(
    db: Db,
    asker: Asker,
    now: Now,
    name: Text = "",
    project: Text = "",
    job: Text = "",
    expires: Text = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    chosen = [scope for scope in SCOPES if scope in (scopes or [])]
    typed = {"name": name, "project": project, "job": job, "expires": expires, "scopes": " ".join(chosen)}
    try:
        wish = tokens.TokenRequest(
            name=name, scopes=chosen, project=project or None, job=job.strip() or None, seconds=_seconds(expires)
        )
        secret, _ = tokens.create(db, wish, maker=asker, now=now)
    except RequestRefused as refusal:
        return _refused(views.keys_page(db, asker, now), refusal, typed=typed)
    return replace(views.keys_page(db, asker, now), secret=secret).response()


def _seconds(text: str) -> float | None:
    try:
        return parse_positive_seconds(text, "expires") if text.strip() else None
    except ValueError as error:
        raise InvalidSetting("expires", str(error)) from None


@router.endpoint("POST", "/keys/{prefix}/revoke", access=PERSON)
def revoke_key(prefix: str, db: Db, asker: Asker, now: Now) -> Response:
    tokens.revoke(db, prefix, asker=asker, now=now)
    return RedirectResponse("/settings/keys", 303)


# ---- people ---------------------------------------------------------------------------------


@router.endpoint("GET", "/people", access=SERVER_ADMIN)
def list_people(db: Db, asker: Asker, now: Now) -> Response:
    return views.people_page(db, asker, now).response()


@router.endpoint("POST", "/people", access=SERVER_GRANT)
def add_person(
    request: Request, db: Db, asker: Asker, now: Now, config: Config, name: Text = "", role: Text = "none",
    project: Text = "",
) -> Response:  # fmt: skip
    try:
        chosen = _role(role)
        roles = {} if chosen is None else {project: chosen}
        added, code = people.add(db, name, roles=roles, who=asker.name, now=now)
    except RequestRefused as refusal:
        return _refused(views.people_page(db, asker, now), refusal, typed=name)
    link = f"{public_address(request, config)}/reset#{code}"
    return replace(views.people_page(db, asker, now), link=link, link_for=added).response()


@router.endpoint("POST", "/people/{person}/link", access=SERVER_GRANT)
def reset_link(person: str, request: Request, db: Db, asker: Asker, now: Now, config: Config) -> Response:
    code = people.reset_link(db, person, who=asker.name, now=now)
    link = f"{public_address(request, config)}/reset#{code}"
    return replace(views.people_page(db, asker, now), link=link, link_for=person).response()


@router.endpoint("POST", "/people/{person}/admin", access=SERVER_GRANT)
def set_admin(person: str, db: Db, asker: Asker, now: Now, admin: Text = "") -> Response:
    try:
        people.set_admin(db, person, admin == "true", who=asker.name, now=now)
    except NotPossible as refusal:
        return _refused(views.people_page(db, asker, now), refusal)
    return RedirectResponse("/settings/people" if person != asker.name else "/settings", 303)


@router.endpoint("POST", "/people/{person}/remove", access=SERVER_GRANT)
def remove_person(person: str, db: Db, asker: Asker, now: Now) -> Response:
    try:
        people.remove(db, person, who=asker.name, now=now)
    except NotPossible as refusal:
        return _refused(views.people_page(db, asker, now), refusal)
    return RedirectResponse("/settings/people", 303)


# ---- projects -------------------------------------------------------------------------------


@router.endpoint("GET", "/projects", access=ANY_PROJECT_ADMIN)
def list_projects(db: Db, asker: Asker, now: Now) -> Response:
    return views.projects_page(db, asker, now).response()


@router.endpoint("POST", "/projects", access=SERVER_ADMIN)
def add_project(db: Db, asker: Asker, now: Now, name: Text = "") -> Response:
    try:
        added = projects.add(db, name, who=asker.name, now=now)
    except RequestRefused as refusal:
        return _refused(views.projects_page(db, asker, now), refusal, typed=name)
    return RedirectResponse(f"/settings/projects/{added}", 303)


@router.endpoint("GET", "/projects/{project}", access=PROJECT_ADMIN)
def show_project(project: str, db: Db, asker: Asker, now: Now) -> Response:
    return views.project_page(db, asker, now, project).response()


@router.endpoint("POST", "/projects/{project}/members", access=PROJECT_GRANT)
def set_member(project: str, db: Db, asker: Asker, now: Now, person: Text = "", role: Text = "") -> Response:
    try:
        people.set_role(db, person.strip().lower(), project, _role(role), who=asker.name, now=now)
    except RequestRefused as refusal:
        return _refused(views.project_page(db, asker, now, project), refusal, typed=person)
    return RedirectResponse(f"/settings/projects/{project}", 303)


def _role(text: str) -> Role | None:
    if text == "none":
        return None
    if text not in Role.__members__:
        raise InvalidSetting("role", f"role must be one of {', '.join(Role.__members__)}")
    return Role[text]


@router.endpoint("POST", "/projects/{project}/jobs", access=SERVER_GRANT)
def move_job(project: str, db: Db, asker: Asker, now: Now, job: Text = "") -> Response:
    try:
        projects.move_job(db, job.strip(), project, who=asker.name, now=now)
    except RequestRefused as refusal:
        return _refused(views.project_page(db, asker, now, project), refusal)
    return RedirectResponse(f"/settings/projects/{project}", 303)
