"""A server, a GPT in training under `holdfast run`, and the address of the dashboard.

The model is chosen for the machine: `demo_model.py` measures how long an iteration takes. Without `--seconds` the
demo runs until Ctrl-C. With it, the demo also lowers the budget and restores an earlier iteration through the HTTP
API that the dashboard uses, kills the trainer with SIGKILL in between, and prints the measured figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from demo_summary import DemoEvents, read_losses, summary

from holdfast.client import CheckpointInfo, Client, JobSummary, ServerError, UnreachableError
from holdfast.protocol.wire import DEFAULT_PORT

JOB = "char-gpt"
ROOT = Path(__file__).resolve().parent.parent
LOWER_BUDGET = 0.02
REPLAY_ITERATIONS = 10
"""Minimum number of iterations to restore back, if possible, and to compare afterwards."""
SHORTEST_INTERVAL = 4
"""Minimum interval at which a kill reliably loses an iteration."""
MOST_KILLS = 3
"""Kills until one loses something: a snapshot that was just taken survives in memory."""
KILL_INTERVAL = 10
"""Interval that replaces a shorter one until the kill."""
STARTED = re.compile(r"start (\d+): process (\d+),")
ENDED = re.compile(r"the trainer ended \((killed by SIGKILL)\) at iteration ([\d,]+)")


class DemoFailed(Exception):
    """The demo cannot continue; the message says why and where the logs are."""


class Demo:
    """The processes of the demo and a client of their server."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.log = state / "trainer.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.url = ""
        self.client = Client()

    def start(self) -> None:
        port = _free_port(DEFAULT_PORT)
        if port != DEFAULT_PORT:
            print(f"Port {DEFAULT_PORT} is taken; this demo uses {port}.")
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url)
        self._spawn("server.log", "serve", "--port", str(port), "--db", str(self.state / "holdfast.db"))
        model = self._choose_model()  # while the server starts
        self.until(self._ready, "the server to answer", 120)
        options = ["--server", self.url, "--store", str(self.state / "checkpoints")]
        trainer = [sys.executable, str(ROOT / "examples" / "char_gpt.py"), "--epochs", "1000", *model]
        # a policy that spends the budget in full shows it at work
        self._spawn("trainer.log", "run", *options, "--", *trainer, HOLDFAST_POLICY="checkfreq")

    def stop(self) -> None:
        """Send SIGINT to the trainer, then to the server, and wait for each; another Ctrl-C kills them."""
        try:
            for process in reversed(self.processes):
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(45)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def job(self) -> JobSummary | None:
        """Return the job; `None` before its first report."""
        try:
            return self.client.job(JOB)
        except ServerError:
            return None

    def trainer_pid(self) -> int:
        return int(STARTED.findall(self.log.read_text())[-1][1])

    def kills(self) -> list[int]:
        """Return the last iteration of each attempt that was killed."""
        return [int(iteration.replace(",", "")) for _, iteration in ENDED.findall(self.log.read_text())]

    def restorable(self) -> list[CheckpointInfo]:
        if self.job() is None:
            return []
        rows = [row for row in self.client.checkpoints(JOB) if row.restorable and not row.abandoned]
        return sorted(rows, key=lambda row: row.iteration)

    def until(
        self, happened: Callable[[], bool], what: str, seconds: float, *, pause_seconds: float = 0.2
    ) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {seconds:.0f} s for {what}; see the logs in {self.state}")
            self.check()
            time.sleep(pause_seconds)

    def check(self) -> None:
        for process in self.processes:
            if process.poll() is not None:
                name = "server" if process is self.processes[0] else "trainer"
                tail = (self.state / f"{name}.log").read_text().splitlines()[-8:]
                raise DemoFailed("\n  ".join([f"the {name} ended; the last lines of its log:", *tail]))

    def _choose_model(self) -> list[str]:
        """Return options of the training script for a model that suits this machine."""
        with open(self.state / "model.log", "wb") as log:
            tool = [sys.executable, str(ROOT / "tools" / "demo_model.py")]
            chosen = subprocess.run(tool, stdout=subprocess.PIPE, stderr=log, check=False)  # noqa: S603
        if chosen.returncode:
            raise DemoFailed(f"no model could be measured; see {self.state / 'model.log'}")
        return chosen.stdout.decode().split()

    def _ready(self) -> bool:
        try:
            self.client.jobs()
        except UnreachableError:
            return False
        return True

    def _spawn(self, log: str, *arguments: str, **environment: str) -> None:
        with open(self.state / log, "ab") as output:
            # in their own process groups: Ctrl-C then reaches only this process, which ends them in order
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "holdfast.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=os.environ | environment,
            )
        self.processes.append(process)


