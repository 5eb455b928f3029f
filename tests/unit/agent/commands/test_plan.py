"""`holdfast plan`: what it answers, what it draws, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.pacing import FailureHistory, PacingSettings, Profile
from holdfast.pacing.failures import FailureEstimate
from holdfast.pacing.what_if import compare_intervals
from tests.support.fake_server import FakeServer, Holdfast

LLAMA_3 = ("--ranks", "16384", "--mtbf", "3.0931h", "--stall", "5s", "--lag", "2min", "--restart", "5min")


def table(output: str) -> dict[str, list[str]]:
    """The rows by name, cells as printed."""
    lines = output.splitlines()
    (start,) = (at for at, line in enumerate(lines) if "OVERHEAD" in line)
    ends = [lines[start].index(name) for name in ("EVERY", "TIME", "OVERHEAD", "ETTR", "UNSAVED", "GPU-H")]
    rows = lines[start + 1 : lines.index("", start)]
    return {
        row[: ends[0]].strip(): [row[a:b].strip() for a, b in zip(ends, [*ends[1:], None], strict=True)]
        for row in rows
        if len(row) > ends[0] and row[ends[0]].isdigit()
    }


def measured() -> dict[str, Any]:
    profile = Profile(iteration_seconds=0.25, snapshot_seconds=0.1, persist_seconds=1.5, cost_seconds=0.4)
    history = FailureHistory(
        failures=FailureEstimate(world_size=8, count=3, exposure_seconds=9e5), restart_seconds=45
    )
    found = compare_intervals(profile, PacingSettings(), history, current=20, requested=[400])
    return {
        "job": "gpt", "comparison": msgspec.to_builtins(found), "why_none": "", "held_by_hand": True,
        "failures": 3, "running_seconds": 9e5, "restarts": 2,
        "origins": {
            "mtbf_seconds": "estimated", "restart_seconds": "measured", "world_size": "measured", "budget": "set",
        },
    }  # fmt: skip


def test_the_answer_comes_first_and_is_the_published_one(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("plan", *LLAMA_3, "--policy", "checkfreq")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("The best interval is 330 iterations (5 min 30 s): 93.5 % of the time")
    said = " ".join(result.stdout.split("\n\n")[0].split())
    assert (
        "checkfreq with a budget of 3.5 % takes one every 143 (2 min 23 s): 92.5 %, as if 166 of 16,384 GPUs"
        in said
    )
    assert "GPU-hours a day behind the best." in said
    assert "the next checkpoint is durable before the next failure with a probability of 98.7 %" in said
    assert server.requests == []


def test_the_table_has_the_optimum_its_neighbours_and_every_policy(holdfast: Holdfast) -> None:
    rows = table(holdfast("plan", *LLAMA_3, "--policy", "checkfreq", "--every", "1800").stdout)
    assert rows["optimum"][:4] == ["330", "5 min 30 s", "1.52 %", "93.5 %"]
    assert rows["half the optimum"][3] == rows["twice the optimum"][3] == "92.8 %"
    assert rows["checkfreq"][0] == rows["in force"][0] == "143"
    assert rows["goodput"][0] == "330"
    assert rows["every 1,800"][:4] == ["1,800", "30 min", "0.278 %", "88.5 %"]
    assert rows["optimum"][5] == "-"


def test_what_is_over_the_budget_is_marked(holdfast: Holdfast) -> None:
    output = holdfast("plan", *LLAMA_3, "--budget", "1%").stdout
    assert "Its overhead of 1.52 % is over the budget of 1 %." in output
    assert table(output)["optimum"][2] == "1.52 % !"


def test_an_interval_shorter_than_writing_is_reported_as_longer(holdfast: Holdfast) -> None:
    output = " ".join(holdfast("plan", *LLAMA_3, "--every", "20").stdout.split())
    assert "The requested interval is 20 (20 s, actually 2 min, since writing takes longer): 92.0 %" in output


def test_the_plot_fits_80_plain_columns_and_marks_what_matters(holdfast: Holdfast) -> None:
    output = holdfast("plan", *LLAMA_3, "--policy", "checkfreq", "--every", "60").stdout
    assert output.isascii()
    assert max(map(len, output.splitlines())) <= 80
    drawn = [line for line in output.splitlines() if "|" in line]
    assert len(drawn) == 13
    picture = "\n".join(line.partition("|")[2] for line in drawn)
    assert (picture.count("O"), picture.count("X"), picture.count("+")) == (1, 1, 1)
    assert picture.count(":") >= 10
    assert picture.splitlines()[-1].count("*") < 3  # a curve that leaves the picture does not run along its edge
    assert "O optimum   X in force   + requested   : 3.5 % budget" in output
    axis = next(line for line in output.splitlines() if "10 min" in line and "1 h" in line)
    assert axis.index("10 min") < axis.index("20 min") < axis.index("1 h")
    column = next(line.index("O") for line in drawn if "O" in line)
    assert axis.index("5 min") < column < axis.index("10 min")


def test_the_curve_rises_to_the_optimum_and_falls_after_it(holdfast: Holdfast) -> None:
    drawn = [
        line.partition("|")[2].ljust(72) for line in holdfast("plan", *LLAMA_3).stdout.splitlines() if "|" in line
    ]
    heights = [next((row for row in range(13) if drawn[row][column] in "*OX"), None) for column in range(72)]
    top = next(line.index("O") for line in drawn if "O" in line)
    known = [(column, height) for column, height in enumerate(heights) if height is not None]
    before = [height for column, height in known if column <= top]
    after = [height for column, height in known if column >= top]
    assert before == sorted(before, reverse=True)
    assert after == sorted(after)


def test_options_left_out_are_reported_as_assumed(holdfast: Holdfast) -> None:
    output = holdfast("plan", "--parameters", "7B", "--ranks", "64", "--iteration", "800ms").stdout
    basis = {line[:14].strip(): line[14:] for line in output.rpartition("\n\n")[2].splitlines()}
    assert basis["state"].split("  ")[0] == "98 GB"
    assert "7B parameters of 14 bytes" in basis["state"]
    assert basis["iteration"].split()[-1] == basis["ranks"].split()[-1] == "given"
    for name in ("copying", "writing", "cost of one", "failures", "restart", "budget"):
        assert "assumed" in basis[name]
    assert "follows from size and speeds" in basis["durable after"]
    assert "measured" not in output


def test_scripts_get_the_curve_and_what_it_rests_on(holdfast: Holdfast) -> None:
    answer = json.loads(holdfast("plan", *LLAMA_3, "--json").stdout)
    assert len(answer["comparison"]["curve"]) == 60
    assert answer["comparison"]["best"]["interval"] == 330
    assert answer["comparison"]["world_size"] == 16384
    assert {"name": "failures", "value": "one in 3 h 6 min", "origin": "given"} in answer["inputs"]
    assert "measured" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "nothing to plan for"),
        (["--state", "6GB", "--mtbf", "0"], "mtbf '0' must be greater than 0"),
        (["--state", "6GB", "--mtbf", "-3h"], "mtbf '-3h'"),
        (["--state", "6GB", "--budget", "300"], "outside 0.01% to 100%"),
        (["--state", "6GB", "--budget", "-1"], "outside 0.01% to 100%"),
        (["--state", "6"], "'6' is not a size"),
        (["--state", "0GB"], "greater than 0"),
        (["--state", "6GB", "--parameters", "7B"], "use one of them"),
        (["--parameters", "405B"], "5.67 TB a rank, more than any machine has: give --ranks"),
        (["--state", "6GB", "--iteration", "0s"], "--iteration '0s' must be greater than 0"),
        (["--state", "6GB", "--write-bandwidth", "0MB/s"], "--write-bandwidth"),
        (["--state", "6GB", "--copy-bandwidth", "fast"], "is not a speed"),
        (["--state", "6GB", "--every", "0"], "interval '0' is outside"),
        (["--state", "6GB", "--policy", "astrology"], "policy 'astrology' is not one of checkfreq"),
        (["--state", "6GB", "--policy", "fixed"], "add --every 500"),
        (["--state", "6GB", "--restart", "soon"], "is not a time"),
        (["--stall", "-1s"], "--stall '-1s'"),
        (["--stall", "10ms", "--parity", "10+2"], "need the size: give --state or --parameters"),
        (["--job", "gpt", "--state", "6GB"], "--state is measured"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    holdfast: Holdfast, server: FakeServer, options: list[str], reason: str
) -> None:
    result = holdfast("plan", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert server.requests == []


def test_a_fixed_interval_is_the_one_in_force(holdfast: Holdfast) -> None:
    output = holdfast("plan", "--state", "6.5GB", "--policy", "fixed", "--every", "500").stdout
    assert "fixed takes one every 500" in output.replace("\n", " ")
    assert "requested" not in output
    assert "fixed: " not in output, "nothing decides in its place"
    rows = table(output)
    assert rows["fixed"][0] == rows["in force"][0] == "500"


def test_where_no_interval_helps_it_says_so(holdfast: Holdfast) -> None:
    output = holdfast("plan", "--stall", "10h", "--mtbf", "1h").stdout
    assert output.startswith("No interval helps: with a failure every 1 h")
    assert "best interval is" not in output


def test_a_running_job_is_planned_from_what_was_measured_of_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.plan = measured()
    result = holdfast("plan", "--job", "gpt", "--mtbf", "12h", "--budget", "2%", "--every", "400", "--ranks", "16")
    assert result.exit_code == 0, result.stderr
    (request,) = server.requests
    path, _, query = request[1].partition("?")
    assert path == "/api/v1/jobs/gpt/plan"
    assert set(query.split("&")) == {"budget=0.02", "every=400", "mtbf=43200.0", "ranks=16"}
    assert "The interval in force, set by hand, is 20 (5 s)" in result.stdout
    assert "published rate corrected by 3 failures in 10 d 10 h; 90 % between" in result.stdout
    assert table(result.stdout)["every 400"][0] == "400"
    assert "measured: without checkpoints and rare long waits; UNSAVED counts both" in result.output


def test_a_job_that_is_still_being_measured_has_no_plan(holdfast: Holdfast) -> None:
    result = holdfast("plan", "--job", "gpt")
    assert (result.exit_code, result.stderr) == (
        1,
        "holdfast: no plan yet: nothing is measured yet\n",
    )
    assert holdfast("plan", "--job", "unknown").exit_code == 1


def test_planning_needs_neither_torch_nor_a_web_stack() -> None:
    asked = "import sys, holdfast.commands.plan; print({'torch', 'numpy', 'fastapi'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


def test_simulated_runs_come_near_what_the_formula_says(holdfast: Holdfast) -> None:
    arguments = ["plan", "--ranks", "64", "--mtbf", "3h", "--stall", "5s", "--lag", "1min", "--restart", "5min"]
    output = json.loads(holdfast(*arguments, "--simulate", "--json").stdout)
    formula = {each["name"]: each["ettr"] for each in output["comparison"]["policies"]}
    simulated = {each["policy"]: each for each in output["simulated"]}
    assert {"checkfreq", "goodput", "young-daly"} <= simulated.keys()
    for name, each in simulated.items():
        assert each["ettr_low"] <= each["ettr"] <= each["ettr_high"]
        assert each["ettr"] == pytest.approx(formula[name], abs=0.01)
    assert simulated["goodput"]["checkpoints"] < simulated["checkfreq"]["checkpoints"]


def test_simulated_runs_are_shown_below_the_plot(holdfast: Holdfast) -> None:
    asked = ["plan", "--state", "80GB", "--ranks", "64", "--mtbf", "3h"]
    shown = holdfast(*asked, "--simulate").stdout
    assert "20 runs of each policy" in shown
    assert "\\n" not in shown, "a line that is wrapped is printed as lines"
    assert "LOST WORK" in shown
    assert "LOST WORK" not in holdfast(*asked).stdout


def trace_file(folder: Path, events: list[dict[str, object]]) -> str:
    path = folder / "faults.json"
    path.write_text(json.dumps(events))
    return str(path)


def fault(node: str, start: float, end: float) -> list[dict[str, object]]:
    return [
        {"node_id": node, "event_time": start, "event_type": "fault_start"},
        {"node_id": node, "event_time": end, "event_type": "fault_end"},
    ]


def test_a_recorded_trace_replaces_the_constant_rate(holdfast: Holdfast, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, [*fault("a", 1, 3), *fault("b", 6, 10)])
    asked = ["plan", "--ranks", "16", "--stall", "5s", "--restart", "1h", "--trace", trace]
    output = json.loads(holdfast(*asked, "--cluster-nodes", "2", "--json").stdout)
    assert "2 faults of 2 nodes in 10 days" in output["simulated_jobs"]
    for each in output["simulated"]:
        assert (each["failures"], each["runs"]) == (2, 1)
        assert each["waiting_share"] == pytest.approx(0.6)  # both nodes are needed: 2 and 4 of 10 days
        assert each["restart_share"] == pytest.approx(1 / 240)  # nothing is left of the trace after the second
    with_a_spare = json.loads(holdfast(*asked, "--cluster-nodes", "3", "--spares", "1", "--json").stdout)
    assert {each["waiting_share"] for each in with_a_spare["simulated"]} == {0.0}
    shown = holdfast(*asked, "--cluster-nodes", "3", "--spares", "1", "--accelerate", "2").stdout
    assert "in 5 days" in shown
    assert "needs 2 nodes and has 1 spare" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spares", "2"], "--spares is about a fault trace: give the file with --trace"),
        (["--trace", "missing.json"], "cannot read --trace missing.json: No such file"),
        (
            ["--trace", "FILE", "--trace-unit", "weeks"],
            "--trace-unit 'weeks' is unknown: give days, hours or seconds",
        ),
        (["--trace", "FILE", "--trace-level", "Flood"], "has no fault_start of the level 'Flood'"),
        (["--trace", "FILE", "--spares", "9"], "1 nodes and 9 spares do not fit into a cluster of 2 nodes"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(
    holdfast: Holdfast, tmp_path: Path, options: list[str], words: str
) -> None:
    trace = trace_file(tmp_path, [*fault("a", 1, 3), *fault("b", 6, 10)])
    given = [trace if option == "FILE" else option for option in options]
    result = holdfast("plan", "--ranks", "8", "--stall", "5s", *given)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


COCI = ("--state", "6.5GB", "--iteration", "1s", "--write-budget", "500GB/day", "--policy", "coci")


def test_coci_is_compared_with_even_spacing_at_equal_writes(holdfast: Holdfast) -> None:
    done = holdfast("plan", *COCI, "--total", "1000000", "--loss-falls-to", "1%")
    said = " ".join(done.stdout.split())
    assert "coci: for the least progress lost with a write budget of 500 GB/day: 890 checkpoints" in said
    assert (
        "That is 890 checkpoints in total, against 889 with even spacing. Relative to even spacing, a failure "
        "loses 0.7" in said
    )
    found = json.loads(holdfast("plan", *COCI, "--total", "1000000", "--loss-falls-to", "1%", "--json").stdout)
    assert found["placement"]["lost_progress"] < 0.8
    assert set(found["placement"]["ended_early"]) == {"0.25", "0.5", "0.75"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--total", "9"), "--total and --loss-falls-to belong together"),
        (("--policy", "coci", "--loss-falls-to", "1%"), "--total and --loss-falls-to belong together"),
        (("--policy", "coci", "--total", "9", "--loss-falls-to", "0%"), "give more than 0 and less than 100%"),
        (("--policy", "coci", "--total", "9", "--loss-falls-to", "far"), "--loss-falls-to 'far' is not a share"),
    ],
)
def test_options_of_coci_that_make_no_sense_are_refused(holdfast: Holdfast, options, why) -> None:
    done = holdfast("plan", *options)
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
