"""The identity of a client and its rights."""

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
"""Stands for the set of all projects."""


class Role(IntEnum):
    """A person's role in a project. Each includes the rights of the ones before."""

    viewer = 1
    operator = 2
    admin = 3


_ROLES: dict[Scope, Role] = {"read": Role.viewer, "control": Role.operator, "admin": Role.admin}
"""The role that a scope gives a key. None of them includes reporting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A person, a key, or an anonymous client.

    Routes never check it to refuse a request: the access rules of the endpoints decide.
    """

    kind: Literal["person", "key", "anonymous"]
    name: str
    """As the audit log and the list of edits show it."""
    admin: bool = False
    """Administrator of the server, and thereby of every project."""
    roles: Mapping[str, Role] = field(default_factory=lambda: MappingProxyType({}))
    """Roles by project."""
    scopes: frozenset[Scope] = frozenset()
    project: str | None = None
    """The only project that a key is valid for; `None` for all."""
    job: str | None = None
    """The only job that a key is valid for; `None` for all jobs of its project."""
    sign_in_id: str | None = None
    """Id of the browser session that authenticated the person."""
    key_owner: str | None = None
    """The person who made the key, directly or with another key; `None` for people."""
    password_entered_at: float | None = None
    """When the person entered the password; `None` without one: keys, and people of the identity provider."""

    @property
    def owner(self) -> str:
        """The person responsible: a key made with another key belongs to the person who made the first."""
        return self.key_owner or self.name

    def role_in(self, project: str) -> Role | None:
        if self.admin:
            return Role.admin
        if self.kind == "key":
            return self._key_role() if self.project in (None, project) else None
        return self.roles.get(project)

    @property
    def permissions(self) -> Hashable:
        """Equal for principals that may see and do the same."""
        return (self.kind, self.admin, frozenset(self.roles.items()), self.scopes, self.project, self.job)

    @property
    def highest_role(self) -> Role | None:
        """The highest role in any project."""
        if self.admin:
            return Role.admin
        return self._key_role() if self.kind == "key" else max(self.roles.values(), default=None)

    @property
    def visible_projects(self) -> frozenset[str] | None:
        """Projects whose jobs lists may show, or `ALL_PROJECTS`."""
        return self.projects_with_role(Role.viewer)

    def projects_with_role(self, role: Role) -> frozenset[str] | None:
        """Projects in which the principal has the role or a higher one, or `ALL_PROJECTS`."""
        if self.admin:
            return ALL_PROJECTS
        if self.kind == "key":
            if (self._key_role() or 0) < role:
                return frozenset()
            return ALL_PROJECTS if self.project is None else frozenset([self.project])
        return frozenset(project for project, held in self.roles.items() if held >= role)

    def _key_role(self) -> Role | None:
        return max((_ROLES[scope] for scope in self.scopes if scope in _ROLES), default=None)


OPERATOR = Principal(kind="person", name="operator", admin=True, scopes=frozenset(SCOPES))
"""Every client of a server without accounts that may use it."""
ANONYMOUS = Principal(kind="anonymous", name="anonymous")

current_principal: ContextVar[Principal] = ContextVar("principal", default=ANONYMOUS)
"""The client of the request that is being answered."""
