"""The table of the transitions of restore orders, and the diagram of it in the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from holdfast.protocol.wire import OPEN_ORDER_STATES, OrderState
from holdfast_server import models
from holdfast_server.records.order_transitions import (
    OVERRULED,
    TRANSITIONS,
    AttemptBegan,
    Concluded,
    LineageBegan,
    Reported,
    next_state,
)

PAGE = Path(__file__).resolve().parents[4] / "docs/internals/restore.md"
STATES = get_args(OrderState)


def order(state, *, taken_by=2, fence=1, overruled=None, expires_at=None):
    return models.RestoreOrderRecord(
        state=state, taken_by_attempt=taken_by, fence=fence, overruled_state=overruled, expires_at=expires_at
    )


def diagram() -> str:
    """Draw each transition as a line."""
    lines = []
    for transition in TRANSITIONS:
        before = ", ".join(transition.before).replace(", ".join(OPEN_ORDER_STATES), "open")
        condition = (transition.guard.__doc__ or "").strip().partition("\n")[0]
        line = f"{before:<30}── {transition.cause:<19}──▶ {transition.after:<11}{condition}"
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def test_the_documentation_draws_the_table():
    drawn = PAGE.read_text().partition("restoring or unknown:\n\n```text\n")[2].partition("```")[0]
    assert drawn == diagram()


def test_every_state_but_the_first_is_reached_and_only_two_are_final():
    assert {transition.after for transition in TRANSITIONS} == set(STATES) - {"requested"}
    left = {state for transition in TRANSITIONS for state in transition.before}
    assert set(STATES) - left == {"restored", "superseded"}


def test_only_what_an_agent_did_moves_an_order_that_has_ended():
    for transition in TRANSITIONS:
        for before in set(transition.before) - set(OPEN_ORDER_STATES):
            assert before in OVERRULED
            assert transition.cause in ("reports restoring", "reports restored", "began its lineage")


@pytest.mark.parametrize(
    ("before", "cause", "after"),
    [
        (order("requested"), Reported("delivered", 2, 2, False), "delivered"),
        (order("requested"), Reported("delivered", 1, 2, False), None),
        (order("restoring", fence=3), Reported("restored", 2, 2, False), None),
        (order("restoring"), Reported("restored", 1, 2, False), "restored"),
        (order("restoring"), Reported("restoring", 2, 2, False), None),
        (order("restoring"), Reported("restoring", 3, 3, False), "restoring"),
        (order("cancelled"), Reported("restoring", 2, 2, False), "restoring"),
        (order("cancelled"), Reported("restoring", 2, 3, False), None),
        (order("expired"), Reported("restoring", 2, 2, True), None),
        (order("failed"), Reported("restored", 2, 2, False), None),
        (order("failed"), Reported("restored", 3, 3, False), "restored"),
        (order("failed"), LineageBegan(3, at=5.0, failed_at=6.0), None),
        (order("failed"), LineageBegan(3, at=7.0, failed_at=6.0), "restored"),
        (order("restored"), LineageBegan(3, at=7.0, failed_at=None), None),
        (order("restoring"), AttemptBegan(3, now=10.0), None),
        (order("restoring", expires_at=9.0), AttemptBegan(3, now=10.0), "expired"),
        (order("restoring", expires_at=9.0), AttemptBegan(2, now=10.0), None),
        (order("unknown", overruled="cancelled", expires_at=9.0), AttemptBegan(3, now=10.0), "cancelled"),
        (order("unknown"), Concluded("restoring"), "restoring"),
        (order("restoring"), Concluded("unknown"), "unknown"),
        (order("superseded"), Concluded("cancelled"), None),
    ],
)
def test_the_guards_decide(before, cause, after):
    assert next_state(before, cause) == after
