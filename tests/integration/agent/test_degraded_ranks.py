"""A degraded restore of several ranks, of which one has lost bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint import restore
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.store import Lineage, open_store
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher


@pytest.fixture
def damaged(launcher: RankLauncher, tmp_path: Path) -> str:
    """The newest checkpoint, in which a low byte of a number that only rank 1 holds has changed."""
    launcher.run(2, "tests.support.degraded_workloads.save", root=str(tmp_path))
    store = open_store(tmp_path)
    newest = max(store.checkpoints("job"))
    manifest = restore.manifest(store, "job", newest)
    (tensor,) = (each for each in manifest.tensors if each.rank == 1 and each.name.startswith("own."))
    path = tmp_path / "job" / newest / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.start] ^= 0xFF
    path.write_bytes(data)
    return newest


def test_what_one_rank_has_lost_makes_the_lineage_of_all_inexact(
    launcher: RankLauncher, damaged: str, tmp_path: Path
) -> None:
    found = launcher.run(
        2, "tests.support.degraded_workloads.resume", root=str(tmp_path), checkpoint=damaged, degraded=True
    )
    (*first, exact), (*second, replaced) = found
    assert first == second == [parse_checkpoint_id(damaged)[0], 2]
    assert exact == [float(n) for n in range(4096)]
    assert replaced != [float(n + 1) for n in range(4096)]
    assert all(abs(weight - n - 1) <= n + 1 for n, weight in enumerate(replaced)), "the important bytes are exact"
    store = open_store(tmp_path)
    assert [each.inexact for each in store.records("job", Lineage)] == [None, damaged]
    marked = {each: restore.manifest(store, "job", each).inexact for each in store.checkpoints("job")}
    assert {parse_checkpoint_id(each)[1]: inexact for each, inexact in marked.items()} == {1: None, 2: damaged}


def test_an_order_that_is_not_degraded_uses_it_on_no_rank(
    launcher: RankLauncher, damaged: str, tmp_path: Path
) -> None:
    found = launcher.run(
        2, "tests.support.degraded_workloads.resume", root=str(tmp_path), checkpoint=damaged, degraded=False
    )
    assert all(iteration < parse_checkpoint_id(damaged)[0] for iteration, _, _ in found)
    assert {each.inexact for each in open_store(tmp_path).records("job", Lineage)} == {None}
