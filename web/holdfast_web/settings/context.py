"""Views of the pages under /settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.protocol.administration import PersonRow, TokenRow
from holdfast_server.accounts import people, projects, sign_ins, tokens
from holdfast_server.accounts.projects import MemberRow, ProjectRow
from holdfast_server.accounts.sign_ins import SignInRow
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database
from holdfast_web.shared.render import View

ROLES = tuple(role.name for role in Role)


@dataclass(frozen=True, kw_only=True)
class SettingsPage(View):
    """The fields that all settings pages share."""

    asker: Principal
    now: float
    refused: str = ""
    done: str = ""


@dataclass(frozen=True, kw_only=True)
class NoAccountsPage(View):
    template: ClassVar[str] = "settings/no_accounts.html"
    shared: bool
    """Whether the server has a shared token."""


@dataclass(frozen=True, kw_only=True)
class YouPage(SettingsPage):
    template: ClassVar[str] = "settings/you.html"
    sign_ins: list[SignInRow]
    by_provider: bool


@dataclass(frozen=True, kw_only=True)
class KeysPage(SettingsPage):
    template: ClassVar[str] = "settings/keys.html"
    keys: list[TokenRow]
    projects: list[str]
    """The projects for which the asker may create a key."""
    secret: str = ""
    """The new key, shown once."""
    typed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PeoplePage(SettingsPage):
    template: ClassVar[str] = "settings/people.html"
    people: list[PersonRow]
    link: str = ""
    """A link to choose a password, shown once."""
    link_for: str = ""
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectsPage(SettingsPage):
    template: ClassVar[str] = "settings/projects.html"
    projects: list[ProjectRow]
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectPage(SettingsPage):
    template: ClassVar[str] = "settings/project.html"
    project: str
    members: list[MemberRow]
    roles: tuple[str, ...] = ROLES
    typed: str = ""


async def you_page(db: Database, asker: Principal, now: float) -> YouPage:
    found = await sign_ins.rows(db, asker, now=now)
    by_provider = await people.by_provider(db, asker.name)
    return YouPage(asker=asker, now=now, sign_ins=found, by_provider=by_provider)


async def keys_page(db: Database, asker: Principal, now: float) -> KeysPage:
    found = await tokens.rows(db, asker=asker, now=now)
    names = [row.name for row in await projects.rows(db, asker)]
    return KeysPage(asker=asker, now=now, keys=found, projects=names)


async def people_page(db: Database, asker: Principal, now: float) -> PeoplePage:
    return PeoplePage(asker=asker, now=now, people=await people.rows(db))


async def projects_page(db: Database, asker: Principal, now: float) -> ProjectsPage:
    found = await projects.rows(db, asker, role=Role.admin)
    return ProjectsPage(asker=asker, now=now, projects=found)


async def project_page(db: Database, asker: Principal, now: float, project: str) -> ProjectPage:
    members = await projects.members(db, project)
    return ProjectPage(asker=asker, now=now, project=project, members=members)
