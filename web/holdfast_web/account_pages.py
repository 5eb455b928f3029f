"""What the pages of signing in, settings and the audit log show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.answers import AuditEntry, PersonRow, TokenRow
from holdfast_server.accounts.principal import Principal, Role
from holdfast_server.accounts.projects import MemberRow, ProjectRow
from holdfast_server.accounts.sign_ins import SignInRow
from holdfast_web.render import View

ROLES = tuple(role.name for role in Role)


@dataclass(frozen=True, kw_only=True)
class LoginPage(View):
    template: ClassVar[str] = "login.html"
    accounts: bool
    then: str
    """The path to go on to."""
    refused: str = ""
    name: str = ""
    """As it was typed."""
    provider: str = ""
    """What the button of the identity provider says."""
    empty: bool = False
    """Nobody can sign in yet: the server waits to be set up."""


@dataclass(frozen=True, kw_only=True)
class LinkPage(View):
    """Where a link leads that works once: to set the server up, or to a new password."""

    template: ClassVar[str] = "link.html"
    setup: bool
    refused: str = ""
    name: str = ""
    code: str = ""


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


@dataclass(frozen=True, kw_only=True)
class AuditPage(View):
    template: ClassVar[str] = "audit.html"
    entries: list[AuditEntry]
    filters: dict[str, str]
    """By name, as they stand in the address."""
    actions: list[str]
    older: int | None
    """From which row on the next page begins; None: there is none."""
    query: str
    """The filters again, for the addresses of the exports and of the next page."""
    now: float
