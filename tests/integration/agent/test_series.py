"""The store of a series in processes that fork and are killed; its benchmark and its example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.series import __main__ as bench
from holdfast_series import SeriesStore, SeriesStoreClosed

ROOT = Path(__file__).resolve().parents[3]
KILLED = """
import os, signal, sys, torch
from holdfast_series import SeriesStore
store = SeriesStore(memory="1B", store=sys.argv[1])
store.put(0, torch.ones(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_reads_and_puts_nothing(tmp_path: Path) -> None:
    with SeriesStore(memory="5kB", store=tmp_path) as store:
        for step in range(3):
            store.put(step, torch.full((1000,), float(step)))
        if not (child := os.fork()):
            works = all(bool((store.get(step) == step).all()) for step in range(3))
            try:
                store.put(3, torch.ones(1000))
            except SeriesStoreClosed as error:
                works = works and "parent process" in str(error)
            else:
                works = False
            os._exit(0 if works else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bool((store.get(0) == 0).all())


def test_the_example_inverts() -> None:
    command = [sys.executable, ROOT / "examples/seismic_inversion.py", "--side", "40", "--steps", "260"]
    ended = subprocess.run([*command, "--iterations", "3"], capture_output=True, text=True, check=True)
    misfits = [float(line.split("misfit ")[1].split(",")[0]) for line in ended.stdout.splitlines()]
    assert len(misfits) == 3
    assert misfits[-1] < misfits[0]


def test_the_benchmark_returns_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [method for method in bench.methods() if not method.name.startswith("every 8th")]
    small[-1].codec.iterations = small[-2].codec.iterations = 3  # type: ignore[attr-defined]
    monkeypatch.setattr(bench, "methods", lambda: small)
    flush = torch.set_flush_denormal(False)
    try:
        figures = bench.main(side=40, steps=90, rounds=1)
    finally:
        assert flush
        torch.set_flush_denormal(False)
    assert figures["bound_violations"] == 0
    assert {"autoencoder_ratio", "gradient_error", "gradient_speedup_vs_revolve"} <= figures.keys()
