"""Parts of a session that only some jobs use, and the saver that is built from them.

What such a part needs is imported only where a job uses it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from holdfast.checkpoint.retention_queue import RetentionQueue
from holdfast.config import Config
from holdfast.disabled import is_disabled
from holdfast.distributed.ranks import Ranks
from holdfast.pacing import Controller
from holdfast.protocol.orders import OnTrouble
from holdfast.save.history import History
from holdfast.save.host_buffers import Arena
from holdfast.save.persister import Persister
from holdfast.save.reports import CheckpointEvents
from holdfast.save.saver import Saver
from holdfast.save.snapshotter import Snapshotter
from holdfast.save.store_shares import StoreShares
from holdfast.state.registry import Registry
from holdfast.store import Store, open_store, open_tiers
from holdfast.system import supervisor_channel
from holdfast.telemetry.iteration_metrics import IterationMetrics
from holdfast.telemetry.reporter import Reporter, TrainingPosition

if TYPE_CHECKING:
    from holdfast.engine.draining import DrainQueue
    from holdfast.engine.earlier_start import EarlierStart
    from holdfast.engine.trouble_rule import TroubleRule
    from holdfast.incremental.planner import IncrementalPlanner
    from holdfast.inventory.watch import Inventory
    from holdfast.memory_tier.tier import MemoryTier
    from holdfast.save.compression import Compression
    from holdfast.save.host_state import HostStateForks
    from holdfast.save.two_phase_commit import RankCommit
    from holdfast.telemetry.machine_metrics import MachineMetrics


def open_stores(job: str, options: Config) -> tuple[Store, EarlierStart | None]:
    """Open the store, and the one that it is copied to; a supervisor knows those of earlier starts."""
    if not supervisor_channel.is_supervised():
        store = open_store(options.store)
        return store if options.drain is None else open_tiers(store, options.drain), None
    from holdfast.engine.earlier_start import open_store_of_start

    return open_store_of_start(job, options.store, options.drain)


def open_memory(job: str, uid: str, options: Config, ranks: Ranks, reporter: Reporter) -> MemoryTier | None:
    """Open memory that outlives this process; without a supervisor, there is none."""
    if ranks.world_size == 1 and not supervisor_channel.is_supervised():
        return None
    if options.peers:
        from holdfast.peers.tier import open_peer_memory_tier

        return open_peer_memory_tier(job, uid, options.max_in_flight, ranks, reporter)
    from holdfast.memory_tier.tier import open_memory_tier

    return open_memory_tier(job, uid, options.max_in_flight, ranks, reporter)


def compression(options: Config, ranks: Ranks, controller: Controller, reporter: Reporter) -> Compression | None:
    """Return what decides when checkpoints are compressed, on rank 0."""
    if not (options.compress and ranks.leads):
        return None
    from holdfast.save.compression import Compression

    return Compression(controller, reporter)


def build_saver(
    store: Store,
    options: Config,
    ranks: Ranks,
    reporter: Reporter,
    meter: IterationMetrics,
    compression: Compression | None,
    controller: Controller,
) -> tuple[Saver, MemoryTier | None]:
    """Build what saves checkpoints, and the memory that outlives this process, if there is any."""
    job, uid = reporter.job, uuid.uuid4().hex
    memory = open_memory(job, uid, options, ranks, reporter)
    arenas = [Arena() for _ in range(options.max_in_flight)] if memory is None else memory.arenas
    reports = CheckpointEvents(reporter, store, options.parity, bool(options.compress))
    history = History(store, job, uid, ranks=ranks, reporter=reporter, reports=reports)
    retention = RetentionQueue(store, job, options.retention_rules, reporter, history.training_head)
    shares = StoreShares(store, ranks, reporter, controller)
    saver = Saver(
        history,
        Snapshotter(
            debug=options.debug, arenas=arenas, kept=len(arenas) - options.max_in_flight,
            make_forks=host_state_forks(store, options, reporter, memory),
        ),
        Persister(
            store, max_in_flight=options.max_in_flight,
            ranks=rank_commit(ranks, store, retention), make_room=retention.make_room,
            make_planner=partial(incremental_planner, options, store), pace_of=shares.pace,
        ),
        retention, reports, ranks, shares, memory=memory, parity=options.parity,
        read_metrics=meter.newest_metrics if ranks.leads else lambda: None,  # for the manifest
        compresses=compression.begin if compression is not None else lambda: False,
        transform=options.transform,
    )  # fmt: skip
    if memory is not None and memory.sender is not None:
        saver.observe(memory.sender)
    return saver, memory


def incremental_planner(options: Config, store: Store) -> IncrementalPlanner | None:
    """Return what decides which tensors are written in part."""
    if not options.incremental or find_spec("numpy") is None:
        return None
    from holdfast.incremental.planner import MOST_COPIED_REGIONS, MOST_REGIONS, IncrementalPlanner

    return IncrementalPlanner(options.incremental, MOST_REGIONS if store.shares_files else MOST_COPIED_REGIONS)


def host_state_forks(
    store: Store, options: Config, reporter: Reporter, memory: MemoryTier | None
) -> Callable[[], HostStateForks | None]:
    """Return what makes the part that writes large arrays from a fork of the process; it makes none for a copy."""

    def make() -> HostStateForks | None:
        from holdfast.save.host_state import make_forks

        return make_forks(
            options.host_state,
            store,
            lambda level, text: reporter.notice(level, "host_state", text),
            has_memory_tier=memory is not None,
            has_parity=options.parity is not None,
            compresses=bool(options.compress),
            planner=incremental_planner(options, store),
        )

    return make


def trouble_rule(
    rule: OnTrouble, meter: IterationMetrics, saver: Saver, reporter: Reporter, ranks: Ranks
) -> TroubleRule | None:
    """Return the rule that restores when the losses are wrong, and have them watched; None if it is off."""
    if not rule.is_on:
        return None
    from holdfast.engine.trouble_rule import TroubleRule
    from holdfast.telemetry.loss_watch import LossWatch

    watch = LossWatch()
    meter.watch_losses(watch)
    return TroubleRule(rule, watch, saver, reporter, ranks)


def rank_commit(ranks: Ranks, store: Store, retention: RetentionQueue) -> RankCommit | None:
    """Return what commits checkpoints together with the other ranks, if there are any."""
    if ranks.world_size == 1:
        return None
    from holdfast.distributed.side_group import SideGroup
    from holdfast.save.two_phase_commit import RankCommit

    return RankCommit(ranks, store, retention.make_room) if isinstance(ranks, SideGroup) else None


def drain_queue(
    store: Store, options: Config, ranks: Ranks, saver: Saver, reporter: Reporter
) -> DrainQueue | None:
    """Return what copies checkpoints to the store behind, on rank 0."""
    if options.drain is None or is_disabled("drain") or not ranks.leads:
        return None
    from holdfast.engine.draining import DrainQueue

    rules = options.drain_retention or options.retention_rules
    queue = DrainQueue(store, reporter.job, saver.retention, reporter, options.drain_every, rules)
    saver.observe(queue)
    return queue


def watch_over(registry: Registry) -> Inventory | None:
    """Return the watch over the objects; `None` if it is switched off, or left out of the installation."""
    if is_disabled("inventory"):
        return None
    try:
        from holdfast.inventory.watch import Inventory
    except ImportError:
        return None
    return Inventory(registry)


def machine_metrics(position: TrainingPosition) -> MachineMetrics | None:
    """Return what measures the machine; `None` if it is switched off, or left out of the installation."""
    if is_disabled("machine-metrics"):
        return None
    try:
        from holdfast.telemetry.machine_metrics import MachineMetrics
    except ImportError:
        return None
    return MachineMetrics(position)
