"""The types of fields of events: each field has limits, and the type that its name promises."""

from __future__ import annotations

import typing

import msgspec
import pytest

from holdfast.protocol import wire
from holdfast.protocol.field_types import CheckpointId, JobName, time_fields
from holdfast.protocol.timeline import AttemptInfo, CheckpointInfo, IntervalInfo, LineageInfo, StallInfo

EVENTS = typing.get_args(wire.Event)
ROUNDED = (AttemptInfo, CheckpointInfo, IntervalInfo, LineageInfo, StallInfo)
"""Rows of a timeline, whose times are rounded to milliseconds."""
FREE = {
    "lines",
    "tensors",
    "origin",
    "state",
    "kind",
    "mode",
    "level",
    "verdict",
    "section",
    "supervised",
    "waits",
    "writing",
    "definition",
    "is_default",
}
"""Fields with a fixed set of values, or whose parts are checked where they are stored."""


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_each_field_of_an_event_has_limits(event: type[msgspec.Struct]) -> None:
    free = set(FREE)
    for name, hint in typing.get_type_hints(event, include_extras=True).items():
        if name not in free and name in event.__struct_fields__:
            assert "Annotated" in str(hint), name


@pytest.mark.parametrize("kind", [*EVENTS, *ROUNDED], ids=lambda kind: kind.__name__)
def test_what_is_named_as_a_time_is_a_time(kind: type[msgspec.Struct]) -> None:
    named = {name for name in kind.__struct_fields__ if name == "at" or name.endswith("_at")}
    assert time_fields(kind) == named


@pytest.mark.parametrize(
    ("kind", "valid", "invalid"),
    [
        (
            CheckpointId,
            ["000000000003-1", "999999999999-999999999"],
            ["", "3-1", "000000000003-1\n", "٠" * 12 + "-1"],
        ),
        (JobName, ["a", "a.b_c-1", "x" * 100], ["", ".a", "a b", "a/b", "a\n", "x" * 101]),
    ],
)
def test_ids_and_names(kind: object, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert msgspec.convert(text, kind) == text
    for text in invalid:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, kind)
