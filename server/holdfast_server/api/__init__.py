"""The HTTP API: it parses, calls and answers, and holds no rule."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_server.api import desired, ingest, jobs, restores, stream, system

router = APIRouter()
router.include_router(system.router)
for part in (ingest, jobs, desired, restores, stream):
    router.include_router(part.router, prefix="/api/v1")

__all__ = ["router"]
