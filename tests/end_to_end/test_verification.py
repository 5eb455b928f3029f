"""Checkpoints that are read back on demand, while their job trains and when it does not run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client import Client, Conflict
from tests.support.edited_manifests import decode_manifest
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, environment, known, spawned

pytestmark = pytest.mark.processes

JOB = "verified"
UNDER_WAY = ("snapshot", "persisting")


def verify(server: Client, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*HOLDFAST, "verify", JOB, *arguments]
    env = environment(folder / "store", server.server)
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=PATIENCE_SECONDS)


def train(folder: Path, server: Client) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    trainer = [sys.executable, str(TRAINER), str(folder / "ledger.txt"), "--job", JOB, "--epochs", "100000",
               "--every", "5", "--slowly"]  # fmt: skip
    return spawned(trainer, folder / "trainer.log", environment(folder / "store", server.server))


def damage(folder: Path, checkpoint: str) -> str:
    """Flip one bit of a tensor of a stored checkpoint; the tensor's name."""
    place = folder / "store" / JOB / checkpoint
    tensors = decode_manifest((place / "manifest.json").read_bytes()).tensors
    tensor = max(tensors, key=lambda each: each.end - each.start)
    with open(place / tensor.file, "r+b") as file:
        file.seek(tensor.start)
        byte = file.read(1)[0]
        file.seek(tensor.start)
        file.write(bytes([byte ^ 1]))
    return tensor.name


def test_a_job_reads_its_checkpoints_back_beside_its_training_and_at_its_next_start(
    server: Client, tmp_path: Path
) -> None:
    with train(tmp_path, server) as running:
        eventually(
            lambda: (job := known(server, JOB)) is not None and job.checkpoints_total >= 4, "four checkpoints"
        )
        paused = server.edit(JOB, paused=True).version  # so that retention takes none of them
        eventually(lambda: server.job(JOB).applied_version >= paused, "the pause to be applied")
        eventually(
            lambda: all(row.state not in UNDER_WAY for row in server.checkpoints(JOB)), "the last one to settle"
        )
        newest, before, third = (row.id for row in server.checkpoints(JOB)[:3])

        began = server.job(JOB).iteration
        sound = verify(server, tmp_path, newest, "--against", before, "--json")
        assert sound.returncode == 0, sound.stderr
        told = json.loads(sound.stdout)
        assert (told["state"], told["asked_by"]) == ("sound", "operator")
        assert told["read_bytes"] > 0
        eventually(lambda: server.job(JOB).iteration > began, "training to go on")
        table = server.tensors(JOB, newest, other=before)
        assert table.measure == "difference"
        weights = {row.name: row for row in table.rows}["model.0.weight"]
        assert weights.elements == 96
        assert weights.distance is not None
        assert 0 < weights.distance < weights.norm

        tensor = damage(tmp_path, before)
        found = verify(server, tmp_path, before)
        assert found.returncode == 1
        assert (
            f"{before} is damaged: rank-0.safetensors: tensor {tensor} does not match its digest" in found.stderr
        )
        rows = {row.id: row for row in server.checkpoints(JOB)}
        assert (rows[before].state, rows[before].restorable) == ("damaged", False)
        with pytest.raises(Conflict):
            server.restore(JOB, checkpoint=before)
        assert any(notice.code == "damaged" and tensor in notice.message for notice in server.notices(JOB))
        running.kill()
        running.wait()

    eventually(lambda: not server.job(JOB).alive, "the server to miss the job")
    waits = verify(server, tmp_path, third)
    assert waits.returncode == 0
    assert "is not running and verifies it at its next start" in waits.stdout
    with train(tmp_path, server) as running:
        eventually(lambda: server.verification(JOB, third).state == "sound", "the next start to read it")
        running.kill()
