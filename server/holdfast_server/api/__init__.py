"""The HTTP API. Routes parse the request and encode the answer; the logic is in the modules that they call."""

from __future__ import annotations

from holdfast_server.api import (
    accounts,
    alerts,
    attempts,
    checkpoints,
    comparison,
    desired_state,
    exports,
    ingest,
    iteration_annotations,
    jobs,
    report_retention,
    restores,
    system,
)

ROUTERS = (
    ingest.router, system.router, jobs.router, attempts.router, comparison.router, iteration_annotations.router,
    exports.router, desired_state.router, checkpoints.router, restores.router, alerts.router,
    report_retention.router, accounts.router, system.documentation,
)  # fmt: skip
"""The routers of the API, in the order of the reference."""
