"""Free and total space of stores by their id, not by an address, which several stores may have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "store_disks",
        sa.Column("store", sa.String(), nullable=False),
        sa.Column("day", _NUMBER, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("free_bytes", _NUMBER, nullable=False),
        sa.Column("total_bytes", _NUMBER, nullable=True),
        sa.PrimaryKeyConstraint("store", "day", name="pk_store_disks"),
    )
    op.execute(
        "INSERT INTO store_disks (store, day, at, free_bytes) "
        "SELECT stores.id, account_stores.day, account_stores.at, account_stores.free_bytes "
        "FROM account_stores JOIN stores ON stores.address = account_stores.store "
        "WHERE (SELECT count(*) FROM stores AS same WHERE same.address = account_stores.store) = 1"
    )
    op.execute(
        "INSERT INTO store_disks (store, day, at, free_bytes) "
        "SELECT id, CAST(at AS BIGINT) / 86400 * 86400, at, free_bytes FROM stores "
        "WHERE free_bytes IS NOT NULL AND NOT EXISTS (SELECT 1 FROM store_disks AS known "
        "WHERE known.store = stores.id AND known.day = CAST(stores.at AS BIGINT) / 86400 * 86400)"
    )
    op.drop_table("account_stores")
    op.drop_column("stores", "free_bytes")
