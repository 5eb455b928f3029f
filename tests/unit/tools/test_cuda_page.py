"""docs/cuda.md is what the results in benchmarks/results say, and so are README and the support matrix."""

import json

import pytest

from benchmarks.cuda import page
from benchmarks.cuda.page import PAGE, ROOT
from benchmarks.cuda.results import ResultFile
from benchmarks.cuda.stages import STAGES


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page.page(page.files()), "python -m benchmarks.cuda.page writes it"


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_readme_and_the_support_matrix_say_the_same(name):
    assert page.summary(page.files()) in " ".join((ROOT / name).read_text().split())


def test_each_result_that_is_kept_is_of_a_stage():
    names = {stage.name for stage in STAGES}
    for results in page.files():
        assert len(results.runs()) >= 1
        assert {row["stage"] for row in results.rows if "stage" in row} <= names


def test_a_newer_result_replaces_an_older_one(tmp_path):
    older, newer = (
        {"stage": "every", "case": "1 GB", "values": {"overhead": x}, "met": x < 1, "note": ""} for x in (1, 0)
    )
    results = []
    for number, row in enumerate((older, newer)):
        file = tmp_path / f"{number}.jsonl"
        run = {"run": {"name": f"device {number}", "torch": "2", "at": f"2026-01-0{number + 1}", "cores": 1}}
        end = {"stage": "every", "end": "complete", "seconds": 1, "reason": ""}
        file.write_text("\n".join(map(json.dumps, (run, row, end))))
        results.append(ResultFile.read(file))
    assert "1 missed" in page.summary(results[:1])
    assert "2 times, last on one device 1 with torch 2, 2026-01-02" in page.summary(results)
    assert "1 met" in page.summary(results)
    text = page.page(results)
    assert text.index("## 2026-01-02: device 1") < text.index("## 2026-01-01: device 0")
    assert "overhead 1; MISSED" in text
