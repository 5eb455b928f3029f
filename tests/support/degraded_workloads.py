"""Ranks of which one loses less significant bytes of what only it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.engine.startup import Startup
from holdfast.protocol.wire import Desired, RestoreOrder

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel

ITERATIONS = 4


def _begun(root: str, **options: Any) -> tuple[holdfast.Session, holdfast.Variables]:
    torch.manual_seed(0)
    own = holdfast.Variables(weights=torch.arange(4096.0) + dist.get_rank())
    model = torch.nn.Linear(1, 1, bias=False)
    session = holdfast.Session("job", store=root, every=2, parity="important 4+2", model=model, own=own, **options)
    return session, own


def _train(session: holdfast.Session) -> None:
    for _ in range(ITERATIONS):
        session.step()
        session.wait(60)


def save(stage: WorkloadChannel, root: str) -> None:
    session, _ = _begun(root)
    session.resume()
    _train(session)
    session.close()


def resume(stage: WorkloadChannel, root: str, checkpoint: str, *, degraded: bool) -> tuple[int, int, list[float]]:
    """Resume with the order to restore `checkpoint`; return iteration, lineage and this rank's own weights."""
    wanted = RestoreOrder(id="o", checkpoint=checkpoint, fence=1, degraded=degraded)
    Startup._first_desired = lambda self: Desired(  # type: ignore[method-assign]
        version=1, latest_attempt=1, restore=wanted
    )
    session, own = _begun(root, server="http://127.0.0.1:9")
    found = session.resume()
    _train(session)
    lineage = session.lineage
    session.close()
    return found, lineage, own.weights.tolist()
