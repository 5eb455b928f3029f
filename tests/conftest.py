from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support import ram_disk

if TYPE_CHECKING:
    from tests.support.postgres import Cluster

ROOM_BYTES = 256 << 20
# Before torch is imported: OpenMP's threads spin while they wait for each other, and take the processors from the
# other tests that run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples each time, and as long as they take: neither a busy machine nor a new example is a fault of the
# change that is tested.
# The programs that tests start import `tests.support` as well.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
# Also on Python 3.14, which has another default: loaders of the tests read classes and lambdas of test functions,
# and each worker would import torch. Tests of other start methods name them.
multiprocessing.set_start_method("fork")


# What is imported and collected stays until the end: searching it for garbage takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is there by now out of all later searches for garbage."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """Where a script has put the tests in the background, Ctrl-C is ignored by them and all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# each in an environment that has what it needs
NEEDS = {"frameworks": "lightning", "torchtitan": "torchtitan", "charts": "helm_python"}
collect_ignore = [folder for folder, module in NEEDS.items() if not importlib.util.find_spec(module)]

SLOW = ("browser", "crash", "long", "postgresql", "processes")
FAST_PATH = "end_to_end/test_quick_start.py"
"""The one test with real processes in `make test`: a job that is killed, resumed and restored."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs PostgreSQL, and what belongs to `make test`."""
    here = Path(__file__).parent
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("database_kind") == "postgresql":
            item.add_marker("postgresql")
        place = item.path.relative_to(here).as_posix()
        slow = any(item.get_closest_marker(name) for name in SLOW)
        if place == FAST_PATH or (place.startswith("unit/") and not slow):
            item.add_marker("fast")
    # Playwright leaves its event loop running in a process, where no test after it can start one.
    # The files with the most tests come first among them, so that all workers have something to do to the end.
    in_browser = Counter(item.path for item in items if item.get_closest_marker("browser"))
    items.sort(key=lambda item: (item.path in in_browser, -in_browser[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile` one that gets to its end when a worker has died."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.xdist_scheduler import FileScheduler  # pytest-xdist is there

    return FileScheduler(config, log)


@pytest.fixture(autouse=True)
def _sessions_are_closed() -> Iterator[None]:
    """One that is left open has SIGTERM: told to end by a later test, it would end the tests with their grace."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if signal.getsignal(signal.SIGTERM) is not before:
        signal.signal(signal.SIGTERM, before)
        pytest.fail("a session was left open")


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory, where there is some to spare."""
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=ram_disk.place(ROOM_BYTES)) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from holdfast_server.db import Database  # most tests need no server

    database = Database(str(tmp_path_factory.mktemp("migrated") / "holdfast.db"))
    database.prepare()
    database.release()
    return database.path


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL of the tests' own; without one they are skipped, or fail where HOLDFAST_REQUIRE_POSTGRES=1."""
    from tests.support.postgres import Cluster, NoPostgres  # `make cuda-check` needs no server

    try:
        cluster = Cluster()
    except NoPostgres as error:
        if os.environ.get("HOLDFAST_REQUIRE_POSTGRES") == "1":
            pytest.fail(str(error))
        pytest.skip(f"NOTHING IS TRIED ON POSTGRESQL: {error}")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def _template(cluster: Cluster) -> str:
    """A database whose tables are there; copied, it is there at once."""
    from holdfast_migrations import upgrade
    from holdfast_server.core.settings import database_url

    name = cluster.create()
    upgrade(database_url(cluster.url(name)))
    return name


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def empty_database(database_kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server that has run before: the tables are there, which saves each test the time of making them."""
    if database_kind == "sqlite":
        folder: Path = request.getfixturevalue("fast_path")
        yield str(shutil.copy(request.getfixturevalue("migrated"), folder / "holdfast.db"))
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    name = cluster.create(request.getfixturevalue("_template"))
    yield cluster.url(name)
    cluster.drop(name)


@pytest.fixture
def new_database(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """One that nothing was ever stored in."""
    if database_kind == "sqlite":
        yield str(tmp_path / "holdfast.db")
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    name = cluster.create()
    yield cluster.url(name)
    cluster.drop(name)
