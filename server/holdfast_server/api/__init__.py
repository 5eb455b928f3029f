"""The HTTP API. Routes parse the request and encode the answer; the logic is in the modules that they call."""

from __future__ import annotations

from holdfast_server.api import (
    account,
    accounts,
    alerts,
    approvals,
    attempts,
    checkpoints,
    comparison,
    desired_state,
    exports,
    ingest,
    iteration_annotations,
    jobs,
    report,
    report_retention,
    restores,
    stores,
    system,
    training,
    values,
)

ROUTERS = (
    ingest.router, system.router, jobs.router, attempts.router, comparison.router, report.router, account.router,
    iteration_annotations.router, exports.router, desired_state.router, checkpoints.router, restores.router,
    training.router, values.router, stores.router, approvals.router, alerts.router,
    report_retention.router, accounts.router, system.documentation,
)  # fmt: skip
"""The routers of the API, in the order of the reference."""
