"""The pages under /settings: what people look after themselves, and what admins look after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.protocol.administration import PersonRow, TokenRow
from holdfast_server.accounts import people, projects, sign_ins, tokens
from holdfast_server.accounts.auth_backends import SharedSecret
from holdfast_server.accounts.projects import MemberRow, ProjectRow
from holdfast_server.accounts.sign_ins import SignInRow
from holdfast_server.core.errors import InvalidSetting, NotPossible, Refused
from holdfast_server.core.principal import SCOPES, Principal, Role
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.dependencies import Asker, Clock, Config, Db
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the routes share: who asks for what, and when."""

    request: Request
    db: Db
    asker: Principal
    now: float

    async def you(self) -> YouPage:
        found = await sign_ins.rows(self.db, self.asker, now=self.now)
        by_provider = await people.by_provider(self.db, self.asker.name)
        return YouPage(asker=self.asker, now=self.now, sign_ins=found, by_provider=by_provider)

    async def keys(self) -> KeysPage:
        found = await tokens.rows(self.db, asker=self.asker, now=self.now)
        of = [row.name for row in await projects.rows(self.db, self.asker)]
        return KeysPage(asker=self.asker, now=self.now, keys=found, projects=of)

    async def people(self) -> PeoplePage:
        return PeoplePage(asker=self.asker, now=self.now, people=await people.rows(self.db))

    async def projects(self) -> ProjectsPage:
        found = await projects.rows(self.db, self.asker, role=Role.admin)
        return ProjectsPage(asker=self.asker, now=self.now, projects=found)

    async def project(self, name: str) -> ProjectPage:
        found = await projects.members(self.db, name)
        return ProjectPage(asker=self.asker, now=self.now, project=name, members=found)

    async def link(self, config: ServerSettings, code: str, person: str) -> Response:
        """The page with an address that is told once."""
        link = f"{public_address(self.request, config)}/reset#{code}"
        return replace(await self.people(), link=link, link_for=person).response()


async def _asked(request: Request, db: Db, clock: Clock, asker: Asker) -> _Asked:
    return _Asked(request, db, asker, clock())


async def _of_accounts(request: Request, db: Db, clock: Clock, asker: Asker) -> _Asked:
    if not request.app.state.door.accounts:
        raise NotPossible(NO_ACCOUNTS)
    return _Asked(request, db, asker, clock())


Accounts = Annotated[_Asked, Depends(_of_accounts)]
"""On a server with accounts only."""


def _again(page: Settings, refusal: Refused, **typed: Any) -> Response:
    """The page as it is now, with what was typed, and why what was asked for was not done."""
    shown = replace(page, refused=sentence(refusal), **typed)
    return shown.response(status_of(refusal), headers_of(refusal))


# ---- you ------------------------------------------------------------------------------------


@router.get("")
async def you(asked: Annotated[_Asked, Depends(_asked)]) -> Response:
    door = asked.request.app.state.door
    if not door.accounts:
        return NoAccountsPage(shared=isinstance(door, SharedSecret)).response()
    return (await asked.you()).response()


@router.post("/password")
async def change_password(asked: Accounts, present: Text = "", password: Text = "") -> Response:
    db, name, session = asked.db, asked.asker.name, asked.asker.session
    try:
        await sign_ins.check_password(db, name, present, visitor(asked.request), now=asked.now)
        await people.change_password(db, name, password, keep=session, now=asked.now)
    except Refused as refusal:
        return _again(await asked.you(), refusal)
    done = "Your password is changed, and your other browsers are signed out."
    response = replace(await asked.you(), done=done).response()
    remember_device(asked.request, response, await sign_ins.new_device(db, name))
    return response


@router.post("/sessions/end")
async def end_other_sessions(asked: Accounts) -> Response:
    await sign_ins.end_others(asked.db, asked.asker, now=asked.now)
    return RedirectResponse("/settings#browsers", 303)


@router.post("/sessions/{sign_in}/end")
async def end_session(sign_in: str, asked: Accounts) -> Response:
    await sign_ins.end(asked.db, asked.asker, sign_in, now=asked.now)
    return RedirectResponse("/settings#browsers", 303)


# ---- keys -----------------------------------------------------------------------------------


@router.get("/keys")
async def keys(asked: Accounts) -> Response:
    return (await asked.keys()).response()