class Ticker:
    """A progress line: rewritten on a terminal, printed every five seconds in a log."""

    def __init__(self, demo: Demo) -> None:
        self.demo, self.live, self.printed_at = demo, sys.stdout.isatty(), 0.0
        self.killed_attempt = 0
        """The attempt that was killed; the server learns of it from the next one."""

    def tick(self) -> None:
        line = _progress(self.demo.job(), self.killed_attempt)
        if self.live:
            print(f"\r\033[K{line}", end="", flush=True)
        elif time.monotonic() - self.printed_at > 5:
            self.printed_at = time.monotonic()
            print(line, flush=True)

    def say(self, line: str) -> None:
        print(f"\r\033[K{line}" if self.live else line, flush=True)

    def watch(self, happened: Callable[[], bool], what: str, seconds: float, **options: float) -> None:
        """Wait until `happened` returns True; DemoFailed after the time is over."""

        def ticked() -> bool:
            self.tick()
            return happened()

        self.demo.until(ticked, what, seconds, **options)

    def rest(self, until: float) -> None:
        self.watch(lambda: time.monotonic() >= until, "the time to pass", 1e9)


def play(demo: Demo, ticker: Ticker, began: float, seconds: float) -> DemoEvents:
    """Lower the budget at 35 % of the time, kill at 55 %, restore at 75 %; later on a slow machine."""
    story = DemoEvents()
    ticker.watch(lambda: len(demo.restorable()) >= 1, "the first checkpoint", 300)
    wait_for_overhead(demo, ticker, None, began + 0.35 * seconds, began + 0.45 * seconds)
    stale = lower_budget(demo, ticker)
    wait_for_overhead(demo, ticker, stale, began + 0.55 * seconds, began + 0.6 * seconds)
    kill_trainer(demo, ticker, story)
    ticker.rest(began + 0.75 * seconds)
    restore_earlier(demo, ticker, story)
    ticker.rest(began + seconds)
    return story


def wait_for_overhead(
    demo: Demo, ticker: Ticker, stale: tuple[float | None, int] | None, at: float, at_most: float
) -> None:
    """Wait for a measured overhead other than `stale`: within the budget from `at` on, then any."""

    def measured() -> bool:
        job = demo.job()
        if job is None or job.measured_overhead is None or _overhead(job) == stale:
            return False
        now = time.monotonic()
        return now >= at_most or (now >= at and job.measured_overhead <= (job.budget or 0.0))

    ticker.watch(measured, "the overhead to be measured", 300)


def lower_budget(demo: Demo, ticker: Ticker) -> tuple[float | None, int]:
    """Return the overhead that was measured under the previous budget."""
    desired = demo.client.edit(JOB, budget=LOWER_BUDGET)
    ticker.watch(lambda: _applied(demo.job(), desired.version), "the budget to be applied", 60)
    after = demo.client.job(JOB)
    ticker.say(
        f"Budget lowered to {LOWER_BUDGET:.0%}: version {desired.version}, "
        f"applied at iteration {after.applied_iteration}."
    )
    return _overhead(after)


def kill_trainer(demo: Demo, ticker: Ticker, story: DemoEvents) -> None:
    """Kill the trainer shortly before a checkpoint is due, and again if nothing that was reported was lost."""
    fixed = _interval(demo) < SHORTEST_INTERVAL
    if fixed:
        ticker.say(f"Interval fixed at {KILL_INTERVAL} iterations, so that the kill has something to lose.")
        demo.client.edit(JOB, every=KILL_INTERVAL)
        ticker.watch(lambda: _interval(demo) == KILL_INTERVAL, "the interval to be applied", 60)
    for left in reversed(range(MOST_KILLS)):
        if kill_once(demo, ticker, story) or not left:
            break
        ticker.say("No iteration that was reported is repeated, so none can be compared. Killing it once more.")
    if fixed:
        demo.client.edit(JOB, every=None)


def kill_once(demo: Demo, ticker: Ticker, story: DemoEvents) -> int:
    """Kill the trainer, wait for its restart, and return how many lost iterations had been reported."""
    patience = time.monotonic() + 15
    ticker.watch(
        lambda: _nearly_due(demo.job()) or (time.monotonic() > patience and _exposed(demo.job())),
        "a checkpoint to be nearly due",
        60,
        pause_seconds=0.03,
    )
    job, kills, pid = demo.client.job(JOB), demo.kills(), demo.trainer_pid()
    story.killed_at_time, story.killed_attempt = time.time(), job.attempt
    ticker.killed_attempt = job.attempt
    os.kill(pid, signal.SIGKILL)
    ticker.say(f"Trainer killed with SIGKILL (process {pid}).")
    story.losses_before_kill = read_losses(demo.client, JOB)
    ticker.watch(lambda: len(demo.kills()) > len(kills), "the supervisor to notice", 30)
    last = story.killed_at = demo.kills()[-1]
    ticker.watch(lambda: _iteration(demo.job()) > last, "an iteration that is new after the kill", 300)
    resumed = next(row.iteration for row in demo.client.attempts(JOB) if row.attempt == story.killed_attempt + 1)
    lost = max(0, last - resumed)
    ticker.say(
        f"Restarted by `holdfast run` at iteration {resumed}: {lost} lost and repeated, now past {last} again."
    )
    return sum(resumed < iteration <= last for _, iteration in story.losses_before_kill)


