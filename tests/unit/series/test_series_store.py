"""The store of a series: order, tiers, reports, errors."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast_series import (
    Half,
    NoSuchStep,
    Raw,
    SeriesStore,
    SeriesStoreClosed,
    SeriesStoreFull,
    StreamingPCA,
    Zfp,
)


def wave(step: int, side: int = 32) -> Tensor:
    row, column = torch.meshgrid(*(torch.linspace(0, 6, side),) * 2, indexing="ij")
    return torch.sin(row + 0.2 * step) * torch.cos(column - 0.1 * step)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_states_come_back_newest_first() -> None:
    with SeriesStore() as store:
        for step in (3, 4, 7):
            store.put(step, wave(step))
        found = list(reversed(store))
        assert [step for step, _ in found] == [7, 4, 3]
        assert all(torch.equal(state, wave(step)) for step, state in found)


def test_a_state_is_a_copy_on_both_sides() -> None:
    with SeriesStore() as store:
        state = wave(0)
        store.put(0, state)
        state.zero_()
        store.get(0).fill_(7)
        assert torch.equal(store.get(0), wave(0))


def test_a_state_put_again_replaces_the_first_and_is_the_newest() -> None:
    with SeriesStore(memory="100kB") as store:
        for step in (0, 1, 0):
            store.put(step, wave(step + len(store)))
        assert [step for step, _ in reversed(store)] == [0, 1]
        assert torch.equal(store.get(0), wave(2))
        assert store.report().memory_bytes == store.report().raw_bytes == 2 * 4096


def test_the_oldest_states_go_to_the_disk(tmp_path: Path) -> None:
    with SeriesStore(memory="10kB", store=tmp_path) as store:
        for step in range(8):
            store.put(step, wave(step))
        report = store.report()
        assert (report.memory_bytes, report.disk_bytes) == (2 * 4096, 6 * 4096)
        assert all(torch.equal(state, wave(step)) for step, state in reversed(store))


@pytest.mark.parametrize("codec", ["raw", "half", "zfp", "sz3", StreamingPCA(train_states=2)])
def test_payloads_of_each_kind_come_back_from_the_disk(tmp_path: Path, codec: Any) -> None:
    with SeriesStore(codec=codec, memory="1B", store=tmp_path) as store:
        for step in range(5):
            store.put(step, wave(step))
        assert store.report().memory_bytes == 0
        tolerance = StreamingPCA().tolerance
        assert all(float((state - wave(step)).abs().max()) <= tolerance for step, state in reversed(store))


def test_the_file_has_no_name_and_is_gone_when_the_store_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    store = SeriesStore(memory="1B", store=tmp_path)
    store.put(0, wave(0))
    assert list(tmp_path.iterdir()) == []
    store.close()
    store.close()
    assert descriptors() == before


def test_space_on_the_disk_is_used_again(tmp_path: Path) -> None:
    with SeriesStore(memory="1B", store=tmp_path) as store:
        for _ in range(3):
            for step in range(4):
                store.put(step, wave(step))
            store.clear()
        assert store._tiers._file is not None
        assert os.fstat(store._tiers._file._file.fileno()).st_size == 4 * 4096


def test_a_full_store_says_what_to_do_and_keeps_what_it_has() -> None:
    with SeriesStore(memory="5kB") as store:
        store.put(0, wave(0))
        with pytest.raises(SeriesStoreFull, match=r"memory=5 kB .* store="):
            store.put(1, wave(1))
        assert [step for step, _ in reversed(store)] == [0]
        assert store.report().memory_bytes == 4096


def test_a_full_disk_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with SeriesStore(memory="5kB", store=tmp_path) as store:
        store.put(0, wave(0))
        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(SeriesStoreFull, match=rf"no space left .* store='{tmp_path}'"):
            store.put(1, wave(1))
        assert torch.equal(store.get(0), wave(0))
        assert len(store) == 1


def test_an_unknown_step_names_the_steps_that_are_there() -> None:
    with SeriesStore() as store:
        with pytest.raises(NoSuchStep, match="no state of step 3: it is empty"):
            store.get(3)
        store.put(5, wave(5))
        store.put(9, wave(9))
        with pytest.raises(LookupError, match="no state of step 3: it holds steps 5 to 9"):
            store.get(3)


def test_a_closed_store_says_so() -> None:
    store = SeriesStore()
    store.put(0, wave(0))
    store.close()
    for act in (lambda: store.put(1, wave(1)), lambda: store.get(0), store.report, store.clear):
        with pytest.raises(SeriesStoreClosed, match="closed"):
            act()


def test_arguments_without_a_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"codec='zip' is unknown: write one of raw, half, zfp.*extra `codecs`"):
        SeriesStore(codec="zip")
    with pytest.raises(ValueError, match="memory"):
        SeriesStore(memory="much")
    with pytest.raises(ValueError, match=r"store=.* is not a writable directory"):
        SeriesStore(store=tmp_path / "none")


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zfpy", None)
    with pytest.raises(ImportError, match=r"codec 'zfp' needs zfpy: pip install zfpy, .*extra `codecs`"):
        SeriesStore(codec="zfp")


def test_the_report_counts_what_was_done() -> None:
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with SeriesStore(codec=StreamingPCA(1e-2, latents=4, train_states=2)) as store:
        for step in range(5):
            store.put(step, wave(step, 64))
        store.put(5, noise)
        store.put(6, torch.arange(10))
        store.put(7, torch.zeros(64, 64))
        report = store.report()
        assert (report.puts, report.states, report.learned_from, report.exact) == (8, 8, 2, 1)
        assert (report.half_fallbacks, report.raw_fallbacks) == (1, 0)
        assert 0 < report.largest_error <= 1e-2
        assert report.codec_bytes == 4 * 64 * 4
        held = report.memory_bytes + report.codec_bytes
        assert report.ratio == pytest.approx(report.raw_bytes / held)
        store.clear()
        assert (store.report().puts, store.report().states, store.report().raw_bytes) == (0, 0, 0)


def test_states_of_zeros_take_no_space() -> None:
    with SeriesStore(codec=Half()) as store:
        store.put(0, torch.zeros(3, 5, dtype=torch.float64))
        assert store.report().memory_bytes == 0
        assert torch.equal(store.get(0), torch.zeros(3, 5, dtype=torch.float64))


def test_threads_share_a_store() -> None:
    start = threading.Barrier(4)

    def use(number: int) -> bool:
        start.wait()
        for step in range(number, 200, 4):
            store.put(step, wave(step))
        return all(torch.equal(store.get(step), wave(step)) for step in range(number, 200, 4))

    with SeriesStore(codec=Raw(), memory="100kB", store="/tmp") as store, ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(4)))
        assert store.report().states == 200


def test_a_codec_serves_another_store_after_it_learned() -> None:
    codec = StreamingPCA(3e-2, train_states=3)
    for expected in (3, 0):
        with SeriesStore(codec=codec) as store:
            for step in range(6):
                store.put(step, wave(step))
            assert store.report().learned_from == expected


def test_zfp_takes_fields_of_any_number_of_dimensions() -> None:
    with SeriesStore(codec=Zfp(1e-2)) as store:
        for step, shape in enumerate([(), (1,), (70,), (9, 11), (3, 9, 11), (2, 1, 3, 9, 11), (1, 1)]):
            state = torch.linspace(-2, 3, torch.Size(shape).numel()).view(shape)
            store.put(step, state)
            assert store.get(step).shape == state.shape
            assert float((store.get(step) - state).abs().max()) <= 3e-2
