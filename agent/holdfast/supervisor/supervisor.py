"""`holdfast run -- python train.py`: starts a trainer, again when it crashes, and leaves nothing behind.

One thread, and nothing imported that the trainer's own memory or start-up time could feel. The supervisor knows
how far training is from HOLDFAST_PROGRESS, and which job it is from the folder of HOLDFAST_SUPERVISION.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.snapshot.shared_buffers import Held
from holdfast.supervisor.hang_detector import HangDetector, Progress, progress_file, read_progress
from holdfast.system import processes, supervisor_channel
from holdfast.system.supervisor_channel import EXIT_FENCED

if TYPE_CHECKING:
    from holdfast.supervisor.supervisor_link import Told

STARTS_FOR_AN_ORDER = 3
"""One that could not ask the server carries out nothing, nor does one that dies too soon; but not for ever."""
MOST_STACKS = 64
"""Ranks whose stacks go onto the timeline; all are in the log."""
Stay = Literal["never", "failure", "always"]
"""After which end a supervisor waits for an order to restore: none, one that it gives up after, any."""
STAYS: tuple[Stay, ...] = get_args(Stay)
CANNOT_START = (2, 126, 127)
"""Exit statuses of a command that cannot start: Python's for a script that is not there, a program's for arguments
that it does not know, a shell's for a program that it cannot run or find."""
CONTACT_SECONDS = 2.0
"""How long the server may take to say that it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to try again, and when to stop."""

    fruitless_starts: int = 5
    """Starts in a row without a new iteration after which the supervisor gives up."""
    first_backoff_seconds: float = 0.2
    """Wait after a crash; doubled after each fruitless start, back to this one after progress."""
    longest_backoff_seconds: float = 30.0
    grace_seconds: float = 30.0
    """How long a trainer may take to end after SIGINT or SIGTERM before its process group is killed."""
    repeat_seconds: float = 2.0
    """A second signal this long after the first kills at once. Sooner, it is the same Ctrl-C on two ways:
    a terminal signals the whole foreground group, and a parent may pass it on as well."""
    poll_seconds: float = 0.25
    """How often the trainer's progress is looked at while it runs."""
    hang_factor: float = 50.0
    """A trainer without a new iteration for so many usual ones hangs, and is killed; 0: none ever does."""
    hang_least_seconds: float = 600.0
    """... but no sooner: a script evaluates now and then, and its checkpoints may be slow to come."""

    def __post_init__(self) -> None:
        if self.hang_factor < 0 or 0 < self.hang_factor < 2:
            raise ValueError(f"hang factor {self.hang_factor:g}: at least 2 usual iterations, or 0 for never")
        if self.fruitless_starts < 1:
            raise ValueError(f"fruitless starts {self.fruitless_starts}: at least 1 is needed to run at all")
        if self.grace_seconds < 0:
            raise ValueError(f"grace {self.grace_seconds} s: a wait cannot be negative")

    def backoff_seconds(self, fruitless: int) -> float:
        """Between half and all of an exponential wait: jobs that died together do not come back together."""
        longest = min(self.longest_backoff_seconds, self.first_backoff_seconds * 2.0 ** min(fruitless, 60))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311


