"""The one object that a training loop holds: it wires the rooms together and holds no logic of theirs."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from holdfast import endings, protocol, ranks, restore, supervision
from holdfast.checkpoints import Checkpointer
from holdfast.errors import RestoreFailed
from holdfast.leaving import EXIT_ASKED, Leaving
from holdfast.link import Link, NoLink
from holdfast.link.spool import spool_of
from holdfast.meter import Meter
from holdfast.options import Options
from holdfast.orders import Orders
from holdfast.pacing import FIRST_SECONDS, Controller, parse_every
from holdfast.probing import Prober
from holdfast.progress import Progress
from holdfast.protocol import CheckpointKind, checkpoint_id, parse_checkpoint_id
from holdfast.ranks import RanksLost
from holdfast.reports import Reporter, Standing, show_log
from holdfast.retention import Retention
from holdfast.rewind import WRITE_SECONDS, Rewinder
from holdfast.starting import Start, Starter
from holdfast.steering import MEETING_SECONDS, Adrift, Decision, steering_of
from holdfast.store import open_store
from holdfast.tally import Tally
from holdfast.training import Training, named_objects
from holdfast.verifier import Verifier

logger = logging.getLogger("holdfast")

FIRST_CONTACT_SECONDS = 2.0
"""How long a starting job waits for a server to say whether a restore is wanted."""
HEARTBEAT_SECONDS = 3600.0
"""Of ranks other than 0, which are not asked whether they live: they send when they have something to tell."""
ASK_STORE_SECONDS = 60.0
"""Between two questions whether a newer attempt has begun, to a store that may be away."""
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
        mtbf: the mean time between failures of the whole job, in seconds or as "3.1h", where somebody knows it;
            what is then seen of the job corrects it. Default: HOLDFAST_MTBF, else as clusters report it.
        keep: about how many checkpoints retention leaves. Default: HOLDFAST_KEEP, else 12.
        retention: rules in the place of `keep`, any of "last 5, every 1000, spaced 12, size 200GB, per lineage".
            Default: HOLDFAST_RETENTION.
        slots: how many snapshots may be in flight, each in host memory of the state's size. Default:
            HOLDFAST_SLOTS, else 1.
        backend: what writes checkpoints: "thread", "process", or "auto", which measures both and takes the one
            that costs training least. Default: HOLDFAST_BACKEND, else "auto".
        spread: the share of the interval over which the writing of a checkpoint is spread, so that it takes less
            from each iteration and becomes durable later. Default: HOLDFAST_SPREAD, else 0: at full speed.
        debug: digest every tensor before and after it is copied, while training waits, so that not even one
            element can change unseen meanwhile. Default: HOLDFAST_DEBUG, else no.
        owner: who launched the job, as the fleet shows it. Default: HOLDFAST_OWNER, else the user it runs as.
        labels: what to tell it by, {"team": "vision"}. Default: HOLDFAST_LABELS, as in "team=vision, data=v3".
        grace: seconds from SIGTERM to the kill. Told to end by SIGTERM, all ranks do at the same boundary, with a
            last checkpoint if there is time for one, and exit status 143; unless the script handles the signal
            itself. 0 leaves SIGTERM alone. Default: HOLDFAST_GRACE, else 30.
        rewinds: whether the loop can be taken back while it runs, where the session should not judge for itself.
            One that cannot is started again for an order to restore. Default: HOLDFAST_REWINDS, else as it looks.
        state: further objects to checkpoint, under any names: {"policy": policy_net}, which as a keyword would be
            the setting.
        **objects: what makes up the training state, by keyword: model, optimizer, scheduler, scaler …
            Anything with `state_dict` and `load_state_dict`, and random generators of torch, NumPy and Python.

    Raises:
        TypeError: an object has no state_dict, or one that cannot be stored, or is given as a setting; names the
            keyword.
        ValueError: a job name, budget, interval or policy that makes no sense; or this is one of several ranks,
            and torch.distributed is not set up yet.

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
        mtbf: float | str | None = None,
        keep: int | None = None,
        retention: str | Retention | None = None,
        slots: int | None = None,
        backend: str | None = None,
        spread: float | None = None,
        debug: bool | None = None,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        grace: float | None = None,
        rewinds: bool | None = None,
        state: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        settings = {
            "store": store, "server": server, "token": token, "budget": budget, "policy": policy, "every": every,
            "mtbf": mtbf, "keep": keep, "slots": slots,
            "retention": retention, "backend": backend, "spread": spread, "debug": debug, "owner": owner,
            "labels": labels, "grace": grace, "rewinds": rewinds,
        }  # fmt: skip
        try:
            self.job = protocol.validate_job(job)
            options = Options.weigh(**settings)
        except ValueError as error:
            # the message names the setting and the value: the frames of the parsers would only bury it
            raise error.with_traceback(None) from None
        objects = named_objects(state, objects, settings)
        self._ranks = ranks.join()
        self._spread = options.spread
        self._standing = Standing()
        self._controller = Controller(options.settings, world_size=self._ranks.world_size, slots=options.slots)
        self._training = Training(objects, self._standing, self._controller, self._ranks, rewinds=options.rewinds)
        self._reporter = Reporter(
            job, self._standing, quiet=not self._ranks.leads, owner=options.owner, labels=options.labels
        )
        self._checkpoints = Checkpointer(
            open_store(options.store),
            job,
            uuid.uuid4().hex,
            retention=options.retention,
            slots=options.slots,
            backend=options.backend,
            debug=options.debug,
            reporter=self._reporter,
            ranks=self._ranks,
        )
        show_log()
        self._orders = Orders(
            self._checkpoints.store, job, self._reporter, options.settings, retention=options.retention
        )
        self._starter = Starter(self._training, self._checkpoints, self._orders, self._reporter, self._ranks)
        self._rewinder = Rewinder(self._training, self._checkpoints, self._reporter, self._ranks)
        self._steering = steering_of(self._ranks, self._choose)
        self._meter = Meter(self._controller, self._reporter, self._checkpoints.persister.measured)
        self._prober = Prober(self._training, self._meter, self._reporter)
        self._verifier = Verifier(self._checkpoints, self._reporter)
        self._progress = Progress(None if self._ranks.leads else "")
        self._server = options.server
        self._leaving = Leaving(options.grace_seconds)
        self._looked_at = 0.0
        """When it was asked last whether another rank was told to end."""
        self._preempted = self._relaunch = False
        self._taken_at = time.monotonic()
        """When this attempt began, or began its last checkpoint."""
        self._told_withheld = False
        self._ask_store_at = 0.0
        self._over = False
        """A newer attempt of the job has begun, and this one is to end."""
        self._resumed = self._closed = self._forked = self._warned_closed = False
        self._wanted: CheckpointKind | None = None
        self._wanted_restore: str | None = None
        self._last_fault: str | None = None
        self._retry_at_once = False
        supervision.expose(self._ranks.rank)
        if self._ranks.leads:
            supervision.announce(self._checkpoints.uid)
        self._open(options.server, options.token)
        self._introduce()
        self._training.around_updates(
            self._before_update,
            self._meter.clock.update_ends,
            lambda iteration: self._steering.may_act_after(iteration),
        )
        atexit.register(self._at_exit)
        _sessions.add(self)

    # What a loop uses

    @property
    def iteration(self) -> int:
        """The last finished iteration; 0 before the first."""
        return self._standing.iteration

    @property
    def epoch(self) -> int:
        """The epoch that `batches` is in, from 0."""
        return self._training.epoch

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
            OSError: the store was asked for half a minute, and could not be read.
            RanksLost: another rank of this job is gone.
        """
        if not self._resumed:
            self._begin(self._starter.choose())
        return self.iteration

    def batches(self, loader: Iterable[Any], epochs: int | None = 1) -> Iterator[Any]:
        """The batches of `epochs` epochs in all, from where training stands; rewinds in place when told to.

        None is without end, for a loop that counts iterations: `batch = next(batches)`.
        """
        self.resume()
        cursor = self._training.enter(loader)
        if cursor.gap:
            self._reporter.notice("warning", "loader", cursor.gap)
        while epochs is None or cursor.epoch < epochs:
            rewinds = self._training.rewinds
            source = cursor.batches()
            while self._training.rewinds == rewinds:
                started = time.perf_counter()
                batch = next(source, _END)
                if batch is _END:
                    break
                self._meter.clock.stall("data_fetch", time.perf_counter() - started)
                self._training.drew()
                yield batch

    def step(self, **metrics: Any) -> None:
        """The end of an iteration: call it after `optimizer.step()`, with the loss and any other metric.

        It may begin a checkpoint and carry out orders. A restore takes effect here: model, optimizer, loader,
        `Variables` and `iteration` go back together.

        Raises:
            RestoreFailed: a restore broke half-way and the state could not be put back.
            SystemExit: SIGTERM told the job to end; or under `holdfast run`, when a newer attempt of the job has
                begun elsewhere, or to be started again for an order to restore.
        """
        self._standing.iteration += 1
        if self._closed:
            self._warn_closed()
            return
        try:
            self._boundary(metrics)
        except RestoreFailed:
            raise
        except Exception as error:  # the training loop's edge: a fault of ours must not end the user's job
            what = f"{type(error).__name__}: {error}"
            if what != self._last_fault:  # in full once, or it would bury all else that the job prints
                self._last_fault = what
                logger.exception("%s: iteration %d was not recorded", self.job, self.iteration)
                self._reporter.notice("error", "internal", what)
        if self._preempted:
            raise SystemExit(EXIT_ASKED)
        if self._relaunch:
            raise SystemExit(supervision.EXIT_RELAUNCH)
        if self._over and supervision.VARIABLE in os.environ:
            raise SystemExit(supervision.EXIT_FENCED)

    def _warn_closed(self) -> None:
        if self._warned_closed:
            return
        self._warned_closed = True
        if self._forked:
            why = (
                "this process was forked from the one that made the session, and takes no checkpoints; make the "
                "session after the fork"
            )
        else:
            why = (
                f"session.step() after session.close(): iteration {self.iteration:,} and those after it are in no "
                "checkpoint; make a new Session to train on"
            )
        logger.warning("%s: %s", self.job, why)

    def checkpoint(self) -> None:
        """Take a checkpoint at the end of this iteration, whatever the interval.

        Of several ranks rank 0's call counts, and it takes effect where the ranks next agree on something: an
        iteration later as a rule.
        """
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

        Of several ranks rank 0's call counts, and it takes effect where the ranks next agree on something: an
        iteration later as a rule.

        Raises:
            NoSuchCheckpoint: there is none there; it names the nearest earlier one.
        """
        if not self._ranks.leads:
            return
        self._wanted_restore = restore.find(self._checkpoints.store, self.job, iteration)
        self._checkpoints.want("the script", self._wanted_restore)

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
        leads = self._ranks.leads  # rank 0 reports and listens, for all
        if server and leads:
            probe = Link(
                server=server, token=token, job=self.job, uid=checkpoints.uid, attempt=0, rank=0, spool=None
            )
            first = probe.first_desired(FIRST_CONTACT_SECONDS)
            if first is None and (noted := supervision.noted_order()) is not None:
                first = protocol.Desired(restore=noted)
        # past what the server has seen, too: a job whose store was deleted must not repeat its numbers
        latest = first.latest_attempt if first else 0
        at_least = latest + 1 if 0 <= latest < protocol.MAX_ATTEMPT else 1
        checkpoints.latest_lineage = first.latest_lineage if first else 0
        wanted = first.restore.id if first is not None and first.restore is not None else None
        checkpoints.acquire_attempt(latest + 1, order=wanted)
        self._orders.start(first, checkpoints.attempt)
        if server and leads:
            self._reporter.link = Link(
                server=server,
                token=token,
                job=self.job,
                uid=checkpoints.uid,
                attempt=checkpoints.attempt or at_least,
                rank=0,
                spool=spool_of(checkpoints.store.url, self.job) if checkpoints.attempt else None,
                on_desired=self._arrived,
            )
            self._reporter.link.start()
        if first is not None:
            checkpoints.want("an order", first.restore.checkpoint if first.restore else None)
            checkpoints.pinned.follow(first.pins, checkpoints.attempt)
            self._verifier.follow(first.verify)
            checkpoints.retention = self._orders.retention(first)
        if self._ranks.world_size > 1:
            self._tell_of_this_rank(server, token, at_least)

    def _tell_of_this_rank(self, server: str | None, token: str | None, at_least: int) -> None:
        """Each rank tells the server what its own iterations took, and nothing else."""
        checkpoints, rank = self._checkpoints, self._ranks.rank
        uid, attempt = self._ranks.decide(
            lambda: (checkpoints.uid, checkpoints.attempt or at_least), tuple[str, int]
        )
        if not server:
            return
        link = self._reporter.link
        if not isinstance(link, Link):
            link = Link(
                server=server, token=token, job=self.job, uid=uid, attempt=attempt, rank=rank, spool=None,
                flush_seconds=HEARTBEAT_SECONDS, aside=True,
            )  # fmt: skip
            link.start()
        self._meter.tally = Tally(link, rank, self._ranks.world_size)
        self._training.after_gradients(self._meter.clock.gradients_end)

    def _arrived(self, desired: protocol.Desired) -> None:
        """Called by the link's thread, before the boundary that acts on it."""
        self._checkpoints.want("an order", desired.restore.checkpoint if desired.restore else None)
        self._orders.arrived(desired)
        self._checkpoints.pinned.follow(desired.pins, self._checkpoints.attempt)
        self._verifier.follow(desired.verify)

    def _introduce(self) -> None:
        """To the supervisor, if there is one."""
        if self._ranks.leads:
            checkpoints = self._checkpoints
            supervision.introduce(
                supervision.Trained(
                    job=self.job,
                    uid=checkpoints.uid,
                    attempt=checkpoints.attempt,
                    lineage=self.lineage,
                    store=checkpoints.store.url,
                    server=self._server,
                )
            )

    def _begin(self, start: Start) -> None:
        self._resumed = True
        self._starter.begin(start)
        self._training.begin()
        page = self._reporter.link.page if self._ranks.leads else None
        if page is not None and not supervision.is_supervised():  # which says it, and whether the server answers
            logger.info("%s: dashboard: %s", self.job, page)
        self._introduce()
        for gap in self._training.gaps():
            self._reporter.notice("warning", "loader", gap)
        for what in self._training.missing(start.loaded):
            self._reporter.notice("warning", "inventory", what)
        self._steering.begin(self.iteration)
        self._meter.clock.begin()

    def _begin_afresh(self) -> None:
        unused: list[str] = []
        with contextlib.suppress(OSError):  # what cannot be listed cannot be told
            unused = self._checkpoints.store.checkpoints(self.job)
        self._begin(Start())
        if unused:
            self._reporter.notice(
                "warning",
                "afresh",
                f"training starts at iteration 0 although the job has {len(unused)} checkpoints, the newest "
                f"{unused[-1]}: to resume from it, call session.resume() or draw from session.batches(...) before "
                "the first step",
            )

    def _close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._preempted:
            reason = "preempted"
        if self._relaunch:
            reason = "relaunched"
        self._progress.rest()
        atexit.unregister(self._at_exit)
        parts: tuple[Callable[[], object], ...] = (
            self._verifier.close,
            lambda: self._take_final() if reason == "finished" else None,
            lambda: self._checkpoints.close(WRITE_SECONDS, finished=reason == "finished"),
            self._ranks.close,
            self._settle,
            lambda: self._note_ending(reason),
            self._meter.close,
            lambda: self._reporter.attempt_ended(reason),
            self._reporter.link.close,
            self._progress.close,
            self._training.close,
            self._tell_what_is_kept,
            self._leaving.close,  # last: a SIGTERM that comes a second time must not cut the last checkpoint short
        )
        for part in parts:
            try:
                part()
            except Exception:  # the loop may be ending with an error of its own, which must not be hidden
                logger.exception("%s: while closing", self.job)

    def _note_ending(self, reason: str) -> None:
        if self._ranks.leads and self.attempt:
            endings.note(self._checkpoints.store, self.job, self.attempt, reason, self._training.trained)

    def _tell_what_is_kept(self) -> None:
        head = self._checkpoints.head
        kept = parse_checkpoint_id(head)[0] if head is not None else 0
        if self.iteration > kept and self._ranks.leads:
            where = f"resumes from iteration {kept:,}" if kept else "starts at iteration 0"
            logger.warning(
                "%s: the iterations after %s are in no checkpoint: the next attempt %s",
                *(self.job, f"{kept:,}", where),
            )

    def _take_final(self) -> None:
        """So that a job started again after its end finds all its work done."""
        if not self.iteration or not self._checkpoints.wait_settled(WRITE_SECONDS):
            return
        if not self._training.at_boundary:
            logger.info("%s: the loop ended within an iteration; no last checkpoint was taken", self.job)
            return
        try:
            if not self._steering.end(self.iteration):
                return
            self._settle()
            self._checkpoints.find_lineage()
            newest = checkpoint_id(self.iteration, self.lineage)
            if self._ranks.decide(lambda: self._checkpoints.head != newest, bool):
                self._take(Decision(checkpoint="final", at_once=True))
        except RanksLost as error:
            self._reporter.notice("warning", "ranks", f"no last checkpoint: {error}")

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self._close(_ending(type(error) if error is not None else None))

    # The boundary between two iterations

    def _boundary(self, metrics: dict[str, Any]) -> None:
        self._training.boundary()
        for what in self._training.unknown_loaders():
            self._reporter.notice("warning", "loader", what)
        if not self._resumed:  # a loop that neither resumes nor draws its batches here wants a fresh start
            try:
                self._begin_afresh()
            except RanksLost as error:
                self._cast_adrift(error)
        try:
            self._learn(metrics)
        finally:  # the other ranks count on this one
            self._steer()
        self._prober.at_boundary(busy=self._checkpoints.active)

    def _steer(self) -> None:
        try:
            try:
                self._act(self._steering.decision(self.iteration))
            except RestoreFailed:  # no rank goes on
                raise
            except BaseException:  # the other ranks wait for what comes next
                self._steering.look_ahead(self.iteration)
                raise
            self._steering.look_ahead(self.iteration)
        except RanksLost as error:
            self._cast_adrift(error)

    def _cast_adrift(self, error: RanksLost) -> None:
        """What all ranks do together is over; the others find out at once if they have not yet."""
        self._steering = Adrift()
        self._ranks.close()
        self._reporter.notice(
            "error", "ranks", f"{error}; no checkpoint is taken any more, training goes on as far as it can"
        )

    def _learn(self, metrics: dict[str, Any]) -> None:
        """What the iteration that ends here took, and what operators want by now."""
        self._settle()
        if self._leaving.asked and not self._ranks.leads:
            self._ranks.ask_to_end()
        if self._reporter.link.fenced and self._is_replaced():
            self._give_way()
        if self._leaving.asked and isinstance(self._steering, Adrift):
            self._preempted = True
        self._meter.end_iteration(metrics)
        desired = self._reporter.link.desired
        if desired is not None and self._orders.news(desired):
            self._controller.change(self._orders.settings())
            self._checkpoints.retention = self._orders.retention()
            if self._orders.checkpoint_requested:
                self._wanted = "requested"
            if self._orders.probe_requested:
                self._prober.ask()
            self._reporter.applied(desired.version)
            self._reporter.pace(self._controller, changed=True)
        self._rewinder.tell_mode()
        self._progress.update(self.iteration)

    def _act(self, decision: Decision) -> None:
        if decision.end:
            self._end_as_told(decision)
        elif (target := decision.restore) is not None:
            self._meter.learn()
            self._relaunch = self._rewinder.rewind(*self._ranks.decide(lambda: target, tuple[str, str | None]))
            self._checkpoints.want("the script", None)
            self._introduce()
            self._meter.clock.restart()
            self._steering.begin(self.iteration)
        elif decision.checkpoint is not None:
            self._checkpoints.follow_lineage(decision.lineage or self.lineage)
            self._take(decision)
        if self._checkpoints.unprepared:
            self._checkpoints.prepare(self._training.outline)
        self._meter.in_flight = self._checkpoints.active

    def _end_as_told(self, decision: Decision) -> None:
        """The last boundary: save where there is time, and go."""
        self._preempted = True
        checkpoints, saved = self._checkpoints, "there is no time for a checkpoint"
        if decision.checkpoint is not None:
            if checkpoints.wait_settled(self._leaving.left_seconds):
                self._settle()
                checkpoints.follow_lineage(decision.lineage or self.lineage)
                self._take(decision)
            durable = checkpoints.wait_settled(self._leaving.left_seconds)
            newest = checkpoint_id(self.iteration, self.lineage)
            saved = (
                f"saved as {newest}" if durable and checkpoints.head == newest else "it could not be saved in time"
            )
        message = f"told to end by SIGTERM after iteration {self.iteration:,}: {saved}"
        self._reporter.notice("warning", "preempted", message)

    def _told_to_end(self) -> bool:
        if self._leaving.asked or self._ranks.world_size == 1:
            return self._leaving.asked
        now = time.monotonic()
        if now - self._looked_at < MEETING_SECONDS:
            return False
        self._looked_at = now
        return self._ranks.asked_to_end

    def _end(self) -> Decision:
        """With a checkpoint, if that can be durable in time."""
        profile = self._controller.profile
        takes_seconds = None if profile is None else profile.snapshot_seconds + profile.persist_seconds
        kind: CheckpointKind | None = "final" if self._leaving.fits(takes_seconds) else None
        return Decision(end=True, checkpoint=kind, at_once=True, lineage=self.lineage)

    def _settings_changed(self) -> None:
        self._controller.change(self._orders.settings())
        self._reporter.pace(self._controller, changed=True)

    def _settle(self) -> None:
        """Learn from the checkpoints that settled since the last iteration."""
        for settled in self._checkpoints.drain():
            self._meter.checkpoint_settled(settled)
            if settled.fenced and not self._over:
                self._give_way()
            if settled.state == "torn":
                self._retry_at_once = True
                self._reporter.notice("warning", "torn", f"{settled.reason}; taken again at once")

    def _is_replaced(self) -> bool:
        """The server says so; the store has the last word, which is asked for seldom: it may take its time."""
        now = time.monotonic()
        if self._over or now < self._ask_store_at:
            return False
        self._ask_store_at = now + ASK_STORE_SECONDS
        return self._checkpoints.fenced

    def _give_way(self) -> None:
        """A newer attempt has begun: what this one does from now on is nobody's, and nobody is told of it."""
        self._over = True
        self._reporter.link.silence()
        self._reporter.link = NoLink()
        self._steering = Adrift()
        self._ranks.close()
        logger.error(
            "%s: a newer attempt of this job has begun: attempt %d takes no more checkpoints and reports nothing",
            *(self.job, self.attempt),
        )

    def _choose(self, iteration: int) -> Decision:
        """What to do at the boundary after `iteration`, which is this one or a later one."""
        if self._told_to_end():
            return self._end()
        if (target := self._restore_target()) is not None:
            return Decision(restore=target)
        if not self._is_due(iteration):
            return Decision()
        if self._waits_for_memory():
            return Decision(waits=True)
        snapshots = self._checkpoints.snapshots
        has_room = snapshots.free if iteration == self.iteration else snapshots.has_room
        enough = self._checkpoints.under_way >= self._controller.in_flight
        if not has_room or (enough and not self._wanted and not self._retry_at_once):
            # while the one before is being written, this one waits some iterations rather than stall training
            return Decision(waits=True)
        kind, at_once = self._wanted or "scheduled", self._retry_at_once
        self._wanted, self._retry_at_once = None, False
        plan = self._controller.plan
        return Decision(
            checkpoint=kind,
            at_once=at_once,
            mode=plan.mode if plan is not None else "cpu",
            over_seconds=self._spread * self._controller.interval_seconds if self._spread and not at_once else 0.0,
            lineage=self.lineage,
        )

    def _waits_for_memory(self) -> bool:
        """The first checkpoint waits while its memory is allocated in the background, for a minute of training."""
        asked_for = self._wanted or self._retry_at_once or self._controller.plan is not None
        early = self._controller.trained_seconds < FIRST_SECONDS
        return self._checkpoints.unprepared and early and not asked_for

    def _is_due(self, iteration: int) -> bool:
        if self._wanted or self._retry_at_once:
            return True
        if self._orders.withhold(time.monotonic() - self._taken_at):
            if not self._told_withheld:
                self._told_withheld = True
                self._reporter.notice(
                    "warning",
                    "withheld",
                    "settings from the server have kept this job from checkpoints for a day: one is taken now, "
                    "and then one a day for as long as they do",
                )
            return True
        if not self._controller.due(iteration):
            return False
        self._meter.learn()  # after which it may not be
        return self._controller.due(iteration)

    def _take(self, decision: Decision) -> None:
        assert decision.checkpoint is not None
        started = time.perf_counter()
        try:
            self._meter.learn()  # what came before belongs to the time before
        finally:  # the other ranks count on this one
            self._checkpoints.take(
                lambda later: self._training.capture(later=later),
                decision.checkpoint,
                mode=decision.mode,
                over_seconds=decision.over_seconds,
                at_once=decision.at_once,
            )
            self._controller.started(self.iteration)
            self._taken_at = time.monotonic()
        if (change := self._training.structure_change()) is not None:
            self._reporter.notice(
                "warning",
                "structure",
                "the objects have changed since training began, so that the checkpoints from iteration "
                f"{self.iteration:,} on are refused when this script starts again. Compared with a checkpoint of "
                f"the start: {change}. Have the script make this change before session.resume()",
            )
        self._meter.clock.stall("snapshot_wait", time.perf_counter() - started)

    def _before_update(self) -> None:
        """An optimizer is about to change what is being copied: let the copy finish first."""
        waited = self._checkpoints.snapshots.wait_copied()
        if waited:
            self._meter.clock.stall("snapshot_wait", waited)
        self._meter.clock.update_begins()

    def _restore_target(self) -> tuple[str, str | None] | None:
        """(checkpoint, order) to go back to at this boundary."""
        if self._wanted_restore is not None:
            checkpoint, self._wanted_restore = self._wanted_restore, None
            return checkpoint, None
        order = self._orders.restore()
        return (order.checkpoint, order.id) if order is not None else None


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _leave_child() -> None:
    """A forked child has neither the threads nor the right: there a session only counts."""
    for session in _sessions:
        session._closed = session._forked = True
        session._checkpoints.snapshots.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)


def _ending(kind: type[BaseException] | None) -> str:
    if kind is None or issubclass(kind, GeneratorExit):
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else kind.__name__
