"""The services of an application, which its middleware and routes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from starlette.responses import Response

from holdfast_server.accounts.auth_backends import AuthBackend
from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.accounts.oidc import Provider
from holdfast_server.core.access import RouteMatch
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.request_coalescing import RequestCoalescer
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.ingest.admission import AdmissionControl


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Made when the application starts, once its database is open."""

    settings: ServerSettings
    database: Database
    auth: AuthBackend
    clock: Callable[[], float]
    """Returns seconds since the epoch."""
    metrics: ServerMetrics
    coalescer: RequestCoalescer
    admission: AdmissionControl
    job_projects: JobProjects
    streams: Counter[str]
    """Number of open streams by owner."""
    provider: Provider | None
    """Identity provider, if one is configured."""
    find_route: Callable[[str, str], RouteMatch | None]
    """Returns the route of a method and path."""
    error_page: Callable[[Response], Response] | None
    """Renders a refusal in JSON as a page; `None` without a dashboard."""

    @property
    def changes(self) -> ChangeBus:
        return self.database.changes


def services_of(app: Any) -> Services:
    """Return the services of a running application."""
    return cast("Services", app.state.services)
