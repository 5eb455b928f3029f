"""The surface of the command line: what there is, what it is called, and that it stays so."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest
import typer

from holdfast import cli
from tests.support.fake_server import Holdfast

ROOT = Path(__file__).resolve().parents[4]
SURFACE = {
    "alerts ack": ["ALERT", "--json", "--server", "--token"],
    "account": [
        "--by", "--json", "--label", "--owner", "--project", "--server", "--since", "--store", "--token",
    ],
    "alerts channels": ["--json", "--project", "--server", "--token"],
    "alerts comment": ["ALERT", "TEXT", "--json", "--server", "--token"],
    "alerts route": ["CHANNEL", "--json", "--label", "--owner", "--project", "--server", "--token"],
    "alerts rules": ["--json", "--project", "--server", "--token"],
    "alerts show": ["ALERT", "--json", "--server", "--token"],
    "alerts silence": ["ALERT", "TIME_", "--json", "--server", "--token"],
    "alerts unsilence": ["ALERT", "--json", "--server", "--token"],
    "audit": [],
    "approve": ["JOB", "REQUEST", "--json", "--server", "--token"],
    "continue": ["JOB", "--json", "--no-wait", "--server", "--store", "--timeout", "--token"],
    "decline": ["JOB", "REQUEST", "--json", "--server", "--token"],
    "end": ["JOB", "--json", "--no-wait", "--server", "--timeout", "--token", "--yes", "-y"],
    "on-trouble": ["JOB", "RULE", "--json", "--no-wait", "--server", "--token"],
    "pause": ["JOB", "--json", "--no-wait", "--server", "--timeout", "--token"],
    "protect": ["JOB", "--json", "--off", "--server", "--token"],
    "value": ["JOB", "NAME", "NEW", "--json", "--no-wait", "--server", "--timeout", "--token"],
    "unsaved-work": ["JOB", "LIMIT", "--json", "--no-wait", "--server", "--token"],
    "write-budget": ["JOB", "RATE", "--json", "--no-wait", "--server", "--token"],
    "budget": ["JOB", "BUDGET", "--json", "--no-wait", "--server", "--token"],
    "checkpoint": ["JOB", "--json", "--no-wait", "--server", "--timeout", "--token"],
    "checkpoints": ["JOB", "--all", "--json", "--limit", "--server", "--token"],
    "config": ["JOB", "--against", "--attempt", "--json", "--server", "--token"],
    "db": [],
    "delete": ["JOB", "--server", "--token", "--yes", "-y"],
    "doctor": ["STORE", "--disk", "--json", "--server", "--size", "--state", "--token"],
    "every": ["JOB", "INTERVAL", "--for", "--json", "--no-wait", "--server", "--token"],
    "fork": ["JOB", "ITERATION", "NEW", "--json", "--server", "--store", "--token"],
    "goodput": ["JOB", "--json", "--server", "--token", "--window"],
    "jobs": ["--json", "--label", "--owner", "--project", "--search", "--server", "--token"],
    "label": ["JOB", "CHECKPOINT", "TEXT", "--json", "--server", "--token"],
    "logs": ["JOB", "--attempt", "--json", "--server", "--token"],
    "pause-checkpoints": ["JOB", "--json", "--no-wait", "--server", "--token"],
    "pin": ["JOB", "CHECKPOINT", "--json", "--no-wait", "--server", "--token"],
    "plan": [
        "--accelerate", "--budget", "--bytes-per-parameter", "--cluster-nodes", "--compress", "--copy-bandwidth",
        "--every", "--gpus-per-node", "--interval", "--iteration", "--job", "--json", "--lag",
        "--loss-falls-to", "--max-unsaved-work", "--mtbf", "--parameters", "--parity", "--policy", "--ranks",
        "--restart", "--server", "--simulate", "--spares", "--stall", "--state", "--token", "--total", "--trace",
        "--trace-level",
        "--trace-unit", "--unchanged", "--write-bandwidth", "--write-budget",
    ],
    "policy": ["JOB", "POLICY", "--json", "--no-wait", "--server", "--token"],
    "probe": ["JOB", "--json", "--no-wait", "--server", "--timeout", "--token"],
    "report": ["JOB", "--json", "--project", "--server", "--since", "--token"],
    "project": [],
    "reset-numbers": ["JOB", "--attempt", "--json", "--lineage", "--server", "--token"],
    "restore": [
        "JOB", "ITERATION", "--degraded", "--expires", "--json", "--loader", "--nearest", "--no-wait", "--server",
        "--skip-batches", "--skip-to", "--timeout", "--token",
    ],
    "resume-checkpoints": ["JOB", "--json", "--no-wait", "--server", "--token"],
    "retention": ["JOB", "RULES", "--json", "--no-wait", "--server", "--token"],
    "run": [
        "COMMAND", "--budget", "--capture-output", "--grace", "--hang", "--leave-host", "--memory-tier",
        "--server", "--starts", "--stay", "--store", "--warm",
    ],
    "serve": [],
    "show": ["JOB", "--json", "--server", "--token"],
    "stores limit": [
        "STORE", "RATE", "--fallback", "--holds", "--json", "--server", "--token", "--writers",
    ],
    "stores show": ["STORE", "--json", "--server", "--token"],
    "stores weight": ["STORE", "JOB", "WEIGHT_", "--json", "--server", "--token"],
    "store drill": ["PATH", "JOB", "--all", "--checkpoint", "--json", "--rate", "--server", "--token"],
    "store export": [
        "PATH", "JOB", "CHECKPOINT", "TARGET", "--config", "--degraded", "--force", "--format", "--json", "--only",
        "--shard-size",
    ],
    "store gc": [
        "PATH", "--drop", "--dry-run", "--job", "--json", "--keep", "--retention", "--server", "--token",
        "--while-running", "--yes", "-y",
    ],
    "store import": [
        "PATH", "JOB", "SOURCE", "--as", "--iteration", "--json", "--model", "--shard-size",
    ],
    "store ls": ["PATH", "--job", "--json"],
    "store scrub": ["PATH", "--checkpoint", "--job", "--json", "--rate", "--repair", "--server", "--token"],
    "store show": ["PATH", "JOB", "CHECKPOINT", "TENSOR", "--json"],
    "store verify": ["PATH", "--checkpoint", "--job", "--json"],
    "token": [],
    "undo": ["JOB", "--json", "--no-wait", "--server", "--timeout", "--token"],
    "unpin": ["JOB", "CHECKPOINT", "--json", "--no-wait", "--server", "--token"],
    "user": [],
    "verify": ["JOB", "CHECKPOINT", "--against", "--json", "--no-wait", "--server", "--timeout", "--token"],
}  # fmt: skip


def surface() -> dict[str, list[str]]:
    root = typer.main.get_command(cli.app)
    found = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for path, leaf in ({f"{name} {sub}": c for sub, c in inner.items()} if inner else {name: command}).items():
            options = sorted(o for p in leaf.params if p.param_type_name == "option" for o in p.opts)
            found[path] = [p.name.upper() for p in leaf.params if p.param_type_name == "argument"] + options
    return found


def test_commands_arguments_and_options_are_these() -> None:
    found = {path: [word for word in words if word != "--help"] for path, words in surface().items()}
    assert found == SURFACE


OF_THE_SERVER = {"audit", "db", "project", "serve", "token", "user"}
"""Commands whose help is not the agent's."""


