"""What an operator asks of a server beside its jobs: alerts, retention, people, keys, the audit log."""

from __future__ import annotations

from holdfast.protocol.administration import (
    Alert,
    AlertChannel,
    AlertDelivery,
    AlertRule,
    AuditEntry,
    NewToken,
    PersonRow,
    TokenRow,
)
from holdfast.protocol.questions import Kept
from holdfast.server_link.json_client import JsonClient


class Administration(JsonClient):
    """Part of `holdfast.client.Client`."""

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
        """What fires, the newest first; with `history`, what has resolved too. Raises NotFound for a job."""
        query = {"state": "all" if history else "open", "limit": limit, "before": before}
        if job is not None:
            return self._rows(Alert, "alerts", "/jobs/{job}/alerts", job, query=query)
        return self._rows(Alert, "alerts", "/alerts", query={"project": project, **query})

    def acknowledge(self, job: str, alert: int) -> Alert:
        """Somebody is at it. Raises NotFound, and Conflict when it has resolved."""
        return self._ask(Alert, "POST", "/jobs/{job}/alerts/{alert}/acknowledge", job, alert, twice=True)

    def silence(self, job: str, alert: int, *, seconds: float) -> Alert:
        """Nobody is told of it, nor of the same again, for so long. Raises NotFound, Conflict and Invalid."""
        return self._ask(
            Alert, "POST", "/jobs/{job}/alerts/{alert}/silence", job, alert, body={"seconds": seconds}, twice=True
        )

    def unsilence(self, job: str, alert: int) -> Alert:
        """The silence is over at once. Raises NotFound and Conflict."""
        return self._ask(Alert, "POST", "/jobs/{job}/alerts/{alert}/unsilence", job, alert, twice=True)

    def alert_rules(self, project: str = "default") -> list[AlertRule]:
        """The built-in ones first, as they are in this project. Raises NotFound."""
        return self._rows(AlertRule, "rules", "/projects/{project}/alert-rules", project)

    def change_alert_rule(
        self, rule: str, *, project: str = "default", **changes: float | str | bool
    ) -> AlertRule:
        """Change `enabled`, `severity`, `limit`, `for_seconds` or `jobs`; a new name needs a `kind` as well.

        Raises:
            NotFound, Invalid.
        """
        return self._ask(AlertRule, "PUT", "/projects/{project}/alert-rules/{rule}", project, rule, body=changes)

    def remove_alert_rule(self, rule: str, *, project: str = "default") -> None:
        """A rule of the project's own is gone; a built-in one is as it came. Raises NotFound."""
        self._tell("DELETE", "/projects/{project}/alert-rules/{rule}", project, rule)

    def alert_channels(self, project: str = "default") -> list[AlertChannel]:
        """Where alerts are sent; for admins of the project. Raises NotFound and NotPermitted."""
        return self._rows(AlertChannel, "channels", "/projects/{project}/alert-channels", project)

    def add_alert_channel(
        self, name: str, target: str, *, least_severity: str = "warning", project: str = "default"
    ) -> AlertChannel:
        """Mail addresses, or a URL; the secret of a webhook is in this answer and in no other.

        Raises:
            NotFound, NotPermitted, Invalid, and Conflict where the server sends no mail, or no webhooks.
        """
        body = {"name": name, "target": target, "least_severity": least_severity}
        return self._ask(AlertChannel, "POST", "/projects/{project}/alert-channels", project, body=body)

    def remove_alert_channel(self, channel: str, *, project: str = "default") -> None:
        """Raises NotFound and NotPermitted."""
        self._tell("DELETE", "/projects/{project}/alert-channels/{channel}", project, channel)

    def test_alert_channel(self, channel: str, *, project: str = "default") -> AlertDelivery:
        """Send a message there; `alert_deliveries` tells whether it arrived. Raises NotFound and NotPermitted."""
        return self._ask(
            AlertDelivery, "POST", "/projects/{project}/alert-channels/{channel}/test", project, channel
        )

    def alert_deliveries(self, channel: str, *, project: str = "default", limit: int = 50) -> list[AlertDelivery]:
        """The newest first. Raises NotFound and NotPermitted."""
        return self._rows(
            AlertDelivery,
            "deliveries",
            "/projects/{project}/alert-channels/{channel}/deliveries",
            project,
            channel,
            query={"limit": limit},
        )

    # ---- people, keys, the audit log ----------------------------------------------------------

    def people(self) -> list[PersonRow]:
        """Who may sign in; for those who look after the server. Raises NotPermitted."""
        return self._rows(PersonRow, "people", "/people")

    def tokens(self) -> list[TokenRow]:
        """Keys that whoever asks may revoke, the newest first. Raises NotPermitted."""
        return self._rows(TokenRow, "tokens", "/tokens")

    def create_token(
        self,
        name: str,
        scopes: list[str],
        *,
        project: str | None = None,
        job: str | None = None,
        seconds: float | None = None,
    ) -> NewToken:
        """Make a key; it is told here and never again. Raises NotFound, NotPermitted, Conflict and Invalid."""
        body = {"name": name, "scopes": scopes, "project": project, "job": job, "seconds": seconds}
        return self._ask(NewToken, "POST", "/tokens", body=body)

    def revoke_token(self, prefix: str) -> TokenRow:
        """No instance takes it 5 seconds later. Revoked twice is revoked. Raises NotFound."""
        return self._ask(TokenRow, "POST", "/tokens/{prefix}/revoke", prefix, twice=True)

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
        """Who changed what, the newest first, in projects that the asker is an admin of. Raises NotPermitted."""
        query = {
            "who": who, "action": action, "job": job, "project": project, "older_than": older_than, "limit": limit,
        }  # fmt: skip
        return self._rows(AuditEntry, "entries", "/audit", query=query)

    # ---- what is kept -------------------------------------------------------------------------

    def retention(self, project: str = "default") -> Kept:
        """How long a project keeps what its jobs reported, and how much that is. Raises NotFound."""
        return self._ask(Kept, "GET", "/projects/{project}/retention", project)

    def change_retention(self, *, project: str = "default", **limits: float | int | None) -> Kept:
        """Change some limits: `samples_seconds`, `fine_seconds`, `reports_seconds`, `samples_bytes`; None is none.

        What is beyond one goes within minutes, and does not come back. Raises NotFound, NotPermitted and Invalid.
        """
        return self._ask(Kept, "PATCH", "/projects/{project}/retention", project, body=limits)
