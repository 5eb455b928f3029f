"""The part of the client for many jobs, alerts, retention, users, keys and the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.protocol.administration import (
    Alert,
    AlertChannel,
    AlertDelivery,
    AlertRule,
    AuditEntry,
    NewToken,
    Person,
    Token,
)
from holdfast.protocol.analyses import ReportRetention
from holdfast.protocol.fleet import BulkChange, BulkResult, Fleet
from holdfast.protocol.timeline import Comparison, ComparisonAxis
from holdfast.server_link.json_client import JsonClient


class Administration(JsonClient):
    """The methods of `holdfast.client.Client` that concern no single job's training."""

    # ---- many jobs ----------------------------------------------------------------------------

    def change_jobs(self, change: BulkChange) -> BulkResult:
        """Change several jobs, or preview it; each is changed or refused on its own. Raises Invalid."""
        return self._fetch(BulkResult, "POST", "/jobs/changes", body=change)

    def compare(
        self,
        jobs: Sequence[str],
        metrics: Sequence[str] = ("loss",),
        *,
        axis: ComparisonAxis = "iteration",
        start: float | None = None,
        end: float | None = None,
        points: int = 300,
    ) -> Comparison:
        """Return metrics of up to eight jobs or lineages on one axis. Raises NotFound and Invalid.

        Args:
            jobs: names of jobs, or `job:lineage`.
            metrics: at most four.
            axis: iterations, seconds since the start of each job, or seconds since 1970.
            start: where the window begins on the axis; `None`: at its beginning.
            end: where it ends.
            points: points of a curve, about.
        """
        query = {"job": list(jobs), "metric": list(metrics), "x": axis, "from": start, "to": end, "points": points}
        return self._fetch(Comparison, "GET", "/compare", query=query)

    def _project(self, project: str | None) -> str:
        """Return a project, by default `default`, or the one that the key has access to."""
        if project is None:
            seen = self._fetch(Fleet, "GET", "/jobs", query={"size": 1}).projects
            project = seen[0] if len(seen) == 1 else "default"
        return project

    # ---- alerts -------------------------------------------------------------------------------

    def alerts(
        self,
        *,
        job: str | None = None,
        project: str | None = None,
        history: bool = False,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Alert]:
        """Return the open alerts, newest first; with `history`, also resolved ones. Raises NotFound for a job."""
        query = {"state": "all" if history else "open", "limit": limit, "before": before}
        if job is not None:
            return self._rows(Alert, "alerts", "/jobs/{job}/alerts", job, query=query)
        return self._rows(Alert, "alerts", "/alerts", query={"project": project, **query})

    def acknowledge(self, job: str, alert: int) -> Alert:
        """Acknowledge an alert. Raises NotFound, and Conflict if it has resolved."""
        return self._fetch(Alert, "POST", "/jobs/{job}/alerts/{alert}/acknowledge", job, alert, idempotent=True)

    def silence(self, job: str, alert: int, *, seconds: float) -> Alert:
        """Send no notifications for an alert and its recurrences. Raises NotFound, Conflict and Invalid."""
        path, body = "/jobs/{job}/alerts/{alert}/silence", {"seconds": seconds}
        return self._fetch(Alert, "POST", path, job, alert, body=body, idempotent=True)

    def unsilence(self, job: str, alert: int) -> Alert:
        """End the silence of an alert. Raises NotFound and Conflict."""
        return self._fetch(Alert, "POST", "/jobs/{job}/alerts/{alert}/unsilence", job, alert, idempotent=True)

    def alert_rules(self, project: str | None = None) -> list[AlertRule]:
        """Return the alert rules of a project, built-in ones first. Raises NotFound."""
        return self._rows(AlertRule, "rules", "/projects/{project}/alert-rules", self._project(project))

    def change_alert_rule(
        self, rule: str, *, project: str | None = None, **changes: float | str | bool
    ) -> AlertRule:
        """Change `enabled`, `severity`, `limit`, `for_seconds` or `jobs` of a rule; a new rule needs a `kind`.

        Raises NotFound and Invalid.
        """
        return self._fetch(
            AlertRule, "PUT", "/projects/{project}/alert-rules/{rule}", self._project(project), rule, body=changes
        )

    def remove_alert_rule(self, rule: str, *, project: str | None = None) -> None:
        """Delete a rule, or reset a built-in rule to its default. Raises NotFound."""
        self._call("DELETE", "/projects/{project}/alert-rules/{rule}", self._project(project), rule)

    def alert_channels(self, project: str | None = None) -> list[AlertChannel]:
        """Return the alert channels, for admins of the project. Raises NotFound and NotPermitted."""
        return self._rows(AlertChannel, "channels", "/projects/{project}/alert-channels", self._project(project))

    def add_alert_channel(
        self, name: str, target: str, *, least_severity: str = "warning", project: str | None = None
    ) -> AlertChannel:
        """Add mail addresses or a URL. Only this response has the secret of a webhook.

        Raises:
            NotFound, NotPermitted, Invalid.
            Conflict: the server sends no mail, or no webhooks.
        """
        body = {"name": name, "target": target, "least_severity": least_severity}
        return self._fetch(
            AlertChannel, "POST", "/projects/{project}/alert-channels", self._project(project), body=body
        )

    def remove_alert_channel(self, channel: str, *, project: str | None = None) -> None:
        """Delete an alert channel. Raises NotFound and NotPermitted."""
        self._call("DELETE", "/projects/{project}/alert-channels/{channel}", self._project(project), channel)

    def test_alert_channel(self, channel: str, *, project: str | None = None) -> AlertDelivery:
        """Send a test message; `alert_deliveries` returns its outcome. Raises NotFound and NotPermitted."""
        return self._fetch(
            AlertDelivery,
            "POST",
            "/projects/{project}/alert-channels/{channel}/test",
            self._project(project),
            channel,
        )

    def alert_deliveries(
        self, channel: str, *, project: str | None = None, limit: int = 50
    ) -> list[AlertDelivery]:
        """Return the deliveries of a channel, newest first. Raises NotFound and NotPermitted."""
        path = "/projects/{project}/alert-channels/{channel}/deliveries"
        return self._rows(
            AlertDelivery, "deliveries", path, self._project(project), channel, query={"limit": limit}
        )

    # ---- users, keys, the audit log -----------------------------------------------------------

    def people(self) -> list[Person]:
        """Return the users, for administrators of the server. Raises NotPermitted."""
        return self._rows(Person, "people", "/people")

    def tokens(self) -> list[Token]:
        """Return the keys that the caller may revoke, newest first. Raises NotPermitted."""
        return self._rows(Token, "tokens", "/tokens")

    def create_token(
        self,
        name: str,
        scopes: list[str],
        *,
        project: str | None = None,
        job: str | None = None,
        seconds: float | None = None,
    ) -> NewToken:
        """Create a key. Only this response has it. Raises NotFound, NotPermitted, Conflict and Invalid."""
        body = {"name": name, "scopes": scopes, "project": project, "job": job, "seconds": seconds}
        return self._fetch(NewToken, "POST", "/tokens", body=body)

    def revoke_token(self, prefix: str) -> Token:
        """Revoke a key; it stops working within 5 seconds. Idempotent. Raises NotFound."""
        return self._fetch(Token, "POST", "/tokens/{prefix}/revoke", prefix, idempotent=True)

    def audit(
        self,
        *,
        who: str | None = None,
        action: str | None = None,
        job: str | None = None,
        project: str | None = None,
        older_than: int | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Return the audit log of projects that the caller administers, newest first. Raises NotPermitted."""
        query = {
            "who": who, "action": action, "job": job, "project": project, "older_than": older_than, "limit": limit,
        }  # fmt: skip
        return self._rows(AuditEntry, "entries", "/audit", query=query)

    # ---- retention of reports -----------------------------------------------------------------

    def retention(self, project: str | None = None) -> ReportRetention:
        """Return how long a project keeps reports, and their size. Raises NotFound."""
        return self._fetch(ReportRetention, "GET", "/projects/{project}/retention", self._project(project))

    def change_retention(self, *, project: str | None = None, **limits: float | int | None) -> ReportRetention:
        """Change `samples_seconds`, `fine_seconds`, `reports_seconds` or `samples_bytes`; `None` is no limit.

        Reports beyond a limit are deleted within minutes. Raises NotFound, NotPermitted and Invalid.
        """
        return self._fetch(
            ReportRetention, "PATCH", "/projects/{project}/retention", self._project(project), body=limits
        )
