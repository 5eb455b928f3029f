"""Who may ask for what: every route of the server, and nothing that is not here.

A route without a line in this table answers 404 to everybody, and a test that walks the routes fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from starlette.routing import compile_path

from holdfast_server.core.principal import Principal, Role

Verdict = Literal["allow", "sign in", "forbid", "hide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who may ask for a route."""

    where: Literal["anybody", "signed in", "lists", "job", "project", "any project", "server", "reports"]
    """`anybody`: without a word. `signed in`: people, about themselves. `lists`: people and keys, each of whom is
    shown what they may see. `job`, `project`: who has the role in the project of the path. `any project`: who has
    it in one. `server`: who looks after the whole server. `reports`: agents; that the report is of a job of theirs
    is seen to where it is taken in."""
    role: Role = Role.viewer
    reports: bool = False
    """Agents may ask for it too. That a job of another project looks like one that nobody has heard of is seen to
    by the route: a refusal would tell that it is there."""
    fresh: bool = False
    """It goes far: a person who came by a password shows it again, unless that was a moment ago."""
    lasting: bool = False
    """Its answer takes its time, so whether the asker still may is looked at again and again."""


ANYBODY, SIGNED_IN, LISTS = Rule(where="anybody"), Rule(where="signed in"), Rule(where="lists")
DOWNLOAD = Rule(where="job", lasting=True)
VIEW, OPERATE = Rule(where="job"), Rule(where="job", role=Role.operator)
RESTORE = Rule(where="job", role=Role.operator, fresh=True)
ADMINISTER = Rule(where="job", role=Role.admin, fresh=True)
PROJECT_VIEW, PROJECT_OPERATE = Rule(where="project"), Rule(where="project", role=Role.operator)
PROJECT_ADMIN = Rule(where="project", role=Role.admin)
SOME_PROJECT_ADMIN = Rule(where="any project", role=Role.admin)
SERVER_ADMIN = Rule(where="server", role=Role.admin)
PROJECT_RULE = Rule(where="project", role=Role.admin, fresh=True)
SERVER_RULE = Rule(where="server", role=Role.admin, fresh=True)

