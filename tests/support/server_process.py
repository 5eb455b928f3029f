"""The server as a workload of a fork server."""

from __future__ import annotations

import gc
import os
import sys

import psycopg  # noqa: F401 - as what follows, what a server imports when it starts
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.dialects.sqlite.pysqlite  # noqa: F401
import typer
import uvloop  # noqa: F401

from holdfast_server.serve import serve
from holdfast_web.job import routes  # noqa: F401
from tests.support.fork_server import WorkloadChannel


def live(stage: WorkloadChannel, arguments: list[str], environment: dict[str, str]) -> None:
    """As `python -m holdfast_server`, from its arguments to its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["holdfast_server", *arguments]
    try:
        typer.run(serve)
    except SystemExit as end:
        gc.collect()  # what is left half done says so, as at the end of any process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
