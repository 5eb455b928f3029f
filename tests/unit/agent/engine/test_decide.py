"""What is done at a boundary, as a table of situations."""

import dataclasses

import pytest

from holdfast.engine.coordination import FACTOR, Decision, Situation, decide

NOTHING, WAITS = Decision(), Decision(waits=True)
SCHEDULED = Decision(checkpoint="scheduled", lineage=1)
REQUESTED = Decision(checkpoint="requested", lineage=1)
AGAIN = Decision(checkpoint="scheduled", at_once=True, lineage=1)
BACK = Decision(restore=("000000000003-1", "order"))
ENDS, SAVES = (
    Decision(end=True, at_once=True, lineage=1),
    Decision(end=True, checkpoint="final", at_once=True, lineage=1),
)
BUSY = {"in_flight": 1, "max_in_flight": 1}
TARGET = ("000000000003-1", "order")


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        # nothing to do
        ({}, NOTHING),
        ({"memory_ready": False}, NOTHING),
        ({"has_room": False}, NOTHING),
        (BUSY, NOTHING),
        # due: it waits rather than stall training
        ({"due": True}, SCHEDULED),
        ({"withheld": True}, SCHEDULED),
        ({"due": True, "memory_ready": False}, WAITS),
        ({"withheld": True, "memory_ready": False}, WAITS),
        ({"due": True, "has_room": False}, WAITS),
        ({"due": True} | BUSY, WAITS),
        ({"due": True, "in_flight": 1, "max_in_flight": 2}, SCHEDULED),
        ({"due": True, "in_flight": 1, "max_in_flight": 2, "has_room": False}, WAITS),
        ({"due": True, "lineage": 7}, dataclasses.replace(SCHEDULED, lineage=7)),
        ({"due": True, "mode": "gpu"}, dataclasses.replace(SCHEDULED, mode="gpu")),
        # requested: it waits for room only
        ({"requested": True}, REQUESTED),
        ({"requested": True, "due": True}, REQUESTED),
        ({"requested": True, "memory_ready": False}, REQUESTED),
        ({"requested": True} | BUSY, REQUESTED),
        ({"requested": True, "has_room": False}, WAITS),
        # torn: another copy is taken at once
        ({"retry": True}, AGAIN),
        ({"retry": True} | BUSY, AGAIN),
        ({"retry": True, "memory_ready": False}, AGAIN),
        ({"retry": True, "has_room": False}, WAITS),
        ({"retry": True, "requested": True}, dataclasses.replace(AGAIN, checkpoint="requested")),
        # a call of an integration comes with a checkpoint, or while one waits, but not before a restore or an end
        ({"call_due": True}, Decision(call=True)),
        ({"call_due": True, "due": True}, dataclasses.replace(SCHEDULED, call=True)),
        ({"call_due": True, "due": True} | BUSY, dataclasses.replace(WAITS, call=True)),
        ({"call_due": True, "restore": TARGET}, BACK),
        ({"call_due": True, "end_requested": True}, SAVES),
        # a restore comes before any checkpoint
        ({"restore": TARGET}, BACK),
        ({"restore": TARGET, "due": True, "requested": True, "retry": True}, BACK),
        ({"restore": TARGET, "has_room": False} | BUSY, BACK),
        ({"restore": ("000000000003-1", None)}, Decision(restore=("000000000003-1", None))),
        # an end comes before all, with a checkpoint where that can be durable in time
        ({"end_requested": True}, SAVES),
        ({"end_requested": True, "restore": TARGET, "requested": True}, SAVES),
        ({"end_requested": True, "has_room": False, "memory_ready": False} | BUSY, SAVES),
        ({"end_requested": True, "checkpoint_seconds": 2.0, "grace_left_seconds": 2.0 * FACTOR}, SAVES),
        ({"end_requested": True, "checkpoint_seconds": 2.0, "grace_left_seconds": 1.99 * FACTOR}, ENDS),
        ({"end_requested": True, "checkpoint_seconds": 2.0, "grace_left_seconds": 0.0, "due": True}, ENDS),
        ({"end_requested": True, "checkpoint_seconds": 0.0, "grace_left_seconds": 0.0}, SAVES),
        ({"grace_left_seconds": 0.0, "checkpoint_seconds": 99.0, "due": True}, SCHEDULED),
    ],
)
def test_what_is_decided(given, decided):
    assert decide(Situation(**given)) == decided


def test_a_decision_is_something_to_do_or_nothing():
    assert [bool(each) for each in (NOTHING, WAITS)] == [False, False]
    assert all((SCHEDULED, BACK, ENDS, Decision(call=True)))
