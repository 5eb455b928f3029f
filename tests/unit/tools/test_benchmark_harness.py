"""The options of a benchmark are the parameters of its function."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from benchmarks import harness


def example(
    file: Path,
    rounds: int = 3,
    sizes: list[float] = [0.5],  # noqa: B006 - not changed
    only: list[Literal["a", "b"]] | None = None,
    mode: Literal[1, 2] = 1,
    quick: bool = False,
    hour: bool = True,
) -> None:
    """Do something.

    Args:
        rounds: of 100 %
        hour: leave out
            the hour
    """


def parsed(*words: str) -> dict[str, object]:
    return vars(harness.parser_of(example).parse_args(["file", *words]))


def test_defaults_are_those_of_the_function():
    assert parsed() == {
        "file": Path("file"), "rounds": 3, "sizes": [0.5], "only": None, "mode": 1, "quick": False, "hour": True,
    }  # fmt: skip


def test_options_have_the_types_of_the_parameters():
    found = parsed(
        "--rounds", "2", "--sizes", "1,2", "3", "--only=a", "--only", "b", "--mode", "2", "--no-hour", "--quick"
    )
    assert found == {
        "file": Path("file"), "rounds": 2, "sizes": [1, 2, 3], "only": ["a", "b"], "mode": 2, "quick": True,
        "hour": False,
    }  # fmt: skip


@pytest.mark.parametrize("words", [["--only", "c"], ["--sizes", "x"], ["--mode", "3"]])
def test_other_values_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert words[0] in capsys.readouterr().err


def test_help_has_the_descriptions_of_the_docstring():
    text = harness.parser_of(example).format_help()
    assert "of 100 %" in text
    assert "leave out the hour" in text
    assert "{a,b}" in text


def test_numbers_are_rounded_at_any_depth():
    assert harness.rounded({"a": 1 / 3, "b": {"c": 2 / 3, "d": 1}}) == {"a": 0.33333, "b": {"c": 0.66667, "d": 1}}


def test_functions_are_called_in_turns():
    calls: list[str] = []
    first, second = harness.in_turns(2, lambda: calls.append("a"), lambda: calls.append("b"))
    assert calls == ["a", "b", "a", "b"]
    assert (len(first), len(second)) == (2, 2)


def test_a_table_is_aligned_with_its_head(capsys: pytest.CaptureFixture[str]):
    table = harness.Table({"name  ": "", "seconds": ".1f"})
    table.row("a", 1.25)
    table.row("b", None)
    assert capsys.readouterr().out.splitlines() == ["name    seconds", "a           1.2", "b             –"]
