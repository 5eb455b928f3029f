"""Every *switch it on* of docs/systems.md, run as it is printed there, has the effect that the page promises."""

from __future__ import annotations

import logging
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint import restore
from holdfast.format.manifest import Manifest, reused_bytes
from holdfast.store import open_store
from tests.support.eventually import eventually
from tests.support.job_processes import HOLDFAST, known, served

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/systems.md").read_text()
SECTIONS = {
    title.lower().replace(" ", "-"): text
    for title, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
ROWS = ("published", "measured by", "here", "wins", "loses", "default")
MOST_ITERATIONS = 2000


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the blocks take as given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    model = nn.Linear(4, 1)
    given = {
        "EPOCHS": 10_000, "dataset": [torch.randn(4) for _ in range(3200)], "holdfast": holdfast, "loss": 0.5,
        "loss_of": lambda model, batch: model(batch).square().mean(), "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()), "torch": torch,
    }  # fmt: skip
    yield given
    if isinstance(session := given.get("session"), holdfast.Session):
        session.close()


def switch_on(system: str, names: dict[str, Any]) -> Any:
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS[system], re.DOTALL)
    exec(compile(block, f"docs/systems.md, {system}", "exec"), names)
    return names.get("session")


def iterate(session: holdfast.Session, optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    session.step(loss=0.5)


def manifests(job: str, session: holdfast.Session, optimizer: torch.optim.Optimizer, count: int) -> list[Manifest]:
    """Take so many checkpoints."""
    session.resume()
    for _ in range(count):
        session.checkpoint()
        iterate(session, optimizer)
        assert [outcome.is_durable for outcome in session.wait(60)] == [True]
    store = open_store(session.store)
    return [restore.manifest(store, job, name) for name in store.checkpoints(job)]


def planned(system: str, names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Train until an interval is chosen; what the log says of it."""
    caplog.set_level(logging.DEBUG, "holdfast")
    session = switch_on(system, names)
    session.resume()
    for _ in range(MOST_ITERATIONS):
        iterate(session, names["optimizer"])
        session.wait(60)
        if "interval: every" in caplog.text:
            break
    return " ".join(record.getMessage() for record in caplog.records if "interval: " in record.getMessage())


def test_every_system_has_a_test_and_every_row() -> None:
    switched = set(re.findall(r'(?:switch_on|planned)\("([\w-]+)"', Path(__file__).read_text()))
    assert switched == set(SECTIONS)
    listed = re.findall(r"^\| \[[^\]]*\]\(#([\w-]+)\)", PAGE, re.MULTILINE)
    assert listed == list(SECTIONS)
    for section in SECTIONS.values():
        assert [row for row in ROWS if f"\n| {row} |" not in section] == []
        assert "| built |" in section or "**Not built**" in section


def test_what_measures_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    measured = "\n".join(re.findall(r"^\| measured by \|(.*)$", PAGE, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", measured)) <= targets
    for module in re.findall(r"python -m ([\w.]+)", measured):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_checkfreq_spends_the_budget(names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    said = planned("checkfreq", names, caplog)
    assert "policy checkfreq" in said
    assert "as often as the budget of 3.5 % allows" in said


def test_coci_decides_within_the_write_budget(names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    said = planned("coci", names, caplog)
    assert "policy coci" in said
    assert "goodput decides, as the write budget of 500 GB/day does not bind" in said
    assert "retention '12 by progress'" in caplog.text


def test_a_forked_child_writes_host_state(names: dict[str, Any]) -> None:
    session = switch_on("crum", names)
    session.step(loss=0.5)
    (outcome,) = session.wait(60)
    assert (outcome.iteration, outcome.is_durable) == (1, True)
    found = restore.manifest(open_store(session.store), "in-background", outcome.checkpoint)
    assert any(".host." in file.name for file in found.files)


def test_only_rows_that_changed_are_written(names: dict[str, Any]) -> None:
    session = switch_on("merkle-tree-incremental-checkpoints", names)
    session.resume()
    for row in range(4):
        names["optimizer"].zero_grad()
        names["model"](torch.tensor([[row]])).sum().backward()
        session.checkpoint()
        names["optimizer"].step()
        session.step(loss=0.5)
        assert [outcome.is_durable for outcome in session.wait(60)] == [True]
    store = open_store(session.store)
    newest = restore.manifest(store, "rows", store.checkpoints("rows")[-1])
    assert reused_bytes(newest.files) > 15_000_000
    assert sum(file.size_bytes for file in newest.files if file.written_by is None) < 100_000


def test_important_bytes_have_parity(names: dict[str, Any]) -> None:
    session = switch_on("unequal-protection", names)
    (found,) = manifests("protected", session, names["optimizer"], 1)
    assert all(file.parity is not None and file.parity.important is not None for file in found.files)


def test_an_autoencoder_stores_states(names: dict[str, Any]) -> None:
    switch_on("autoencoder-compression", names)
    waves = torch.linspace(0, 6, 64).sin().outer(torch.linspace(0, 6, 64).cos())
    with names["states"] as states:
        for step in range(80):
            states.put(step, waves * math.cos(step / 10))
        assert (states.get(79) - waves * math.cos(7.9)).abs().max() <= 0.03
        report = states.report()
    assert report.codec == "autoencoder"
    assert report.training_seconds > 0, "it learned from the first states"
    assert report.ratio > 2, "half precision, which stores them, has 2"


def test_a_running_job_is_probed(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"```\nholdfast (.*)\n```", SECTIONS["data-stalls"])
    loss_of = names["loss_of"]
    probes: list[subprocess.Popen[str]] = []

    class Probed(Exception):
        pass

    with served(tmp_path) as client:
        monkeypatch.setenv("HOLDFAST_SERVER", client.server)

        def probed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if not probes:
                eventually(lambda: known(client, "fed") is not None, "the job to be known")
                probes.append(subprocess.Popen([*HOLDFAST, *command.split()], stdout=subprocess.PIPE, text=True))
            elif probes[0].poll() is not None:
                raise Probed
            return loss_of(model, batch)

        names["loss_of"] = probed
        with pytest.raises(Probed):
            switch_on("data-stalls", names)
        said, _ = probes[0].communicate()
    assert probes[0].returncode == 0
    assert "to load" in said
