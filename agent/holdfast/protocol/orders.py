"""Orders to pause or end training, the data that a restore leaves out, and the rule about wrong losses."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec

from holdfast.protocol.field_types import (
    MAX_INTEGER,
    MAX_ITERATION,
    Count,
    Iteration,
    Lineage,
    OptionalText,
    Text,
    Time,
)

POLICY = "policy"
"""Actor name of a job's rule `on_trouble`."""
HaltAction = Literal["pause", "continue", "end"]
HaltState = Literal["paused", "continued", "ended", "failed"]
"""Failed: there is no durable checkpoint of the state, so training continues instead of ending."""
Then = Literal["alert", "pause", "end"]
_ON_TROUBLE = re.compile(r"(observe|restore)(?: +([0-9]+) +in +([0-9]+))?(?:,? +then +(alert|pause|end))?")


class TrainingOrder(msgspec.Struct, kw_only=True, frozen=True):
    """An order to pause, continue or end training. It acts once, and stays until another one replaces it."""

    id: str
    action: HaltAction
    who: Text = ""


class HaltReport(msgspec.Struct, kw_only=True, tag="halt"):
    """Training was paused, continues, ends on request, or could not end."""

    at: Time
    iteration: Iteration
    lineage: Lineage
    state: HaltState
    by: Text = ""
    """Actor that requested it: an operator, or `policy` for the rule `on_trouble`."""
    order: OptionalText = None
    """Id of the order that it carries out; `None` for the rule, and for a command on the store."""
    reason: OptionalText = None


class DataSkip(msgspec.Struct, kw_only=True, frozen=True):
    """Data that a restore is to leave out: `batches`, or those of all iterations up to `to_iteration`."""

    batches: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)] | None = None
    to_iteration: Iteration | None = None
    loader: Count | None = None
    """Number of the loader, in the order of first use; `None`: the only one."""


def skip_of(batches: int | None, to_iteration: int | None, iteration: int, loader: int | None) -> DataSkip | None:
    """Return the data that a restore to `iteration` leaves out, if any. ValueError: invalid combination."""
    if not batches and not to_iteration:
        if loader is not None:
            raise ValueError("to leave out the data of one loader, also give the number of batches")
        return None
    if batches and to_iteration:
        raise ValueError(
            "give either the number of batches to leave out or the last iteration to leave out, not both"
        )
    if to_iteration and to_iteration <= iteration:
        raise ValueError(f"the last iteration to leave out must be after {iteration:,}, not {to_iteration:,}")
    if not 0 <= (batches or 0) <= MAX_INTEGER or (to_iteration or 0) > MAX_ITERATION or (loader or 0) < 0:
        raise ValueError("leave out at least 1 batch; loaders are numbered from 0")
    return DataSkip(batches=batches or None, to_iteration=to_iteration or None, loader=loader)


@dataclass(frozen=True, slots=True)
class OnTrouble:
    """Reaction of a job to wrong losses."""

    mode: Literal["off", "observe", "restore"] = "off"
    most: int = 2
    """Most restores for wrong losses within `within` iterations."""
    within: int = 1000
    then: Then = "alert"
    """Action after the last restore, or if there is nothing to restore."""

    @property
    def is_on(self) -> bool:
        return self.mode != "off"

    def __str__(self) -> str:
        limit = "" if (self.most, self.within) == (2, 1000) else f" {self.most} in {self.within}"
        return f"{self.mode}{limit}" + ("" if self.then == "alert" else f" then {self.then}")


def parse_on_trouble(value: str | OnTrouble) -> OnTrouble:
    """Parse `off`, `observe`, `restore` or `restore 3 in 2000 then pause`. ValueError for anything else."""
    if isinstance(value, OnTrouble):
        return value
    text = str(value).strip().lower()
    if text == "off":
        return OnTrouble()
    match = _ON_TROUBLE.fullmatch(text)
    if match is None or 0 in (numbers := [int(each) for each in match.group(2, 3) if each is not None]):
        forms = "off, observe, restore, restore 3 in 2000, or restore 3 in 2000 then pause"
        raise ValueError(f"on_trouble={value!r}: give {forms}")
    mode: Literal["observe", "restore"] = "restore" if match[1] == "restore" else "observe"
    rule = OnTrouble(mode, numbers[0], numbers[1]) if numbers else OnTrouble(mode)
    return dataclasses.replace(rule, then=cast("Then", match[4] or "alert"))
