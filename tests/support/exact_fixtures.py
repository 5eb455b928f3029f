"""Fixtures for tests of exact resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support import exact_job
from tests.support.fork_server import ForkServer
from tests.support.multi_rank import RankLauncher
from tests.support.training_log import Log

Undisturbed = Callable[..., Log]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The log of a run that nothing interrupts, by accumulation and by where an iteration ends."""
    known: dict[tuple[int, bool], Log] = {}

    def log(accumulation: int, across: bool) -> Log:
        if (accumulation, across) not in known:
            store = tmp_path_factory.mktemp("undisturbed")
            job = exact_job.ExactJob(store, accumulation=accumulation, across=across, every=10**9).run()
            known[accumulation, across] = job.crash().log
        return known[accumulation, across]

    return log


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer("tests.support.exact_job_process")
    yield fork_server
    fork_server.close()


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """As many as the processes that are killed have: sums are made in another order with others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankLauncher]:
    launcher = RankLauncher("tests.support.exact_multi_rank_workloads")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def undisturbed_ranks(ranks: RankLauncher) -> Callable[..., list[Log]]:
    """The logs of a job's ranks that nothing interrupts, by rank."""
    known: dict[str, list[Log]] = {}

    def logs(kind: str, world_size: int, **options: Any) -> list[Log]:
        key = f"{kind} {world_size} {options}"
        if key not in known:
            known[key] = ranks.run(
                world_size, "tests.support.exact_multi_rank_workloads.undisturbed", kind=kind, **options
            )
        return known[key]

    return logs
