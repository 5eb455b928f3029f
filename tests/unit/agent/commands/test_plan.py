"""`holdfast plan`: what it answers, what it draws, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from holdfast.pacing import History, Profile, Settings
from holdfast.pacing.failures import Failures
from holdfast.pacing.what_if import outlook
from tests.support.fake_server import FakeServer, Holdfast

LLAMA_3 = ("--ranks", "16384", "--mtbf", "3.0931h", "--stall", "5s", "--lag", "2min", "--restart", "5min")


def table(told: str) -> dict[str, list[str]]:
    """The rows by name, cells as printed."""
    lines = told.splitlines()
    (start,) = (at for at, line in enumerate(lines) if "OVERHEAD" in line)
    ends = [lines[start].index(name) for name in ("EVERY", "TIME", "OVERHEAD", "ETTR", "AT RISK", "GPU-HOURS")]
    rows = lines[start + 1 : lines.index("", start)]
    return {
        row[: ends[0]].strip(): [row[a:b].strip() for a, b in zip(ends, [*ends[1:], None], strict=True)]
        for row in rows
        if len(row) > ends[0] and row[ends[0]].isdigit()
    }


def measured() -> dict[str, Any]:
    profile = Profile(iteration_seconds=0.25, snapshot_seconds=0.1, persist_seconds=1.5, cost_seconds=0.4)
    history = History(failures=Failures(world_size=8, count=3, exposure_seconds=9e5), restart_seconds=45)
    found = outlook(profile, Settings(), history, present=20, asked=[400])
    return {
        "job": "gpt", "outlook": msgspec.to_builtins(found), "why_none": "", "held_by_hand": True, "failures": 3,
        "running_seconds": 9e5, "restarts": 2,
        "origins": {
            "mtbf_seconds": "estimated", "restart_seconds": "measured", "world_size": "measured", "budget": "set",
        },
    }  # fmt: skip


def test_the_answer_comes_first_and_is_the_published_one(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("plan", *LLAMA_3)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("A checkpoint every 330 iterations (5.5 min) is best: 93.5% of the time")
    said = " ".join(result.stdout.split("\n\n")[0].split())
    assert (
        "checkfreq with a budget of 3.5% takes one every 143 (2.38 min): 92.5%, as if 166 of 16,384 GPUs" in said
    )
    assert "GPU-hours a day behind the best." in said
    assert "the next checkpoint is durable before the next failure with a probability of 98.7%" in said
    assert server.requests == []


def test_the_table_has_the_optimum_its_neighbours_and_every_policy(holdfast: Holdfast) -> None:
    rows = table(holdfast("plan", *LLAMA_3, "--every", "1800").stdout)
    assert rows["optimum"][:4] == ["330", "5.5 min", "1.52%", "93.5%"]
    assert rows["half the optimum"][3] == rows["twice the optimum"][3] == "92.8%"
    assert rows["checkfreq"][0] == rows["in force"][0] == "143"
    assert rows["goodput"][0] == "330"
    assert rows["every 1,800"][:4] == ["1,800", "30 min", "0.278%", "88.5%"]
    assert rows["optimum"][5] == "-"


def test_what_is_over_the_budget_is_marked(holdfast: Holdfast) -> None:
    told = holdfast("plan", *LLAMA_3, "--budget", "1%").stdout
    assert "That is 1.52% overhead, more than the budget of 1%." in told
    assert table(told)["optimum"][2] == "1.52% !"


def test_an_interval_that_cannot_be_kept_is_said_to_be_longer(holdfast: Holdfast) -> None:
    told = " ".join(holdfast("plan", *LLAMA_3, "--every", "20").stdout.split())
    assert "You ask for one every 20 (20 s, in fact 2 min, as writing one takes so long): 92.0%" in told


def test_the_plot_fits_80_plain_columns_and_marks_what_matters(holdfast: Holdfast) -> None:
    told = holdfast("plan", *LLAMA_3, "--every", "60").stdout
    assert told.isascii()
    assert max(map(len, told.splitlines())) <= 80
    drawn = [line for line in told.splitlines() if "|" in line]
    assert len(drawn) == 13
    picture = "\n".join(line.partition("|")[2] for line in drawn)
    assert (picture.count("O"), picture.count("X"), picture.count("+")) == (1, 1, 1)
    assert picture.count(":") >= 10
    assert picture.splitlines()[-1].count("*") < 3  # a curve that leaves the picture does not run along its edge
    assert "O optimum   X in force   + asked for   : 3.5% budget" in told
    axis = next(line for line in told.splitlines() if "10 min" in line and "60 min" in line)
    assert axis.index("10 min") < axis.index("20 min") < axis.index("60 min")
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


def test_what_was_left_out_is_said_to_be_assumed(holdfast: Holdfast) -> None:
    told = holdfast("plan", "--parameters", "7B", "--ranks", "64", "--iteration", "800ms").stdout
    basis = {line[:14].strip(): line[14:] for line in told.rpartition("\n\n")[2].splitlines()}
    assert basis["state"].split("  ")[0] == "98 GB"
    assert "7B parameters of 14 bytes" in basis["state"]
    assert basis["iteration"].split()[-1] == basis["ranks"].split()[-1] == "given"
    for name in ("copying", "writing", "cost of one", "failures", "restart", "budget"):
        assert "assumed" in basis[name]
    assert "follows from size and speeds" in basis["durable after"]
    assert "measured" not in told


def test_scripts_get_the_curve_and_what_it_rests_on(holdfast: Holdfast) -> None:
    answer = json.loads(holdfast("plan", *LLAMA_3, "--json").stdout)
    assert len(answer["outlook"]["curve"]) == 60
    assert answer["outlook"]["best"]["interval"] == 330
    assert answer["outlook"]["world_size"] == 16384
    assert {"name": "failures", "value": "one in 3.09 h", "origin": "given"} in answer["rests_on"]
    assert "measured" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "say what to plan for"),
        (["--state", "6GB", "--mtbf", "0"], "mtbf '0' has to be more than 0"),
        (["--state", "6GB", "--mtbf", "-3h"], "mtbf '-3h'"),
        (["--state", "6GB", "--budget", "300"], "outside 0.01% to 100%"),
        (["--state", "6GB", "--budget", "-1"], "outside 0.01% to 100%"),
        (["--state", "6"], "'6' is not a size"),
        (["--state", "0GB"], "more than 0"),
        (["--state", "6GB", "--parameters", "7B"], "give one of them"),
        (["--parameters", "405B"], "5.67 TB a rank, more than any has: give --ranks"),
        (["--state", "6GB", "--iteration", "0s"], "--iteration '0s' has to be more than 0"),
        (["--state", "6GB", "--write-bandwidth", "0MB/s"], "--write-bandwidth"),
        (["--state", "6GB", "--copy-bandwidth", "fast"], "is not a speed"),
        (["--state", "6GB", "--every", "0"], "interval '0' is outside"),
        (["--state", "6GB", "--policy", "astrology"], "policy 'astrology' is not one of checkfreq"),
        (["--state", "6GB", "--policy", "fixed"], "add --every 500"),
        (["--state", "6GB", "--restart", "soon"], "is not a time"),
        (["--stall", "-1s"], "--stall '-1s'"),
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
    told = holdfast("plan", "--state", "6.5GB", "--policy", "fixed", "--every", "500").stdout
    assert "fixed takes one every 500" in told.replace("\n", " ")
    assert "You ask for" not in told
    assert "fixed: " not in told, "nothing decides in its place"
    rows = table(told)
    assert rows["fixed"][0] == rows["in force"][0] == "500"


def test_where_no_interval_helps_it_says_so(holdfast: Holdfast) -> None:
    told = holdfast("plan", "--stall", "10h", "--mtbf", "1h").stdout
    assert told.startswith("No interval helps: with a failure every 60 min")
    assert "is best" not in told


def test_a_running_job_is_planned_from_what_was_measured_of_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.plan = measured()
    result = holdfast("plan", "--job", "gpt", "--mtbf", "12h", "--budget", "2%", "--every", "400", "--ranks", "16")
    assert result.exit_code == 0, result.stderr
    (request,) = server.requests
    path, _, query = request[1].partition("?")
    assert path == "/api/v1/jobs/gpt/plan"
    assert set(query.split("&")) == {"budget=0.02", "every=400", "mtbf=43200.0", "ranks=16"}
    assert "In force, set by hand, is one every 20 (5 s)" in result.stdout
    assert "the usual rate, corrected by 3 failures in 250 h; 90% between" in result.stdout
    assert table(result.stdout)["every 400"][0] == "400"


def test_a_job_that_is_still_being_measured_has_no_plan(holdfast: Holdfast) -> None:
    result = holdfast("plan", "--job", "gpt")
    assert (result.exit_code, result.stderr) == (
        1,
        "holdfast: nothing to plan with yet: nothing is measured yet\n",
    )
    assert holdfast("plan", "--job", "nobody").exit_code == 1


def test_planning_needs_neither_torch_nor_a_web_stack() -> None:
    asked = "import sys, holdfast.commands.plan; print({'torch', 'numpy', 'fastapi'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"


def test_simulated_runs_come_near_what_the_formula_says(holdfast: Holdfast) -> None:
    arguments = ["plan", "--ranks", "64", "--mtbf", "3h", "--stall", "5s", "--lag", "1min", "--restart", "5min"]
    told = json.loads(holdfast(*arguments, "--simulate", "--json").stdout)
    formula = {each["name"]: each["effective"] for each in told["outlook"]["policies"]}
    simulated = {each["policy"]: each for each in told["simulated"]}
    assert {"checkfreq", "goodput", "young-daly"} <= simulated.keys()
    for name, each in simulated.items():
        assert each["ettr_low"] <= each["ettr"] <= each["ettr_high"]
        assert each["ettr"] == pytest.approx(formula[name], abs=0.01)
    assert simulated["goodput"]["checkpoints"] < simulated["checkfreq"]["checkpoints"]


def test_simulated_runs_are_shown_below_the_plot(holdfast: Holdfast) -> None:
    asked = ["plan", "--state", "80GB", "--ranks", "64", "--mtbf", "3h"]
    shown = holdfast(*asked, "--simulate").stdout
    assert "20 runs of each policy" in shown
    assert "HOURS LOST A DAY" in shown
    assert "HOURS LOST A DAY" not in holdfast(*asked).stdout
