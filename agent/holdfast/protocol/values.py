"""Values that operators change while a job trains: their definition, a change, and the report of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from holdfast.protocol.field_types import MAX_INTEGER, Count, Iteration, Lineage, Number, OptionalText, Text, Time

MAX_VALUES = 64
"""Values of a job, each with one name."""
MAX_CHOICES = 64
MAX_CHOICE = 100
"""Characters of a choice."""
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$(?!\n)"

Scalar = (
    bool
    | Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
    | Number
    | Annotated[str, msgspec.Meta(max_length=MAX_CHOICE)]
)
ValueName = Annotated[str, msgspec.Meta(pattern=NAME)]
ValueKind = Literal["float", "int", "bool", "text"]


class ValueDefinition(msgspec.Struct, kw_only=True, frozen=True):
    """What the script allows for a value."""

    name: ValueName
    kind: ValueKind
    default: Scalar
    low: Number | None = None
    high: Number | None = None
    choices: Annotated[tuple[Scalar, ...], msgspec.Meta(max_length=MAX_CHOICES)] = ()
    """The only values that are allowed; none: all of the kind, within the bounds."""


class ValueChange(msgspec.Struct, kw_only=True, frozen=True):
    """An operator's change of a value that the agent has not applied yet."""

    id: str
    name: ValueName
    value: Scalar | None
    """`None`: the script's own."""
    lineage: Count = 0
    """Lineage of the job when the change was made: a restore after it discards it."""


ValueState = Literal["requested", "applied", "refused", "superseded"]
"""Superseded: by a later change of the value, or by a restore."""


class ValueEdit(msgspec.Struct, kw_only=True, frozen=True):
    """An operator's change of a value, as the server knows it."""

    id: str
    name: str
    value: Scalar | None
    """`None`: the script's own."""
    before: Scalar | None
    """Value requested before; `None`: the script's own."""
    who: str
    at: float
    state: ValueState
    delivered: bool
    """Whether the agent has received it."""
    iteration: int | None = None
    """It is in force from the iteration after this one on."""
    lineage: int | None = None
    reason: str | None = None
    """Why it was refused or superseded."""


class JobValue(msgspec.Struct, kw_only=True, frozen=True):
    """A value of a job."""

    definition: ValueDefinition
    value: Scalar
    """Value in force, as the agent last reported it."""
    is_default: bool
    """Whether that is the script's own."""
    at: float
    """Time of that report."""
    changes: list[ValueEdit] = []
    """The newest changes, newest first."""


class NewValue(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A value to set; a text is parsed, and `null` returns to the script's own."""

    value: Scalar | None


class ValueReport(msgspec.Struct, kw_only=True, tag="value"):
    """The definition of a value, the value in force after `iteration`, and the outcome of a change."""

    at: Time
    iteration: Iteration
    lineage: Lineage
    definition: ValueDefinition
    value: Scalar
    is_default: bool = True
    """Whether the script's own value is in force."""
    change: OptionalText = None
    """Id of the change that was applied or refused."""
    refused: Text = ""
    """Why that change was refused."""


class ValueInForce(msgspec.Struct, frozen=True):
    """A value that an operator has set; only rank 0 knows the rest."""

    value: Scalar | None
    """`None`: the script's own again."""
    change: str = ""
    """Id of the change."""
    number: int = 0
    """Number of its record."""
    iteration: int = 0
    """It is in force from the iteration after this one on."""


def saved_values(in_force: Mapping[str, ValueInForce]) -> dict[str, list[Scalar | None]]:
    """Return what a checkpoint saves of values in force."""
    return {name: list(msgspec.structs.astuple(each)) for name, each in in_force.items()}


def values_of(state: Mapping[str, Any]) -> dict[str, ValueInForce]:
    """Return the values in force in the saved state of a session; none in one from before there were values."""
    return {name: ValueInForce(*saved) for name, saved in state.get("values", {}).items()}