def restore_earlier(demo: Demo, ticker: Ticker, story: DemoEvents) -> None:
    """Restore a checkpoint that is old enough to replay and compare iterations."""
    ticker.watch(lambda: len(demo.restorable()) >= 2, "a checkpoint to go back to", 300)
    points, now = demo.restorable(), _iteration(demo.job())
    chosen = next((row for row in reversed(points) if row.iteration <= now - REPLAY_ITERATIONS), points[0])
    order = demo.client.restore(JOB, chosen.iteration)
    ticker.say(f"Restore of iteration {chosen.iteration} requested (order {order.id}).")
    for moved in demo.client.follow(order, timeout_seconds=120):
        order = moved
    if order.state != "restored":
        raise DemoFailed(f"the restore ended as {order.state}: {order.reason or 'no reason given'}")
    story.order = order
    again, patience = chosen.iteration + REPLAY_ITERATIONS, time.monotonic() + 60
    ticker.say(f"Restored: the job continues from iteration {order.iteration} on lineage {order.new_lineage}.")
    ticker.watch(lambda: _iteration(demo.job()) >= again or time.monotonic() > patience, "the replay", 120)


def _progress(job: JobSummary | None, killed_attempt: int) -> str:
    if job is None:
        return "the trainer is starting (importing torch, reading the training text) ..."
    last = job.last_durable.iteration if job.last_durable else "none yet"
    loss = "-" if job.loss is None else f"{float(job.loss):.3f}"
    overhead = "measuring" if job.measured_overhead is None else f"{job.measured_overhead:.2%}"
    budget = "-" if job.budget is None else f"{job.budget:.1%}"
    status = "killed, restarting" if job.attempt == killed_attempt else job.status
    return (
        f"iteration {job.iteration}  loss {loss}  {job.iterations_per_second or 0:.1f}/s  "
        f"overhead {overhead} of {budget}  checkpoint {last}  [{status}]"
    )


def _applied(job: JobSummary | None, version: int) -> bool:
    return job is not None and (job.applied_version or 0) >= version


def _exposed(job: JobSummary | None) -> bool:
    return job is not None and job.unsaved_iterations >= 1


def _nearly_due(job: JobSummary | None) -> bool:
    """Return whether half of an interval has passed and no checkpoint will begin before the kill."""
    if job is None or job.interval is None:
        return False
    latest = job.interval - 2
    since_report = int(job.last_contact_seconds * (job.iterations_per_second or 0.0))
    return min(job.interval * 3 // 5, latest) <= job.unsaved_iterations + since_report <= latest


def _interval(demo: Demo) -> int:
    job = demo.job()
    return (job.interval if job else None) or 0


def _overhead(job: JobSummary) -> tuple[float | None, int]:
    return job.measured_overhead, job.measured_window_iterations


def _iteration(job: JobSummary | None) -> int:
    return job.iteration if job else 0


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise DemoFailed("no free port on 127.0.0.1")


@contextlib.contextmanager
def _running(state: Path) -> Iterator[Demo]:
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    demo = Demo(state)
    # both, and first: background jobs of a shell inherit SIGINT as ignored, and so would the
    # server and the trainer
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        demo.start()
        yield demo
    finally:
        print("\nStopping the trainer, then the server ...", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            demo.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="lower the budget, kill, restore, and end by then")
    parser.add_argument("--state", type=Path, default=ROOT / ".demo", help="a directory that is emptied first")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"Starting the server and choosing a model for this machine. Logs are in {options.state}.", flush=True)
    try:
        with _running(options.state) as demo:
            print(f"\n  Dashboard:  {demo.url}/jobs/{JOB}\n\nCtrl-C ends it.\n", flush=True)
            ticker = Ticker(demo)
            if options.seconds is None:
                ticker.rest(float("inf"))
            else:
                figures = summary(demo.client, JOB, play(demo, ticker, began, options.seconds))
                ticker.say("\n" + figures)
    except KeyboardInterrupt:
        pass
    except (DemoFailed, ServerError, UnreachableError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
