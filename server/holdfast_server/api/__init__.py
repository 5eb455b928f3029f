"""The HTTP API. Routes parse the request and encode the answer; the logic is in the modules that they call."""

from __future__ import annotations

from fastapi import APIRouter

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

router = APIRouter()
# The first route, because routes are matched in order and reports are by far the most frequent requests.
router.include_router(ingest.router, prefix="/api/v1")
router.include_router(system.router)
for part in (
    jobs, attempts, comparison, iteration_annotations, exports, desired_state, checkpoints, restores, alerts,
    report_retention, accounts,
):  # fmt: skip
    router.include_router(part.router, prefix="/api/v1")

__all__ = ["router"]