@router.post("/keys")
async def create_key(
    asked: Accounts,
    name: Text = "",
    project: Text = "",
    job: Text = "",
    expires: Text = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> Response:
    wished = [scope for scope in scopes or [] if scope in SCOPES]
    typed = {"name": name, "project": project, "job": job, "expires": expires, "scopes": " ".join(wished)}
    try:
        wish = tokens.Wish(
            name=name, scopes=[scope for scope in SCOPES if scope in wished], project=project or None,
            job=job.strip() or None, seconds=_seconds(expires),
        )  # fmt: skip
        secret, _ = await tokens.create(asked.db, wish, maker=asked.asker, now=asked.now)
    except Refused as refusal:
        return _again(await asked.keys(), refusal, typed=typed)
    return replace(await asked.keys(), secret=secret).response()


def _seconds(text: str) -> float | None:
    try:
        return parse_positive_seconds(text, "expires") if text.strip() else None
    except ValueError as error:
        raise InvalidSetting("expires", str(error)) from None


@router.post("/keys/{prefix}/revoke")
async def revoke_key(prefix: str, asked: Accounts) -> Response:
    await tokens.revoke(asked.db, prefix, asker=asked.asker, now=asked.now)
    return RedirectResponse("/settings/keys", 303)


# ---- people ---------------------------------------------------------------------------------


@router.get("/people")
async def everybody(asked: Accounts) -> Response:
    return (await asked.people()).response()


@router.post("/people")
async def add_person(asked: Accounts, config: Config, name: Text = "") -> Response:
    try:
        added, link = await people.add(asked.db, name, who=asked.asker.name, now=asked.now)
    except Refused as refusal:
        return _again(await asked.people(), refusal, typed=name)
    return await asked.link(config, link, added)


@router.post("/people/{person}/link")
async def reset_link(person: str, asked: Accounts, config: Config) -> Response:
    link = await people.reset_link(asked.db, person, who=asked.asker.name, now=asked.now)
    return await asked.link(config, link, person)


@router.post("/people/{person}/admin")
async def set_admin(person: str, asked: Accounts, admin: Text = "") -> Response:
    try:
        await people.set_admin(asked.db, person, admin == "true", who=asked.asker.name, now=asked.now)
    except NotPossible as refusal:
        return _again(await asked.people(), refusal)
    return RedirectResponse("/settings/people" if person != asked.asker.name else "/settings", 303)


@router.post("/people/{person}/remove")
async def remove_person(person: str, asked: Accounts) -> Response:
    try:
        await people.remove(asked.db, person, who=asked.asker.name, now=asked.now)
    except NotPossible as refusal:
        return _again(await asked.people(), refusal)
    return RedirectResponse("/settings/people", 303)


# ---- projects -------------------------------------------------------------------------------


@router.get("/projects")
async def all_projects(asked: Accounts) -> Response:
    return (await asked.projects()).response()


@router.post("/projects")
async def add_project(asked: Accounts, name: Text = "") -> Response:
    try:
        added = await projects.add(asked.db, name, who=asked.asker.name, now=asked.now)
    except Refused as refusal:
        return _again(await asked.projects(), refusal, typed=name)
    return RedirectResponse(f"/settings/projects/{added}", 303)


@router.get("/projects/{project}")
async def one_project(project: str, asked: Accounts) -> Response:
    return (await asked.project(project)).response()


@router.post("/projects/{project}/members")
async def set_member(project: str, asked: Accounts, person: Text = "", role: Text = "") -> Response:
    try:
        name, held = person.strip().lower(), _role(role)
        await people.set_role(asked.db, name, project, held, who=asked.asker.name, now=asked.now)
    except Refused as refusal:
        return _again(await asked.project(project), refusal, typed=person)
    return RedirectResponse(f"/settings/projects/{project}", 303)


def _role(text: str) -> Role | None:
    if text == "none":
        return None
    if text not in Role.__members__:
        raise InvalidSetting("role", f"a role is one of {', '.join(Role.__members__)}")
    return Role[text]


@router.post("/projects/{project}/jobs")
async def move_job(project: str, asked: Accounts, job: Text = "") -> Response:
    try:
        await projects.move_job(asked.db, job.strip(), project, who=asked.asker.name, now=asked.now)
    except Refused as refusal:
        return _again(await asked.project(project), refusal)
    return RedirectResponse(f"/settings/projects/{project}", 303)
