"""Accelerate: a killed job continues exactly, in the middle of an epoch and of an accumulation of gradients."""

from __future__ import annotations

from benchmarks.integrations.kills import compare, run


def test_a_job_of_accelerate_resumes_exactly_in_mid_epoch(tmp_path):
    uninterrupted = run("accelerate", "holdfast", tmp_path / "uninterrupted")
    killed = run("accelerate", "holdfast", tmp_path / "killed", kills=5, seed=2)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == 5
    assert result.exact, result