TABLE: dict[tuple[str, str], Rule] = {
    # what agents do
    ("POST", "/api/v1/ingest"): Rule(where="reports", reports=True),
    ("GET", "/api/v1/jobs/{job}/desired"): Rule(where="job", reports=True, lasting=True),
    # what programs ask, and operators order
    ("GET", "/api/v1/jobs"): LISTS,
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
    ("GET", "/api/v1/jobs/{job}/plan"): VIEW,
    ("GET", "/api/v1/jobs/{job}/checkpoints"): VIEW,
    ("PATCH", "/api/v1/jobs/{job}/checkpoints/{checkpoint}"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): VIEW,
    ("POST", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): OPERATE,
    ("DELETE", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/verification"): OPERATE,
    ("GET", "/api/v1/jobs/{job}/checkpoints/{checkpoint}/tensors"): VIEW,
    ("GET", "/api/v1/jobs/{job}/edits"): VIEW,
    ("GET", "/api/v1/jobs/{job}/notices"): VIEW,
    ("GET", "/api/v1/jobs/{job}/preview"): VIEW,
    ("GET", "/api/v1/jobs/{job}/stream"): Rule(where="job", lasting=True),
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
    ("PATCH", "/api/v1/projects/{project}/retention"): PROJECT_RULE,
    ("GET", "/api/v1/projects/{project}/alert-rules"): PROJECT_VIEW,
    ("PUT", "/api/v1/projects/{project}/alert-rules/{rule}"): PROJECT_OPERATE,
    ("DELETE", "/api/v1/projects/{project}/alert-rules/{rule}"): PROJECT_OPERATE,
    ("GET", "/api/v1/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("POST", "/api/v1/projects/{project}/alert-channels"): PROJECT_ADMIN,
    ("DELETE", "/api/v1/projects/{project}/alert-channels/{channel}"): PROJECT_ADMIN,
    ("POST", "/api/v1/projects/{project}/alert-channels/{channel}/test"): PROJECT_ADMIN,
    ("GET", "/api/v1/projects/{project}/alert-channels/{channel}/deliveries"): PROJECT_ADMIN,
    # people, keys and the log, for programs
    ("GET", "/api/v1/people"): SERVER_ADMIN,
    ("GET", "/api/v1/tokens"): LISTS,
    # what a key may do is held to what its maker may, where it is made
    ("POST", "/api/v1/tokens"): Rule(where="lists", fresh=True),
    ("POST", "/api/v1/tokens/{prefix}/revoke"): LISTS,  # of another's key, nobody learns that it is there
    ("GET", "/api/v1/audit"): SOME_PROJECT_ADMIN,
    # whoever watches the server
    ("GET", "/healthz"): ANYBODY,
    ("GET", "/readyz"): ANYBODY,
    ("GET", "/metrics"): LISTS,
    ("GET", "/openapi.json"): LISTS,
    ("GET", "/docs"): LISTS,
    ("GET", "/docs/style.css"): LISTS,
    ("GET", "/static"): ANYBODY,
    # pages: signing in
    ("GET", "/login"): ANYBODY,
    ("POST", "/login"): ANYBODY,
    ("GET", "/login/provider"): ANYBODY,
    ("GET", "/login/provider/back"): ANYBODY,
    ("GET", "/setup"): ANYBODY,
    ("POST", "/setup"): ANYBODY,
    ("GET", "/reset"): ANYBODY,
    ("POST", "/reset"): ANYBODY,
    ("POST", "/logout"): SIGNED_IN,
    # pages: jobs
    ("GET", "/"): LISTS,
    ("GET", "/fleet/live"): LISTS,
    ("POST", "/fleet/budget"): LISTS,  # of each job it is asked for itself
    ("GET", "/fleet/stream"): Rule(where="lists", lasting=True),
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
    ("GET", "/jobs/{job}/plan/answer"): VIEW,
    ("GET", "/jobs/{job}/restore"): RESTORE,  # the dialog too, so that nobody is stopped at its end
    ("POST", "/jobs/{job}/budget"): OPERATE,
    ("POST", "/jobs/{job}/interval"): OPERATE,
    ("POST", "/jobs/{job}/policy"): OPERATE,
    ("POST", "/jobs/{job}/retention"): OPERATE,
    ("POST", "/jobs/{job}/undo"): OPERATE,
    ("POST", "/jobs/{job}/pause"): OPERATE,
    ("POST", "/jobs/{job}/checkpoint"): OPERATE,
    ("POST", "/jobs/{job}/probe"): OPERATE,
    ("POST", "/jobs/{job}/restores"): RESTORE,
    ("POST", "/jobs/{job}/restores/{order}/cancel"): OPERATE,
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
    ("GET", "/settings"): SIGNED_IN,
    ("POST", "/settings/password"): SIGNED_IN,
    ("POST", "/settings/sessions/end"): SIGNED_IN,
    ("POST", "/settings/sessions/{sign_in}/end"): SIGNED_IN,
    ("GET", "/settings/keys"): SIGNED_IN,
    ("POST", "/settings/keys"): Rule(where="signed in", fresh=True),
    ("POST", "/settings/keys/{prefix}/revoke"): SIGNED_IN,
    ("GET", "/settings/people"): SERVER_ADMIN,
    ("POST", "/settings/people"): SERVER_RULE,
    ("POST", "/settings/people/{person}/admin"): SERVER_RULE,
    ("POST", "/settings/people/{person}/remove"): SERVER_RULE,
    ("POST", "/settings/people/{person}/link"): SERVER_RULE,
    ("GET", "/settings/projects"): SOME_PROJECT_ADMIN,
    ("POST", "/settings/projects"): SERVER_ADMIN,
    ("GET", "/settings/projects/{project}"): PROJECT_ADMIN,
    ("POST", "/settings/projects/{project}/members"): PROJECT_RULE,
    ("POST", "/settings/projects/{project}/jobs"): SERVER_RULE,
    ("GET", "/audit"): SOME_PROJECT_ADMIN,
    ("GET", "/audit/export"): SOME_PROJECT_ADMIN,
}

FRESH_SECONDS = 3600.0
"""How long ago a password may have been typed for what goes far."""
_MOUNTS = ("/static",)


@dataclass(frozen=True, slots=True)
class Found:
    """The line of the table that a request is about."""

    path: str
    rule: Rule
    job: str | None
    project: str | None


def _compiled() -> dict[str, list[tuple[re.Pattern[str], str, Rule]]]:
    by_method: dict[str, list[tuple[re.Pattern[str], str, Rule]]] = {}
    for (method, path), rule in TABLE.items():
        pattern = compile_path(f"{path}/{{rest:path}}" if path in _MOUNTS else path)[0]
        by_method.setdefault(method, []).append((pattern, path, rule))
    return by_method


_PATTERNS = _compiled()
METHODS = frozenset(_PATTERNS)


def find(method: str, path: str) -> Found | None:
    """The first line that fits, as the router takes its first route that does."""
    for pattern, template, rule in _PATTERNS.get("GET" if method == "HEAD" else method, ()):
        if (match := pattern.match(path)) is not None:
            named = match.groupdict()
            return Found(template, rule, named.get("job"), named.get("project"))
    return None


def judge(found: Found, asker: Principal, project: str | None) -> Verdict:
    """Whether `asker` may have it.

    Args:
        found: the line of the table.
        asker: who asks.
        project: that of the job in the path; None for a job that nobody has heard of.
    """
    rule = found.rule
    if rule.where == "anybody":
        return "allow"
    if asker.kind == "nobody":
        return "sign in"
    if rule.where == "job":
        return _of_job(found, asker, project)
    match rule.where:
        case "reports":
            return "allow" if "report" in asker.scopes else "forbid"
        case "signed in":
            return "allow" if asker.kind == "person" else "forbid"
        case "lists":
            return "allow" if asker.kind == "person" or (asker.job is None and asker.everywhere) else "forbid"
        case "server":
            return "allow" if asker.admin else "forbid"
        case "any project":
            return "allow" if asker.job is None and (asker.everywhere or 0) >= rule.role else "forbid"
        case "project":
            role = None if asker.job is not None or found.project is None else asker.role_in(found.project)
            return "hide" if role is None else "allow" if role >= rule.role else "forbid"
    raise AssertionError(rule.where)


def is_fresh(found: Found, asker: Principal, *, now: float) -> bool:
    """Whether `asker`, who may have it, need not show again who they are."""
    typed_at = asker.password_typed_at
    return not found.rule.fresh or typed_at is None or now - typed_at <= FRESH_SECONDS


def _of_job(found: Found, asker: Principal, project: str | None) -> Verdict:
    if asker.admin and asker.kind == "person":
        return "allow"
    mine = asker.job in (None, found.job)
    if found.rule.reports and "report" in asker.scopes and mine:
        return "allow"
    role = asker.role_in(project) if project is not None and mine else None
    if role is None:
        reporter = project is not None and mine and "report" in asker.scopes and project == asker.project
        return "forbid" if reporter else "hide"
    return "allow" if role >= found.rule.role else "forbid"
