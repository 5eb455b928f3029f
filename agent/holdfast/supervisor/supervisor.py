"""The supervisor behind `holdfast run`: it starts a trainer, restarts it after a crash, and kills what it leaves.

It has one thread, and few imports, so that it takes little memory from the trainer. It reads training's progress
from the file HOLDFAST_PROGRESS, and the job from the folder HOLDFAST_SUPERVISION.

One module, since what happens after an end depends on all that was seen of the start.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import SupervisorReport, SupervisorState
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.supervisor import old_rendezvous, output_capture
from holdfast.supervisor.end_causes import EndCause, HostFaults, end_cause, kernel_kills
from holdfast.supervisor.hang_detector import HangDetector, RestartProgress, progress_file, read_progress
from holdfast.supervisor.restart_limits import RestartLimits
from holdfast.supervisor.server_reports import ServerReports
from holdfast.supervisor.warm_start import ForkedTrainer, WarmStarts
from holdfast.system import process_facts, processes, supervisor_channel, supervisor_files
from holdfast.system.processes import describe_exit, shell_status
from holdfast.system.supervisor_channel import EXIT_FENCED, EXIT_HOST_FAULT

if TYPE_CHECKING:
    from holdfast.protocol.wire import RestoreOrder

MAX_STARTS_PER_RESTORE = 3
"""Starts for one restore request before the supervisor ignores it."""
MAX_REPORTED_STACKS = 64
"""Number of ranks whose stacks are reported to the server; the log has all."""
Stay = Literal["never", "failure", "always"]
"""When to wait for a restore request after the last start: never, after giving up, always."""
STAYS: tuple[Stay, ...] = get_args(Stay)
CANNOT_START = (2, 126, 127)
"""Exit statuses of a command that cannot start: Python's for a missing script, a program's for unknown arguments,
a shell's for a program that it cannot run or find."""
CONTACT_SECONDS = 2.0
"""How long to wait for the server's first response, and for its last one when a signal ended the supervisor."""


