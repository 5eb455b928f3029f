"""Loaders of other libraries that have a position of their own, in a loop that is killed."""

import pytest

from benchmarks.integrations.kills import compare, run


@pytest.mark.parametrize(
    ("loader", "workers"), [("torchdata", 0), ("mosaic", 0), ("mosaic", 2), ("grain", 1), ("grain-dataset", 0)]
)
def test_a_loader_of_another_library_resumes_exactly(tmp_path, loader, workers):
    arguments = ["--loader", loader, "--workers", str(workers)]
    uninterrupted = run("stateful_loader", "holdfast", tmp_path / "uninterrupted", arguments=arguments)
    killed = run("stateful_loader", "holdfast", tmp_path / "killed", kills=2, seed=1, arguments=arguments)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == 2
    assert result.exact, result
