"""The parts of the client for alerts, approvals, retention, the account, users, keys and the audit log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.protocol.account import Account, AccountKey, AccountWindow
from holdfast.protocol.administration import (
    Alert,
    AlertChannel,
    AlertDelivery,
    AlertDetails,
    AlertRule,
    AlertStep,
    Approval,
    AuditEntry,
    NewToken,
    Person,
    Token,
)
from holdfast.protocol.analyses import ReportRetention
from holdfast.protocol.fleet import Fleet
from holdfast.protocol.stores import NewStoreLimit, NewStoreWeight, StoreInfo, StoreLimit, StoreList
from holdfast.server_link.json_client import JsonClient


def project_of(http: JsonClient, project: str | None) -> str:
    """Return a project, by default `default`, or the one that the key has access to."""
    if project is None:
        seen = http.fetch(Fleet, "GET", "/jobs", query={"size": 1}).projects
        project = seen[0] if len(seen) == 1 else "default"
    return project


class Alerts:
    """Alerts, their rules, and the channels that they are sent to: `client.alerts`."""

    def __init__(self, http: JsonClient) -> None:
        self._http = http

    def find(
        self,
        *,
        job: str | None = None,
        project: str | None = None,
        labels: Sequence[str] = (),
        history: bool = False,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Alert]:
        """Return the open alerts, newest first; with `history`, also resolved ones.

        Args:
            job: the one job; `labels` and `project` are then ignored.
            labels: labels of the jobs that all match, such as `team: vision`, or `team` for any value.

        Raises:
            NotFound: no such job.
        """
        query: dict[str, object] = {"state": "all" if history else "open", "limit": limit, "before": before}
        if job is not None:
            return self._http.rows(Alert, "alerts", "/jobs/{job}/alerts", job, query=query)
        query |= {"project": project, "label": list(labels)}
        return self._http.rows(Alert, "alerts", "/alerts", query=query)

    def details(self, alert: int) -> AlertDetails:
        """Return an alert with its states, comments, messages and group. Raises NotFound."""
        return self._http.fetch(AlertDetails, "GET", "/alerts/{alert}", alert)

    def comment(self, job: str, alert: int, text: str) -> AlertStep:
        """Comment on an alert, open or resolved. Raises NotFound and Invalid."""
        path = "/jobs/{job}/alerts/{alert}/comments"
        return self._http.fetch(AlertStep, "POST", path, job, alert, body={"text": text})

    def acknowledge(self, job: str, alert: int) -> Alert:
        """Acknowledge an alert. Raises NotFound, and Conflict if it has resolved."""
        return self._http.fetch(
            Alert, "POST", "/jobs/{job}/alerts/{alert}/acknowledge", job, alert, idempotent=True
        )

    def silence(self, job: str, alert: int, *, seconds: float) -> Alert:
        """Send no notifications for an alert and its recurrences. Raises NotFound, Conflict and Invalid."""
        path, body = "/jobs/{job}/alerts/{alert}/silence", {"seconds": seconds}
        return self._http.fetch(Alert, "POST", path, job, alert, body=body, idempotent=True)

    def unsilence(self, job: str, alert: int) -> Alert:
        """End the silence of an alert. Raises NotFound and Conflict."""
        return self._http.fetch(Alert, "POST", "/jobs/{job}/alerts/{alert}/unsilence", job, alert, idempotent=True)

    def rules(self, project: str | None = None) -> list[AlertRule]:
        """Return the alert rules of a project, built-in ones first. Raises NotFound."""
        return self._http.rows(
            AlertRule, "rules", "/projects/{project}/alert-rules", project_of(self._http, project)
        )

    def change_rule(self, rule: str, *, project: str | None = None, **changes: float | str | bool) -> AlertRule:
        """Change `enabled`, `severity`, `limit`, `for_seconds`, `jobs` or `runbook` of a rule.

        A new rule needs a `kind`. Raises NotFound and Invalid.
        """
        return self._http.fetch(
            AlertRule,
            "PUT",
            "/projects/{project}/alert-rules/{rule}",
            project_of(self._http, project),
            rule,
            body=changes,
        )

    def remove_rule(self, rule: str, *, project: str | None = None) -> None:
        """Delete a rule, or reset a built-in rule to its default. Raises NotFound."""
        self._http.call("DELETE", "/projects/{project}/alert-rules/{rule}", project_of(self._http, project), rule)

    def channels(self, project: str | None = None) -> list[AlertChannel]:
        """Return the alert channels, for admins of the project. Raises NotFound and NotPermitted."""
        return self._http.rows(
            AlertChannel, "channels", "/projects/{project}/alert-channels", project_of(self._http, project)
        )

    def add_channel(
        self,
        name: str,
        target: str,
        *,
        least_severity: str = "warning",
        owner: str = "",
        labels: Mapping[str, str] | None = None,
        project: str | None = None,
    ) -> AlertChannel:
        """Add mail addresses or a URL. Only this response has the secret of a webhook.

        Args:
            owner: pattern of the owners of jobs whose alerts it receives; empty for any.
            labels: patterns of the labels of these jobs by name; each must match.

        Raises:
            NotFound, NotPermitted, Invalid.
            Conflict: the server sends no mail, or no webhooks.
        """
        body = {
            "name": name, "target": target, "least_severity": least_severity, "owner": owner,
            "labels": dict(labels or {}),
        }  # fmt: skip
        return self._http.fetch(
            AlertChannel, "POST", "/projects/{project}/alert-channels", project_of(self._http, project), body=body
        )

    def route_channel(
        self,
        channel: str,
        *,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        least_severity: str | None = None,
        project: str | None = None,
    ) -> AlertChannel:
        """Change which alerts a channel receives. What is `None` does not change.

        Raises NotFound, NotPermitted and Invalid.
        """
        changes = {"owner": owner, "labels": labels, "least_severity": least_severity}
        body = {name: value for name, value in changes.items() if value is not None}
        path = "/projects/{project}/alert-channels/{channel}"
        return self._http.fetch(
            AlertChannel, "PATCH", path, project_of(self._http, project), channel, body=body, idempotent=True
        )

    def remove_channel(self, channel: str, *, project: str | None = None) -> None:
        """Delete an alert channel. Raises NotFound and NotPermitted."""
        self._http.call(
            "DELETE", "/projects/{project}/alert-channels/{channel}", project_of(self._http, project), channel
        )

    def test_channel(self, channel: str, *, project: str | None = None) -> AlertDelivery:
        """Send a test message; `deliveries` returns its outcome. Raises NotFound and NotPermitted."""
        return self._http.fetch(
            AlertDelivery,
            "POST",
            "/projects/{project}/alert-channels/{channel}/test",
            project_of(self._http, project),
            channel,
        )

    def deliveries(self, channel: str, *, project: str | None = None, limit: int = 50) -> list[AlertDelivery]:
        """Return the deliveries of a channel, newest first. Raises NotFound and NotPermitted."""
        path = "/projects/{project}/alert-channels/{channel}/deliveries"
        return self._http.rows(
            AlertDelivery, "deliveries", path, project_of(self._http, project), channel, query={"limit": limit}
        )


class Approvals:
    """Requests about protected jobs, which a second person approves or declines: `client.approvals`."""

    def __init__(self, http: JsonClient) -> None:
        self._http = http

    def find(self, job: str) -> list[Approval]:
        """Return the newest requests that need or needed approval, newest first. Raises NotFound."""
        return self._http.rows(Approval, "approvals", "/jobs/{job}/approvals", job)

    def approve(self, job: str, approval: str) -> Approval:
        """Approve a request of another person, which is carried out at once.

        Raises:
            NotFound.
            Conflict: it no longer waits, or cannot be carried out.
        """
        return self._http.fetch(Approval, "POST", "/jobs/{job}/approvals/{approval}/approve", job, approval)

    def decline(self, job: str, approval: str) -> Approval:
        """Decline a request, or withdraw your own. Raises NotFound, and Conflict if it no longer waits."""
        return self._http.fetch(Approval, "POST", "/jobs/{job}/approvals/{approval}/decline", job, approval)


class Accounts:
    """Users, keys and the audit log: `client.accounts`."""

    def __init__(self, http: JsonClient) -> None:
        self._http = http

    def people(self) -> list[Person]:
        """Return the users, for administrators of the server. Raises NotPermitted."""
        return self._http.rows(Person, "people", "/people")

    def keys(self) -> list[Token]:
        """Return the keys that the caller may revoke, newest first. Raises NotPermitted."""
        return self._http.rows(Token, "tokens", "/tokens")

    def create_key(
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
        return self._http.fetch(NewToken, "POST", "/tokens", body=body)

    def revoke_key(self, prefix: str) -> Token:
        """Revoke a key; it stops working within 5 seconds. Idempotent. Raises NotFound."""
        return self._http.fetch(Token, "POST", "/tokens/{prefix}/revoke", prefix, idempotent=True)

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
        return self._http.rows(AuditEntry, "entries", "/audit", query=query)


class Reports:
    """Retention of what jobs reported to the server, and the account that sums it: `client.reports`."""

    def __init__(self, http: JsonClient) -> None:
        self._http = http

    def retention(self, project: str | None = None) -> ReportRetention:
        """Return how long a project keeps reports, and their size. Raises NotFound."""
        return self._http.fetch(
            ReportRetention, "GET", "/projects/{project}/retention", project_of(self._http, project)
        )

    def change_retention(self, *, project: str | None = None, **limits: float | int | None) -> ReportRetention:
        """Change `samples_seconds`, `fine_seconds`, `reports_seconds` or `samples_bytes`; `None` is no limit.

        Reports beyond a limit are deleted within minutes. Raises NotFound, NotPermitted and Invalid.
        """
        return self._http.fetch(
            ReportRetention, "PATCH", "/projects/{project}/retention", project_of(self._http, project), body=limits
        )

    def account(
        self,
        since: AccountWindow = "24h",
        *,
        by: AccountKey = "project",
        project: str | None = None,
        owner: str | None = None,
        label: str | None = None,
        store: str | None = None,
    ) -> Account:
        """Return GPU-hours by cause, saved work and bytes, summed by project, owner, label, store or job.

        Args:
            label: labels that all match, such as `team: vision`, separated by commas.

        Raises:
            Invalid: a value is unknown.
        """
        query = {"since": since, "by": by, "project": project, "owner": owner, "label": label, "store": store}
        return self._http.fetch(Account, "GET", "/account", query=query)


class Stores:
    """Stores, what jobs write to them, and limits: `client.stores`."""

    def __init__(self, http: JsonClient) -> None:
        self._http = http

    def find(
        self, search: str = "", *, job: str | None = None, sort: str = "load", page: int = 1, size: int = 500
    ) -> StoreList:
        """Return one page of the stores that your jobs write to.

        Args:
            search: part of an address, or an id.
            job: only stores that this job writes to.
            sort: `load`, the highest rate first, or `address`.
        """
        query = {"search": search, "job": job, "sort": sort, "page": page, "size": size}
        return self._http.fetch(StoreList, "GET", "/stores", query=query)

    def get(self, store: str) -> StoreInfo:
        """Return a store by its id. Raises NotFound."""
        return self._http.fetch(StoreInfo, "GET", "/stores/{store}", store)

    def limits(self) -> list[StoreLimit]:
        """Return all limits."""
        return self._http.rows(StoreLimit, "limits", "/store-limits")

    def set_limit(self, limit: NewStoreLimit) -> StoreLimit:
        """Limit what all jobs together write to a store or below an address. Raises Invalid and NotPermitted."""
        return self._http.fetch(StoreLimit, "PUT", "/store-limits", body=limit, idempotent=True)

    def remove_limit(self, target: str) -> None:
        """Remove a limit; one that does not exist is removed already. Raises NotPermitted."""
        self._http.call("DELETE", "/store-limits", query={"target": target}, idempotent=True)

    def set_weight(self, store: str, job: str, weight: float) -> StoreInfo:
        """Set the weight of a job in the division of a limit. Raises NotFound, Invalid and NotPermitted."""
        body = NewStoreWeight(job=job, weight=weight)
        return self._http.fetch(StoreInfo, "PUT", "/stores/{store}/weights", store, body=body, idempotent=True)
