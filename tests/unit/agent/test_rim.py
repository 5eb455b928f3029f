"""Packages that a job does without, one after the other and all at once; and how large the rest, the core, is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.server_link.spool import spool_directory

ROOT = Path(__file__).resolve().parents[3]
RIM = {
    "client": ["client"],
    "codecs": ["codecs"],
    "commands": ["commands"],
    "encoded-files": ["checkpoint.decoding", "format.file_transforms", "save.compression"],
    "incremental": ["incremental", "save.forked_rows", "save.layered_files"],
    "host-state": ["save.forked_image", "save.host_state", "system.memory_maps"],
    "integrations": ["integrations"],
    "inventory": ["inventory"],
    "loss-curve": ["pacing.coci", "pacing.loss_curve"],
    "machine-metrics": ["telemetry.machine_metrics"],
    "maintenance": [
        "checkpoint.dcp_import", "checkpoint.drill", "checkpoint.export", "checkpoint.forking",
        "checkpoint.garbage_collection", "checkpoint.scrub", "checkpoint.sharded_export",
    ],
    "memory-tier": ["memory_tier", "save.completion_marker", "save.shared_buffers"],
    "on-request": [
        "checkpoint.verification", "data.digests", "data.empty_epochs", "data.loading_probe",
        "data.sampler_values", "engine.probing", "engine.verification_queue", "protocol.jobs", "state.ddp_buckets",
    ],
    "object-stores": [
        "store.bucket", "store.gcs_and_azure", "store.http_place", "store.object_keys", "store.objects",
        "store.s3", "store.s3_connection",
    ],
    "loader": [
        "data.generators", "data.indexed", "data.loader", "data.loader_arguments", "data.loader_position",
        "data.order", "data.reachable",
    ],
    "datasets": ["data.hidden_generators", "data.sampled", "data.streams"],
    "loops": ["data.foreign_cursors", "engine.skipped_epochs"],
    "drain": ["checkpoint.draining", "engine.draining", "store.tiers"],
    "parity": ["format.important", "format.parity_stripes", "save.parity"],
    "peers": ["peers"],
    "ranks": [
        "distributed.side_group", "distributed.wait_reports", "engine.rank_coordination",
        "format.merged_ranks", "format.resharding", "save.two_phase_commit", "state.sharded_tensors",
    ],
    "restores-in-place": ["engine.in_place_restore", "engine.left_out_data"],
    "pipelines": ["state.stage_selection", "state.stages", "telemetry.metrics_relay"],
    "schedules": ["state.schedules"],
    "simulation": ["simulation", "pacing.what_if"],
    "supervisor": [
        "supervisor", "engine.earlier_start", "system.processes", "system.published_imports",
        "system.supervisor_files",
    ],
    "store-shares": ["store_share"],
    "testing": ["testing"],
    "values": ["engine.live_values", "learning_rate", "protocol.value_rules"],
    "halts": ["engine.halting"],
    "trouble": ["engine.trouble_rule", "telemetry.loss_watch"],
}  # fmt: skip
ALL = "all"
CASES = RIM | {ALL: [each for names in RIM.values() for each in names]}
MOST_MODULES, MOST_LINES = 111, 15_060
"""Size of the core. Lower both as it shrinks. A change that would raise one belongs in the rim."""
PROGRAM = """
import importlib.abc, json, os, sys
import msgspec, numpy, psutil, torch, urllib3

class Blocked(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in self.names):
            raise ImportError(f"{name} is imported")

def train(store, blocked):
    sys.meta_path.insert(0, Blocked(blocked))
    import holdfast

    for start in (0, 3):
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        with holdfast.Session(os.path.basename(store), store=store, model=model, optimizer=optimizer) as session:
            assert session.resume() == start
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                session.checkpoint()
                session.step(loss=1.0)
                assert all(outcome.is_durable for outcome in session.wait(60))
    ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "holdfast"}
    with open(store + ".json", "w") as file:
        json.dump(ours, file)

def warm_up():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.square().sum().backward()
    torch.optim.Adam([parameter]).step()  # its first step imports more of torch

torch.set_num_threads(1)
warm_up()
for store, *blocked in json.loads(sys.argv[1]):
    if not (child := os.fork()):  # torch is imported once
        os.dup2(os.open(store + ".log", os.O_WRONLY | os.O_CREAT), 2)
        train(store, blocked)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what each job left, which trained, reported and resumed while packages were blocked."""
    folder = tmp_path_factory.mktemp("rim")
    jobs = [[str(folder / name), *(f"holdfast.{each}" for each in blocked)] for name, blocked in CASES.items()]
    environment = os.environ | {"HOLDFAST_SERVER": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(jobs)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_reports_and_resumes_without(case: str, trained: Path) -> None:
    said = (trained / f"{case}.log").read_text()
    assert (trained / f"{case}.json").exists(), said
    assert "is imported" not in said
    assert list(spool_directory(str(trained / case), case).iterdir()), "no report waits for the server"


def test_the_core_is_no_larger_and_listed(trained: Path) -> None:
    """The page lists what is loaded after one checkpoint, one resume and one report without the rim."""
    files = {name: Path(file) for name, file in json.loads((trained / f"{ALL}.json").read_text()).items()}
    assert len(files) <= MOST_MODULES
    assert sum(map(lines_of_code, files.values())) <= MOST_LINES
    page = (ROOT / "docs/internals/architecture.md").read_text()
    section = page.partition("## The core")[2].partition("\n## ")[0]
    assert listing(files) in section, "python tests/unit/agent/test_rim.py FILE prints the table"
    assert f"{len(files)} modules" in section


def lines_of_code(path: Path) -> int:
    """Count the lines without blanks, comments, docstrings and imports."""
    text = path.read_text()
    left = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


def listing(names: Iterable[str]) -> str:
    """Return the table of the page: modules by package."""
    packages = defaultdict[str, list[str]](list)
    for name in sorted(names):
        package, _, module = name.removeprefix("holdfast").lstrip(".").rpartition(".")
        if package or not (ROOT / "agent/holdfast" / module).is_dir():
            packages[package].append(module or "__init__")
    rows = [f"| {f'`{package}`' if package else ''} | {', '.join(names)} |" for package, names in packages.items()]
    return "\n".join(["| package | modules |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(listing(json.loads(Path(sys.argv[1]).read_text())), end="")
