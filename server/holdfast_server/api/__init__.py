"""The HTTP API: it parses, calls and answers, and holds no rule."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_server.api import (
    accounts,
    alerts,
    checkpoints,
    desired_state,
    exports,
    ingest,
    jobs,
    restores,
    retention,
    stream,
    system,
)

router = APIRouter()
# First, since routes are tried in their order, and batches come a hundred times as often as all else.
router.include_router(ingest.router, prefix="/api/v1")
router.include_router(system.router)
for part in (jobs, exports, desired_state, checkpoints, restores, alerts, retention, stream, accounts):
    router.include_router(part.router, prefix="/api/v1")

__all__ = ["router"]
