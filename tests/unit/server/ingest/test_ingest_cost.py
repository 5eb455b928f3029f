"""What taking in a batch costs the database: the same after hundreds of batches as after a few."""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from holdfast_server.db import on_connection
from tests.support import database_queries
from tests.support.postgres import ON_SQLITE

ITERATIONS = 100
STEPS = 10
"""Of the database, counted as one."""
LITTLE_MORE = 1.3
"""Trees grow deeper, and some batches complete more buckets than others; to go through rows grows with them."""


@ON_SQLITE
def test_a_batch_takes_as_many_steps_after_hundreds_of_them(client, agent):
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def watch(session: Session) -> None:
        def of_the_writer(connection: Connection) -> None:
            connection.connection.driver_connection.set_progress_handler(step, STEPS)

        on_connection(session, of_the_writer)

    agent.start()
    agent.train(ITERATIONS)
    database_queries.of(client).write(watch)

    def steps_of(batches: int) -> float:
        nonlocal steps
        steps = 0
        for _ in range(batches):
            agent.train(ITERATIONS)
        return steps / batches

    few = steps_of(50)
    steps_of(200)
    assert few > 10
    assert steps_of(50) < LITTLE_MORE * few
