"""Where the server stores: a SQLite file, or a PostgreSQL database."""

from __future__ import annotations

from holdfast_server.db.database import Database as Database
from holdfast_server.db.database import job_transaction as job_transaction
from holdfast_server.db.database import transaction as transaction
from holdfast_server.db.statements import DatabaseBusy as DatabaseBusy
from holdfast_server.db.statements import DatabaseClosed as DatabaseClosed
from holdfast_server.db.statements import DatabaseInUse as DatabaseInUse
from holdfast_server.db.statements import DatabaseUnavailable as DatabaseUnavailable
from holdfast_server.db.statements import Statement as Statement
from holdfast_server.db.statements import insert as insert
from holdfast_server.db.statements import lock_alerts as lock_alerts
from holdfast_server.db.statements import lock_job as lock_job
from holdfast_server.db.statements import named_jobs as named_jobs
from holdfast_server.db.statements import on_connection as on_connection
from holdfast_server.db.statements import size_bytes as size_bytes
from holdfast_server.db.statements import size_question as size_question
