"""Parts of a session that only some jobs use. What they need is imported where a job uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.checkpoint.retention_queue import RetentionQueue
from holdfast.config import Config
from holdfast.disabled import is_disabled
from holdfast.distributed.ranks import Ranks, SideGroup
from holdfast.pacing import Controller
from holdfast.save.saver import Saver
from holdfast.store import Store, open_store, open_tiers
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.engine.draining import DrainQueue
    from holdfast.engine.earlier_start import EarlierStart
    from holdfast.engine.trouble_rule import TroubleRule
    from holdfast.incremental.planner import IncrementalPlanner
    from holdfast.memory_tier.tier import MemoryTier
    from holdfast.save.compression import Compression
    from holdfast.save.host_state import HostStateForks
    from holdfast.save.two_phase_commit import RankCommit
    from holdfast.telemetry.loss_watch import LossWatch


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


def incremental_planner(options: Config, store: Store) -> IncrementalPlanner | None:
    """Return what decides which tensors are written in part."""
    if not options.incremental:
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
            compresses=options.compress,
        )

    return make


def loss_watch(options: Config) -> LossWatch | None:
    """Return the watch over the losses; None where the job does nothing about wrong ones."""
    if not options.on_trouble.is_on:
        return None
    from holdfast.telemetry.loss_watch import LossWatch

    return LossWatch()


def trouble_rule(
    options: Config, losses: LossWatch | None, saver: Saver, reporter: Reporter, ranks: Ranks
) -> TroubleRule | None:
    """Return the rule that restores by itself when the losses are wrong."""
    if losses is None:
        return None
    from holdfast.engine.trouble_rule import TroubleRule

    return TroubleRule(options.on_trouble, losses, saver, reporter, ranks)


def rank_commit(ranks: Ranks, store: Store, retention: RetentionQueue) -> RankCommit | None:
    """Return what commits checkpoints together with the other ranks, if there are any."""
    if not isinstance(ranks, SideGroup):
        return None
    from holdfast.save.two_phase_commit import RankCommit

    return RankCommit(ranks, store, retention.make_room)


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
