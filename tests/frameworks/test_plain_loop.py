"""The plain loop, as the measure for the adapters."""

import pytest

from benchmarks.integrations.kills import compare, run


@pytest.mark.parametrize("kills", [5])
def test_a_plain_loop_resumes_exactly(tmp_path, kills):
    uninterrupted = run("plain", "holdfast", tmp_path / "uninterrupted")
    killed = run("plain", "holdfast", tmp_path / "killed", kills=kills, seed=1)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == kills
    assert result.exact, result
