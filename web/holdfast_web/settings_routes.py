"""The pages under /settings: what people look after themselves, and what admins look after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, TypeVar

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from holdfast.pacing.quantities import parse_positive_seconds
from holdfast_server.accounts import people, projects, sign_ins, tokens
from holdfast_server.accounts.doors import SharedSecret
from holdfast_server.accounts.people import PersonRow
from holdfast_server.accounts.principal import SCOPES, Principal, Role, Scope
from holdfast_server.accounts.projects import MemberRow, ProjectRow
from holdfast_server.accounts.sign_ins import SignInRow
from holdfast_server.accounts.tokens import TokenRow
from holdfast_server.dependencies import Asker, Clock, Config, Db
from holdfast_server.errors import InvalidSetting, NotPossible, Refused
from holdfast_web.render import View
from holdfast_web.routing import PageRoute, Text, headers_of, status_of
from holdfast_web.signing_in import public_address, remember_device, sentence, visitor

NO_ACCOUNTS = "this server has no accounts: start it with `holdfast serve --accounts`"

ROLES = tuple(role.name for role in Role)

router = APIRouter(prefix="/settings", route_class=PageRoute, include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class Settings(View):
    """What all pages of the settings share."""

    asker: Principal
    now: float
    refused: str = ""
    done: str = ""


@dataclass(frozen=True, kw_only=True)
class NoAccountsPage(View):
    template: ClassVar[str] = "settings_none.html"
    shared: bool
    """There is a shared secret instead."""


@dataclass(frozen=True, kw_only=True)
class YouPage(Settings):
    template: ClassVar[str] = "settings_you.html"
    sign_ins: list[SignInRow]
    by_provider: bool


@dataclass(frozen=True, kw_only=True)
class KeysPage(Settings):
    template: ClassVar[str] = "settings_keys.html"
    keys: list[TokenRow]
    projects: list[str]
    """In which the asker may make one."""
    secret: str = ""
    """Of the key that was just made: told here and never again."""
    typed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PeoplePage(Settings):
    template: ClassVar[str] = "settings_people.html"
    people: list[PersonRow]
    link: str = ""
    """The address with which somebody chooses a password: told here and never again."""
    link_for: str = ""
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectsPage(Settings):
    template: ClassVar[str] = "settings_projects.html"
    projects: list[ProjectRow]
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectPage(Settings):
    template: ClassVar[str] = "settings_project.html"
    project: str
    members: list[MemberRow]
    roles: tuple[str, ...] = ROLES
    typed: str = ""


P = TypeVar("P", bound=Settings)


def _again(page: P, refusal: Refused) -> Response:
    """The page as it is now, with why what was asked for was not done."""
    return replace(page, refused=sentence(refusal)).response(status_of(refusal), headers_of(refusal))


async def _needs_accounts(request: Request) -> None:
    if not request.app.state.door.accounts:
        raise NotPossible(NO_ACCOUNTS)


of_accounts = APIRouter(dependencies=[Depends(_needs_accounts)], route_class=PageRoute, include_in_schema=False)
"""Settings that there are on a server with accounts only."""


# ---- you ------------------------------------------------------------------------------------


@router.get("")
async def you(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    door = request.app.state.door
    if not door.accounts:
        return NoAccountsPage(shared=isinstance(door, SharedSecret)).response()
    return (await _you(db, asker, clock())).response()


async def _you(db: Db, asker: Principal, now: float) -> YouPage:
    return YouPage(
        asker=asker,
        now=now,
        sign_ins=await sign_ins.rows(db, asker, now=now),
        by_provider=await people.by_provider(db, asker.name),
    )


@of_accounts.post("/password")
async def change_password(
    request: Request, db: Db, clock: Clock, asker: Asker, present: Text = "", password: Text = ""
) -> Response:
    now = clock()
    try:
        await sign_ins.check_password(db, asker.name, present, visitor(request), now=now)
        await people.change_password(db, asker.name, password, keep=asker.session, now=now)
    except Refused as refusal:
        return _again(await _you(db, asker, now), refusal)
    done = "Your password is changed, and your other browsers are signed out."
    response = replace(await _you(db, asker, now), done=done).response()
    remember_device(request, response, await sign_ins.new_device(db, asker.name))
    return response


@of_accounts.post("/sessions/end")
async def end_other_sessions(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    await sign_ins.end_others(db, asker, now=clock())
    return RedirectResponse("/settings#browsers", 303)


@of_accounts.post("/sessions/{sign_in}/end")
async def end_session(sign_in: str, request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    await sign_ins.end(db, asker, sign_in, now=clock())
    return RedirectResponse("/settings#browsers", 303)


# ---- keys -----------------------------------------------------------------------------------


@of_accounts.get("/keys")
async def keys(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    return (await _keys(db, asker, clock())).response()


async def _keys(db: Db, asker: Principal, now: float) -> KeysPage:
    return KeysPage(
        asker=asker,
        now=now,
        keys=await tokens.rows(db, asker=asker, now=now),
        projects=[row.name for row in await projects.rows(db, asker)],
    )


@of_accounts.post("/keys")
async def create_key(
    request: Request,
    db: Db,
    clock: Clock,
    asker: Asker,
    name: Text = "",
    project: Text = "",
    job: Text = "",
    expires: Text = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    now = clock()
    wished = [scope for scope in scopes or [] if scope in SCOPES]
    typed = {"name": name, "project": project, "job": job, "expires": expires, "scopes": " ".join(wished)}
    try:
        wish = tokens.Wish(
            name=name, scopes=_scopes(wished), project=project or None, job=job.strip() or None,
            seconds=_seconds(expires),
        )  # fmt: skip
        secret, _ = await tokens.create(db, wish, maker=asker, now=now)
    except Refused as refusal:
        return _again(replace(await _keys(db, asker, now), typed=typed), refusal)
    return replace(await _keys(db, asker, now), secret=secret).response()


def _scopes(names: Sequence[str]) -> list[Scope]:
    return [scope for scope in SCOPES if scope in names]


def _seconds(text: str) -> float | None:
    try:
        return parse_positive_seconds(text, "expires") if text.strip() else None
    except ValueError as error:
        raise InvalidSetting("expires", str(error)) from None


@of_accounts.post("/keys/{prefix}/revoke")
async def revoke_key(prefix: str, request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    await tokens.revoke(db, prefix, asker=asker, now=clock())
    return RedirectResponse("/settings/keys", 303)


# ---- people ---------------------------------------------------------------------------------


@of_accounts.get("/people")
async def everybody(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    return (await _people(db, asker, clock())).response()


async def _people(db: Db, asker: Principal, now: float) -> PeoplePage:
    return PeoplePage(asker=asker, now=now, people=await people.rows(db))


@of_accounts.post("/people")
async def add_person(
    request: Request, db: Db, config: Config, clock: Clock, asker: Asker, name: Text = ""
) -> Response:
    now = clock()
    try:
        added, link = await people.add(db, name, who=asker.name, now=now)
    except Refused as refusal:
        return _again(replace(await _people(db, asker, now), typed=name), refusal)
    page = await _people(db, asker, now)
    return replace(page, link=f"{public_address(request, config)}/reset#{link}", link_for=added).response()


@of_accounts.post("/people/{person}/link")
async def reset_link(
    person: str, request: Request, db: Db, config: Config, clock: Clock, asker: Asker
) -> Response:
    now = clock()
    link = await people.reset_link(db, person, who=asker.name, now=now)
    page = await _people(db, asker, now)
    return replace(page, link=f"{public_address(request, config)}/reset#{link}", link_for=person).response()


@of_accounts.post("/people/{person}/admin")
async def set_admin(
    person: str, request: Request, db: Db, clock: Clock, asker: Asker, admin: Text = ""
) -> Response:
    now = clock()
    try:
        await people.set_admin(db, person, admin == "true", who=asker.name, now=now)
    except NotPossible as refusal:
        return _again(await _people(db, asker, now), refusal)
    return RedirectResponse("/settings/people" if person != asker.name else "/settings", 303)


@of_accounts.post("/people/{person}/remove")
async def remove_person(person: str, request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    now = clock()
    try:
        await people.remove(db, person, who=asker.name, now=now)
    except NotPossible as refusal:
        return _again(await _people(db, asker, now), refusal)
    return RedirectResponse("/settings/people", 303)


# ---- projects -------------------------------------------------------------------------------


@of_accounts.get("/projects")
async def all_projects(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    return (await _projects(db, asker, clock())).response()


async def _projects(db: Db, asker: Principal, now: float) -> ProjectsPage:
    return ProjectsPage(asker=asker, now=now, projects=await projects.rows(db, asker, role=Role.admin))


@of_accounts.post("/projects")
async def add_project(request: Request, db: Db, clock: Clock, asker: Asker, name: Text = "") -> Response:
    now = clock()
    try:
        added = await projects.add(db, name, who=asker.name, now=now)
    except Refused as refusal:
        return _again(replace(await _projects(db, asker, now), typed=name), refusal)
    return RedirectResponse(f"/settings/projects/{added}", 303)


@of_accounts.get("/projects/{project}")
async def one_project(project: str, request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    return (await _project(db, asker, project, clock())).response()


async def _project(db: Db, asker: Principal, project: str, now: float) -> ProjectPage:
    return ProjectPage(asker=asker, now=now, project=project, members=await projects.members(db, project))


@of_accounts.post("/projects/{project}/members")
async def set_member(
    project: str, request: Request, db: Db, clock: Clock, asker: Asker, person: Text = "", role: Text = ""
) -> Response:
    now = clock()
    try:
        held = _role(role)
        await people.set_role(db, person.strip().lower(), project, held, who=asker.name, now=now)
    except Refused as refusal:
        return _again(replace(await _project(db, asker, project, now), typed=person), refusal)
    return RedirectResponse(f"/settings/projects/{project}", 303)


def _role(text: str) -> Role | None:
    if text == "none":
        return None
    if text not in Role.__members__:
        raise InvalidSetting("role", f"a role is one of {', '.join(Role.__members__)}")
    return Role[text]


@of_accounts.post("/projects/{project}/jobs")
async def move_job(project: str, request: Request, db: Db, clock: Clock, asker: Asker, job: Text = "") -> Response:
    now = clock()
    try:
        await projects.move_job(db, job.strip(), project, who=asker.name, now=now)
    except Refused as refusal:
        return _again(await _project(db, asker, project, now), refusal)
    return RedirectResponse(f"/settings/projects/{project}", 303)


router.include_router(of_accounts)