def test_what_the_server_brings_is_a_command_and_the_other_way_round() -> None:
    assert {entry.name for entry in entry_points(group=cli.COMMANDS)} == OF_THE_SERVER


def test_the_guide_names_no_command_that_there_is_not() -> None:
    words = re.compile(r"(?:^|`|\$\(|exec |, \")holdfast ([a-z]+(?:-[a-z]+)*)", re.MULTILINE)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        named = set(words.findall(page.read_text()))
        assert named <= {path.partition(" ")[0] for path in SURFACE}, page.name


@pytest.mark.parametrize("path", sorted(SURFACE.keys() - OF_THE_SERVER))
def test_every_command_explains_itself_with_an_example(holdfast: Holdfast, path: str) -> None:
    output = holdfast(*path.split(), "--help")
    assert output.exit_code == 0
    assert f"holdfast {path}" in output.stdout.split("Example", 1)[1]
    assert re.search(r"exit\s+codes?\b", output.stdout, re.IGNORECASE)


@pytest.mark.parametrize("path", sorted(SURFACE))
def test_only_a_command_that_asks_a_server_lists_the_exit_code_of_an_unreachable_one(
    holdfast: Holdfast, path: str
) -> None:
    help_text = " ".join(holdfast(*path.split(), "--help").stdout.split())
    assert "--token" in SURFACE[path] or "no server is reachable" not in help_text


