"""The one object that a training loop holds: it wires the rooms together and holds no logic of theirs."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from holdfast import protocol, ranks, restore
from holdfast.checkpoints import Checkpointer
from holdfast.data import Cursor, cursor_over
from holdfast.errors import DamagedCheckpoint, HoldfastError, RestoreFailed
from holdfast.link import Link
from holdfast.meter import Meter
from holdfast.options import Options
from holdfast.orders import Orders
from holdfast.pacing import Controller, parse_every
from holdfast.progress import Progress
from holdfast.protocol import CheckpointKind, checkpoint_id, parse_checkpoint_id
from holdfast.reports import Reporter, Standing
from holdfast.restore import Loaded
from holdfast.snapshot import Snapshot
from holdfast.state import Captured, Registry, decode
from holdfast.store import open_store

logger = logging.getLogger("holdfast")

FIRST_CONTACT_SECONDS = 2.0
"""How long a starting job waits for a server to say whether a restore is wanted."""
WRITE_SECONDS = 600.0
"""How long a restore or the end of a job waits for a checkpoint to become durable."""
_END = object()


class Session:
    """Checkpoints a training loop, brings it back where it left off, and takes orders for it.

    Args:
        job: the job's name, under which its checkpoints and its history are kept.
        store: the directory of checkpoints. Default: HOLDFAST_STORE, else `checkpoints`.
        server: address of a Holdfast server; optional. Default: HOLDFAST_SERVER.
        token: the server's secret. Default: HOLDFAST_TOKEN.
        budget: overhead that checkpointing may cause, 0.035 or "3.5%". Default: HOLDFAST_BUDGET, else 3.5 %.
        policy: what chooses the interval. Default: HOLDFAST_POLICY, else "checkfreq".
        every: a fixed interval in iterations in the policy's place. Default: HOLDFAST_EVERY.
        keep: about how many checkpoints retention leaves. Default: HOLDFAST_KEEP, else 12.
        **objects: what makes up the training state, by keyword: model, optimizer, scheduler, scaler …
            Anything with `state_dict` and `load_state_dict`.

    Raises:
        TypeError: an object has no state_dict, or one that cannot be stored; names the keyword.
        ValueError: a job name, budget, interval or policy that makes no sense; or several ranks.

    The loop runs under `session.batches(...)`, or calls `session.resume()` and draws its own batches; each
    iteration ends with `session.step()`. Not thread-safe: use it from the thread that trains.
    """

    def __init__(
        self,
        job: str,
        *,
        store: str | os.PathLike[str] | None = None,
        server: str | None = None,
        token: str | None = None,
        budget: float | str | None = None,
        policy: str | None = None,
        every: int | None = None,
        keep: int | None = None,
        **objects: Any,
    ) -> None:
        self.job = protocol.validate_job(job)
        ranks.require_single_process()
        options = Options.weigh(
            store=store, server=server, token=token, budget=budget, policy=policy, every=every, keep=keep
        )
        self._registry = Registry(objects)
        self._registry.capture({})  # what cannot be stored shows now, not an hour into training
        self._standing = Standing()
        self._reporter = Reporter(job, self._standing)
        self._checkpoints = Checkpointer(
            open_store(options.store),
            job,
            uuid.uuid4().hex,
            keep=options.keep,
            versions={
                "holdfast": version("holdfast"),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            reporter=self._reporter,
        )
        self._orders = Orders(self._checkpoints.store, job, self._reporter, options.settings)
        self._controller = Controller(options.settings)
        self._meter, self._progress = Meter(self._controller, self._reporter), Progress()
        self._cursor: Cursor | None = None
        self._loader_state: dict[str, Any] | None = None
        self._rewinds = 0
        self._resumed = self._closed = False
        self._wanted: CheckpointKind | None = None
        self._wanted_restore: str | None = None
        self._retry_at_once = self._prepared = False
        self._open(options.server, options.token)
        self._hooks = [
            hook
            for optimizer in self._registry.optimizers.values()
            for hook in (
                optimizer.register_step_pre_hook(self._before_update),
                optimizer.register_step_post_hook(self._after_update),
            )
        ]
        atexit.register(self._at_exit)

    # What a loop uses

    @property
    def iteration(self) -> int:
        """The last finished iteration; 0 before the first."""
        return self._standing.iteration

    @property
    def epoch(self) -> int:
        """The epoch that `batches` is in, from 0."""
        return self._cursor.epoch if self._cursor else 0

    @property
    def lineage(self) -> int:
        """The line of iterations that training is on; a restore begins a new one."""
        return self._standing.lineage

    @property
    def attempt(self) -> int:
        """How many times the job has been started, this time included; 0 while its store cannot be written to."""
        return self._checkpoints.attempt

    def resume(self) -> int:
        """Go on from the newest durable checkpoint, or from the one an operator asked for.

        Returns:
            The iteration it resumed from, 0 for a fresh start.

        Raises:
            IncompatibleCheckpoint: the checkpoint is sound, but the script's objects are others now.
            UnknownFormat: a newer Holdfast wrote it.
        """
        if not self._resumed:
            self._start(*self._choose_start())
        return self.iteration

    def batches(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[Any]:
        """The batches of `epochs` epochs in all, from where training stands; rewinds in place when told to."""
        self._cursor, gap = cursor_over(loader)
        if gap:
            self._reporter.notice("warning", "loader", gap)
        self.resume()
        self._place_cursor()
        while self._cursor.epoch < epochs:
            rewinds = self._rewinds
            source = self._cursor.batches()
            while self._rewinds == rewinds:
                started = time.perf_counter()
                batch = next(source, _END)
                if batch is _END:
                    break
                self._meter.clock.stall("data_fetch", time.perf_counter() - started)
                yield batch

    def step(self, **metrics: Any) -> None:
        """The end of an iteration: call it after `optimizer.step()`, with the loss and any other metric.

        It may begin a checkpoint and carry out orders. A restore takes effect here: model, optimizer, loader,
        `Variables` and `iteration` go back together.

        Raises:
            RestoreFailed: a restore broke half-way and the state could not be put back.
        """
        if not self._resumed:  # a loop that neither resumes nor draws its batches here wants a fresh start
            self._start(None, None)
        self._standing.iteration += 1
        try:
            self._boundary(metrics)
        except RestoreFailed:
            raise
        except Exception as error:  # the training loop's edge: a fault of ours must not end the user's job
            logger.exception("%s: iteration %d was not recorded", self.job, self.iteration)
            self._reporter.notice("error", "internal", f"{type(error).__name__}: {error}")

    def checkpoint(self) -> None:
        """Take a checkpoint at the end of this iteration, whatever the interval."""
        self._wanted = "requested"

    def every(self, iterations: int | None) -> None:
        """Take a checkpoint every so many iterations; None leaves it to the policy again."""
        every = parse_every(iterations) if iterations is not None else None
        self._orders.base = dataclasses.replace(self._orders.base, every=every)
        self._settings_changed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No checkpoints inside the `with` block, other than those that a restore takes for safety."""
        self._orders.pauses += 1
        self._settings_changed()
        try:
            yield
        finally:
            self._orders.pauses -= 1
            self._settings_changed()

    def restore(self, iteration: int) -> None:
        """Go back to the checkpoint of `iteration` at the end of this one, in the next `step`.

        Raises:
            NoSuchCheckpoint: there is none there; it names the nearest earlier one.
        """
        self._wanted_restore = restore.find(self._checkpoints.store, self.job, iteration)

    def close(self) -> None:
        """Take a last checkpoint, wait until it is durable, tell the server, let go. Called at exit as well."""
        self._close("finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(_ending(kind))

    # Start and end

    def _open(self, server: str | None, token: str | None) -> None:
        """Become the newest attempt, and learn what is wanted before training starts."""
        checkpoints, first = self._checkpoints, None
        if server:
            probe = Link(
                server=server, token=token, job=self.job, uid=checkpoints.uid, attempt=0, rank=0, spool=None
            )
            first = probe.first_desired(FIRST_CONTACT_SECONDS)
        # past what the server has seen, too: a job whose store was deleted must not repeat its numbers
        at_least = first.latest_attempt + 1 if first else 1
        checkpoints.acquire_attempt(at_least)
        self._orders.start(first, checkpoints.attempt)
        if server:
            self._reporter.link = Link(
                server=server,
                token=token,
                job=self.job,
                uid=checkpoints.uid,
                attempt=checkpoints.attempt or at_least,
                rank=0,
                spool=Path(checkpoints.store.url) / self.job / "spool" if checkpoints.attempt else None,
                on_desired=self._orders.arrived,
            )
            self._reporter.link.start()

    def _choose_start(self) -> tuple[Loaded | None, str | None]:
        """The checkpoint to begin from, and the order that asked for it, if one did."""
        store, order = self._checkpoints.store, self._orders.restore(self._orders.first)
        if order is not None:
            try:
                return restore.load(store, self.job, order.checkpoint), order.id
            except HoldfastError as error:
                self._reporter.order(order.id, "failed", reason=str(error))
        for checkpoint in restore.candidates(store, self.job):
            try:
                return restore.load(store, self.job, checkpoint), None
            except DamagedCheckpoint as error:
                self._reporter.damaged(checkpoint, error)
        return None, None

    def _start(self, loaded: Loaded | None, order: str | None) -> None:
        self._resumed = True
        if loaded is not None:
            self._registry.check(loaded.manifest.state, loaded.shapes)
            self._apply(loaded)
        lineages = self._checkpoints.store.lineages(self.job)
        if loaded is not None and order is None and lineages:
            self._checkpoints.continue_lineage(lineages[-1], loaded.id)
        else:
            self._begin_lineage(loaded.id if loaded else None, order)
        self._reporter.lineage_began(self._checkpoints.lineage)
        self._reporter.attempt_began(
            loaded.id if loaded else None,
            self._checkpoints.versions,
            self._checkpoints.store.checkpoints(self.job),
        )
        self._reporter.order(order, "restored")
        self._meter.clock.begin()

    def _begin_lineage(self, parent: str | None, order: str | None) -> None:
        try:
            self._checkpoints.begin_lineage(self.iteration, parent, order, self._orders.first.latest_lineage + 1)
        except (OSError, HoldfastError) as error:
            self._checkpoints.fail(f"could not note lineage {self.lineage}: {error}")

    def _close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if reason == "finished" and self.iteration:
            self._take_final()
        self._checkpoints.close(WRITE_SECONDS)
        self._settle()
        self._meter.send_samples(wait=True)
        self._reporter.attempt_ended(reason)
        self._reporter.link.close()
        self._progress.close()
        for hook in self._hooks:
            hook.remove()

    def _take_final(self) -> None:
        """So that a job started again after its end finds all its work done."""
        if self._checkpoints.wait_settled(WRITE_SECONDS):
            self._settle()
            if self._checkpoints.head != checkpoint_id(self.iteration, self.lineage):
                self._take("final", at_once=True)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self._close(_ending(type(error) if error is not None else None))

    # The boundary between two iterations

    def _boundary(self, metrics: dict[str, Any]) -> None:
        self._settle()
        desired = self._reporter.link.desired
        if self._orders.news(desired):
            self._controller.change(self._orders.settings())
            if self._orders.checkpoint_requested:
                self._wanted = "requested"
            self._reporter.applied(desired.version if desired else 0)
            self._reporter.pace(self._controller, changed=True)
        target = self._restore_target()
        if target is None:
            self._checkpoint_if_due()
        if not self._prepared and self._checkpoints.snapshots.free:
            self._prepared = True
            self._checkpoints.prepare(self._capture)
        self._meter.end_iteration(metrics, active=self._checkpoints.active)
        self._progress.update(self.iteration)
        if target is not None:
            self._rewind(*target)

    def _settings_changed(self) -> None:
        self._controller.change(self._orders.settings())
        self._reporter.pace(self._controller, changed=True)

    def _settle(self) -> None:
        """Learn from the checkpoints that settled since the last iteration."""
        for settled in self._checkpoints.drain():
            self._meter.checkpoint_settled(settled)
            if settled.state == "torn":
                self._retry_at_once = True
                self._reporter.notice("warning", "torn", f"{settled.reason}; taken again at once")

    def _checkpoint_if_due(self) -> None:
        due = self._wanted or self._retry_at_once or self._controller.due(self.iteration)
        if due and self._checkpoints.snapshots.free:
            # while the one before is being written, this one waits some iterations rather than stall training
            self._take(self._wanted or "scheduled", at_once=self._retry_at_once)
            self._wanted, self._retry_at_once = None, False

    def _take(self, kind: CheckpointKind, *, at_once: bool) -> Snapshot | None:
        started = time.perf_counter()
        snapshot = self._checkpoints.take(self._capture, kind, at_once=at_once)
        self._meter.clock.stall("snapshot_wait", time.perf_counter() - started)
        self._controller.started(self.iteration)
        return snapshot

    def _capture(self) -> Captured:
        return self._registry.capture(
            {
                "iteration": self.iteration,
                "lineage": self.lineage,
                "loader": self._cursor.state_dict() if self._cursor else self._loader_state,
                "controller": self._controller.state_dict(),
            }
        )

    def _before_update(self, *_: object) -> None:
        """An optimizer is about to change what is being copied: let the copy finish first."""
        waited = self._checkpoints.snapshots.wait_copied()
        if waited:
            self._meter.clock.stall("snapshot_wait", waited)
        self._meter.clock.update_begins()

    def _after_update(self, *_: object) -> None:
        self._meter.clock.update_ends()

    # Restore in place

    def _restore_target(self) -> tuple[str, str | None] | None:
        """(checkpoint, order) to go back to at this boundary."""
        if self._wanted_restore is not None:
            checkpoint, self._wanted_restore = self._wanted_restore, None
            return checkpoint, None
        order = self._orders.restore()
        return (order.checkpoint, order.id) if order is not None else None

    def _rewind(self, checkpoint: str, order: str | None) -> None:
        """Until the new lineage is noted nothing has changed, and a failure leaves training as it is."""
        started = time.perf_counter()
        self._reporter.order(order, "restoring")
        try:
            loaded = restore.load(self._checkpoints.store, self.job, checkpoint)
            self._registry.check(loaded.manifest.state, loaded.shapes)
            safety = self._take_safety()
            self._checkpoints.begin_lineage(
                parse_checkpoint_id(checkpoint)[0], checkpoint, order, self._orders.first.latest_lineage + 1
            )
        except (HoldfastError, OSError) as error:
            self._reporter.order(order, "failed", reason=str(error))
            self._reporter.notice("error", "restore", f"restore of {checkpoint} refused: {error}")
            self._meter.clock.restart()
            return
        restored = self._apply_or_return(loaded, safety, order)
        seconds = time.perf_counter() - started
        self._meter.clock.restart()
        self._reporter.lineage_began(self._checkpoints.lineage)
        self._reporter.stall("restore", seconds, self.iteration, self.lineage)
        if restored:
            self._reporter.order(order, "restored", seconds=seconds, safety=safety)

    def _take_safety(self) -> str:
        """The state about to be left, durable, so that the restore can be undone."""
        if not self._checkpoints.wait_settled(WRITE_SECONDS):
            raise HoldfastError("the checkpoint before is still being written")
        identity = checkpoint_id(self.iteration, self.lineage)
        if self._checkpoints.head == identity:
            return identity
        snapshot = self._take("safety", at_once=True)
        if snapshot is None or not snapshot.settled.wait(WRITE_SECONDS) or snapshot.outcome != "durable":
            reason = snapshot.reason if snapshot is not None else "it could not be taken"
            raise HoldfastError(f"no safety checkpoint of the state to be left: {reason}")
        return identity

    def _apply_or_return(self, loaded: Loaded, safety: str, order: str | None) -> bool:
        """False when it broke half-way: such a state must not be trained on, so the one before is put back."""
        try:
            self._apply(loaded)
        except Exception as error:  # a user's load_state_dict may raise anything
            try:
                self._checkpoints.begin_lineage(parse_checkpoint_id(safety)[0], safety, None, 1)
                self._apply(restore.load(self._checkpoints.store, self.job, safety))
            except Exception as worse:
                raise RestoreFailed(
                    f"restoring {loaded.id} failed ({error}), and so did going back to {safety} ({worse}); "
                    f"start the script again: it goes on from {safety}"
                ) from error
            self._reporter.order(order, "failed", reason=f"{error}; training went back to {safety}")
            return False
        return True

    def _apply(self, loaded: Loaded) -> None:
        self._registry.apply(loaded.manifest.state, loaded.tensors)
        state = decode(loaded.manifest.state["session"], loaded.tensors, copy=True)
        self._standing.iteration = loaded.manifest.iteration
        self._loader_state = state["loader"]
        if self._controller.plan is None:  # a restart; in place, what is measured by now is better
            self._controller.load_state_dict(state["controller"])
        self._controller.rewound(self.iteration)
        self._rewinds += 1
        self._place_cursor()
        self._progress.update(self.iteration)

    def _place_cursor(self) -> None:
        if self._cursor is not None and self._loader_state is not None:
            self._cursor.load_state_dict(self._loader_state)
            self._loader_state = None


def _ending(kind: type[BaseException] | None) -> str:
    if kind is None or issubclass(kind, GeneratorExit):
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else kind.__name__
