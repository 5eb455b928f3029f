"""The forms of values that operators change while a job trains, and what a restore does to values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.protocol.jobs import CheckpointInfo
from holdfast.protocol.value_rules import bounds, shown
from holdfast.protocol.values import JobValue, Scalar, ValueEdit
from holdfast_server.queries.job_view import JobView
from holdfast_server.records import job_values

EDITS_SHOWN = 20
LOGARITHMIC_FROM = 20.0
"""Ratio of the bounds from which on a slider is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class ValueForm:
    """One value: its field, what is in force, and its newest change."""

    value: JobValue
    number: int
    """Number of the value on the page."""
    typed: str
    """Text of the field."""
    error: str = ""

    @property
    def name(self) -> str:
        return self.value.definition.name

    @property
    def in_force(self) -> str:
        return shown(self.value.value)

    @property
    def default(self) -> str:
        return shown(self.value.definition.default)

    @property
    def bounds(self) -> str:
        return bounds(self.value.definition)

    @property
    def choices(self) -> list[str]:
        definition = self.value.definition
        return ["true", "false"] if definition.kind == "bool" else [shown(each) for each in definition.choices]

    @property
    def scale(self) -> str:
        """The scale of the slider: logarithmic, linear, or empty without one."""
        low, high = self.value.definition.low, self.value.definition.high
        if low is None or high is None:
            return ""
        return "log" if low > 0 and high / low >= LOGARITHMIC_FROM else "linear"

    @property
    def edit(self) -> ValueEdit | None:
        """The newest change."""
        return self.value.changes[0] if self.value.changes else None


@dataclass(frozen=True, kw_only=True)
class ValueHistory:
    """One change of a value in the history."""

    edit: ValueEdit
    before: str
    after: str
    undo: str | None
    """The value to return to, as a form sends it; empty for the script's own. `None` if it cannot be undone."""


@dataclass(frozen=True, kw_only=True)
class ValueReset:
    """What a restore does to a value."""

    name: str
    now: str
    then: str


def forms_of(view: JobView) -> list[ValueForm]:
    """Return the forms of all values; an open change is in the field already."""
    return [
        ValueForm(value=value, number=number, typed=shown(_wanted(value)))
        for number, value in enumerate(job_values.values_of(view.session, view.job), start=1)
    ]


def refused(forms: list[ValueForm], name: str, typed: str, error: str) -> list[ValueForm]:
    """Return the forms with the refused input of one."""
    return [replace(form, typed=typed, error=error) if form.name == name else form for form in forms]


def history_of(forms: list[ValueForm]) -> list[ValueHistory]:
    """Return the newest changes of all values, newest first; of each value the last one can be undone."""
    found = []
    for form in forms:
        default = form.value.definition.default
        for place, edit in enumerate(form.value.changes):
            is_undoable = place == 0 and edit.state in ("requested", "applied") and edit.before != edit.value
            undo = "" if edit.before is None else shown(edit.before)
            found.append(
                ValueHistory(
                    edit=edit, before=shown(edit.before, default), after=shown(edit.value, default),
                    undo=undo if is_undoable else None,
                )
            )  # fmt: skip
    return sorted(found, key=lambda row: row.edit.at, reverse=True)[:EDITS_SHOWN]


def resets_of(view: JobView, checkpoint: CheckpointInfo) -> list[ValueReset]:
    """Return the values that a restore of a checkpoint changes, or whose open changes it discards."""
    values = job_values.values_of(view.session, view.job)
    if not values:
        return []
    then = job_values.values_at(view.session, view.job, checkpoint.iteration, view.ancestry(checkpoint.lineage))
    found = []
    for value in values:
        definition = value.definition
        saved = then.get(definition.name)
        now, after = shown(_wanted(value)), shown(definition.default if saved is None else saved)
        if now != after:
            found.append(ValueReset(name=definition.name, now=now, then=after))
    return found


def _wanted(value: JobValue) -> Scalar:
    """Return the value of an open change, else the one in force."""
    edit = value.changes[0] if value.changes else None
    if edit is None or edit.state != "requested":
        return value.value
    return value.definition.default if edit.value is None else edit.value
