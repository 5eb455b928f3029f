"""What is spelled otherwise by SQLite and by PostgreSQL, in one spelling."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from sqlalchemy import BindParameter, Connection, String, bindparam, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.db.errors import DatabaseUnavailable


def insert(session: AsyncSession | Connection, table: type[models.Base]) -> postgresql.Insert:
    """An INSERT that can be given `on_conflict_do_nothing` or `on_conflict_do_update`.

    await session.execute(insert(session, models.Project).values(name=…).on_conflict_do_nothing())
    """
    if _on_postgres(session):
        return postgresql.insert(table)
    made: Any = sqlite.insert(table)  # it has the same methods, and no common type says so
    return made  # type: ignore[no-any-return]


def named_jobs() -> BindParameter[Any]:
    """In a question that is put together once, the jobs that `{"jobs": names}` names each time that it is asked.

    To put a question together takes longer than SQLite needs to answer it for a job.
    """
    return bindparam("jobs", expanding=True, type_=String())


async def lock_job(session: AsyncSession, job: str) -> None:
    """From here to the end of the transaction, no other unit that locks this job runs, on any instance.

    A job need not exist to be locked, so that two instances that hear of it first make it once. On SQLite there
    is one writer anyway. `Database.write(work, job=…)` has locked the job already when `work` begins.
    """
    if _on_postgres(session):
        await session.execute(select(func.pg_advisory_xact_lock(job_key(job))))


async def locked_job(session: AsyncSession, job: str) -> models.Job | None:
    """The row of a job, as it is once it is locked; None for a job that nobody has heard of."""
    await lock_job(session, job)
    return await session.get(models.Job, job, populate_existing=True)


async def size_bytes(session: AsyncSession) -> int:
    """All that is stored, tables, indexes and what is free in between."""
    return await session.scalar(text(size_question(session.get_bind().dialect.name))) or 0


def size_question(dialect: str) -> str:
    if dialect == "postgresql":
        return "SELECT pg_database_size(current_database())"
    return "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"


async def require_writable(session: AsyncSession) -> None:
    """DatabaseUnavailable for a PostgreSQL that only reads, as a standby. On SQLite who writes has the lock."""
    if _on_postgres(session) and await session.scalar(text("SHOW transaction_read_only")) == "on":
        raise DatabaseUnavailable("it can be read and not be written: it is a standby, or was made read-only")


def job_key(job: str | None) -> int:
    """None: of all that is about no job. People, keys and rules change rarely, and one after the other."""
    return lock_key("no job" if job is None else f"job {job}")


def lock_key(name: str) -> int:
    """A name among PostgreSQL's advisory locks, which go by 64-bit numbers and are shared by a whole database."""
    return int.from_bytes(blake2b(f"holdfast {name}".encode(), digest_size=8).digest(), signed=True)


def _on_postgres(session: AsyncSession | Connection) -> bool:
    dialect = session.dialect if isinstance(session, Connection) else session.get_bind().dialect
    return dialect.name == "postgresql"
