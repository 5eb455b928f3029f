"""A job goes on, or back, on another machine: nothing of the first is left but the store."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.client import Client
from holdfast.store import Attempt, Lineage, open_store
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, LedgerStep, environment, known, read_ledger, spawned
from tests.support.object_servers import moto, rclone, use, variables  # noqa: F401 - the first two are fixtures
from tests.support.trial_pool import LONG

pytestmark = pytest.mark.processes

EPOCHS, ITERATIONS = 5, 135
NAMED = subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0
"""Whether a process can have a host name of its own here."""


@dataclass(frozen=True)
class Machine:
    """A place of its own to live and work in, and a name where that is possible."""

    folder: Path
    name: str
    variables: dict[str, str]
    temporary: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="hf-"))
    """Not below the folder: a socket lies in it, whose address may have 108 bytes."""

    def __post_init__(self) -> None:
        for part in ("home", "work"):
            (self.folder / part).mkdir(parents=True)
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)

    @property
    def ledger(self) -> Path:
        return self.folder / "work" / "ledger.txt"

    def command(self, *command: str) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name] if NAMED else []
        return ["env", "-C", str(self.folder / "work"), *named, *command]

    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.folder / "home"), "TMPDIR": self.temporary, "XDG_STATE_HOME": ""}
        return environment(self.folder) | own | self.variables

    def trains(self, job: str, *options: str) -> list[str]:
        script = [sys.executable, str(TRAINER), str(self.ledger), "--job", job, "--every", "5"]
        return self.command(*script, "--epochs", str(EPOCHS), *options)

    def is_lost(self) -> list[LedgerStep]:
        """All that is on it is gone; what its trainer did is what a test remembers."""
        steps = read_ledger(self.ledger)
        shutil.rmtree(self.folder)
        shutil.rmtree(self.temporary)
        return steps


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LedgerStep]:
    """What the job comes to on one machine."""
    folder = tmp_path_factory.mktemp("alone")
    here = Machine(folder / "machine", "alone", {"HOLDFAST_STORE": str(folder / "store")})
    subprocess.run(here.trains("alone"), env=here.environment(), check=True, timeout=PATIENCE_SECONDS)
    steps = {step.iteration: step for step in read_ledger(here.ledger)}
    assert sorted(steps) == list(range(1, ITERATIONS + 1))
    return steps


@pytest.fixture(params=["directory", "moto", pytest.param("rclone", marks=LONG)])
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What both machines are told of the one store that they share."""
    if request.param == "directory":
        return {"HOLDFAST_STORE": str(tmp_path / "shared")}
    address = request.getfixturevalue(request.param).address
    return {"HOLDFAST_STORE": use(monkeypatch, address), **variables(address)}


def lose_the_first(
    folder: Path, shared: dict[str, str], job: str, is_saved: Callable[[], object]
) -> list[LedgerStep]:
    """It trains until a checkpoint is saved, is killed, and all its files are gone; what it did."""
    first = Machine(folder / "first", "first-machine", shared)
    with spawned(first.trains(job, "--slowly"), folder / "first.log", first.environment()) as trainer:
        eventually(lambda: len(read_ledger(first.ledger)) > 12, "the first machine to train")
        eventually(is_saved, "a checkpoint to go on from")
        trainer.kill()
        trainer.wait()
    return first.is_lost()


def test_another_machine_goes_on_bit_for_bit_from_the_store_alone(
    tmp_path: Path, shared: dict[str, str], left_alone: dict[int, LedgerStep]
) -> None:
    store, job = open_store(shared["HOLDFAST_STORE"]), "moves"
    before = lose_the_first(tmp_path, shared, job, lambda: store.checkpoints(job))
    newest = int(store.checkpoints(job)[-1][:12])
    second = Machine(tmp_path / "second", "second-machine", shared)
    subprocess.run(second.trains(job), env=second.environment(), check=True, timeout=PATIENCE_SECONDS)
    after = read_ledger(second.ledger)
    assert [step.iteration for step in after] == list(range(newest + 1, ITERATIONS + 1))
    assert newest >= 5
    for step in (*before, *after):
        assert step.outcome == left_alone[step.iteration].outcome, step.iteration
    hosts = [attempt.host for attempt in store.records(job, Attempt)]
    assert hosts == (["first-machine", "second-machine"] if NAMED else [os.uname().nodename] * 2)


def test_an_order_given_when_the_first_machine_was_gone_is_carried_out_by_the_second(
    tmp_path: Path, shared: dict[str, str], left_alone: dict[int, LedgerStep], server: Client
) -> None:
    job = f"ordered-{tmp_path.name}"
    variables = shared | {"HOLDFAST_SERVER": server.server}
    store = open_store(shared["HOLDFAST_STORE"])

    def has_one_to_leave() -> object:
        return len(store.checkpoints(job)) > 1 and known(server, job) and server.oldest_restorable(job)

    before = lose_the_first(tmp_path, variables, job, has_one_to_leave)
    oldest = server.oldest_restorable(job)
    assert oldest is not None
    order = server.restore(job, checkpoint=oldest.id)
    second = Machine(tmp_path / "second", "second-machine", variables)
    command = second.command(*HOLDFAST, "run", "--", *second.trains(job))
    subprocess.run(command, env=second.environment(), check=True, timeout=PATIENCE_SECONDS)
    done, after = server.order(job, order.id), read_ledger(second.ledger)
    reached = [step.state for step in done.transitions if step.state != "delivered"]  # may come before the restore
    assert reached == ["requested", "restoring", "restored"]
    assert [step.iteration for step in after] == list(range(oldest.iteration + 1, ITERATIONS + 1))
    for step in (*before, *after):
        assert step.outcome == left_alone[step.iteration].outcome, step.iteration
    seen = known(server, job)
    assert seen is not None
    assert (seen.status, seen.iteration, seen.attempt) == ("finished", ITERATIONS, 2)
    (lineage,) = [each for each in store.records(job, Lineage) if each.order == order.id]
    assert (lineage.parent, lineage.left is not None) == (oldest.id, True)
    assert done.undoable  # the newest that the first machine had made durable
