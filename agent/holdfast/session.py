"""`Session`: the public object of a training loop. It builds the components and delegates to them.

One module, since users read this class as one document.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar, cast

from holdfast.checkpoint import restore
from holdfast.checkpoint.retention_queue import Protector
from holdfast.config import SETTINGS, Config, named_objects
from holdfast.data.cursor import Cursor
from holdfast.distributed import ranks
from holdfast.engine import optional_parts
from holdfast.engine.boundary import Boundary
from holdfast.engine.coordination import CollectiveCall, Requests, RestoreTarget
from holdfast.engine.lifecycle import WRITE_SECONDS, Life, Lifecycle, ending_of
from holdfast.engine.operator import Operator
from holdfast.engine.startup import Startup
from holdfast.engine.training import Training
from holdfast.errors import RestoreFailed
from holdfast.pacing import Controller, parse_every
from holdfast.protocol import ids, orders
from holdfast.protocol.wire import StallKind
from holdfast.retention import Retention
from holdfast.save.run import CheckpointOutcome, RunListener
from holdfast.system import supervisor_channel
from holdfast.system.preemption import PreemptionHandler
from holdfast.telemetry.configuration import flatten
from holdfast.telemetry.iteration_metrics import IterationMetrics
from holdfast.telemetry.reporter import Reporter, TrainingPosition, console_log

logger = logging.getLogger("holdfast")

_END = object()
ScalarT = TypeVar("ScalarT", bool, int, float, str)
OPEN_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """A session that checkpoints a training loop, resumes it where it stopped, and carries out requests of
    operators.

    Args:
        job: the job's name, under which its checkpoints and its history are kept.
        store: the directory of checkpoints. Default: HOLDFAST_STORE, else `checkpoints`.
        drain: a store that gets copies of checkpoints in the background, such as "s3://bucket/run" where `store`
            is a local disk. Default: HOLDFAST_DRAIN, else none.
        drain_every: how often: "10min", or 5 for every fifth checkpoint. Default: HOLDFAST_DRAIN_EVERY, else 10
            minutes.
        drain_retention: which copies stay there. Default: HOLDFAST_DRAIN_RETENTION, else as `retention` or `keep`.
        server: address of a Holdfast server; optional. Default: HOLDFAST_SERVER.
        token: the server's secret. Default: HOLDFAST_TOKEN.
        budget: overhead that checkpointing may cause, 0.035 or "3.5%". Default: HOLDFAST_BUDGET, else 3.5 %.
        write_budget: what checkpoints may send to the store, "2TB/day" or "500GB/h". Default:
            HOLDFAST_WRITE_BUDGET, else 2 TB or 2,000 times the state a day, whichever is more.
        max_unsaved_work: work that a failure may lose, as far as both budgets allow: 600 or "10min". Default:
            HOLDFAST_MAX_UNSAVED_WORK, else 10 minutes.
        policy: the policy that chooses the interval. Default: HOLDFAST_POLICY, else "goodput".
        every: a fixed interval instead of a policy: 500 iterations, or a time such as "10min", "1.5h" or
            "2h30min". Default: HOLDFAST_EVERY.
        mtbf: the mean time between failures of the whole job, in seconds or as "3.1h"; failures of the job
            correct it. Default: HOLDFAST_MTBF, else the rate published for clusters.
        total: iterations of the job, for progress and the policy "coci". Default: HOLDFAST_TOTAL, else unknown.
        keep: approximate number of checkpoints that stay. Default: HOLDFAST_KEEP, else 12.
        retention: rules instead of `keep`, such as "last 5, every 1000, size 200GB"; the page on training scripts
            lists all. Default: HOLDFAST_RETENTION.
        max_in_flight: maximum number of snapshots in flight, each in host memory of the state's size. Default:
            HOLDFAST_MAX_IN_FLIGHT, else 1.
        peers: number of other hosts that hold the newest snapshot of each rank in memory: 0 or 1. Needs
            `holdfast run` on each host. Default: HOLDFAST_PEERS, else 0.
        parity: data and parity blocks, "10+2": up to 2 damaged blocks of each stripe of 12 can be repaired.
            "important 10+2" protects only the important bytes of numbers, in less space.
            Default: HOLDFAST_PARITY, else off.
        compress: compress checkpoints without loss, as byte planes or by the transform of that name, where that
            makes them smaller. Pauses while it costs too much. Default: HOLDFAST_COMPRESS, else no.
        incremental: write only the changed rows of tensors in which few change. "auto": of tensors that samples
            select; True: of all large tensors; False: of none. Default: HOLDFAST_INCREMENTAL, else "auto".
        host_state: how large arrays outside of models and optimizers are saved: "copy", or "fork", from a forked
            image of the process without a second copy. "auto" forks where the copy would not fit into memory, or
            would block training longer. Default: HOLDFAST_HOST_STATE, else "auto".
        debug: digest every tensor before and after it is copied, while training waits, to detect a change of any
            element. Default: HOLDFAST_DEBUG, else no.
        owner: the user who launched it, shown in the fleet. Default: HOLDFAST_OWNER, else the user it runs as.
        labels: labels of the job, {"team": "vision"}. Default: HOLDFAST_LABELS, as in "team=vision, data=v3".
        grace: seconds from SIGTERM to the kill. On SIGTERM all ranks end at the same boundary, with a last
            checkpoint if there is time for one, and exit status 143; unless the script handles the signal itself.
            0 leaves SIGTERM alone. Default: HOLDFAST_GRACE, else 30.
        restorable_in_place: whether a restore may happen while the loop runs; otherwise the script is restarted
            for it. Default: HOLDFAST_RESTORABLE_IN_PLACE, else detected.
        on_trouble: "restore" the last good checkpoint without the data of that time when the loss is wrong, or
            "observe". Default: HOLDFAST_ON_TROUBLE, else "off".
        state: more objects to checkpoint, also under the names of settings: {"policy": policy_net}.
        keep_settings: arguments for `keep`, for adapters that call `resume` themselves: {"optimizer": "lr"}, or
            {"ema": None} for the object itself.
        **objects: the objects that make up the training state, by keyword: model, optimizer, scheduler, scaler …
            Anything with `state_dict` and `load_state_dict`, and random generators of torch, NumPy and Python.

    Raises:
        TypeError: an object has no state_dict, cannot be stored, or is passed as a setting; the message names the
            keyword.
        ValueError: a job name, store, budget, interval or policy is invalid; or this is one of several ranks, and
            torch.distributed is not initialized.

    The loop runs under `session.batches(...)`, or calls `session.resume()` and draws its own batches; each
    iteration ends with `session.step()`. Not thread-safe: use it from the thread that trains.
    """

    def __init__(
        self,
        job: str,
        *,
        store: str | os.PathLike[str] | None = None,
        drain: str | os.PathLike[str] | None = None,
        drain_every: int | str | timedelta | None = None,
        drain_retention: str | Retention | None = None,
        server: str | None = None,
        token: str | None = None,
        budget: float | str | None = None,
        write_budget: float | str | None = None,
        max_unsaved_work: float | str | None = None,
        policy: str | None = None,
        every: int | str | timedelta | None = None,
        mtbf: float | str | None = None,
        total: int | None = None,
        keep: int | None = None,
        retention: str | Retention | None = None,
        max_in_flight: int | None = None,
        peers: int | None = None,
        parity: str | None = None,
        compress: bool | str | None = None,
        incremental: bool | Literal["auto"] | None = None,
        host_state: str | None = None,
        debug: bool | None = None,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        grace: float | None = None,
        restorable_in_place: bool | None = None,
        on_trouble: str | None = None,
        state: Mapping[str, Any] | None = None,
        keep_settings: Mapping[str, str | Iterable[str] | None] | None = None,
        **objects: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name in SETTINGS}
        try:
            self.job = ids.validate_job(job)
            options = Config.from_arguments_and_environment(**arguments).without_disabled()
        except ValueError as error:
            # the message names the setting and the value: the frames of the parsers would only bury it
            raise error.with_traceback(None) from None
        self._build(options, named_objects(state, objects), keep_settings or {})
        OPEN_SESSIONS.add(self)
        atexit.register(self.close_at_exit)

    def _build(
        self, options: Config, objects: Mapping[str, Any], keep_settings: Mapping[str, str | Iterable[str] | None]
    ) -> None:
        """Build the components, each from those before it."""
        store, earlier = optional_parts.open_stores(self.job, options)  # first: the rest attaches to objects
        self._ranks = ranks.join()
        self._position = TrainingPosition()
        self._controller = Controller(
            options.pacing, world_size=self._ranks.world_size, max_in_flight=options.max_in_flight,
            total_iterations=options.total,
        )  # fmt: skip
        self._training = Training(
            objects, self._position, self._controller, self._ranks, restorable_in_place=options.restorable_in_place
        )
        self._reporter = Reporter(
            self.job, self._position, quiet=not self._ranks.leads, owner=options.owner, labels=options.labels
        )
        self._meter = IterationMetrics(self._controller, self._reporter)
        compression = optional_parts.compression(options, self._ranks, self._controller, self._reporter)
        self._saver, self._memory = optional_parts.build_saver(
            store, options, self._ranks, self._reporter, self._meter, compression, self._controller
        )
        self._drain = optional_parts.drain_queue(store, options, self._ranks, self._saver, self._reporter)
        console_log.open()
        self._requests = Requests()
        self._operator = Operator(
            self._saver.history, self._saver.retention, self._controller, self._reporter, self._requests,
            options.pacing, self._saver.shares, rules=options.retention_rules, on_trouble=options.on_trouble,
        )  # fmt: skip
        startup = Startup(
            self._training, self._saver, self._operator, self._reporter, self._ranks, self._meter, earlier,
            self._memory, server=options.server, token=options.token,
        )  # fmt: skip
        self._progress = supervisor_channel.open_progress_file(self._ranks.leads)
        self._preemption = PreemptionHandler(options.grace)
        self._lifecycle = Lifecycle()
        self._reported: str | None = None  # the last error of `step`: a repeated one is logged once
        self._limitations: set[str] = set()  # said about loaders, of which a script may make one in each epoch
        try:
            kept = {keyword: names for keyword, names in keep_settings.items() if names is not None}
            self.keep(*(keep_settings.keys() - kept.keys()), **kept)
            self._boundary = Boundary(
                training=self._training, controller=self._controller, saver=self._saver,
                reporter=self._reporter, ranks=self._ranks, operator=self._operator, requests=self._requests,
                startup=startup, meter=self._meter, preemption=self._preemption, lifecycle=self._lifecycle,
                compression=compression, progress=self._progress, server=options.server,
            )  # fmt: skip
            startup.open()
            self._boundary.attach()
        except BaseException:  # leave the process as it was found
            self._undo()
            raise

    def _undo(self) -> None:
        """Leave the process as it was found."""
        parts = self._reporter, self._ranks, self._training, self._preemption
        release = self._memory.release if self._memory is not None else lambda: None
        for close in (*[part.close for part in parts], release):
            with contextlib.suppress(Exception):
                close()
        console_log.close()

    # What a loop uses

    @property
    def iteration(self) -> int:
        """The last finished iteration; 0 before the first."""
        return self._position.iteration

    @property
    def epoch(self) -> int:
        """The epoch that `batches` is in, from 0."""
        return self._training.epoch

    @property
    def lineage(self) -> int:
        """The current lineage; a restore begins a new one."""
        return self._position.lineage

    @property
    def attempt(self) -> int:
        """The number of this start of the job, from 1; 0 while its store cannot be written to."""
        return self._saver.history.attempt

    @property
    def url(self) -> str | None:
        """Address of the job's page on the server, without credentials; `None` without a server."""
        return self._reporter.page

    @property
    def logger_runs(self) -> dict[str, tuple[str, int]]:
        """Runs of loggers, by logger: (run id, lineage that it logs). Saved and restored with each checkpoint."""
        return self._training.logger_runs

    def resume(self) -> int:
        """Resume from the newest durable checkpoint, or from the one that an operator requested.

        Returns:
            The iteration it resumed from, 0 for a fresh start.

        Raises:
            IncompatibleCheckpoint: the checkpoint is sound, but does not fit the script's objects.
            UnknownFormat: a newer Holdfast wrote it.
            OSError: the store could not be read for half a minute.
            RanksLost: another rank of this job is gone.
            SystemExit: the job was paused before this start, and ends while it is still paused, as in `step`.
        """
        if self._lifecycle.state is Life.STARTING:
            self._boundary.resume()
            self._limitations.update(self._training.limitations())
        return self.iteration

    def keep(self, /, *objects: str, **settings: str | Iterable[str]) -> None:
        """Keep settings or objects of the script that the checkpoint would replace. Call it before `resume`.

        `session.keep(optimizer="weight_decay", scheduler=["T_max"])` continues with the script's settings; a
        schedule moves to the position that it would have reached with them. `session.keep("ema")` also resumes
        from a checkpoint that lacks `ema` or does not fit it: `ema` starts as the script created it.

        Raises:
            ValueError: an unknown keyword or setting, named with those that there are; or the session has resumed.
        """
        if self._lifecycle.state is not Life.STARTING:
            raise ValueError("session.keep: call it before session.resume() or session.batches(...)")
        names = {keyword: [each] if isinstance(each, str) else list(each) for keyword, each in settings.items()}
        self._training.registry.keep(objects, names)

    def batches(self, loader: Iterable[Any], epochs: int | None = 1) -> Iterator[Any]:
        """Resume, and return an iterator over the batches of `epochs` epochs in total, from the current position.

        The state is restored when this returns. The iterator follows restores in place. With `None` it never ends,
        for a loop that counts iterations: `batch = next(batches)`.

        Raises:
            ValueError: while iterating: an epoch has no batch, which with `None` would repeat forever.
            The errors of `resume`.
        """
        self.resume()
        number, cursor = self._training.cursor_for(loader)
        self._training.skipped_epochs.called(number, cursor.epoch, epochs)
        self._training.report_left_out(self._saver.history, self._reporter)
        self._reporter.length.follow(loader, cursor.epoch, epochs, lambda: self._training.counted.batches)
        is_known = cursor.limitation in self._limitations
        if cursor.limitation and not is_known and (epochs is None or cursor.epoch < epochs):
            self._limitations.add(cursor.limitation)
            self._reporter.notice("warning", "loader", cursor.limitation)
        return self._drawn_from(number, cursor, epochs)

    def _drawn_from(self, number: int, cursor: Cursor, epochs: int | None) -> Iterator[Any]:
        skipped = self._training.skipped_epochs
        is_over = epochs is not None and cursor.epoch >= epochs
        what = skipped.skip() if is_over else skipped.end(is_within_epoch=cursor.continues)
        if what is not None:
            self._reporter.notice("warning", "loader", what)
        while epochs is None or cursor.epoch < epochs:
            restores, epoch, is_empty = self._training.restore_count, cursor.epoch, not cursor.continues
            source = cursor.batches()
            while self._training.restore_count == restores:
                started = time.perf_counter()
                batch = next(source, _END)
                if batch is _END:
                    if is_empty and (epochs is None or not cursor.may_be_empty):
                        raise ValueError(f"session.batches: epoch {epoch} has no batch: {cursor.why_empty()}")
                    break
                is_empty = False
                self._meter.clock.stall("data_fetch", time.perf_counter() - started)
                self._training.record_batch(number)
                yield batch

    def step(self, **metrics: Any) -> None:
        """End an iteration: call it after `optimizer.step()`, with the loss, its `tokens` and any other metric.

        It may begin a checkpoint and carry out requests. A restore takes effect here: model, optimizer, loader,
        `Variables` and `iteration` go back together.

        Raises:
            RestoreFailed: a restore failed half-way, and the previous state could not be put back.
            SystemExit: SIGTERM; under `holdfast run` also a newer attempt elsewhere, or a restore by a restart.
        """
        self._position.iteration += 1
        if self._lifecycle.only_counts:
            if self._reported != self._lifecycle.state.value:
                self._reported = self._lifecycle.state.value
                logger.warning("%s: %s", self.job, self._lifecycle.why_uncounted(self.iteration))
            return
        try:
            if not self._lifecycle.is_ending:
                self._boundary.run(metrics)
        except RestoreFailed:
            raise
        except Exception as error:  # a defect of Holdfast must not end the user's job
            what = f"{type(error).__name__}: {error}"
            if what != self._reported:
                self._reported = what
                logger.exception("%s: iteration %d was not recorded", self.job, self.iteration)
                self._reporter.notice("error", "internal", what)
        if (status := self._lifecycle.exit_status) is not None:
            raise SystemExit(status)

    def mark(self, name: str, /, **metrics: Any) -> None:
        """Mark the last iteration on the job's timeline: the end of an epoch, or a validation and its metrics.

        The timeline shows the first 2,000 marks of an attempt; of several ranks, those of rank 0. `name` says what
        happened, such as "epoch 3" or "validation"; `metrics` are numbers to show with it.
        """
        self._reporter.mark(name, metrics)

    def annotate(self, text: str, iteration: int | None = None) -> None:
        """Annotate an iteration on the job's timeline, as in `session.annotate("new data")`.

        It counts as one of the 2,000 marks. Only the call on rank 0 counts. `text` has at most 300 characters;
        `iteration` is a finished iteration; `None`, or a later iteration, means the last one.
        """
        self._reporter.mark(text, {}, iteration)

    def config(self, values: object = None, /, **others: Any) -> None:
        """Report the configuration of the attempt, such as hyper-parameters, for the job's page.

        Further calls add to it. Of several ranks, that of rank 0 counts. Values whose names are those of secrets,
        such as `api_key`, are masked.

        Args:
            values: a mapping, an `argparse.Namespace` or a dataclass; names of nested values are joined by dots.
            **others: further values by name.

        Raises:
            TypeError: `values` has no names.
        """
        if self._ranks.leads:
            self._reporter.configure(({} if values is None else flatten(values)) | flatten(others))

    def value(
        self,
        name: str,
        default: ScalarT,
        *,
        low: float | None = None,
        high: float | None = None,
        choices: Iterable[ScalarT] = (),
    ) -> ScalarT:
        """Return the value in force for this iteration: `default`, until an operator changes it.

        Call it in the loop. All ranks change it at the same iteration, and it is part of what checkpoints hold. A
        change is rejected if it has another type than `default`, is outside the bounds, or is not one of the
        choices; the first call sets these rules. ValueError: the arguments are invalid.
        """
        return cast("ScalarT", self._boundary.values.value(name, default, low, high, choices))

    def checkpoint(self) -> None:
        """Take a checkpoint at the end of this iteration, whatever the interval.

        With several ranks, only the call on rank 0 counts, and usually takes effect an iteration later.
        """
        self._requests.checkpoint = True

    def wait(self, timeout: float | None = None) -> list[CheckpointOutcome]:
        """Wait until no checkpoint is in progress; return the outcomes of those that ended since the last call.

        `session.checkpoint()`, `session.step()` and `session.wait()` leave the state of that iteration durable, or
        say why it is not. The time counts as a wait for a checkpoint. With several ranks, each rank may call it
        independently, between two steps.

        Args:
            timeout: seconds; `None` waits without a limit.

        Returns:
            The outcomes on this rank, oldest first, at most the last 1,000, including those that could not begin.

        Raises:
            TimeoutError: a checkpoint is still in progress.
        """
        with self._meter.clock.stalled("snapshot_wait"):
            settled = self._saver.wait_settled(timeout)
        if not settled:
            raise TimeoutError(f"session.wait: a checkpoint is still in progress after {timeout:g} s")
        return self._saver.reports.outcomes()

    def every(self, interval: int | str | timedelta | None) -> None:
        """Take a checkpoint every `interval` iterations, or every "10min"; `None` returns to the policy.

        A time begins with the last checkpoint. ValueError: `interval` is neither a whole number of at least 1 nor
        a time above 0.
        """
        self._operator.fix_interval(parse_every(interval) if interval is not None else None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take no checkpoints inside the `with` block, except those that protect a restore."""
        with self._operator.paused():
            yield

    def restore(
        self, iteration: int, *, skip_batches: int = 0, skip_to: int = 0, loader: int | None = None
    ) -> None:
        """Restore the checkpoint of `iteration` in the next `step`.

        With several ranks, only the call on rank 0 counts, and usually takes effect an iteration later.

        Args:
            skip_batches: batches of the loader in `session.batches` to leave out after it, on each rank.
            skip_to: instead, leave out the batches of all iterations up to this one.
            loader: number of that loader, from 0 in the order of first use, if there are several.

        Raises:
            NoSuchCheckpoint: that iteration has no checkpoint; the error names the nearest earlier one.
            ValueError: the data to leave out is invalid.
        """
        skip = orders.skip_of(skip_batches, skip_to, iteration, loader)
        if not self._ranks.leads:
            return
        checkpoint = restore.find(self._saver.history.store, self.job, iteration)
        self._saver.retention.protect(Protector.SCRIPT, checkpoint)
        self._requests.restore = RestoreTarget(checkpoint, skip=skip)

    def on_restored(self, callback: Callable[[int, int], object]) -> None:
        """Call `callback(iteration, lineage)` after a resume from a checkpoint and after each restore in place.

        It runs on the training thread, and immediately if the job has already resumed. An exception is logged;
        training continues.
        """
        self._boundary.restore_callbacks.add(callback)

    # What adapters use in addition

    @property
    def rank(self) -> int:
        """The number of this process among those of the job, from 0."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self._ranks.world_size

    @property
    def store(self) -> str:
        """Address of the store: an absolute path, or a URL without credentials."""
        return self._saver.history.store.url

    @property
    def measured_overhead(self) -> float | None:
        """The share of training time that checkpoints cost, 0.02 for 2 %; `None` until it is measured."""
        return self._controller.measured_overhead

    @property
    def last_restore_times(self) -> tuple[float, float]:
        """Start and end of the last resume or restore, in seconds since the epoch; zeros before the first."""
        return self._boundary.restore_callbacks.began_at, self._boundary.restore_callbacks.ended_at

    def notice(self, level: Literal["info", "warning", "error"], code: str, message: str) -> None:
        """Show a message in the log and among the notices on the job's page."""
        self._reporter.notice(level, code, message)

    def wait_copied(self) -> None:
        """Wait until the running copy allows an update.

        Optimizers of the session do so in their `step`. Call it before `graph.replay()` where a CUDA graph has
        captured that step: a replay calls no hooks.
        """
        self._training.announce_replay()
        self._boundary.before_update()

    def observe(self, listener: RunListener, on_stall: Callable[[StallKind, float], None] | None = None) -> None:
        """Call `listener` at each change of a checkpoint, and `on_stall(kind, seconds)` after a wait of training.

        The listener is called on any thread, `on_stall` on the training thread; only one such function is kept.
        """
        self._saver.observe(listener)
        if on_stall is not None:
            self._meter.clock.observe(on_stall)

    def checkpoints(self, optimizer: object) -> bool:
        """Return whether an optimizer is part of the state."""
        return any(each is optimizer for each in self._training.registry.optimizers)

    def at_iteration_end(self, call: Callable[[], object]) -> None:
        """Call this on each rank when an iteration ends, before anything of it is saved."""
        self._boundary.values.on_iteration_end.append(call)

    def call_together(self, call: CollectiveCall) -> None:
        """Make a call on all ranks at the same boundary, whenever rank 0 says that it is due.

        For calls that need every rank, such as a report to a launcher. All ranks must register theirs before the
        first iteration; only one is kept.
        """
        self._boundary.call_together(call)

    def close(self) -> None:
        """Take a final checkpoint, wait until it is durable, report the end. Also runs at interpreter exit."""
        self._close("finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(ending_of(kind))

    def _close(self, reason: str) -> None:
        life = self._lifecycle
        if life.is_over:
            return
        reason = life.ending(reason)
        has_begun = life.state is not Life.STARTING  # after an interrupted resume the state may be half-loaded
        finished = reason == "finished" and has_begun
        life.enter(Life.CLOSING)
        atexit.unregister(self.close_at_exit)
        OPEN_SESSIONS.discard(self)
        parts: tuple[Callable[[], object], ...] = (
            self._progress.rest if self._progress is not None else lambda: None,
            self._operator.close,
            lambda: self._boundary.take_final() if finished else None,
            lambda: self._saver.close(WRITE_SECONDS, finished=finished),
            lambda: self._drain.close(WRITE_SECONDS, finished=finished) if self._drain is not None else None,
            self._ranks.close,
            self._boundary.settle,
            lambda: self._boundary.note_ending(reason),
            self._meter.close,
            lambda: self._reporter.attempt_ended(reason),
            self._reporter.close,
            self._progress.close if self._progress is not None else lambda: None,
            self._training.close,
            lambda: self._boundary.unsaved_work.report_unsaved() if has_begun else None,
            lambda: self._boundary.unsaved_work.report_uncounted() if reason == "finished" else None,
            console_log.close,
            self._preemption.close,  # last: a second SIGTERM must not interrupt the final checkpoint
        )
        life.close(self.job, parts)

    def close_at_exit(self) -> None:
        """Close the session as at interpreter exit, with the error that ended the script, if any."""
        error = getattr(sys, "last_value", None)
        self._close(ending_of(type(error) if error is not None else None))
