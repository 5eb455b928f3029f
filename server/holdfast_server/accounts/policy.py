"""Access rules for every route of the server.

A route without a rule answers 404 to every client, and a test that compares this table with the routes fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from starlette.routing import compile_path
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
DOWNLOAD = AccessRule(audience="job", long_lived=True)
VIEW, OPERATE = AccessRule(audience="job"), AccessRule(audience="job", role=Role.operator)
RESTORE = AccessRule(audience="job", role=Role.operator, recent_password=True)
ADMINISTER = AccessRule(audience="job", role=Role.admin, recent_password=True)
PROJECT_VIEW, PROJECT_OPERATE = AccessRule(audience="project"), AccessRule(audience="project", role=Role.operator)
PROJECT_ADMIN = AccessRule(audience="project", role=Role.admin)
ANY_PROJECT_ADMIN = AccessRule(audience="any project", role=Role.admin)
SERVER_ADMIN = AccessRule(audience="server", role=Role.admin)
PROJECT_GRANT = AccessRule(audience="project", role=Role.admin, recent_password=True)
SERVER_GRANT = AccessRule(audience="server", role=Role.admin, recent_password=True)

TABLE: dict[tuple[str, str], AccessRule] = {
    # agents
    ("POST", "/api/v1/ingest"): AccessRule(audience="report", agents=True),
    ("GET", "/api/v1/jobs/{job}/desired"): AccessRule(audience="job", agents=True, long_lived=True),
    # jobs
    ("GET", "/api/v1/jobs"): LISTS,
    ("GET", "/api/v1/compare"): LISTS,  # the query checks each job
    ("POST", "/api/v1/jobs/changes"): LISTS,  # the route checks each job
    ("GET", "/api/v1/jobs/{job}"): VIEW,
    ("DELETE", "/api/v1/jobs/{job}"): ADMINISTER,
    ("PATCH", "/api/v1/jobs/{job}/numbers"): ADMINISTER,
    ("GET", "/api/v1/jobs/{job}/timeline"): VIEW,
    ("GET", "/api/v1/jobs/{job}/export/samples.csv"): DOWNLOAD,
    ("GET", "/api/v1/jobs/{job}/export/samples.parquet"): DOWNLOAD,
    ("GET", "/api/v1/jobs/{job}/export/checkpoints.csv"): DOWNLOAD,
    ("GET", "/api/v1/jobs/{job}/export/trace.json"): VIEW,
    ("GET", "/api/v1/jobs/{job}/goodput"): VIEW,
    ("GET", "/api/v1/jobs/{job}/ranks"): VIEW,
    ("GET", "/api/v1/jobs/{job}/forks"): VIEW,
    ("GET", "/api/v1/jobs/{job}/attempts"): VIEW,
    ("GET", "/api/v1/jobs/{job}/attempts/{attempt}/configuration"): VIEW,
    ("GET", "/api/v1/jobs/{job}/attempts/{attempt}/output"): VIEW,
    ("GET", "/api/v1/jobs/{job}/plan"): VIEW,
    ("GET", "/api/v1/jobs/{job}/checkpoints"): VIEW,
    ("PATCH", "/api/v1/jobs/{job}/checkpoints/{checkpoint}"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): VIEW,
    ("POST", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): OPERATE,
    ("DELETE", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): OPERATE,
    ("PUT", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/scrub"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/tensors"): VIEW,
    ("GET", "/api/v1/jobs/{job}/edits"): VIEW,
    ("GET", "/api/v1/jobs/{job}/notices"): VIEW,
    ("GET", "/api/v1/jobs/{job}/annotations"): VIEW,
    ("POST", "/api/v1/jobs/{job}/annotations"): OPERATE,
    ("PATCH", "/api/v1/jobs/{job}/annotations/{annotation}"): OPERATE,
    ("DELETE", "/api/v1/jobs/{job}/annotations/{annotation}"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/preview"): VIEW,
    ("GET", "/api/v1/jobs/{job}/stream"): AccessRule(audience="job", long_lived=True),
    ("PATCH", "/api/v1/jobs/{job}/desired"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/restores"): VIEW,
    ("POST", "/api/v1/jobs/{job}/restores"): RESTORE,
    ("GET", "/api/v1/jobs/{job}/restores/preview"): VIEW,
    ("GET", "/api/v1/jobs/{job}/restores/{order}"): VIEW,
    ("POST", "/api/v1/jobs/{job}/restores/{order}/cancel"): OPERATE,
    ("POST", "/api/v1/jobs/{job}/restores/{order}/undo"): RESTORE,
    ("GET", "/api/v1/alerts"): LISTS,
    ("GET", "/api/v1/jobs/{job}/alerts"): VIEW,
    ("POST", "/api/v1/jobs/{job}/alerts/{alert}/acknowledge"): OPERATE,
    ("POST", "/api/v1/jobs/{job}/alerts/{alert}/silence"): OPERATE,
    ("POST", "/api/v1/jobs/{job}/alerts/{alert}/unsilence"): OPERATE,
    ("GET", "/api/v1/projects/{project}/retention"): PROJECT_VIEW,
    ("PATCH", "/api/v1/projects/{project}/retention"): PROJECT_GRANT,
    ("GET", "/api/v1/projects/{project}/alert-rules"): PROJECT_VIEW,
    ("PUT", "/api/v1/projects/{project}/alert-rules/{rule}"): PROJECT_OPERATE,
    ("DELETE", "/api/v1/projects/{project}/alert-rules/{rule}"): PROJECT_OPERATE,
    ("GET", "/api/v1/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("POST", "/api/v1/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("DELETE", "/api/v1/projects/{project}/alert-channels/{channel}"): PROJECT_ADMIN,
    ("POST", "/api/v1/projects/{project}/alert-channels/{channel}/test"): PROJECT_ADMIN,
    ("GET", "/api/v1/projects/{project}/alert-channels/{channel}/deliveries"): PROJECT_ADMIN,
    # people, keys and the audit log
    ("GET", "/api/v1/people"): SERVER_ADMIN,
    ("GET", "/api/v1/tokens"): LISTS,
    # the route limits a new key to the rights of its maker
    ("POST", "/api/v1/tokens"): AccessRule(audience="lists", recent_password=True),
    ("POST", "/api/v1/tokens/{prefix}/revoke"): LISTS,  # an unknown key and another person's look the same
    ("GET", "/api/v1/audit"): ANY_PROJECT_ADMIN,
    # monitoring and documentation
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/metrics"): LISTS,
    ("GET", "/openapi.json"): LISTS,
    ("GET", "/docs"): LISTS,
    ("GET", "/docs/style.css"): LISTS,
    ("GET", "/static"): PUBLIC,
    # pages: signing in
    ("GET", "/login"): PUBLIC,
    ("POST", "/login"): PUBLIC,
    ("GET", "/login/provider"): PUBLIC,
    ("GET", "/login/provider/back"): PUBLIC,
    ("GET", "/setup"): PUBLIC,
    ("POST", "/setup"): PUBLIC,
    ("GET", "/reset"): PUBLIC,
    ("POST", "/reset"): PUBLIC,
    ("POST", "/logout"): PERSON,
    ("GET", "/session"): LISTS,
    # pages: jobs
    ("GET", "/"): LISTS,
    ("GET", "/fleet/live"): LISTS,
    ("GET", "/compare"): LISTS,  # the query checks each job
    ("POST", "/fleet/confirm"): LISTS,  # the route checks each job
    ("POST", "/fleet/change"): LISTS,  # the route checks each job
    ("POST", "/alerts/acknowledge"): LISTS,  # the route checks each alert
    ("GET", "/fleet/stream"): AccessRule(audience="lists", long_lived=True),
    ("GET", "/jobs/{job}"): VIEW,
    ("GET", "/jobs/{job}/live"): VIEW,
    ("GET", "/jobs/{job}/history"): VIEW,
    ("GET", "/jobs/{job}/points"): VIEW,
    ("GET", "/jobs/{job}/controls"): VIEW,
    ("GET", "/jobs/{job}/preview"): VIEW,
    ("GET", "/jobs/{job}/goodput"): VIEW,
    ("GET", "/jobs/{job}/stalls"): VIEW,
    ("GET", "/jobs/{job}/checkpoints/{checkpoint}"): VIEW,
    ("POST", "/jobs/{job}/checkpoints/{checkpoint}/pin"): OPERATE,
    ("POST", "/jobs/{job}/checkpoints/{checkpoint}/label"): OPERATE,
    ("POST", "/jobs/{job}/checkpoints/{checkpoint}/verify"): OPERATE,
    ("POST", "/jobs/{job}/checkpoints/{checkpoint}/verify/cancel"): OPERATE,
    ("GET", "/jobs/{job}/checkpoints/{checkpoint}/verification"): VIEW,
    ("GET", "/jobs/{job}/plan"): VIEW,
    ("GET", "/jobs/{job}/ranks"): VIEW,
    ("GET", "/jobs/{job}/attempts"): VIEW,
    ("GET", "/jobs/{job}/attempts/{attempt}"): VIEW,
    ("GET", "/jobs/{job}/attempts/{attempt}/output"): VIEW,
    ("GET", "/jobs/{job}/plan/answer"): VIEW,
    ("GET", "/jobs/{job}/restore"): RESTORE,  # so that the dialog, not its last step, asks for the password
    ("POST", "/jobs/{job}/budget"): OPERATE,
    ("POST", "/jobs/{job}/limits"): OPERATE,
    ("POST", "/jobs/{job}/interval"): OPERATE,
    ("POST", "/jobs/{job}/policy"): OPERATE,
    ("POST", "/jobs/{job}/retention"): OPERATE,
    ("POST", "/jobs/{job}/undo"): OPERATE,
    ("POST", "/jobs/{job}/pause"): OPERATE,
    ("POST", "/jobs/{job}/checkpoint"): OPERATE,
    ("POST", "/jobs/{job}/probe"): OPERATE,
    ("POST", "/jobs/{job}/restores"): RESTORE,
    ("POST", "/jobs/{job}/restores/{order}/cancel"): OPERATE,
    ("GET", "/jobs/{job}/annotations/new"): OPERATE,
    ("POST", "/jobs/{job}/annotations"): OPERATE,
    ("GET", "/jobs/{job}/annotations/{annotation}"): OPERATE,
    ("POST", "/jobs/{job}/annotations/{annotation}"): OPERATE,
    ("POST", "/jobs/{job}/annotations/{annotation}/delete"): OPERATE,
    ("GET", "/jobs/{job}/delete"): ADMINISTER,
    ("POST", "/jobs/{job}/delete"): ADMINISTER,
    # pages: alerts
    ("GET", "/alerts"): LISTS,
    ("GET", "/alerts/live"): LISTS,
    ("POST", "/jobs/{job}/alerts/{alert}/acknowledge"): OPERATE,
    ("POST", "/jobs/{job}/alerts/{alert}/silence"): OPERATE,
    ("POST", "/jobs/{job}/alerts/{alert}/unsilence"): OPERATE,
    ("GET", "/projects/{project}/alert-rules"): PROJECT_VIEW,
    ("POST", "/projects/{project}/alert-rules"): PROJECT_OPERATE,
    ("POST", "/projects/{project}/alert-rules/{rule}"): PROJECT_OPERATE,
    ("POST", "/projects/{project}/alert-rules/{rule}/remove"): PROJECT_OPERATE,
    ("GET", "/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("POST", "/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("POST", "/projects/{project}/alert-channels/{channel}/remove"): PROJECT_ADMIN,
    ("POST", "/projects/{project}/alert-channels/{channel}/test"): PROJECT_ADMIN,
    # pages: settings and the log
    ("GET", "/settings"): PERSON,
    ("POST", "/settings/password"): PERSON,
    ("POST", "/settings/sessions/end"): PERSON,
    ("POST", "/settings/sessions/{sign_in}/end"): PERSON,
    ("GET", "/settings/keys"): PERSON,
    ("POST", "/settings/keys"): AccessRule(audience="person", recent_password=True),
    ("POST", "/settings/keys/{prefix}/revoke"): PERSON,
    ("GET", "/settings/people"): SERVER_ADMIN,
    ("POST", "/settings/people"): SERVER_GRANT,
    ("POST", "/settings/people/{person}/admin"): SERVER_GRANT,
    ("POST", "/settings/people/{person}/remove"): SERVER_GRANT,
    ("POST", "/settings/people/{person}/link"): SERVER_GRANT,
    ("GET", "/settings/projects"): ANY_PROJECT_ADMIN,
    ("POST", "/settings/projects"): SERVER_ADMIN,
    ("GET", "/settings/projects/{project}"): PROJECT_ADMIN,
    ("POST", "/settings/projects/{project}/members"): PROJECT_GRANT,
    ("POST", "/settings/projects/{project}/jobs"): SERVER_GRANT,
    ("GET", "/audit"): ANY_PROJECT_ADMIN,
    ("GET", "/audit/export"): ANY_PROJECT_ADMIN,
}

RECENT_PASSWORD_SECONDS = 3600.0
"""How long an entered password counts as recent."""
HEALTH_CHECKS = ("/healthz", "/readyz")
_MOUNTS = ("/static",)


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The rule for a request, with the job and project in its path."""

    path: str
    """The route's template, as in `/jobs/{job}`."""
    rule: AccessRule
    job: str | None
    project: str | None


