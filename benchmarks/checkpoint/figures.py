"""The report: a table, notes and figures from the results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable

from benchmarks.harness import rounded

from .registry import CONTENDERS, ONLY_BY_NAME, OURS, PLAIN, TORCH_SAVE
from .results import BenchmarkOptions, Results
from .table import LEAST_SECONDS, Medians, best, best_ways, medians, ratio, render

Say = Callable[[str], None]

LEGEND = """\
blocked s        time that the training thread waited: in save, before optimizer steps, in hooks
slow-down s      time that a checkpoint adds to the {k} iterations after it, with interference; also per iteration
backgr. CPU s    CPU time of other threads and processes for one checkpoint
durable s        time from save until fsynced during training; "idle s" without training; "persist s" is the part
                 of "idle s" after the copy in memory
memory MB        peak of all processes, with helpers' interpreters, beyond training without the library
restore          into a new model and optimizer, every page touched, compared bit for bit
each iter.       iterations with a checkpoint after each ÷ iterations without
"""


def report(results: Results, plan: BenchmarkOptions, say: Say = print) -> None:
    order = [entry.name for entry in (*CONTENDERS, *ONLY_BY_NAME) if entry.name in results.samples]
    contenders = {name: _medians_of(name, results) for name in order}
    limits = best_ways(medians(results.limits))
    lines = [
        *_heading(contenders, results),
        *render(contenders),
        "",
        *LEGEND.format(k=plan.k).splitlines(),
        "",
        *_best_peers(contenders),
        *_limits(limits, results.state_bytes),
        *_notes({name: results.notes[name] for name in contenders}),
        *(f"left out    {name}: {reason}" for name, reason in results.left_out.items()),
        f"figures: {json.dumps(rounded(figures(contenders, limits, results)))}",
    ]
    for line in lines:
        say(line)


def figures(contenders: dict[str, Medians], limits: Medians, results: Results) -> dict[str, float | None]:
    """Return Holdfast ÷ another: below 1 is better.

    The best peer is the best of all peers and configurations for that figure.
    Waits below a millisecond count as one, and slow-downs below the difference of two plain stretches count as
    that difference: otherwise the luckiest of many peers would seem to cost nothing.
    `persist_vs_bare_write`: time from the copy in memory until durable without training, digests, manifest and
    commit included, ÷ the fastest bare write and fsync of as many bytes; `durable_…` includes the copy.
    `restore_…`: cold cache, unless the name says warm.
    `slot_bytes_vs_state`: extra memory of all processes per snapshot in flight.
    """
    ours, peers = contenders.get(OURS, {}), _peers(contenders)
    torch_save = contenders.get(TORCH_SAVE, {})

    def beside(measure: str, least: float = 0.0) -> float | None:
        rival = best(peers, measure)
        return ratio(ours.get(measure), rival[1] if rival else None, least=least)

    background = {name: each for name, each in peers.items() if each.get("background_cpu", 0.0) > 0.05}
    rival = best(background, "background_cpu")
    bare_write = min((limits[key] for key in ("write_direct", "write_buffered") if key in limits), default=None)
    bare_read = min((limits[key] for key in ("read_cold", "read_buffered") if key in limits), default=None)
    return {
        "blocked_vs_torch_save": ratio(ours.get("blocked"), torch_save.get("blocked")),
        "blocked_vs_best_peer": beside("blocked", LEAST_SECONDS),
        "slowdown_vs_best_peer": beside("slowdown", max(LEAST_SECONDS, _noise_seconds(results))),
        "durable_vs_best_peer": beside("durable"),
        "persist_vs_bare_write": ratio(ours.get("persist_idle"), bare_write),
        "durable_vs_bare_write": ratio(ours.get("durable_idle"), bare_write),
        "restore_vs_bare_read": ratio(ours.get("restore_cold"), bare_read),
        "restore_vs_best_peer": beside("restore_cold"),
        "slot_bytes_vs_state": ratio(ours.get("slot_bytes"), results.state_bytes),
        "every_iteration_vs_best_peer": beside("every_iteration"),
        "background_cpu_vs_best_peer": ratio(ours.get("background_cpu"), rival[1] if rival else None),
        "restore_warm_vs_bare_read": ratio(ours.get("restore_warm"), limits.get("read_warm")),
        "restore_warm_vs_best_peer": beside("restore_warm"),
        "slowdown_of_an_iteration": ours.get("slowdown_share"),
        "noise_of_an_iteration": _noise(results),
        "every_iteration": ours.get("every_iteration"),
    }


def _medians_of(name: str, results: Results) -> Medians:
    samples = dict(results.samples[name])
    if samples.get("iteration"):
        pairs = zip(samples["slowdown"], samples["iteration"], strict=True)
        samples["slowdown_share"] = [slowdown / iteration for slowdown, iteration in pairs]
    found = medians(samples)
    if name in results.memory_bytes:
        extra, max_in_flight = results.memory_bytes[name]
        found |= {"memory_mb": extra / 1e6, "slot_bytes": extra / max_in_flight}
    if name == PLAIN:  # it saves nothing: its figures are noise of the clock
        found = {
            key: found[key] for key in ("iteration", "slowdown", "slowdown_share", "memory_mb") if key in found
        }
    return found


def _heading(contenders: dict[str, Medians], results: Results) -> list[str]:
    iteration = statistics.median([each["iteration"] for each in contenders.values()])
    taken = max(len(each["blocked"]) for each in results.samples.values())
    size = f"{results.state_bytes / 1e6:,.0f} MB"
    return ["", f"State {size}, iteration {iteration:.3f} s, medians of {taken} interleaved checkpoints", ""]


def _peers(contenders: dict[str, Medians]) -> dict[str, Medians]:
    return {name: each for name, each in contenders.items() if name not in (OURS, PLAIN)}


def _best_peers(contenders: dict[str, Medians]) -> list[str]:
    measures = ("blocked", "slowdown", "durable", "restore_cold", "restore_warm", "every_iteration")
    found = {measure: best(_peers(contenders), measure) for measure in measures}
    parts = [f"{measure.replace('_', ' ')} {at[1]:.4g} by {at[0]}" for measure, at in found.items() if at]
    return [f"best peers  {', '.join(parts)}"]


def _limits(limits: Medians, size_bytes: int) -> list[str]:
    names = {
        "write_direct": "direct write + fsync",
        "write_buffered": "buffered write + fsync",
        "read_cold": "direct read",
        "read_buffered": "buffered read",
        "read_warm": "read, cached",
        "memcpy": "copy in memory",
        "device_copy": "copy from the GPU to pinned memory",
    }
    parts = [
        f"{title} {limits[key]:.3f} s ({size_bytes / limits[key] / 1e9:.1f} GB/s)"
        for key, title in names.items()
        if math.isfinite(limits.get(key, math.inf))
    ]
    return ["bare limits " + ", ".join(parts)] if parts else []


def _notes(notes: dict[str, str]) -> list[str]:
    whose: dict[str, list[str]] = {}
    for name, note in notes.items():
        whose.setdefault(note, []).append(name)
    return [f"note        {'; '.join(names)}: {note}" for note, names in whose.items() if note]


def _noise(results: Results) -> float | None:
    """Return the median difference of two plain stretches, as a share of an iteration."""
    plain = results.samples.get(PLAIN, {})
    pairs = zip(plain.get("slowdown", ()), plain.get("iteration", ()), strict=True)
    shares = [abs(slowdown) / iteration for slowdown, iteration in pairs]
    return statistics.median(shares) if shares else None


def _noise_seconds(results: Results) -> float:
    samples = results.samples.get(PLAIN, {}).get("slowdown", ())
    return statistics.median(map(abs, samples)) if samples else 0.0