def test_a_command_that_asks_a_server_lists_the_exit_code_of_an_unreachable_one(holdfast: Holdfast) -> None:
    for path in ("jobs", "alerts", "store gc"):
        assert "3 no server is reachable" in " ".join(holdfast(*path.split(), "--help").stdout.split())


def test_the_version_is_that_of_the_distribution(holdfast: Holdfast) -> None:
    assert holdfast("--version").stdout.strip() == f"holdfast {version('holdfast')}"


def test_a_command_starts_without_torch_and_without_the_server() -> None:
    program = (
        "import sys; from holdfast.cli import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print({'torch', 'numpy', 'fastapi', 'sqlalchemy'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def found_in(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    entries = [EntryPoint(name="serve", value=value, group=cli.COMMANDS) for value in values]
    monkeypatch.setattr(cli, "entry_points", lambda group, name: entries)


def test_serve_comes_from_the_entry_point_with_its_own_options(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_in(monkeypatch, f"{__name__}:serve_stand_in")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert holdfast("serve", "--port", "1234").stdout == "port 1234\n"
    assert "A port to listen on" in holdfast("serve", "--help").stdout


def serve_stand_in(port: int = typer.Option(7117, help="A port to listen on.")) -> None:
    print(f"port {port}")


@pytest.mark.parametrize("entries", [[], ["fastapi_that_is_not_there:serve"]])
def test_serve_without_the_server_says_how_to_get_it(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch, entries: list[str]
) -> None:
    found_in(monkeypatch, *entries)
    result = holdfast("serve", "--port", "1")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "holdfast: the server is not installed here: install Holdfast with its extra `server`"
    )


def test_a_module_of_ours_that_is_missing_is_not_hidden(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_in(monkeypatch, "holdfast_server_misspelt:serve")
    assert isinstance(holdfast("serve").exception, ModuleNotFoundError)


def test_run_ends_with_the_trainers_exit_status(holdfast: Holdfast) -> None:
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert holdfast("run", "--starts", "1", "--", *failing).exit_code == 3
    assert holdfast("run", sys.executable, "-c", "raise SystemExit(0)").exit_code == 0


def test_run_hands_its_settings_to_the_trainer(holdfast: Holdfast) -> None:
    program = "import os, sys; sys.exit(os.environ['HOLDFAST_STORE'] + os.environ['HOLDFAST_BUDGET'] != 's2%')"
    assert holdfast("run", "--store", "s", "--budget", "2%", "--", sys.executable, "-c", program).exit_code == 0


def test_run_refuses_a_budget_that_the_trainer_would_refuse(holdfast: Holdfast) -> None:
    result = holdfast("run", "--budget", "300", "--", sys.executable, "-c", "")
    assert result.exit_code == 2
    assert "budget '300'" in result.stderr


def test_run_of_what_is_not_there_says_so(holdfast: Holdfast) -> None:
    result = holdfast("run", "--", "no-such-trainer")
    assert result.exit_code == 127
    assert "cannot start 'no-such-trainer'" in result.stderr


def test_run_of_nothing_is_refused(holdfast: Holdfast) -> None:
    assert holdfast("run").exit_code == 2