def _compiled() -> dict[str, list[tuple[re.Pattern[str], str, AccessRule]]]:
    by_method: dict[str, list[tuple[re.Pattern[str], str, AccessRule]]] = {}
    for (method, path), rule in TABLE.items():
        pattern = compile_path(f"{path}/{{rest:path}}" if path in _MOUNTS else path)[0]
        by_method.setdefault(method, []).append((pattern, path, rule))
    return by_method


_PATTERNS = _compiled()
METHODS = frozenset(_PATTERNS)


def find(method: str, path: str) -> RouteMatch | None:
    """Return the first rule that matches, as the router takes the first route that does."""
    for pattern, template, rule in _PATTERNS.get("GET" if method == "HEAD" else method, ()):
        if (match := pattern.match(path)) is not None:
            named = match.groupdict()
            return RouteMatch(template, rule, named.get("job"), named.get("project"))
    return None


def match_of(scope: Scope) -> RouteMatch | None:
    """Return the match of a request, which is searched for once."""
    state = scope.setdefault("state", {})
    if "route" not in state:
        state["route"] = find(scope["method"], scope["path"])
    match: RouteMatch | None = state["route"]
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
    entered_at = asker.password_entered_at
    return match.rule.recent_password and entered_at is not None and now - entered_at > RECENT_PASSWORD_SECONDS


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
