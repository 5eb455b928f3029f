"""Real stages of a pipeline report to a real server what the last of them measures."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from holdfast.checkpoint import restore
from holdfast.client import Client
from holdfast.store import open_store
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher

pytestmark = pytest.mark.processes


def test_the_loss_of_the_last_stage_is_that_of_the_job(
    launcher: RankLauncher, server: Client, tmp_path: Path
) -> None:
    trained = launcher.run(
        2, "tests.support.pipeline_workloads.train", store=str(tmp_path), server=server.server, per_rank=2
    )
    packed = trained[1]["losses"].items()
    losses = {int(iteration): struct.unpack("<d", bytes.fromhex(loss))[0] for iteration, loss in packed}
    assert trained[0]["losses"] == {}
    (series,) = server.timeline("job").series
    assert dict(zip(series.iteration, series.metrics["loss"].mean, strict=True)) == losses
    store = open_store(str(tmp_path))
    newest = restore.manifest(store, "job", store.checkpoints("job")[-1]).metrics["loss"]
    assert newest.value == losses[newest.iteration]
