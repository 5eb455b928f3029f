"""Startup of an attempt: chooses the checkpoint and lineage, loads, and reports the start.

One module, since each way to choose ends in the same steps.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.accelerators import modules_in_use
from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import LoadedCheckpoint
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.config import environment_notices
from holdfast.data.cursor import BatchesAnIteration
from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.engine.operator import Operator
from holdfast.engine.optional_parts import machine_metrics
from holdfast.engine.training import Training
from holdfast.engine.unsaved_work import describe_running_predecessor
from holdfast.errors import DamagedCheckpoint, HoldfastError, IncompatibleCheckpoint, with_way_out
from holdfast.protocol import wire
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.history import History
from holdfast.save.saver import Saver
from holdfast.server_link.connection import ServerConnection
from holdfast.server_link.http_client import AgentClient, Backoff, RequestFailed
from holdfast.server_link.spool import spool_directory
from holdfast.store import Attempt, Lineage, Store
from holdfast.store.records import failures_between, first_start_note
from holdfast.system import supervisor_channel
from holdfast.telemetry.iteration_metrics import IterationMetrics, RankReporter
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.engine.earlier_start import EarlierStart
    from holdfast.memory_tier.tier import MemoryTier

T = TypeVar("T")
logger = logging.getLogger("holdfast")

PATIENCE_SECONDS = 30.0
"""How long a start waits for a store that does not answer."""
FIRST_CONTACT_SECONDS = 2.0
"""How long a starting job waits for the server's first answer."""
HEARTBEAT_SECONDS = 3600.0
"""Ranks other than 0 send only reports: the server does not monitor them."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state when training starts; the defaults describe a fresh start."""

    loaded: LoadedCheckpoint | None = None
    lineage: Lineage | None = None
    """The one that it continues; None for a new one."""
    order: str | None = None
    """The order that asked for it."""
    left: str | None = None
    """The newest durable checkpoint of what is left for it: the way back."""
    left_out: tuple[wire.LeftOutData, ...] = ()
    """Data that was left out on the way to its state."""


REPORTED_RESTORES = 8
"""Number of recent restores to report again: an order stays open until its outcome is reported or it expires."""


def publish_attempt(history: History, server: str | None) -> None:
    """Publish the attempt to the supervisor, if there is one."""
    supervisor_channel.publish_attempt(
        supervisor_channel.PublishedAttempt(
            job=history.job,
            uid=history.uid,
            attempt=history.attempt,
            lineage=history.position.lineage,
            store=history.store.url,
            server=server,
        )
    )


def ordered(store: Store, job: str) -> list[Lineage]:
    """The last lineages that orders began."""
    return [lineage for lineage in store.records(job, Lineage) if lineage.order is not None][-REPORTED_RESTORES:]