class Supervisor:
    """Runs `command` until it ends by itself, is told to end, or gets nowhere.

    Args:
        command: the trainer and its arguments.
        limits: when to try again and when to stop.
        environment: added to this process's own; HOLDFAST_STORE and its like.
        stay: after which end to wait for an order to restore, where the trainer has named a server.
        memory_tier: hold memory for the trainer's snapshots, which so outlive it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        stay: Stay = "failure",
        memory_tier: bool = True,
    ) -> None:
        if not command:
            raise ValueError("no command to run: holdfast run -- python train.py")
        self.command = list(command)
        self.limits = limits or Limits()
        self.environment = dict(environment or {})
        self.stay = stay
        self.memory_tier = memory_tier
        self.say = supervisor_channel.say
        self.starts = 0
        self._progress = Progress()
        self._folder = Path()
        """Which the trainer knows, too."""
        self._hung = False
        """The start that ended now was killed because it hung."""
        self._orders: collections.Counter[str] = collections.Counter()
        """That starts were made for."""
        self._told: Told | None = None
        self._greeted = False
        """It has been said where the job's page is, and whether the server answers."""
        self._not_ours: frozenset[int] = frozenset()
        self._held: Held | None = None
        self._rescue: subprocess.Popen[bytes] | None = None
        """Makes durable what the last start has left in memory."""

    def run(self) -> int:
        """The exit status for the shell: 0, the trainer's own, or 128 + the signal that ended it."""
        with processes.caught_signals() as signals, supervisor_channel.folder_of_a_supervisor() as folder:
            self._folder = folder
            self._not_ours = frozenset(processes.below(os.getpid()))
            processes.adopt_orphans()
            self._held = Held(self._folder) if self.memory_tier else None
            try:
                return self._supervise(signals)
            finally:
                self._await_rescue(signals)
                if self._held is not None:
                    self._held.close()

    def _supervise(self, signals: processes.Signals) -> int:
        fruitless, previous_exit = 0, None
        while True:
            status = self._run_once(signals, previous_exit)
            previous_exit = describe_exit(status) + (" because it hung" if self._hung else "")
            self._start_rescue(previous_exit)
            if signals.stops and status != 0:
                self.say(f"stopped: the trainer ended ({previous_exit})")
                # 1: the signal raised an exception, as in torchrun, however its ranks have ended
                return 128 + signals.stops[0][0] if status == 1 else shell_status(status)
            if (other := self._taken_over(status)) is not None:
                self.say(f"{other}: this one ends, and starts the trainer no more", logging.ERROR)
                return EXIT_FENCED
            if (order := supervisor_channel.take_relaunch(self._folder)) is not None:
                self.say(f"the trainer ended to be taken back to {order.checkpoint}: starting it again")
                fruitless = 0 if self._progress.end() else fruitless
                self._progress.taken_back(parse_checkpoint_id(order.checkpoint)[0])
                continue
            fruitless = 0 if self._progress.end() else fruitless + 1
            if status == 0:
                end = f"the trainer ended with exit status 0 at iteration {self._progress.reached}"
            elif status in CANNOT_START and not self._has_begun:
                end = (
                    f"giving up: the command cannot start ({previous_exit}, before a session began). Correct it, "
                    f"as the error above says, and run it again: {shlex.join(self.command)}"
                )
            elif fruitless >= self.limits.fruitless_starts:
                end = self._gave_up(fruitless, previous_exit)
            elif self._wait(signals, fruitless, previous_exit):
                continue
            else:
                return 128 + signals.stops[0][0]
            self.say(end, logging.ERROR if status else logging.INFO)
            if not self._stays(signals, status, end):
                return 128 + signals.stops[0][0] if signals.stops and status else shell_status(status)
            fruitless = 0

    def _start_rescue(self, end: str) -> None:
        """Save what is whole in memory, beside whatever comes next."""
        trained = supervisor_channel.introduced(self._folder)
        if trained is None or self._held is None or not self._held.sealed:
            return
        dead = ",".join(supervisor_channel.announced(self._folder))
        told = msgspec.json.encode(trained).decode()
        words = [str(self._folder), told, end, dead, *map(str, processes.helpers())]
        try:
            with processes.blocked(*processes.STOPS):
                self._rescue = subprocess.Popen(  # noqa: S603  this interpreter
                    [sys.executable, "-P", "-m", processes.RESCUE, *words],
                    env=os.environ | self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        except OSError as error:
            self.say(f"what is in memory is not saved before the next start: {error}", logging.WARNING)

    def _await_rescue(self, signals: processes.Signals) -> None:
        """It is the last one: whoever waits for this process counts on what it saves."""
        stops = len(signals.stops)
        while self._rescue is not None and self._rescue.poll() is None and len(signals.stops) == stops:
            signals.sleep(self.limits.poll_seconds)

    def _taken_over(self, status: int) -> str | None:
        """Who trains this job elsewhere: it must not be taken from them by another start here."""
        trained = supervisor_channel.introduced(self._folder)
        if trained is None:
            return "the trainer was fenced" if status == EXIT_FENCED else None
        return supervisor_channel.taken_over(trained, supervisor_channel.announced(self._folder))

    def _stays(self, signals: processes.Signals, status: int, end: str) -> bool:
        """Wait for an order, if that is wanted and there is a server to hear it from; whether one has come."""
        trained = supervisor_channel.introduced(self._folder)
        wanted = self.stay == "always" or (self.stay == "failure" and status != 0)
        if not wanted or signals.stops or trained is None or not trained.server:
            return False
        from holdfast.supervisor.supervisor_link import Waiting

        self._tell(
            "warning" if status else "info", "waits", f"{end}. The supervisor waits for an order to restore"
        )
        self.say(f"waiting for an order to restore {trained.job}; Ctrl-C ends this")
        tried = {order for order, starts in self._orders.items() if starts >= STARTS_FOR_AN_ORDER}
        waiting = Waiting(trained, signals.rouse, tried)
        try:
            while not signals.stops and (order := waiting.order) is None:
                signals.sleep(None)
        finally:
            waiting.close()
        if signals.stops or order is None:
            return False
        if (
            other := supervisor_channel.taken_over(trained, supervisor_channel.announced(self._folder))
        ) is not None:
            self.say(f"{other}: the order is for that one")
            return False
        self._orders[order.id] += 1
        again = " again, which has not carried it out" if self._orders[order.id] > 1 else ""
        self.say(f"an order to restore {order.checkpoint} has come: starting the trainer{again}")
        return True

    def _tell(self, level: Literal["info", "warning", "error"], code: str, *messages: str) -> None:
        """Onto the job's timeline, where the trainer has named a server."""
        trained = supervisor_channel.introduced(self._folder)
        if trained is None or not trained.server:
            return
        if self._told is None:
            from holdfast.supervisor.supervisor_link import Told

            self._told = Told()
        self._told.tell(trained, self._progress.reached, level, code, *messages)

    @property
    def _has_begun(self) -> bool:
        """A start has come as far as its session."""
        return self._progress.highest > 0 or supervisor_channel.introduced(self._folder) is not None

    def _gave_up(self, fruitless: int, previous_exit: str) -> str:
        starts = "1 start" if fruitless == 1 else f"{fruitless} starts in a row"
        if not self._has_begun:
            found, then = "before a session began", ""
        else:
            found, then = self._progress.place, ": it resumes from its newest checkpoint"
        return (
            f"giving up: {starts} ended without a new iteration, the last one ({previous_exit}) {found}. Correct "
            f"the cause, as shown above, and run it again{then}"
        )

    def _wait(self, signals: processes.Signals, fruitless: int, previous_exit: str) -> bool:
        """Back off before the next start; False when told to stop meanwhile."""
        seconds = self.limits.backoff_seconds(fruitless)
        tries = f", try {fruitless + 1} of {self.limits.fruitless_starts}" if fruitless else ""
        self.say(
            f"the trainer ended ({previous_exit}) {self._progress.place}; "
            f"starting it again in {seconds:.1f} s{tries}",
            logging.WARNING,
        )
        deadline = time.monotonic() + seconds
        while not signals.stops and (left := deadline - time.monotonic()) > 0:
            signals.sleep(left)
        if signals.stops:
            self.say("stopped while waiting to start the trainer again")
        return not signals.stops

    def _run_once(self, signals: processes.Signals, previous_exit: str | None) -> int:
        """One start, from fork to the last process below it; the status as subprocess gives it."""
        self._progress.begin()
        self._hung = False
        self.starts += 1
        supervisor_channel.forget_ranks(self._folder)
        if self._held is not None:
            self._held.unclaim()
        with progress_file(self._folder / "progress") as progress:
            trainer = self._start(self._folder / "progress", previous_exit)
            self.say(f"start {self.starts}: process {trainer.pid}, {shlex.join(self.command)}")
            try:
                self._watch(trainer, signals, progress)
            finally:
                if left := processes.kill_below(trainer.pid, self._not_ours):
                    self.say(f"still there after SIGKILL: {', '.join(map(str, left))}", logging.ERROR)
                status = trainer.wait()
            self._progress.see(*read_progress(progress))
        return status

    def _start(self, progress_path: Path, previous_exit: str | None) -> subprocess.Popen[bytes]:
        environment = os.environ | self.environment
        environment |= {"HOLDFAST_SUPERVISED": "1", "HOLDFAST_PROGRESS": str(progress_path)}
        environment[supervisor_channel.VARIABLE] = str(self._folder)
        environment[supervisor_channel.STARTED_AT] = f"{time.time():.3f}"
        environment.setdefault("HOLDFAST_GRACE", f"{self.limits.grace_seconds:g}")
        environment.pop(supervisor_channel.PREVIOUS_EXIT, None)
        if previous_exit is not None:
            environment[supervisor_channel.PREVIOUS_EXIT] = previous_exit
        return subprocess.Popen(  # noqa: S603
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,  # a group in the background that reads the terminal would be stopped
            process_group=0,
            preexec_fn=processes.die_with_parent if sys.platform == "linux" else None,
        )

    def _watch(self, trainer: subprocess.Popen[bytes], signals: processes.Signals, progress: int) -> None:
        """Return when the trainer's own process has ended; pass signals on until then."""
        passed_on = killed = False
        pulse = HangDetector(self.limits.hang_factor, self.limits.hang_least_seconds, time.monotonic())
        while not processes.has_ended(trainer.pid):
            while signals.messages:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer.pid, signals.messages.pop(0))
            if signals.stops and not passed_on:
                signum, passed_on = signals.stops[0][0], True
                grace = f"{self.limits.grace_seconds:g}"
                self.say(f"{_name(signum)}: passed on to the trainer, which has {grace} s to end")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer.pid, signum)
            reason = self._out_of_patience(signals.stops)
            if reason is None and not signals.stops and pulse.hangs(time.monotonic()):
                reason = self._hangs(pulse)
            if reason is not None and not killed:
                self.say(reason, logging.WARNING)
                processes.kill_below(trainer.pid, self._not_ours)
                killed = True
            processes.reap_orphans(trainer.pid)
            if not self._greeted and not signals.stops:
                self._greet()
            signals.sleep(self.limits.poll_seconds)
            iteration, steps = read_progress(progress)
            self._progress.see(iteration, steps)
            pulse.see(steps, time.monotonic())

    def _greet(self) -> None:
        """Say, once the trainer has named its job, where the job's page is and whether the server answers."""
        trained = supervisor_channel.introduced(self._folder)
        if trained is None:
            return
        self._greeted = True
        if not trained.server:
            return
        from holdfast.client import Client, ServerError

        token = (os.environ | self.environment).get("HOLDFAST_TOKEN")
        page = f"dashboard: {trained.server.rstrip('/')}/jobs/{trained.job}"
        try:
            with Client(trained.server, token, timeout_seconds=CONTACT_SECONDS, retries=0) as client:
                client.job(trained.job)
        except ServerError:  # it answers, and has not heard of the job yet
            pass
        except Exception as error:  # whatever answers there, the trainer must be watched over
            self.say(f"{page}: {error}. Training goes on; reports are kept meanwhile", logging.WARNING)
            return
        self.say(f"{page} (the server answers)")

    def _hangs(self, pulse: HangDetector) -> str:
        """Note where every rank is stuck, here and on the timeline, before anything is done about it."""
        silent, usual = pulse.silent_seconds(time.monotonic()), pulse.usual_seconds or 0.0
        self._hung = True
        after = f"no iteration after {self._progress.reached} for {silent:.0f} s, where one takes {usual:.3g} s"
        stacks = supervisor_channel.stacks_of(supervisor_channel.ranks(self._folder))
        told = [f"rank {rank}:\n{text}" for rank, text in stacks.items()] or ["no rank can be asked"]
        for line in "\n".join(told).splitlines():
            self.say(line, logging.ERROR)
        # a rank each, for one notice holds the stacks of one
        more = [f"and {len(told) - MOST_STACKS} more ranks: see the log"] if len(told) > MOST_STACKS else []
        self._tell("error", "hang", f"{after}: the trainer is killed", *told[:MOST_STACKS], *more)
        return f"{after}: killed"

    def _out_of_patience(self, stops: Sequence[tuple[int, float]]) -> str | None:
        """Why the trainer's process group is to be killed, or None."""
        if not stops:
            return None
        first, last = stops[0][1], stops[-1][1]
        if last - first > self.limits.repeat_seconds:
            return "second signal: killed"
        if time.monotonic() - first > self.limits.grace_seconds:
            return f"the trainer did not end within {self.limits.grace_seconds:g} s: killed"
        return None


def describe_exit(status: int) -> str:
    """`killed by SIGKILL` or `exit status 1`, from subprocess's return code."""
    return f"killed by {_name(-status)}" if status < 0 else f"exit status {status}"


def shell_status(status: int) -> int:
    """What a shell would report for this return code of subprocess."""
    return 128 - status if status < 0 else status


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"
