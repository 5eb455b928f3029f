"""A server that can be struck where it has to do with an order to restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import server_life
from striking import watch_answer

from holdfast.protocol.messages import OrderMoved
from holdfast_server.control import control
from holdfast_server.ingest import transaction

if TYPE_CHECKING:
    from nursery import Stage


def live(stage: Stage, **options: Any) -> None:
    watch_answer(control, "order_restore", "accepted", lambda placed, *_: placed[1])
    watch_answer(control, "desired", "handed out", lambda desired, *_: desired.restore is not None)
    watch_answer(
        transaction, "store", "learned", lambda _, db, received: any(map(_restored, received.batch.events))
    )
    server_life.live(stage, **options)


def _restored(event: object) -> bool:
    return isinstance(event, OrderMoved) and event.state == "restored"
