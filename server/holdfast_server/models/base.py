"""Base class and types of the tables."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TextClause,
    TypeDecorator,
    text,
)  # fmt: skip
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class PlainText(TypeDecorator[str]):
    """Text in which U+FFFD replaces NUL characters, which PostgreSQL does not store."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value.replace("\0", "\ufffd") if value else value


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own way to declare it
        bytes: LargeBinary,
        str: PlainText,
        # SQLite's integers hold 64 bits anyway, and only INTEGER counts up by itself.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }


class JobRow:
    """First columns of a table with numbered rows of jobs.

    They precede the others: SQLite reads the columns of a row in order, and those before a large one faster.
    """

    id: Mapped[int] = mapped_column(primary_key=True, sort_order=-5)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), sort_order=-4)


class TrainingRow(JobRow):
    """First columns of a table about points of training."""

    at: Mapped[float] = mapped_column(sort_order=-3)
    iteration: Mapped[int] = mapped_column(sort_order=-2)
    lineage: Mapped[int] = mapped_column(sort_order=-1)


def partial_index(name: str | None, *columns: str | TextClause, where: str, unique: bool = False) -> Index:
    """Return an index of the rows that meet a condition, on both databases."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def table(model: type[Base]) -> Table:
    """Return the table of a model, for statements without the ORM."""
    found = model.__table__
    assert isinstance(found, Table)
    return found
