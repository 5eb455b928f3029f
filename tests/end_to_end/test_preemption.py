"""SIGTERM, as a scheduler sends it: training ends at a boundary, saved, and goes on from there."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.checkpoint import restore
from holdfast.client import Client
from holdfast.store import open_store
from holdfast.system.preemption import EXIT_SIGTERM, REPEAT_SECONDS, SPARE_SECONDS, PreemptionHandler
from holdfast.system.processes import descendants
from tests.support import preemption_workload
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.fork_server import ForkServer
from tests.support.job_processes import HOLDFAST, TRAINER, environment, known, read_ledger, spawned
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher

pytestmark = pytest.mark.processes


def trainer(ledger: Path, job: str, *options: str) -> list[str]:
    return [sys.executable, str(TRAINER), str(ledger), "--job", job, *options]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def newest(store: Path, job: str) -> int:
    return int(open_store(store).checkpoints(job)[-1].partition("-")[0])


@pytest.mark.parametrize("run", [[], [*HOLDFAST, "run", "--"]])
def test_a_trainer_that_is_told_to_end_saves_and_ends(tmp_path: Path, server: Client, run: list[str]) -> None:
    ledger, job = tmp_path / "ledger.txt", f"told-to-end-{len(run)}"
    command = [*run, *trainer(ledger, job, "--slowly", "--every", "100000")]
    with spawned(command, tmp_path / "log", environment(tmp_path / "store", server.server)) as process:
        eventually(lambda: len(read_ledger(ledger)) > 10, "training")
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == EXIT_SIGTERM
    last = read_ledger(ledger)[-1].iteration
    assert newest(tmp_path / "store", job) == last
    found = known(server, job)
    assert found is not None
    assert (found.status, found.iteration) == ("stopped", last)
    told = [notice.message for notice in server.notices(job) if notice.code == "preempted"]
    assert told == [f"SIGTERM received; ending after iteration {last}: saved as {last:012d}-1"]


@pytest.mark.parametrize("told", [0, 2])
def test_all_ranks_end_at_one_boundary_whichever_is_told(
    launcher: RankLauncher, tmp_path: Path, told: int
) -> None:
    done = launcher.run(3, "tests.support.preemption_workload.train", store=str(tmp_path), told=told)
    assert [each["exit"] for each in done] == [EXIT_SIGTERM] * 3
    (last,) = {each["iteration"] for each in done}
    assert last > preemption_workload.TOLD_AT
    store = open_store(tmp_path)
    checkpoints = store.checkpoints("leaving")
    assert newest(tmp_path, "leaving") == last
    assert restore.verify(store, "leaving", checkpoints[-1]).world_size == 3


def to_one(process: subprocess.Popen[bytes]) -> None:
    process.terminate()


def to_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def to_all(process: subprocess.Popen[bytes]) -> None:
    """As systemd does, and a Slurm step; the order is that of the process table."""
    for pid in random.sample(everybody := [process.pid, *descendants(process.pid)], len(everybody)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


class Preempted(NamedTuple):
    """A way to start a trainer, and the processes that SIGTERM reaches."""

    told: Callable[[subprocess.Popen[bytes]], None]
    run: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


GRACE_SECONDS = 120.0
RUN = (*HOLDFAST, "run", "--")
PREEMPTED = {
    "trainer": Preempted(to_one),
    "group without workers": Preempted(to_group, options=("--workers", "0")),
    "group": Preempted(to_group),
    "group, torch's loader": Preempted(to_group, options=("--loader", "torch")),
    "group, torch's loader by hand": Preempted(to_group, options=("--loader", "by hand")),
    "group, spawned workers": Preempted(to_group, options=("--start-method", "spawn")),
    "GNU timeout": Preempted(to_one, ("timeout", "--preserve-status", "10000")),
    "run in GNU timeout": Preempted(to_one, ("timeout", "--preserve-status", "10000", *RUN)),
    "run, all processes": Preempted(to_all, RUN),
    "run, all processes without workers": Preempted(to_all, RUN, ("--workers", "0")),
}


GOES_ON = ("trainer", "run, all processes")
"""Those of which a second start shows that it goes on where the first one ended; `long`: all of them do."""
TIMES = [
    *(pytest.param(each, 2 if name in GOES_ON else 1, id=name) for name, each in PREEMPTED.items()),
    *(pytest.param(each, 50, id=f"{name}-50", marks=pytest.mark.long) for name, each in PREEMPTED.items()),
]


@pytest.mark.parametrize(("preempted", "times"), TIMES)
@pytest.mark.timeout(3600)
def test_sigterm_at_any_moment_ends_in_time_and_loses_nothing(
    tmp_path: Path, preempted: Preempted, times: int
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these moments with HOLDFAST_TEST_SEED={seed}")
    moments, ledger, store = random.Random(seed), tmp_path / "ledger.txt", tmp_path / "store"
    env = environment(store) | {"HOLDFAST_GRACE": f"{GRACE_SECONDS:g}"}
    options = ("--epochs", "4000", "--every", "7", *preempted.options)
    command = [*preempted.run, *trainer(ledger, "any-moment", *options)]
    reached = 0
    for _ in range(times):
        seen = len(read_ledger(ledger))
        with spawned(command, tmp_path / "log", env, group=0) as process:
            steps = moments.choice([1, 2, 5, 20])
            eventually(lambda at=seen + steps: len(read_ledger(ledger)) >= at, "training")
            time.sleep(moments.uniform(0, 0.02))  # where in an iteration it falls is left to chance
            there, asked_at = descendants(process.pid), time.monotonic()
            preempted.told(process)
            assert process.wait(PATIENCE_SECONDS) == EXIT_SIGTERM
            assert time.monotonic() - asked_at < GRACE_SECONDS
        eventually(lambda there=there: not any(map(lives, there)), "the end of all processes")
        steps_here = read_ledger(ledger)[seen:]
        assert steps_here[0].iteration == reached + 1, "nothing is trained twice, nothing left out"
        reached = steps_here[-1].iteration
        assert newest(store, "any-moment") == reached
    opened = open_store(store)
    for checkpoint in opened.checkpoints("any-moment"):
        restore.verify(opened, "any-moment", checkpoint)
    print(f"{times} of {times} saved, with exit status {EXIT_SIGTERM}")


TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2")
BARE = Preempted(to_all, TORCHRUN)
RANKS = {
    "torchrun": BARE,
    "run torchrun": Preempted(to_one, (*RUN, *TORCHRUN)),
    "run torchrun, all processes": Preempted(to_all, (*RUN, *TORCHRUN)),
}


@pytest.mark.parametrize("preempted", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_all_ranks_of_torchrun_are_saved_when_sigterm_ends_them(
    tmp_path: Path, preempted: Preempted, times: int
) -> None:
    command = [*preempted.run, str(TRAINER.with_name("preempted_torchrun_trainer.py")), str(tmp_path), "ranks"]
    env = environment(tmp_path / "store") | {"OMP_NUM_THREADS": "1"}
    ledgers, store, reached = [tmp_path / f"ledger-{rank}" for rank in range(2)], tmp_path / "store", 0

    def iterations() -> list[list[int]]:
        return [list(map(int, ledger.read_text().split())) if ledger.exists() else [] for ledger in ledgers]

    for _ in range(times):
        with spawned(command, tmp_path / "log", env, group=0) as process:
            eventually(lambda at=reached: all(len(each) > at + 10 for each in iterations()), "training")
            there = descendants(process.pid)
            preempted.told(process)
            # torchrun has an exit status of its own: 1, with the traceback of a SignalException
            assert process.wait(PATIENCE_SECONDS) == (1 if preempted is BARE else EXIT_SIGTERM)
        eventually(lambda there=there: not any(map(lives, there)), "the end of all processes")
        first, second = iterations()
        reached = first[-1]
        assert first == second == list(range(1, reached + 1)), "nothing is trained twice, nothing left out"
        opened = open_store(store)
        manifest = restore.verify(opened, "ranks", opened.checkpoints("ranks")[-1])
        assert (manifest.iteration, manifest.world_size) == (reached, 2)
    print(f"{times} of {times} saved")


ENDS = """
import itertools, signal, sys, time
{before}
import holdfast
from holdfast.system.preemption import PreemptionHandler
leaving = PreemptionHandler({grace}, clock={clock})
print("ready", flush=True)
while not leaving.is_requested: time.sleep(0.01)
print("received", flush=True)
while True: time.sleep(0.01)
"""


def ended(grace: float, before: str = "", *, clock: str = "time.monotonic", signals: int = 1) -> tuple[int, float]:
    """How a process that never comes to a boundary ends, and after how long."""
    program = ENDS.format(before=before, grace=grace, clock=clock)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        for number in range(1, signals + 1):
            process.terminate()
            if number < signals:  # two that are pending at the same time are one
                assert process.stdout.readline() == b"received\n"
        return process.wait(PATIENCE_SECONDS), time.monotonic() - began


def test_what_comes_to_no_boundary_ends_with_its_grace() -> None:
    status, seconds = ended(1.0)
    assert status == EXIT_SIGTERM
    assert seconds >= 1.0 - SPARE_SECONDS


def test_a_second_signal_ends_at_once() -> None:
    assert ended(60.0, clock=f"itertools.count(step={REPEAT_SECONDS}).__next__", signals=2)[0] == -signal.SIGTERM


def test_the_same_signal_on_two_ways_is_one() -> None:
    assert ended(1.0, clock="lambda: 0.0", signals=2)[0] == EXIT_SIGTERM


@pytest.mark.parametrize(
    ("grace", "before", "expected"),
    [(0.0, "", -signal.SIGTERM), (60.0, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7)],
)
def test_a_signal_that_is_not_ours_is_left_alone(grace: float, before: str, expected: int) -> None:
    assert ended(grace, before)[0] == expected


def test_the_grace_runs_from_the_signal() -> None:
    now = [100.0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a session was left open by another test"
    leaving = PreemptionHandler(10.0, clock=lambda: now[0])
    try:
        assert not leaving.is_requested
        signal.raise_signal(signal.SIGTERM)  # to this thread, and heard before it returns
        assert leaving.is_requested
        assert leaving.grace_left_seconds == 10.0 - SPARE_SECONDS
        now[0] += 3.0
        assert leaving.grace_left_seconds == 10.0 - 3.0 - SPARE_SECONDS
    finally:
        leaving.close()
        leaving.cancel()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slurm.sh"
SLURM = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "$@" >> "$ASKED"',
}
"""What the example asks of Slurm, on this machine: to start the job, and to queue it again."""


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_the_example_for_slurm_saves_before_its_time_is_over_and_queues_itself_again(
    tmp_path: Path, number: signal.Signals, asked: list[str]
) -> None:
    programs, ledger, requeued = tmp_path / "bin", tmp_path / "ledger.txt", tmp_path / "asked"
    programs.mkdir()
    for name, body in (SLURM | {"holdfast": f'exec {" ".join(HOLDFAST)} "$@"'}).items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    env = environment(tmp_path / "store") | {
        "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "ASKED": str(requeued),
    }  # fmt: skip
    command = ["bash", str(EXAMPLE), *trainer(ledger, "slurm", "--slowly", "--every", "100000")]
    with spawned(command, tmp_path / "log", env) as script:
        eventually(lambda: len(read_ledger(ledger)) > 10, "training")
        script.send_signal(number)
        assert script.wait(PATIENCE_SECONDS) == EXIT_SIGTERM
    assert newest(tmp_path / "store", "slurm") == read_ledger(ledger)[-1].iteration
    assert (requeued.read_text().splitlines() if requeued.exists() else []) == asked


def test_the_example_for_kubernetes_gives_the_time_that_it_tells_of() -> None:
    """No cluster is here: what can be wrong without one is that its two times do not fit."""
    text = (EXAMPLE.parents[1] / "deploy" / "examples" / "training-job.yaml").read_text()
    (period,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    (grace,) = re.findall(r'"--grace", "(\d+)"', text)
    assert 0 < int(grace) < int(period)


METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer("tests.support.loader_worker_trainer")
    yield fork_server
    fork_server.close()


@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_a_script_that_ends(tmp_path: Path, method: str) -> None:
    """multiprocessing sends them SIGTERM, which they ignore while training goes on, and waits for them."""
    command = [sys.executable, str(TRAINER.with_name("loader_worker_trainer.py")), str(tmp_path), method]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path), check=True).stdout
    workers = [int(pid) for pid in told.split()]
    assert len(workers) == 2
    eventually(lambda: not any(map(lives, workers)), "the end of the workers")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wait", ["wait", "stuck", "stuck-without-handler"])
def test_workers_end_with_a_trainer_that_is_killed(
    tmp_path: Path, fork_server: ForkServer, method: str, wait: str
) -> None:
    """A worker that sleeps on a lock, such as that of torch's result queue, never looks for its parent itself."""
    options = {"folder": str(tmp_path / "store"), "method": method, "wait": wait}

    def have_started() -> bool:
        process.listen(0.1)
        return bool(process.all("workers "))

    with fork_server.spawn("tests.support.loader_worker_trainer.live", tmp_path / "log", **options) as process:
        eventually(have_started, "the workers to have started")
        workers = [int(pid) for pid in process.all("workers ")[0].split()]
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not any(map(lives, workers)), "the end of the workers")
