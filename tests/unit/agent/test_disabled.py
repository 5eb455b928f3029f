"""Strategies that HOLDFAST_DISABLE switches off: none is used, and all that they wrote can be read."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.config import environment_notices
from holdfast.disabled import STRATEGIES, VARIABLE
from holdfast.distributed import ranks
from holdfast.format.manifest import Manifest
from holdfast.memory_tier.tier import open_memory_tier
from holdfast.pacing import FailureHistory, PacingSettings, plan, planner, policy_names
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Notice
from holdfast.save import copying
from holdfast.store import open_store
from holdfast.system import supervisor_channel
from holdfast.telemetry import configuration
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support.pacing_profiles import MEASURED
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import DurableJob
from tests.support.supervisor_memory import folder as folder


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = torch.nn.Linear(600, 600), torch.nn.Linear(600, 2)
        self.base.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(batch))


def adapted() -> tuple[Adapted, object]:
    model = Adapted()
    return model, model.adapter.parameters()


def train(store: Path, iterations: int, **options: object) -> list[float]:
    return DurableJob(store, adapted, 600, **options).run(iterations).close().losses


def manifest_of(store: Path, iteration: int) -> Manifest:
    return restore.manifest(open_store(store), "job", checkpoint_id(iteration, 1))


def is_used(strategy: str, found: Manifest) -> bool:
    """Return whether a checkpoint after the first was written with a strategy."""
    match strategy:
        case "planes":
            return any(file.encoding is not None for file in found.files)
        case "parity":
            return any(file.parity is not None for file in found.files)
        case _:
            own = checkpoint_id(found.iteration, found.lineage)
            return any(file.written_by not in (None, own) for file in found.files)


@pytest.mark.parametrize(
    ("strategy", "options"), [("planes", {"compress": True}), ("parity", {"parity": "4+1"}), ("links", {})]
)
def test_a_disabled_strategy_writes_nothing_and_what_it_wrote_is_resumed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, options: dict[str, object]
) -> None:
    whole = train(tmp_path / "whole", 6)
    with_it = train(store, 2, **options)
    monkeypatch.setenv(VARIABLE, f" {strategy.upper()} , unheard-of")
    without = train(store, 2, **options)
    monkeypatch.delenv(VARIABLE)
    again = train(store, 2, **options)
    assert with_it + without + again == whole
    used = [is_used(strategy, manifest_of(store, iteration)) for iteration in (2, 3, 4, 6)]
    assert used == [True, False, False, True]


def test_without_the_memory_tier_no_memory_of_the_supervisor_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(supervisor_channel.VARIABLE, str(folder))

    def uses_it() -> bool:
        tier = open_memory_tier("job", "uid", 1, ranks.join(), Reporter("job", TrainingPosition(), quiet=True))
        try:
            return tier.arenas[0].slot is not None
        finally:
            tier.release()

    assert uses_it()
    monkeypatch.setenv(VARIABLE, "memory-tier")
    assert not uses_it()


def test_without_device_copies_a_device_has_no_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copying.has_room(1 << 20, 0, 1 << 30)
    monkeypatch.setenv(VARIABLE, "device-copy")
    assert not copying.has_room(1 << 20, 0, 1 << 30)


def test_without_the_inventory_state_that_is_in_no_checkpoint_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(store: Path) -> bool:
        caplog.clear()
        with holdfast.Session("job", store=store, model=torch.nn.Linear(1, 1), schedule=Schedule()) as session:
            session.resume()
        return "schedule.optimizer (SGD) is in no checkpoint" in caplog.text

    assert start(tmp_path / "with")
    monkeypatch.setenv(VARIABLE, "inventory")
    assert not start(tmp_path / "without")


class Schedule:
    """An object that refers to an optimizer, which the session is not given."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def tidal(*_: object) -> None: ...


def test_checkfreq_decides_in_place_of_a_disabled_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    tide = EntryPoint("tidal", f"{__name__}:tidal", planner.GROUP)
    monkeypatch.setattr(planner, "installed", lambda: {"tidal": tide})
    monkeypatch.setenv(VARIABLE, "young-daly,goodput,tidal")
    for name in ("young-daly", "goodput", "tidal"):
        made = plan(MEASURED, PacingSettings(policy=name), FailureHistory())
        assert made.policy == "checkfreq"
        assert made.reason.startswith(f"policy {name!r} is switched off by {VARIABLE}; checkfreq decides:")


def test_what_is_disabled_is_said_once_and_unknown_names_list_the_known(
    store: Path, linked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "planes,young-daly,plains,checkfreq,")
    job = DurableJob(store, adapted, 600, compress=True, **linked).run(1)
    said = [
        (each.level, each.message) for each in job.session._reporter.link.of(Notice) if each.code == "disabled"
    ]
    job.close()
    assert said[:2] == [
        ("info", f"{VARIABLE} switches off planes: {STRATEGIES['planes']}"),
        ("info", f"{VARIABLE} switches off the policy young-daly: checkfreq replaces it"),
    ]
    known = ", ".join([*STRATEGIES, *sorted({*policy_names()} - {"checkfreq", "fixed"})])
    wrong = [f"{VARIABLE}={name!r} has no effect: the names are {known}" for name in ("checkfreq", "plains")]
    assert [message for level, message in said if level == "warning"] == wrong
    assert configuration.environment()["disabled"] == "checkfreq, plains, planes, young-daly"


def test_without_the_variable_nothing_is_said() -> None:
    assert [code for _, code, _ in environment_notices([]) if code == "disabled"] == []
    assert "disabled" not in configuration.environment()
