"""Pinned checkpoints outlive retention: with a server, and after a restart without one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client import Client
from holdfast.store import open_store
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, environment, known, spawned

pytestmark = pytest.mark.processes

JOB, EVERY = "pinned", 5
UNDER_WAY = ("snapshot", "persisting")


def holdfast(server: str, store: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*HOLDFAST, *arguments], capture_output=True, text=True, env=environment(store, server), check=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    return done.stdout


def train(folder: Path, server: str = "") -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    trainer = [sys.executable, str(TRAINER), str(folder / "ledger.txt"), "--job", JOB, "--epochs", "100000",
               "--every", str(EVERY), "--slowly"]  # fmt: skip
    env = environment(folder / "store", server) | {"HOLDFAST_KEEP": "2"}
    return spawned(trainer, folder / "trainer.log", env)


def test_pinned_checkpoints_outlive_retention_and_a_restart_with_no_server_until_they_are_unpinned(
    server: Client, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")

    def kept() -> list[str]:
        return store.checkpoints(JOB)

    def six_later(checkpoint: str) -> None:
        """Retention has been at work since: more were taken than it keeps."""
        since = int(checkpoint[:12]) + 6 * EVERY
        eventually(lambda: any(int(each[:12]) >= since for each in kept()), f"six checkpoints after {checkpoint}")

    with train(tmp_path, server.server) as running:
        eventually(
            lambda: (job := known(server, JOB)) is not None and job.checkpoints_total >= 2, "two checkpoints"
        )
        # retention would have taken any of them before a command has started
        paused = server.edit(JOB, paused=True).version
        eventually(lambda: server.job(JOB).applied_version >= paused, "the pause to be applied")
        eventually(
            lambda: all(row.state not in UNDER_WAY for row in server.checkpoints(JOB)), "the last one to settle"
        )
        let_go, pinned = kept()[-2:]
        server.pin(JOB, let_go)
        assert json.loads(holdfast(server.server, tmp_path / "store", "pin", JOB, pinned, "--json"))["applied"]
        server.edit(JOB, paused=False)
        six_later(pinned)
        assert {let_go, pinned} < set(kept())
        server.pin(JOB, let_go, pinned=False)
        eventually(lambda: let_go not in kept(), "retention to take what is pinned no more")
        running.kill()

    with train(tmp_path) as running:  # nothing but the store says what is pinned
        six_later(kept()[-1])
        assert pinned in kept()
        running.kill()
