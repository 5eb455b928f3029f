"""Views of the pages under /settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.protocol.administration import Person, Token
from holdfast_server.accounts import people, projects, sign_ins, tokens
from holdfast_server.accounts.projects import ProjectMember, ProjectSummary
from holdfast_server.accounts.sign_ins import BrowserSession
from holdfast_server.core.principal import Principal, Role, Scope
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
    """Whether the server has a shared secret."""


@dataclass(frozen=True, kw_only=True)
class YouPage(SettingsPage):
    template: ClassVar[str] = "settings/you.html"
    sign_ins: list[BrowserSession]
    by_provider: bool


@dataclass(frozen=True, kw_only=True)
class KeysPage(SettingsPage):
    template: ClassVar[str] = "settings/keys.html"
    keys: list[Token]
    projects: list[str]
    """The projects for which the asker may create a key."""
    scopes: list[Scope]
    """The permissions that it may have in one of them."""
    preselected: Scope
    last_used_seconds: float = tokens.LAST_USED_SECONDS
    """Time between two updates of when a key was last used."""
    secret: str = ""
    """The new key, shown once."""
    typed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PeoplePage(SettingsPage):
    template: ClassVar[str] = "settings/people.html"
    people: list[Person]
    projects: list[str]
    """The projects in which a new person may get a role."""
    roles: tuple[str, ...] = ROLES
    link: str = ""
    """A link to choose a password, shown once."""
    link_for: str = ""
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectsPage(SettingsPage):
    template: ClassVar[str] = "settings/projects.html"
    projects: list[ProjectSummary]
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectPage(SettingsPage):
    template: ClassVar[str] = "settings/project.html"
    project: str
    members: list[ProjectMember]
    roles: tuple[str, ...] = ROLES
    typed: str = ""


def you_page(db: Database, asker: Principal, now: float) -> YouPage:
    found = sign_ins.list_sessions(db, asker, now=now)
    by_provider = people.uses_identity_provider(db, asker.name)
    return YouPage(asker=asker, now=now, sign_ins=found, by_provider=by_provider)


def keys_page(db: Database, asker: Principal, now: float) -> KeysPage:
    found = tokens.list_tokens(db, asker=asker, now=now)
    names = [row.name for row in projects.list_projects(db, asker)]
    return KeysPage(
        asker=asker,
        now=now,
        keys=found,
        projects=names,
        scopes=tokens.grantable(asker, names),
        # of the project that the form names first
        preselected="report" if "report" in tokens.grantable(asker, names[:1]) else "read",
    )


def people_page(db: Database, asker: Principal, now: float) -> PeoplePage:
    names = [row.name for row in projects.list_projects(db, asker)]
    return PeoplePage(asker=asker, now=now, people=people.list_people(db), projects=names)


def projects_page(db: Database, asker: Principal, now: float) -> ProjectsPage:
    found = projects.list_projects(db, asker, role=Role.admin)
    return ProjectsPage(asker=asker, now=now, projects=found)


def project_page(db: Database, asker: Principal, now: float, project: str) -> ProjectPage:
    members = projects.list_members(db, project)
    return ProjectPage(asker=asker, now=now, project=project, members=members)