class Startup:
    """Begins an attempt: in contact with the server, and on the checkpoint that it goes on from.

    All ranks of a job go through it together, rank 0 deciding.
    """

    def __init__(
        self,
        training: Training,
        saver: Saver,
        operator: Operator,
        reporter: Reporter,
        ranks: Ranks,
        meter: IterationMetrics,
        earlier: EarlierStart | None,
        memory: MemoryTier | None,
        *,
        server: str | None,
        token: str | None,
    ) -> None:
        self._training, self._saver, self._history, self._operator = training, saver, saver.history, operator
        self._reporter, self._ranks, self._meter = reporter, ranks, meter
        self._earlier, self._memory, self._server, self._token = earlier, memory, server, token
        self._has_server_answered = False
        """The server answered the request for the first desired state."""
        self._give_up_at: float | None = None
        """When to stop asking the store, which does not answer now."""

    def open(self) -> None:
        """Become the newest attempt, and read the desired state before training starts."""
        supervisor_channel.enable_stack_dump(self._ranks.rank)
        history, leads = self._history, self._ranks.leads  # rank 0 reports and listens, for all
        if leads:
            supervisor_channel.publish_uid(history.uid)
        first = self._first_desired() if self._server and leads else None
        # past what the server has seen, too: a job whose store was deleted must not repeat its numbers
        latest = first.latest_attempt if first else 0
        at_least = latest + 1 if 0 <= latest < MAX_ATTEMPT else 1
        wanted = first.restore.id if first is not None and first.restore is not None else None
        history.acquire_attempt(latest + 1, latest_lineage=first.latest_lineage if first else 0, order=wanted)
        if leads and history.attempt:
            with contextlib.suppress(OSError):  # asked again before anything is deleted
                self._saver.retention.load_requested()
        self._publish()  # a start that fails while it loads has begun this attempt, too
        link: ServerConnection | None = None
        if self._server and leads:
            spool = spool_directory(history.store.url, history.job) if history.attempt else None
            link = ServerConnection(
                server=self._server, token=self._token, job=history.job, uid=history.uid,
                attempt=history.attempt or at_least, rank=0, spool=spool, on_desired=self._operator.receive,
                measures=self._measures(),
            )  # fmt: skip
            self._reporter.connect(link)
        self._operator.start(first)
        if link is not None:
            link.start()
        if self._ranks.world_size > 1:
            self._report_this_rank(at_least)
        elif link is not None and modules_in_use():
            _report_place(link)
        if (stages := self._training.registry.stages) is not None:
            from holdfast.telemetry.metrics_relay import metrics_relay  # only for pipelines

            self._meter.relay_through(metrics_relay(self._ranks.key, self._ranks.rank, stages.group))
        self._publish()

    def _first_desired(self) -> wire.Desired | None:
        assert self._server is not None
        first, client = None, AgentClient(self._server, self._token)
        with contextlib.suppress(RequestFailed):
            first = client.desired(self._history.job, limit_seconds=FIRST_CONTACT_SECONDS)
            self._has_server_answered = True
        client.close()
        if first is None and (noted := supervisor_channel.relaunch_order()) is not None:
            first = wire.Desired(restore=noted)
        return first

    def _report_this_rank(self, at_least: int) -> None:
        """Have each rank report its own iteration times."""
        history, rank = self._history, self._ranks.rank
        uid, attempt = self._ranks.decide(lambda: (history.uid, history.attempt or at_least), tuple[str, int])
        if not self._server:
            return
        link = self._reporter.link
        if link is None:
            link = ServerConnection(
                server=self._server, token=self._token, job=history.job, uid=uid, attempt=attempt, rank=rank,
                spool=None, flush_seconds=HEARTBEAT_SECONDS, send_only=True,
                measures=self._measures(),
            )  # fmt: skip
            link.start()
        _report_place(link)
        self._meter.report_to(RankReporter(link, rank, self._ranks.world_size))
        self._training.after_gradients(self._meter.clock.gradients_end)

    def _measures(self) -> list[Callable[[], wire.Event | None]]:
        """Return what the thread that sends reports measures before it sends."""
        held = self._memory.held_snapshots() if self._memory is not None else None
        measures = list[Callable[[], wire.Event | None]]()
        if (machine := machine_metrics(self._reporter.position)) is not None:
            measures.append(machine.sample)
        if held is not None:
            measures.append(held.sample)
        if self._ranks.leads:
            measures.append(self._saver.shares.sample)
        return measures

    def _publish(self) -> None:
        if self._ranks.leads:
            publish_attempt(self._history, self._server)

    def unused_checkpoints(self) -> str | None:
        """Return a warning if a start at iteration 0 ignores existing checkpoints."""
        unused: list[str] = []
        with contextlib.suppress(OSError):  # what cannot be listed cannot be reported
            unused = self._history.store.checkpoints(self._history.job)
        if not unused:
            return None
        return (
            f"training starts at iteration 0, but the job has {len(unused)} checkpoints, the newest "
            f"{unused[-1]}: to resume from it, call session.resume() or draw from session.batches(...) before "
            "the first step"
        )

    def _missing_history(self) -> str | None:
        """Return a warning if the job has been trained, and this store has no history of it."""
        if self._earlier is not None:
            with contextlib.suppress(OSError):
                if what := self._earlier.missing_history(self._history.store, self._history.uid):
                    return what
        return self._history_elsewhere()

    def _history_elsewhere(self) -> str | None:
        """Return a warning if the server knows attempts of the job of which this store has no record."""
        history, known = self._history, self._operator.first.latest_attempt
        job, store = history.job, history.store
        if not known or not history.attempt:
            return None
        with contextlib.suppress(OSError):
            earlier = [each.number for each in store.records(job, Attempt)]
            if not any(known <= number < history.attempt for number in earlier):
                return (
                    f"training starts at iteration 0, but the server knows attempt {known:,} of {job}, of which "
                    f"this store, {store.url}, has no record: check the store and the working directory"
                )
        return None

    def choose(self) -> Start:
        """Load what an open restore request names, else the best sound checkpoint, and apply it.

        Raises:
            IncompatibleCheckpoint, UnknownFormat: the best one is sound, but cannot be loaded here.
            OSError: the store has not answered for PATIENCE_SECONDS.
        """
        self._give_up_at = None  # a script may retry after an error
        return self._start_from_order() or self._newest()

    def begin(self, start: Start) -> None:
        """Record durably where training starts, and report it."""
        saver, history, store = self._saver, self._history, self._history.store
        loaded = start.loaded.id if start.loaded else None
        committed: list[str] = []
        try:
            if start.lineage is not None:
                history.continue_lineage(start.lineage, loaded)
            else:
                iteration, inexact = self._reporter.position.iteration, self._training.inexact(start.loaded)
                history.begin_lineage(
                    iteration, loaded, start.order, left=start.left, inexact=inexact, left_out=start.left_out
                )
            if self._ranks.leads:
                committed = store.checkpoints(history.job)
        except RanksLost:
            raise
        except (OSError, HoldfastError) as error:
            saver.reports.fail(f"store {store.url}: {error}")
        if self._memory is not None:
            self._memory.report_start(committed)
        saver.save_survivor(committed)
        if history.attempt and self._memory is not None:
            self._memory.free_unclaimed()
        if self._ranks.leads and start.loaded is not None:
            first, present = start.loaded.manifest.attempt, history.attempt
            last = os.environ.get("HOLDFAST_PREVIOUS_EXIT")
            self._training.failed(failures_between(store, history.job, first, present, last))
        self._report_earlier_orders()
        self._reporter.lineage_began(history.lineage)
        pinned, world_size = saver.retention.pinned.checkpoints, self._ranks.world_size
        copies = store.copies(history.job) if self._ranks.leads else {}
        self._reporter.attempt_began(
            loaded, saver.versions, committed, world_size, pinned, copies, store.addresses
        )
        self._reporter.order(start.order, "restored", safety=start.left)
        if start.loaded is not None:
            self._reporter.trained_elsewhere(start.loaded.manifest.fingerprint)
        self._training.begin()
        if self._ranks.leads:
            logger.info("%s: %s", history.job, self._start_message(loaded))
            page = self._reporter.page
            if page is not None and self._has_server_answered and not supervisor_channel.is_supervised():
                logger.info("%s: dashboard: %s", history.job, page)  # a supervisor logs it itself
            if self._earlier is not None and (what := self._earlier.moved) is not None:
                self._reporter.notice("warning", "store", what)
            if loaded is None and not committed and (what := self._missing_history()) is not None:
                self._reporter.notice("warning", "afresh", what)
            other = describe_running_predecessor(store, history.job, history.attempt)
            if other is not None:
                self._reporter.notice("warning", "replaced", other)
        self._publish()
        for level, code, what in environment_notices(os.environ):
            self._reporter.notice(level, code, what)
        for limitation in dict.fromkeys(self._training.limitations()):
            self._reporter.notice("warning", "loader", limitation)
        for what in self._training.missing(start.loaded):
            self._reporter.notice("warning", "inventory", what)
        for level, what in self._training.registry.stored_by_each_rank():
            self._reporter.notice(level, "inventory", what)

    def _report_earlier_orders(self) -> None:
        """Re-report orders that earlier attempts may have completed without reporting."""
        if not self._ranks.leads:
            return
        history = self._history
        try:
            lineages = ordered(history.store, history.job)
        except OSError:  # the next start reports them
            return
        for lineage in lineages:
            if lineage.number != history.lineage.number:
                self._reporter.lineage_began(lineage, at=lineage.created_at)

    def _start_from_order(self) -> Start | None:
        """Restore what an open order requests; `None` where none is open or possible now."""
        try:
            order = self._ask_store(self._operator.restore_at_start, wire.RestoreOrder | None)
            return self._restore_for_order(order) if order is not None else None
        except OSError as error:
            self._operator.reopen()
            what = f"the requested restore waits: the store is unavailable: {error}"
            self._reporter.notice("warning", "restore", what)
            return None

    def _restore_for_order(self, order: wire.RestoreOrder) -> Start | None:
        loaded, left, left_out = None, None, tuple[wire.LeftOutData, ...]()
        try:
            left = self._ask_store(self._head, str | None)
            loaded = self._load(order.checkpoint, degraded=order.degraded)
            left_out = self._left_out(loaded, order.skip, left)
            self._reporter.order(order.id, "restoring")
            self._put_in_place(loaded, left_out)
        except RanksLost:
            raise
        except Exception as error:  # a failed order must not keep the job from starting
            if loaded is None and isinstance(error, OSError):
                raise  # the store is unavailable; a later boundary may carry out the order
            error = restore.explain(self._history.store, self._history.job, order.checkpoint, error)
            self._reporter.order(order.id, "failed", reason=str(error))
            return None
        left = left if left != order.checkpoint else None
        return Start(loaded, order=order.id, left=left, left_out=left_out)

    def _head(self) -> str | None:
        """Return the checkpoint that the job would resume from without an order."""
        chain = restore.candidates(self._history.store, self._history.job)
        return next((checkpoint for checkpoint, continues in chain if continues), None)

    def _left_out(
        self, loaded: LoadedCheckpoint, skip: wire.DataSkip | None, head: str | None
    ) -> tuple[wire.LeftOutData, ...]:
        """Return the data that the new lineage leaves out, if all ranks can."""
        lineages = self._ask_store(self._lineages, list[Lineage])
        current = lineages[-1].left_out if lineages else ()
        counted = BatchesAnIteration()
        if skip is not None and head is not None:
            counted = self._ask_store(lambda: self._counted(head), BatchesAnIteration)
        return self._ranks.run_on_all(lambda: self._training.left_out(loaded, skip, current, counted))

    def _counted(self, head: str) -> BatchesAnIteration:
        """Return how many batches the iterations up to a checkpoint took, if that is known for these ranks."""
        try:
            manifest = read_stored(self._history.store, self._history.job, head).manifest
        except HoldfastError:  # damaged: the caller can give a number of batches
            return BatchesAnIteration()
        if manifest.world_size != self._ranks.world_size:
            return BatchesAnIteration()
        return BatchesAnIteration.saved(manifest.state["session"], manifest.iteration)

    def _lineages(self) -> list[Lineage]:
        return self._history.store.records(self._history.job, Lineage)

    def _newest(self) -> Start:
        store, job = self._history.store, self._history.job
        candidates = self._ask_store(lambda: list(restore.candidates(store, job)), list[tuple[str, bool]])
        lineages = self._ask_store(self._lineages, list[Lineage])
        newest = lineages[-1] if lineages else None
        if (start := self._from_memory(candidates, newest)) is not None:
            return start
        for checkpoint, continues in candidates:
            try:
                loaded = self._load(checkpoint)
                left_out = newest.left_out if newest is not None and continues else loaded.manifest.left_out
                self._put_in_place(loaded, left_out)
            except IncompatibleCheckpoint as error:
                raise IncompatibleCheckpoint(
                    f"{error}. The checkpoint is {checkpoint} of job {job} in {store.url}. If the script changes "
                    "its objects while it trains, make that change before session.resume(). If the script itself "
                    "has changed, give the job another name, or another store"
                ) from error
            except DamagedCheckpoint as error:
                self._history.mark_damaged(checkpoint)
                self._reporter.damaged(checkpoint, error)
                continue
            if not continues:
                self._reporter.notice(
                    "error", "stray", f"no other checkpoint is sound: resuming from {checkpoint}"
                )
                return Start(loaded, left_out=left_out)
            return Start(loaded, lineage=newest, left_out=left_out)
        if candidates:
            best = parse_checkpoint_id(candidates[0][0])[0]
            message = (
                f"every checkpoint of {job} ({len(candidates)}) is damaged: training starts over at iteration 0. "
                "To keep what is left of the newest, stop training and run `holdfast store scrub --repair "
                f"{store.url}` if they have parity, or `holdfast store export --degraded {store.url} {job} "
                f"{best} FILE`, which writes the tensors that are sound"
            )
            self._reporter.notice("error", "all_damaged", message)
        return Start()

    def _from_memory(self, candidates: list[tuple[str, bool]], lineage: Lineage | None) -> Start | None:
        """Resume from the snapshot that the previous attempt left in memory, if nothing durable is newer.

        All ranks do or none: where one cannot, all load from the store.
        """
        store, memory = self._history.store, self._memory
        if memory is None or lineage is None or not memory.may_hold_snapshots:
            return None
        from holdfast.memory_tier.tier import MemoryCheckpoint

        for found in self._ask_store(lambda: memory.candidates(store, candidates), list[MemoryCheckpoint]):
            try:
                load = functools.partial(
                    memory.load, found, self._training.regions, self._training.registry.localized
                )
                loaded = self._ranks.run_on_all(load)
                self._put_in_place(loaded, lineage.left_out)
            except RanksLost:
                raise
            except Exception as error:  # load from the store instead
                memory.report_damaged(found, error)
                continue
            return Start(loaded, lineage=lineage)
        return None

    def _ask_store(self, question: Callable[[], T], kind: Any) -> T:
        """Ask the store on rank 0, and share the answer."""
        return self._ranks.decide(lambda: self._patiently(question), kind)

    def _load(self, checkpoint: str, *, degraded: bool = False) -> LoadedCheckpoint:
        """Load on every rank; all have verified it before any applies it."""
        store, job = self._history.store, self._history.job
        load = functools.partial(self._training.load, store, job, checkpoint, degraded=degraded)
        return self._ranks.run_on_all(lambda: self._patiently(load))

    def _patiently(self, question: Callable[[], T]) -> T:
        """Ask again while the store does not answer; raise its error after PATIENCE_SECONDS without an answer."""
        backoff = Backoff()
        while True:
            try:
                answer = question()
            except OSError as error:
                if isinstance(error, PermissionError) or error.errno == errno.ELOOP:
                    raise  # asking again does not help
                now = time.monotonic()
                if self._give_up_at is None:
                    self._give_up_at = now + PATIENCE_SECONDS
                    reason = f"{error}; retrying for up to {PATIENCE_SECONDS:.0f} s"
                    message = f"store {self._history.store.url} does not answer: {reason}"
                    self._reporter.notice("warning", "store", message)
                if now >= self._give_up_at:
                    raise
                time.sleep(min(self._give_up_at - now, backoff.next_seconds()))
            else:
                self._give_up_at = None
                return answer

    def _put_in_place(self, loaded: LoadedCheckpoint, left_out: tuple[wire.LeftOutData, ...]) -> None:
        differing = self._ranks.run_on_all(lambda: with_way_out(lambda: self._training.check(loaded.manifest)))
        for warning in self._training.restore_buckets(loaded):
            self._reporter.notice("warning", "reducer", warning)
        if loaded.manifest.world_size != self._ranks.world_size:
            from holdfast.format.merged_ranks import dropped_gradients

            if (what := dropped_gradients(loaded.manifest, loaded.state, self._ranks.world_size)) is not None:
                self._reporter.notice("warning", "gradients", what)
        self._ranks.run_on_all(lambda: with_way_out(lambda: self._training.apply(loaded, left_out)))
        for what in differing:
            self._reporter.notice("warning", "settings", what)
        if loaded.repaired or loaded.lost:  # in memory: its files are still damaged
            self._history.mark_damaged(loaded.id)
        self._reporter.repaired(loaded.id, loaded.repaired, loaded.loss)

    def _start_message(self, start: str | None) -> str:
        history, position, url = self._history, self._reporter.position, self._history.store.url
        where = f"resumed from iteration {position.iteration:,} ({start})" if start else "starts at iteration 0"
        if not history.attempt:  # the reason and the store were reported
            return f"training {where}, without checkpoints for now"
        note = first_start_note(history.store, history.job, history.attempt)
        return f"attempt {history.attempt}{note} {where}, lineage {position.lineage}; checkpoints in {url}"


def _report_place(link: ServerConnection) -> None:
    from holdfast.telemetry.rank_place import rank_place  # of several ranks, and where there is a device

    link.event(rank_place())
