"""Phase 2: writes snapshots to a store in the background. Knows no torch."""

from __future__ import annotations

from holdfast.checkpoint_run import Origin
from holdfast.persist.persister import Persister
from holdfast.persist.task import Task, Written

__all__ = ["Origin", "Persister", "Task", "Written"]
