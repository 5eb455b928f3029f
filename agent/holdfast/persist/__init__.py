"""Phase 2: drains snapshots to a store in the background, and says what became of each. Knows no torch."""

from __future__ import annotations

from holdfast.persist.choice import Choice
from holdfast.persist.persister import Persister, Settled
from holdfast.persist.retention_queue import RetentionQueue
from holdfast.persist.task import Origin, Task, Written

__all__ = ["Choice", "Origin", "Persister", "RetentionQueue", "Settled", "Task", "Written"]
