"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Literal

Scope = Literal["report", "read", "control", "admin"]
SCOPES: tuple[Scope, ...] = ("report", "read", "control", "admin")

ALL_PROJECTS: None = None
"""In place of a set of projects: there is none that is not among them."""


class Role(IntEnum):
    """What a person may do in a project; each may do what the ones before may."""

    viewer = 1
    operator = 2
    admin = 3


_ROLES: dict[Scope, Role] = {"read": Role.viewer, "control": Role.operator, "admin": Role.admin}
"""What a key may do that has the scope. Reporting is no part of any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks: a person, a program with a key, or nobody.

    Routes never look at this to refuse somebody: the table in `accounts.policy` says who may ask for what.
    """

    kind: Literal["person", "agent", "nobody"]
    name: str
    """As it stands in the audit log and beside edits."""
    admin: bool = False
    """Of the whole server, and so of every project."""
    roles: Mapping[str, Role] = field(default_factory=lambda: MappingProxyType({}))
    """By project."""
    scopes: frozenset[Scope] = frozenset()
    project: str | None = None
    """The only project that a key is for; None: every one."""
    job: str | None = None
    """The only job that a key is for; None: every one of its project."""
    session: str | None = None
    """The id of the sign-in that shows who it is."""
    belongs_to: str | None = None
    """Of a key: whose it is; None: it is nobody's but its own, as a person."""
    password_typed_at: float | None = None
    """When it signed in with a password; None: it has none, as programs, or who came through the provider."""

    @property
    def owner(self) -> str:
        """Whose the keys are that it makes: a key that a key made goes with the person behind both."""
        return self.belongs_to or self.name

    def role_in(self, project: str) -> Role | None:
        if self.admin:
            return Role.admin
        if self.kind == "agent":
            return self._role() if self.project in (None, project) else None
        return self.roles.get(project)

    @property
    def rights(self) -> Hashable:
        """The same for all who may see and do the same."""
        return (self.kind, self.admin, frozenset(self.roles.items()), self.scopes, self.project, self.job)

    @property
    def everywhere(self) -> Role | None:
        """The most that it may do in any project."""
        if self.admin:
            return Role.admin
        return self._role() if self.kind == "agent" else max(self.roles.values(), default=None)

    @property
    def visible_projects(self) -> frozenset[str] | None:
        """Whose jobs lists may hold; `ALL_PROJECTS` for somebody who may see everything."""
        return self.projects_as(Role.viewer)

    def projects_as(self, role: Role) -> frozenset[str] | None:
        """Those in which it may do what the role may."""
        if self.admin:
            return ALL_PROJECTS
        if self.kind == "agent":
            if (self._role() or 0) < role:
                return frozenset()
            return ALL_PROJECTS if self.project is None else frozenset([self.project])
        return frozenset(project for project, held in self.roles.items() if held >= role)

    def _role(self) -> Role | None:
        return max((_ROLES[scope] for scope in self.scopes if scope in _ROLES), default=None)


OPERATOR = Principal(kind="person", name="operator", admin=True, scopes=frozenset(SCOPES))
"""Whoever reaches a server without accounts, or holds its shared secret."""
NOBODY = Principal(kind="nobody", name="nobody")

current: ContextVar[Principal] = ContextVar("principal", default=NOBODY)
"""Who asked for the page that is being made."""
