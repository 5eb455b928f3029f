"""The states of restore orders, as one table of transitions. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.protocol.wire import OPEN_ORDER_STATES, OrderState
from holdfast_server import models

TOO_LATE: dict[OrderState, str] = {
    "cancelled": "the cancel reached the agent too late", "expired": "an agent started it after it had expired",
}  # fmt: skip
OVERRULED = TOO_LATE | {"failed": "an earlier attempt failed to restore, and reported it late"}
"""Why an order that had ended was carried out after all, by the state it had ended in."""


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent reported the state of the order."""

    state: OrderState
    attempt: int
    newest_attempt: int
    other_open: bool
    """Whether another order of the job is open."""


@dataclass(frozen=True, slots=True)
class LineageBegan:
    """The order began a lineage: it was carried out, even if the attempt ended before it could report so."""

    attempt: int
    at: float
    failed_at: float | None
    """Time of the last report that the order failed."""


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """An attempt trains without carrying out the order that an earlier attempt had started."""

    attempt: int
    now: float


@dataclass(frozen=True, slots=True)
class Concluded:
    """An operator or the server ended the order, or the server lost or regained contact with the agent."""

    state: Literal["cancelled", "expired", "superseded", "unknown", "restoring"]


Cause = Reported | LineageBegan | AttemptBegan | Concluded


def _name_of(cause: Cause) -> str:
    match cause:
        case Reported(state):
            return f"reports {state}"
        case LineageBegan():
            return "began its lineage"
        case AttemptBegan():
            return "attempt begins"
        case Concluded(state):
            return f"server: {state}"


def _always(order: models.RestoreOrderRecord, cause: Any) -> bool:
    return True


def _not_fenced(order: models.RestoreOrderRecord, cause: Reported | LineageBegan) -> bool:
    """The attempt is not one from before the order.

    It may be from before the one that started the order: it noted in the store that it carried it out.
    """
    return cause.attempt >= order.fence


def _not_overtaken(order: models.RestoreOrderRecord, cause: Reported) -> bool:
    """No later attempt has started the order."""
    return _not_fenced(order, cause) and cause.attempt >= (order.taken_by_attempt or 0)


def _later_attempt(order: models.RestoreOrderRecord, cause: Reported | LineageBegan) -> bool:
    """A later attempt than the one that started the order."""
    return _not_fenced(order, cause) and cause.attempt > (order.taken_by_attempt or 0)


def _nothing_newer(order: models.RestoreOrderRecord, cause: Reported) -> bool:
    """No other order is open, and no attempt is newer.

    Only one order is open at a time, and an attempt that ended would have reported its lineage.
    """
    return _not_overtaken(order, cause) and not cause.other_open and cause.attempt >= cause.newest_attempt


def _after_the_failure(order: models.RestoreOrderRecord, cause: LineageBegan) -> bool:
    """A later attempt began it after the failure.

    A failed restore began a lineage before it failed, which the next start reports.
    """
    return _later_attempt(order, cause) and cause.failed_at is not None and cause.at > cause.failed_at


def _left_behind(order: models.RestoreOrderRecord, cause: AttemptBegan) -> bool:
    # Had the earlier attempt completed it, the lineage that it began would have been reported by now.
    return (order.taken_by_attempt or 0) < cause.attempt


def _was_cancelled(order: models.RestoreOrderRecord, cause: AttemptBegan) -> bool:
    """An earlier attempt had started it although it was cancelled."""
    return _left_behind(order, cause) and order.overruled_state == "cancelled"


def _has_expired(order: models.RestoreOrderRecord, cause: AttemptBegan) -> bool:
    """An earlier attempt had started it, and it has expired."""
    is_over = order.expires_at is not None and order.expires_at <= cause.now
    return _left_behind(order, cause) and (order.overruled_state == "expired" or is_over)


@dataclass(frozen=True, slots=True)
class Transition:
    """From some states to another one, by a cause, if the guard allows it. Its docstring is the condition."""

    before: tuple[OrderState, ...]
    cause: str
    after: OrderState
    guard: Callable[[models.RestoreOrderRecord, Any], bool] = _always


_LATE: tuple[OrderState, ...] = tuple(TOO_LATE)
TRANSITIONS = (
    # An agent that restores at its start may skip steps.
    Transition(("requested",), "reports delivered", "delivered", _not_overtaken),
    Transition(("requested", "delivered", "unknown"), "reports restoring", "restoring", _not_overtaken),
    Transition(("restoring",), "reports restoring", "restoring", _later_attempt),
    Transition(("restoring",), "reports unknown", "unknown", _not_overtaken),
    Transition(OPEN_ORDER_STATES, "reports failed", "failed", _not_overtaken),
    Transition(OPEN_ORDER_STATES, "reports cancelled", "cancelled", _not_overtaken),
    Transition(OPEN_ORDER_STATES, "reports expired", "expired", _not_overtaken),
    Transition(OPEN_ORDER_STATES, "reports superseded", "superseded", _not_overtaken),
    # What the agent did takes precedence: it overrules a cancel or an expiry that came too late, and a failure
    # that one attempt could not report before the next attempt had carried the order out.
    Transition(_LATE, "reports restoring", "restoring", _nothing_newer),
    Transition((*OPEN_ORDER_STATES, *_LATE), "reports restored", "restored", _not_fenced),
    Transition(("failed",), "reports restored", "restored", _later_attempt),
    Transition((*OPEN_ORDER_STATES, *_LATE), "began its lineage", "restored", _not_fenced),
    Transition(("failed",), "began its lineage", "restored", _after_the_failure),
    # An attempt trains that does not carry the order out.
    Transition(("restoring", "unknown"), "attempt begins", "cancelled", _was_cancelled),
    Transition(("restoring", "unknown"), "attempt begins", "expired", _has_expired),
    # Operators, time, and contact with the agent.
    Transition(OPEN_ORDER_STATES, "server: cancelled", "cancelled"),
    Transition(OPEN_ORDER_STATES, "server: expired", "expired"),
    Transition(OPEN_ORDER_STATES, "server: superseded", "superseded"),
    Transition(("restoring",), "server: unknown", "unknown"),
    Transition(("unknown",), "server: restoring", "restoring"),
)
"""All transitions. The first that fits decides; without one, the order stays as it is."""


def next_state(order: models.RestoreOrderRecord, cause: Cause) -> OrderState | None:
    """Return the state to which a cause moves an order; `None`: to no other."""
    name = _name_of(cause)
    for transition in TRANSITIONS:
        if order.state in transition.before and transition.cause == name and transition.guard(order, cause):
            return transition.after
    return None
