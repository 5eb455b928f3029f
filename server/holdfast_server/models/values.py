"""Values that operators change while a job trains."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class JobValueRecord(Base):
    """A value of the script, as the current attempt last reported it."""

    __tablename__ = "job_values"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    definition: Mapped[str]
    """`protocol.ValueDefinition` in JSON."""
    value: Mapped[str]
    """What is in force, in JSON."""
    is_default: Mapped[bool]
    at: Mapped[float]


class ValueChangeRecord(Base):
    """An operator's change of a value."""

    __tablename__ = "value_changes"
    __table_args__ = (Index(None, "job", "version"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    name: Mapped[str]
    value: Mapped[str]
    """In JSON; `null` for the script's own."""
    before: Mapped[str]
    """Value requested before; `None`: the script's own."""
    who: Mapped[str]
    at: Mapped[float]
    version: Mapped[int]
    """Version of the desired state that it made."""
    made_in_lineage: Mapped[int]
    """Lineage of the job at that time."""
    state: Mapped[str]
    """`protocol.jobs.ValueState`."""
    iteration: Mapped[int | None]
    """It is in force from the iteration after this one on."""
    lineage: Mapped[int | None]
    reason: Mapped[str | None]
