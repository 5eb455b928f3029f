"""Access rules. Each endpoint declares one of them, and this module decides by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope

from holdfast_server.core.principal import Principal, Role

AccessDecision = Literal["allow", "sign in", "forbid", "hide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """The clients that may use a route."""

    audience: Literal["public", "person", "lists", "job", "project", "any project", "server", "report"]
    """`public`: all clients. `person`: signed-in people, for their own account. `lists`: people and keys; the
    answer holds what they may see. `job`, `project`: principals with the role in the project of the path. `any
    project`: principals with the role in at least one project. `server`: administrators of the server. `report`:
    keys that may report; the route checks whether the key may report on the job."""
    role: Role = Role.viewer
    agents: bool = False
    """Keys that may only report are allowed too. The route makes a job of another project look unknown: a refusal
    would reveal that it exists."""
    recent_password: bool = False
    """Has far-reaching effects: a person with a password must have entered it recently."""
    long_lived: bool = False
    """The answer takes long, so the client's rights are checked repeatedly while it lasts."""


PUBLIC, PERSON, LISTS = AccessRule(audience="public"), AccessRule(audience="person"), AccessRule(audience="lists")
FOLLOW = AccessRule(audience="job", long_lived=True)
VIEW, OPERATE = AccessRule(audience="job"), AccessRule(audience="job", role=Role.operator)
RESTORE = AccessRule(audience="job", role=Role.operator, recent_password=True)
ADMINISTER = AccessRule(audience="job", role=Role.admin, recent_password=True)
PROJECT_VIEW, PROJECT_OPERATE = AccessRule(audience="project"), AccessRule(audience="project", role=Role.operator)
PROJECT_ADMIN = AccessRule(audience="project", role=Role.admin)
ANY_PROJECT_ADMIN = AccessRule(audience="any project", role=Role.admin)
SERVER_ADMIN = AccessRule(audience="server", role=Role.admin)
PROJECT_GRANT = AccessRule(audience="project", role=Role.admin, recent_password=True)
SERVER_GRANT = AccessRule(audience="server", role=Role.admin, recent_password=True)

RECENT_PASSWORD_SECONDS = 3600.0
"""How long an entered password counts as recent."""
HEALTH_CHECKS = ("/healthz", "/readyz")
MAX_FORM_BYTES = 2**20
"""Largest body of a request whose endpoint declares no limit."""


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The rule for a request, with the job and project in its path."""

    path: str
    """The route's template, as in `/jobs/{job}`."""
    rule: AccessRule
    job: str | None
    project: str | None
    max_body_bytes: int = field(default=MAX_FORM_BYTES, kw_only=True)


def match_of(scope: Scope) -> RouteMatch | None:
    """Return the match of a request, which the outermost middleware has searched for; `None` without a route."""
    match: RouteMatch | None = scope["state"]["route"]
    return match


def decide(match: RouteMatch, asker: Principal, project: str | None) -> AccessDecision:
    """Decide whether `asker` may use a route. `project` is that of the job in the path; `None` if it is
    unknown."""
    rule = match.rule
    if rule.audience == "public":
        return "allow"
    if asker.kind == "anonymous":
        return "sign in"
    match rule.audience:
        case "job":
            return _decide_for_job(match, asker, project)
        case "report":
            allowed = "report" in asker.scopes
        case "person":
            allowed = asker.kind == "person"
        case "lists":
            allowed = asker.kind == "person" or (asker.job is None and asker.highest_role is not None)
        case "server":
            allowed = asker.admin
        case "any project":
            allowed = asker.job is None and (asker.highest_role or 0) >= rule.role
        case "project":
            role = None if asker.job is not None or match.project is None else asker.role_in(match.project)
            if role is None:
                return "hide"
            allowed = role >= rule.role
    return "allow" if allowed else "forbid"


def needs_password(match: RouteMatch, asker: Principal, *, now: float) -> bool:
    """Return whether `asker`, who may use the route, has to enter their password again first."""
    return match.rule.recent_password and password_is_old(asker, now=now)


def password_is_old(asker: Principal, *, now: float) -> bool:
    """Return whether a person entered their password too long ago for an action with far-reaching effects."""
    entered_at = asker.password_entered_at
    return entered_at is not None and now - entered_at > RECENT_PASSWORD_SECONDS


def _decide_for_job(match: RouteMatch, asker: Principal, project: str | None) -> AccessDecision:
    if asker.admin and asker.kind == "person":
        return "allow"
    covers_job = asker.job in (None, match.job)
    may_report = covers_job and "report" in asker.scopes
    if match.rule.agents and may_report:
        return "allow"
    role = asker.role_in(project) if project is not None and covers_job else None
    if role is None:
        # A key that reports on the job knows that it exists.
        return "forbid" if may_report and project is not None and project == asker.project else "hide"
    return "allow" if role >= match.rule.role else "forbid"