class Supervisor:
    """Runs `command` until it succeeds, a signal stops it, or restarts make no progress.

    Args:
        environment: variables in addition to those of this process.
        stay: when to wait for a restore request after the last start, if the trainer has a server.
        memory_tier: hold memory for snapshots that outlives the trainer.
        capture_output: send the last lines of the trainer's output to the server.
        warm: keep a process with the trainer's imports, and restart the trainer by forking it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: RestartLimits | None = None,
        environment: Mapping[str, str] | None = None,
        stay: Stay = "failure",
        memory_tier: bool = True,
        capture_output: bool = True,
        warm: bool = False,
    ) -> None:
        if not command:
            raise ValueError("no command to run: holdfast run -- python train.py")
        self.command = list(command)
        self.limits = limits or RestartLimits()
        self.environment = dict(environment or {})
        self.stay = stay
        self.memory_tier, self.capture_output, self.warm = memory_tier, capture_output, warm
        self.log = supervisor_files.log_line
        self.starts = 0
        self._progress = RestartProgress()
        self._folder = Path()
        """Folder shared with the trainer."""
        self._was_hung = False
        """Whether the last start was killed because it hung."""
        self._kernel_kills = 0
        """Processes that the kernel had killed for lack of memory when the last start began."""
        self._host_faults = HostFaults(self.limits.host_faults)
        self._starts_per_restore: collections.Counter[str] = collections.Counter()
        self._reports = ServerReports(self._folder)
        self._last_report_seconds = CONTACT_SECONDS
        self._dashboard_logged = False
        self._not_ours: frozenset[int] = frozenset()
        """Children that this process had before, and the processes that relay output or save snapshots."""
        self._relay: subprocess.Popen[bytes] | None = None
        self._held: SupervisorMemory | None = None
        self._warm_starts: WarmStarts | None = None
        self._rescue: subprocess.Popen[bytes] | None = None
        """Process that saves the last start's snapshot from memory."""

    def run(self) -> int:
        """Run the trainer until it ends for good, and return the exit status for the shell."""
        with processes.caught_signals() as signals, supervisor_files.supervisor_folder() as folder:
            self._folder, self._reports = folder, ServerReports(folder)
            self._not_ours = frozenset(processes.descendants(os.getpid()))
            processes.adopt_orphans()
            self._held = SupervisorMemory(self._folder) if self.memory_tier else None
            self._warm_starts = WarmStarts(self.command, self._folder) if self.warm else None
            try:
                return self._supervise(signals)
            finally:
                if self._warm_starts is not None:
                    self._warm_starts.close()
                self._await_helpers(signals)
                self._reports.settle(self._last_report_seconds)
                if self._held is not None:
                    self._held.close()

    def _supervise(self, signals: processes.PendingSignals) -> int:
        fruitless, previous_exit = 0, None
        while True:
            old_rendezvous.await_end(os.environ | self.environment, signals, self.limits.rendezvous_seconds)
            if signals.stops:
                return self._stopped(signals)
            status = self._run_once(signals, previous_exit)
            while self._warm_starts is not None and self._warm_starts.take_end() and not signals.stops:
                self._progress.end_start()
                status = self._run_once(signals, previous_exit)
            previous_exit = describe_exit(status) + (" because it hung" if self._was_hung else "")
            self._start_rescue(previous_exit)
            cause, reason = self._end_cause(status, previous_exit)
            ended = previous_exit if cause is None else cause.describe(previous_exit)
            if signals.stops and status != 0:
                self.log(f"stopped: the trainer ended ({previous_exit})")
                self._report("stopped", f"holdfast run was stopped by {signals.stop_name}")
                # torchrun exits with 1 after a signal, however its ranks ended
                return 128 + signals.stops[0][0] if status == 1 else shell_status(status)
            if (other := self._replaced_by(status)) is not None:
                self.log(f"{other}; this supervisor ends", logging.ERROR)
                return EXIT_FENCED
            if (requested := supervisor_files.take_ended(self._folder)) is not None:
                status, previous_exit = 0, requested
            elif (order := supervisor_files.take_relaunch(self._folder)) is not None:
                self.log(f"restarting the trainer to restore checkpoint {order.checkpoint}")
                fruitless = 0 if self._progress.end_start() else fruitless
                self._restart_for(order)
                continue
            fruitless = 0 if self._progress.end_start() else fruitless + 1
            if status == 0:
                self._report("ended", previous_exit)
                end = requested or f"the trainer ended with exit status 0 at iteration {self._progress.reached}"
            elif status in CANNOT_START and not self._has_begun:
                end = (
                    f"giving up: the command cannot start ({previous_exit}, before a session began). Correct the "
                    f"error shown above and run it again: {shlex.join(self.command)}"
                )
            elif self._host_faults.reach_limit(cause, time.monotonic()):
                self._report("gave_up", reason, start=fruitless)
                self.log(f"{ended}, {self.limits.host_faults} times on this host: leaving it", logging.ERROR)
                return EXIT_HOST_FAULT
            elif fruitless >= self.limits.fruitless_starts or self._is_hopeless(cause):
                end = self._giving_up(fruitless, ended)
                waits = self._waits(signals, status) is not None
                self._report("gave_up", reason, start=fruitless, waits=waits)
                self._last_report_seconds = output_capture.REPORT_SECONDS
            elif self._back_off(signals, fruitless, ended, reason):
                continue
            else:
                return self._stopped(signals)
            self.log(end, logging.ERROR if status else logging.INFO)
            if not self._wait_for_restore(signals, status, end):
                return 128 + signals.stops[0][0] if signals.stops and status else shell_status(status)
            fruitless = 0

    def _start_rescue(self, end: str) -> None:
        """Start saving complete snapshots from memory, in parallel with the next start."""
        attempt = supervisor_files.published_attempt(self._folder)
        if attempt is None or self._held is None or not self._held.has_snapshot:
            return
        dead = ",".join(supervisor_files.published_uids(self._folder))
        words = [str(self._folder), msgspec.json.encode(attempt).decode(), end, dead]
        try:
            with processes.blocked(*processes.STOP_SIGNALS):
                self._rescue = subprocess.Popen(  # noqa: S603  this interpreter
                    [sys.executable, "-P", "-m", "holdfast.supervisor.crash_commit", *words],
                    env=os.environ | self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
            self._not_ours |= {self._rescue.pid}
        except OSError as error:
            self.log(f"cannot save the snapshot in memory before the next start: {error}", logging.WARNING)

    def _await_helpers(self, signals: processes.PendingSignals) -> None:
        """Wait until the snapshot is saved and the last output is reported, or for another signal."""
        stops, until = len(signals.stops), time.monotonic() + output_capture.REPORT_SECONDS
        while len(signals.stops) == stops and (
            (self._rescue is not None and self._rescue.poll() is None)
            or (self._relay is not None and self._relay.poll() is None and time.monotonic() < until)
        ):
            signals.sleep(self.limits.poll_seconds)

    def _replaced_by(self, status: int) -> str | None:
        """Describe a newer attempt elsewhere, if there is one: the trainer must not be restarted then."""
        attempt = supervisor_files.published_attempt(self._folder)
        if attempt is None:
            return "the trainer was fenced" if status == EXIT_FENCED else None
        return _newer_attempt(attempt, supervisor_files.published_uids(self._folder))

    def _end_cause(self, status: int, previous_exit: str) -> tuple[EndCause | None, str]:
        """Return the cause of an end, if it is known, and the reason: with the exception that the output shows."""
        shown = supervisor_files.take_end(self._folder)
        reason = shown.exception if shown.exception and status == 1 and not self._was_hung else previous_exit
        was_killed = kernel_kills() > self._kernel_kills
        cause = end_cause(shown.cause, status, self._was_hung, was_killed, self._progress.reached)
        return cause, reason if cause is None else cause.describe(reason)

    def _is_hopeless(self, cause: EndCause | None) -> bool:
        """Whether every start will end in the same way: training has never begun."""
        return cause is not None and cause.reaction == "stop" and not self._progress.highest

    def _restart_for(self, order: RestoreOrder) -> None:
        """Note and report that the next start restores a checkpoint."""
        iteration, _ = parse_checkpoint_id(order.checkpoint)
        self._progress.restore_to(iteration)
        self._report("restarting", f"to restore iteration {iteration:,}")

    def _waits(self, signals: processes.PendingSignals, status: int) -> supervisor_channel.PublishedAttempt | None:
        """Return the attempt whose job may get a restore request that the supervisor is to wait for."""
        attempt = supervisor_files.published_attempt(self._folder)
        wanted = self.stay == "always" or (self.stay == "failure" and status != 0)
        if not wanted or signals.stops or attempt is None or not attempt.server:
            return None
        return attempt

    def _wait_for_restore(self, signals: processes.PendingSignals, status: int, end: str) -> bool:
        """Wait for a restore request, if configured and there is a server. Return whether one arrived."""
        attempt = self._waits(signals, status)
        if attempt is None:
            return False
        from holdfast.supervisor.supervisor_link import RestoreRequestWaiter

        self._reports.notify(
            "warning" if status else "info", "waits", f"{end}. The supervisor waits for a restore request",
            iteration=self._progress.reached,
        )  # fmt: skip
        self.log(f"waiting for a restore request for {attempt.job}; Ctrl-C ends this")
        tried = {order for order, starts in self._starts_per_restore.items() if starts >= MAX_STARTS_PER_RESTORE}
        waiting = RestoreRequestWaiter(attempt, signals.wake_up, tried)
        try:
            while not signals.stops and (order := waiting.order) is None:
                signals.sleep(None)
        finally:
            waiting.close()
        if signals.stops or order is None:
            self._reports.wait_ended(iteration=self._progress.reached)
            return False
        if (other := _newer_attempt(attempt, supervisor_files.published_uids(self._folder))) is not None:
            self.log(f"{other}; the restore request is for that attempt")
            return False
        self._starts_per_restore[order.id] += 1
        again = " again: the last start did not complete it" if self._starts_per_restore[order.id] > 1 else ""
        self.log(f"restore of {order.checkpoint} requested: starting the trainer{again}")
        self._restart_for(order)
        return True

    def _report(
        self,
        state: SupervisorState,
        reason: str,
        *,
        start: int = 0,
        limit: int = 0,
        delay_seconds: float = 0.0,
        waits: bool = False,
    ) -> None:
        """Report what this supervisor does now that a start has ended; the arguments are those of the report."""
        report = SupervisorReport(
            at=time.time(), state=state, reason=reason, start=start, limit=limit, delay_seconds=delay_seconds,
            waits=waits,
        )  # fmt: skip
        self._reports.state(report, iteration=self._progress.reached)

    @property
    def _has_begun(self) -> bool:
        """Whether any start began a session."""
        return self._progress.highest > 0 or supervisor_files.published_attempt(self._folder) is not None

    def _giving_up(self, fruitless: int, previous_exit: str) -> str:
        starts = "1 start" if fruitless == 1 else f"{fruitless} starts in a row"
        if not self._has_begun:
            place, then = "before a session began", ""
        else:
            place, then = self._progress.description, ": it resumes from its newest checkpoint"
        return (
            f"giving up: {starts} ended without a new iteration, the last one ({previous_exit}) {place}. Correct "
            f"the error shown above and run it again{then}"
        )

    def _back_off(
        self, signals: processes.PendingSignals, fruitless: int, previous_exit: str, reason: str
    ) -> bool:
        """Wait before the next start. Return False if a signal arrived."""
        seconds = self.limits.backoff_seconds(fruitless)
        limit = self.limits.fruitless_starts
        self._report("restarting", reason, start=fruitless + 1, limit=limit, delay_seconds=seconds)
        tries = f", try {fruitless + 1} of {self.limits.fruitless_starts}" if fruitless else ""
        self.log(
            f"the trainer ended ({previous_exit}) {self._progress.description}; "
            f"restarting it in {seconds:.1f} s{tries}",
            logging.WARNING,
        )
        deadline = time.monotonic() + seconds
        while not signals.stops and (left := deadline - time.monotonic()) > 0:
            signals.sleep(left)
        return not signals.stops

    def _stopped(self, signals: processes.PendingSignals) -> int:
        """Log and report a stop between two starts. Return the status for the shell."""
        self.log("stopped while waiting to start the trainer")
        self._report("stopped", f"holdfast run was stopped by {signals.stop_name}")
        return 128 + signals.stops[0][0]

    def _run_once(self, signals: processes.PendingSignals, previous_exit: str | None) -> int:
        """Run the trainer once, until its last process ended. Return the status as subprocess does."""
        self._progress.begin_start()
        self._was_hung, self._kernel_kills = False, kernel_kills()
        self.starts += 1
        supervisor_files.remove_stack_files(self._folder)
        if self._held is not None:
            self._held.release_claims()
        with progress_file(self._folder / "progress") as progress:
            output = (
                output_capture.begin(self._folder, os.environ | self.environment) if self.capture_output else None
            )
            if output is not None:
                self._relay, self._not_ours = output.relay, self._not_ours | {output.relay.pid}
            try:
                trainer = self._start(self._folder / "progress", previous_exit, output)
                forked = ", warm" if isinstance(trainer, ForkedTrainer) else ""
                self.log(f"start {self.starts}: process {trainer.pid}{forked}, {shlex.join(self.command)}")
                try:
                    self._watch(trainer, signals, progress)
                finally:
                    if left := processes.kill_descendants(trainer.pid, self._spared):
                        self.log(f"processes alive after SIGKILL: {', '.join(map(str, left))}", logging.ERROR)
                    status = trainer.wait()
            finally:
                if output is not None:
                    output.trainer_ended()
            last = read_progress(progress)
            self._progress.update(*last)
            supervisor_files.keep_stores(self._folder, last)
        return status

    @property
    def _spared(self) -> frozenset[int]:
        """The processes that outlive a start."""
        return self._not_ours | (self._warm_starts.pids if self._warm_starts is not None else set())

    def _start(
        self, progress_path: Path, previous_exit: str | None, output: output_capture.OutputCapture | None
    ) -> subprocess.Popen[bytes] | ForkedTrainer:
        environment = os.environ | self.environment
        environment |= {"HOLDFAST_SUPERVISED": "1", "HOLDFAST_PROGRESS": str(progress_path)}
        environment[supervisor_channel.VARIABLE] = str(self._folder)
        environment[supervisor_channel.STARTED_AT] = f"{time.time():.3f}"
        environment.setdefault("HOLDFAST_GRACE", f"{self.limits.grace_seconds:g}")
        environment.pop(supervisor_channel.PREVIOUS_EXIT, None)
        if previous_exit is not None:
            environment[supervisor_channel.PREVIOUS_EXIT] = previous_exit
        stdout, stderr = (None, None) if output is None else (output.stdout, output.stderr)
        try:
            if self._warm_starts is not None:
                forked = self._warm_starts.fork(environment, stdout, stderr)
                if forked is not None:
                    return forked
            return subprocess.Popen(  # noqa: S603
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,  # reading the terminal would stop a background process group
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                # a supervisor that is killed must not leave a trainer that nothing watches
                preexec_fn=process_facts.die_with_parent if sys.platform == "linux" else None,
            )
        finally:
            if output is not None:
                output.trainer_started()

    def _watch(
        self, trainer: subprocess.Popen[bytes] | ForkedTrainer, signals: processes.PendingSignals, progress: int
    ) -> None:
        """Forward signals and detect hangs until the trainer's main process has ended."""
        was_stopped = killed = False
        detector = HangDetector(self.limits.hang_factor, self.limits.hang_least_seconds, time.monotonic())
        while not process_facts.has_ended(trainer.pid):
            while signals.forwarded:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer.pid, signals.forwarded.pop(0))
            if signals.stops and not was_stopped:
                signum, was_stopped = signals.stops[0][0], True
                grace = f"{self.limits.grace_seconds:g}"
                self.log(f"{processes.signal_name(signum)}: forwarded to the trainer, which has {grace} s to end")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer.pid, signum)
            reason = self._kill_reason(signals.stops)
            if reason is None and not signals.stops and detector.is_hung(time.monotonic()):
                reason = self._report_hang(detector)
            if reason is not None and not killed:
                self.log(reason, logging.WARNING)
                processes.kill_descendants(trainer.pid, self._spared)
                killed = True
            processes.reap_orphans(trainer.pid)
            if self._warm_starts is not None and not signals.stops:
                self._warm_starts.watch(trainer.pid)
            if not self._dashboard_logged and not signals.stops:
                self._log_dashboard()
            signals.sleep(self.limits.poll_seconds)
            iteration, steps = read_progress(progress)
            self._progress.update(iteration, steps)
            detector.update(steps, time.monotonic())

    def _log_dashboard(self) -> None:
        """Log the address of the job's page and whether the server answers, once the job is published."""
        attempt = supervisor_files.published_attempt(self._folder)
        if attempt is None:
            return
        self._dashboard_logged = True
        if not attempt.server:
            return
        from holdfast.client import Client, ServerError

        token = (os.environ | self.environment).get("HOLDFAST_TOKEN")
        page = f"dashboard: {attempt.server.rstrip('/')}/jobs/{attempt.job}"
        try:
            with Client(attempt.server, token, timeout_seconds=CONTACT_SECONDS, retries=0) as client:
                client.job(attempt.job)
        except ServerError:  # it answers, but does not know the job yet
            pass
        except Exception as error:  # watching the trainer comes first, whatever answers there
            self.log(f"{page}: {error}. Training continues; reports are stored until it answers", logging.WARNING)
            return
        self.log(f"{page} (the server answers)")

    def _report_hang(self, detector: HangDetector) -> str:
        """Log and report the stacks of all ranks. Return why the trainer is killed."""
        silent, usual = detector.silent_seconds(time.monotonic()), detector.typical_seconds or 0.0
        self._was_hung = True
        after = f"no iteration after {self._progress.reached} for {silent:.0f} s; one usually takes {usual:.3g} s"
        stacks = supervisor_files.dump_stacks(supervisor_files.ranks(self._folder))
        dumps = [f"rank {rank}:\n{text}" for rank, text in stacks.items()] or ["no rank can dump its stacks"]
        for line in "\n".join(dumps).splitlines():
            self.log(line, logging.ERROR)
        # one notice per rank: its length is limited
        more = len(dumps) - MAX_REPORTED_STACKS
        rest = [f"and {more} more ranks: see the log"] if more > 0 else []
        self._reports.notify(
            "error", "hang", f"{after}: the trainer is killed", *dumps[:MAX_REPORTED_STACKS], *rest,
            iteration=self._progress.reached,
        )  # fmt: skip
        return f"{after}: killed"

    def _kill_reason(self, stops: Sequence[tuple[int, float]]) -> str | None:
        """Return why to kill the trainer now, or `None`."""
        if not stops:
            return None
        first, last = stops[0][1], stops[-1][1]
        if last - first > self.limits.repeat_seconds:
            return "second signal: killed"
        if time.monotonic() - first > self.limits.grace_seconds:
            return f"the trainer did not end within {self.limits.grace_seconds:g} s: killed"
        return None


def _newer_attempt(attempt: supervisor_channel.PublishedAttempt, own: Collection[str] = ()) -> str | None:
    """Describe a newer attempt of the job that another supervisor or script began; `None` if none is known.

    `own` are the uids of attempts under this supervisor.
    """
    if not attempt.attempt:
        return None
    from holdfast.store import newest_attempt, open_store  # on demand: it takes memory while a trainer starts

    try:
        newest = newest_attempt(open_store(attempt.store), attempt.job)
    except (OSError, ValueError) as error:
        supervisor_channel.logger.debug("cannot read the newest attempt from the store: %s", error)
        return None
    if newest is None or newest.number <= attempt.attempt or newest.uid in (attempt.uid, *own):
        return None
    return f"attempt {newest.number} of {attempt.job} was started on {newest.host} (process {newest.pid})"
