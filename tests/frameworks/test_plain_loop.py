"""The plain loop, as the measure for the adapters."""

from benchmarks.integrations.kills import compare, run


def test_a_plain_loop_resumes_exactly(tmp_path):
    uninterrupted = run("plain", "holdfast", tmp_path / "uninterrupted")
    killed = run("plain", "holdfast", tmp_path / "killed", kills=2, seed=1)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == 2
    assert result.exact, result
