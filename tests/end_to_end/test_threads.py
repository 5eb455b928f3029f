"""The agent's threads are few, long-lived and named; docs/internals/threads.md lists them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support import SUPPORT
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.job_processes import environment, spawned
from tests.support.object_servers import moto as moto
from tests.support.object_servers import variables

HERE = SUPPORT
DOCUMENT = HERE.parents[1] / "docs" / "internals" / "threads.md"
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


@pytest.mark.processes
@pytest.mark.parametrize("case", ["alone", "with a server", "with S3", "4 ranks and a server"])
def test_500_iterations_start_a_few_named_threads(
    tmp_path: Path, server: Client, request: pytest.FixtureRequest, case: str
) -> None:
    ranks = 4 if case.startswith("4") else 1
    env = environment(tmp_path / "store", server.server if "server" in case else "") | {"OMP_NUM_THREADS": "1"}
    if "S3" in case:
        env |= variables(request.getfixturevalue("moto").address) | {"HOLDFAST_STORE": "s3://bucket/threads"}
    command = [sys.executable]
    if ranks > 1:
        command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(ranks)]
    with spawned(
        [*command, str(HERE / "thread_recording_trainer.py"), str(tmp_path)], tmp_path / "log", env
    ) as run:
        assert run.wait(PATIENCE_SECONDS) == 0
    listed = set(LISTED.findall(DOCUMENT.read_text()))
    for threads in threads_of(tmp_path, ranks):
        assert set(threads) <= listed
        assert threads.total() <= MOST_STARTED
