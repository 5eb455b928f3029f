"""The agent's threads are few, long-lived and named; docs/internals/threads.md lists them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support import SUPPORT
from tests.support.fork_server import ForkServer
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher
from tests.support.object_servers import moto as moto
from tests.support.object_servers import variables

TRAINER = "tests.support.thread_recording_trainer"
DOCUMENT = SUPPORT.parents[1] / "docs" / "internals" / "threads.md"
LISTED = re.compile(r"^\| `(holdfast-[a-z-]+?)(?:-N)?` ", re.MULTILINE)
MOST_STARTED = 20
"""In 500 iterations with up to 100 checkpoints: what starts one for each message or checkpoint starts far more."""


def threads_of(folder: Path, ranks: int) -> list[Counter[str]]:
    """The agent's threads of each rank, their numbers left out."""
    found = []
    for rank in range(ranks):
        names = json.loads((folder / f"threads-{rank}.json").read_text())
        ours = (re.sub(r"[-_]\d+$", "", name) for name in names if name.startswith("holdfast"))
        found.append(Counter(ours))
    return found


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer(TRAINER)
    yield fork_server
    fork_server.close()


@pytest.mark.processes
@pytest.mark.parametrize("case", ["alone", "with a server", "with S3", "4 ranks and a server"])
def test_500_iterations_start_a_few_named_threads(
    tmp_path: Path,
    server: Client,
    fork_server: ForkServer,
    launcher: RankLauncher,
    request: pytest.FixtureRequest,
    case: str,
) -> None:
    ranks = 4 if case.startswith("4") else 1
    told = {
        "HOLDFAST_STORE": str(tmp_path / "store"),
        "HOLDFAST_SERVER": server.server if "server" in case else "",
    }
    if "S3" in case:
        told |= variables(request.getfixturevalue("moto").address) | {"HOLDFAST_STORE": "s3://bucket/threads"}
    options = {"folder": str(tmp_path), "variables": told}
    if ranks > 1:
        launcher.run(ranks, f"{TRAINER}.train", **options)
    else:
        with fork_server.spawn(f"{TRAINER}.live", tmp_path / "log", **options) as process:
            assert process.run() == 0, process.account()
    listed = set(LISTED.findall(DOCUMENT.read_text()))
    for threads in threads_of(tmp_path, ranks):
        assert set(threads) <= listed
        assert threads.total() <= MOST_STARTED
