"""A server process with pause points in the handling of restore orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.protocol.wire import OrderStateChange
from holdfast_server.control import control
from holdfast_server.ingest import transaction
from tests.support import server_process
from tests.support.fault_injection import watch_answer

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel


def live(stage: WorkloadChannel, **options: Any) -> None:
    watch_answer(control, "order_restore", "accepted", lambda placed, *_: placed[1])
    watch_answer(control, "desired", "handed out", lambda desired, *_: desired.restore is not None)
    watch_answer(
        transaction, "store", "learned", lambda _, db, received: any(map(_restored, received.batch.events))
    )
    server_process.live(stage, **options)


def _restored(event: object) -> bool:
    return isinstance(event, OrderStateChange) and event.state == "restored"
