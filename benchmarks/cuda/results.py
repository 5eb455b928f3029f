"""Results as lines of JSON, written as they come, so that a run that is cut off loses nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .stages import STAGES

Row = dict[str, Any]


@dataclass(slots=True)
class ResultFile:
    """Rows of one or several runs: facts of a run, cases, and how a stage ended."""

    path: Path
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        """Read a file; a last line that was cut off is left out. Without a file there are no rows."""
        rows = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return cls(path, rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def cases(self, stage: str) -> dict[str, Row]:
        """Return the newest row of each case; a failure only where nothing else is known."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.get("stage") == stage and "case" in row:
                before = found.get(row["case"])
                if "error" not in row or before is None or "error" in before:
                    found[row["case"]] = row
        return found

    def done(self, stage: str) -> list[str]:
        return [name for name, row in self.cases(stage).items() if "error" not in row]

    def end(self, stage: str) -> Row | None:
        return next((row for row in reversed(self.rows) if row.get("stage") == stage and "end" in row), None)

    def runs(self) -> list[Row]:
        return [row["run"] for row in self.rows if "run" in row]


def status_of(results: ResultFile, stage: str) -> str:
    """Return `not run`, `met`, `MISSED` or `without a goal`, and whether a stage is incomplete."""
    cases, end = results.cases(stage).values(), results.end(stage)
    if not cases:
        return f"not run: {end['reason']}" if end and end.get("reason") else "not run"
    verdicts = [False if "error" in row else row["met"] for row in cases]
    what = "MISSED" if False in verdicts else "met" if True in verdicts else "without a goal"
    is_whole = end is not None and end["end"] in ("complete", "failed")
    return what if is_whole else f"{what}, incomplete"


def figures_of(results: ResultFile) -> dict[str, Any]:
    """Return the values of all cases, named `stage.case.value`, with whether each goal is met."""
    figures: dict[str, Any] = {}
    for stage in STAGES:
        for case, row in results.cases(stage.name).items():
            name = f"{stage.name}.{case}".replace(" ", "_")
            figures |= {f"{name}.{key}": value for key, value in row.get("values", {}).items()}
            figures[f"{name}.met"] = False if "error" in row else row["met"]
    return figures


def table_of(results: ResultFile) -> list[str]:
    """Return the lines of the table: a stage each, with its cases below it."""
    lines = [f"{'stage':<10} {'status':<26} {'seconds':>8}  goal"]
    for stage in STAGES:
        end = results.end(stage.name)
        seconds = f"{end['seconds']:.0f}" if end and "seconds" in end else "-"
        lines.append(f"{stage.name:<10} {status_of(results, stage.name):<26.60} {seconds:>8}  {stage.goal}")
        lines += [f"  {case}: {describe(row)}" for case, row in results.cases(stage.name).items()]
    return lines


def describe(row: Row) -> str:
    """Describe the result of a case in one line."""
    if "error" in row:
        return f"failed: {row['error']}"
    values = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in row["values"].items())
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    return "; ".join(filter(None, (values, row.get("note", ""), verdict)))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
