"""`make bench-series`: gradients of a wave inversion from compressed states, and from recomputed ones.

The gradient of a 2-D acoustic inversion needs the forward states newest first. They are stored by each codec,
or recomputed from as many snapshots as fit into the memory that the codec takes (revolve). Learned codecs learn
from some sources, and all figures are those of other ones; errors are the worst of these, relative to the
gradient with all states in full. Compression counts what a codec learned. Seconds are CPU time of one core for
a gradient, medians of rounds in which all methods take turns, without the training of a codec, which is a
column of its own. `--plot` names an SVG file.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.harness import Table, cost_of, run, seconds_of
from holdfast_series import Autoencoder, Codec, Half, Raw, SeriesStore, StreamingPCA, Sz3, Zfp
from holdfast_series.blocks import BlockCodec

from .gradient import Shot, forward_states, recomputed_gradient, snapshot_bytes, stored_gradient
from .plot import Point, drawn
from .revolve import least_advances
from .wave import Survey, Wave

TRAINING_COLUMNS = (0.14, 0.5, 0.86)
HELD_OUT_COLUMNS = (0.32, 0.68)
"""Where sources are, in shares of the width."""
LEARN_EVERY = 5
GOAL_ERROR = 0.02
"""Largest error of a gradient that counts as good enough."""
FAMILIAR_HERTZ, STRANGE_HERTZ = 12.0, 24.0
COLUMNS = {
    f"{'states':<28}": "", "memory MB": ".2f", "compression": ".1f", "   error": ".1e", " cosine": ".5f",
    "    s": ".2f", "revolve s": ".2f", "slots": "d", "solved": "d", "fallbacks": ".1%", "corrected": ".1%",
    "training s": ".1f",
}  # fmt: skip


@dataclass
class Method:
    """A codec with its states of every `every`-th step, and what came of it."""

    name: str
    codec: Codec
    every: int = 1
    compression: float = 0.0
    memory_bytes: int = 0
    error: float = 0.0
    cosine: float = 1.0
    fallback_share: float = 0.0
    corrected_share: float = 0.0
    violations: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass
class Recomputation:
    """Revolve with some number of snapshots."""

    slots: int
    solved_steps: int = 0
    seconds: list[float] = field(default_factory=list)


def methods() -> list[Method]:
    pca, autoencoder = StreamingPCA(3e-2), Autoencoder(3e-2)
    return [
        Method("everything, raw", Raw()),
        Method("every 8th step, raw", Raw(), 8),
        Method("half", Half()),
        *(Method(f"zfp, {tolerance:g}", Zfp(tolerance)) for tolerance in (1e-3, 1e-2, 1e-1)),
        Method("zfp, 0.01, every 8th step", Zfp(1e-2), 8),
        *(Method(f"SZ3, {tolerance:g}", Sz3(tolerance)) for tolerance in (1e-2, 2e-2)),
        Method("PCA, 0.03", pca),
        Method("autoencoder, 0.03", autoencoder),
        Method("autoencoder, every 8th step", autoencoder, 8),
    ]


def main(side: int = 144, steps: int = 600, rounds: int = 2, plot: Path | None = None) -> dict[str, float]:
    """Compare all methods.

    Args:
        side: grid points of a side; the water takes 16 of them
        plot: write a plot there
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    survey = Survey(side=side, steps=steps)
    wave = Wave(survey, survey.first_velocity() ** 2)
    shots = [_shot(survey, share) for share in HELD_OUT_COLUMNS]
    print(f"problem   {side} × {side} points, {steps} steps, peak {survey.peak_hertz:g} Hz, on one core")
    compared = methods()
    for codec in {id(method.codec): method.codec for method in compared}.values():
        learn(codec, wave)
    exact = [stored_gradient(shot, wave, SeriesStore()) for shot in shots]
    for method in compared:
        measure(method, shots, wave, exact)
    recomputations = {slots_in(method.memory_bytes, survey) for method in compared}
    revolve = {slots: Recomputation(slots) for slots in sorted(recomputations)}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        take_turns(compared, revolve, shots[number % len(shots)], wave, exact[number % len(shots)])
    print_table(compared, revolve, survey)
    strange = strange_source(survey, compared[-2].codec)
    print_strange(strange)
    if plot is not None:
        plot.write_text(drawn([_point(method, revolve, survey) for method in compared]))
    return summary(compared, revolve, survey, strange)


def _shot(survey: Survey, share: float) -> Shot:
    return Shot.fired(survey, round(share * survey.side), survey.true_velocity())


def learn(codec: Codec, wave: Wave) -> None:
    """Let a codec learn from the sources that are not measured."""
    if not isinstance(codec, BlockCodec):
        return
    states = []
    for share in TRAINING_COLUMNS:
        shot = _shot(wave.survey, share)
        states += [
            state.clone() for number, state in enumerate(forward_states(shot, wave)) if not number % LEARN_EVERY
        ]
    codec.fit(states)
    print(f"{codec.name} learned from {len(states)} states in {codec.training_seconds:.1f} s", flush=True)


def measure(method: Method, shots: list[Shot], wave: Wave, exact: list[Tensor]) -> None:
    """Fill in all but the times: the worst of the shots, and the shares of all states."""
    fallbacks = corrected = puts = 0
    for shot, reference in zip(shots, exact, strict=True):
        with SeriesStore(codec=method.codec) as store:
            gradient = stored_gradient(shot, wave, store, method.every)
            report = store.report()
            states = forward_states(shot, wave)
            method.violations += _violations(store, states, method.codec.tolerance, method.every)
        held = report.memory_bytes + report.codec_bytes
        method.memory_bytes = max(method.memory_bytes, held)
        error = float((gradient - reference).norm() / reference.norm())
        method.error = max(method.error, error)
        method.cosine = min(method.cosine, float(F.cosine_similarity(gradient.view(-1), reference.view(-1), 0)))
        fallbacks += report.half_fallbacks + report.raw_fallbacks
        corrected += report.corrected
        puts += report.puts
    raw_bytes = shots[0].survey.steps * exact[0].nbytes
    method.compression = raw_bytes / method.memory_bytes
    method.fallback_share, method.corrected_share = fallbacks / puts, corrected / puts


def _violations(store: SeriesStore, states: object, tolerance: float, every: int) -> int:
    """Count states of which an element is off by more than the tolerance, from what the store gives back."""
    found = 0
    for number, state in enumerate(states):  # type: ignore[arg-type, var-annotated]
        if number % every == 0:
            error = (store.get(number).double() - state.double()).abs().max()
            found += bool(error > tolerance * state.double().abs().max())
    return found


def slots_in(memory_bytes: int, survey: Survey) -> int:
    """Return how many snapshots fit, at least two; that of the start is all zeros, and takes no memory."""
    return max(2, min(memory_bytes // snapshot_bytes(survey) + 1, survey.steps))


def take_turns(
    compared: list[Method], revolve: dict[int, Recomputation], shot: Shot, wave: Wave, exact: Tensor
) -> None:
    """Time each method once, on the same shot."""
    for method in compared:
        with SeriesStore(codec=method.codec) as store:
            gradient = partial(stored_gradient, shot, wave, store, method.every)
            method.seconds.append(seconds_of(gradient, time.process_time))
    for recomputation in revolve.values():
        _, seconds, found = cost_of(partial(recomputed_gradient, shot, wave, recomputation.slots))
        gradient, recomputation.solved_steps = found
        recomputation.seconds.append(seconds)
        assert recomputation.solved_steps == least_advances(shot.survey.steps, recomputation.slots) + 1
        assert torch.equal(gradient, exact), "revolve computes the same gradient"


def strange_source(survey: Survey, codec: Codec) -> Method:
    """Measure a codec on waves of twice the frequency that it learned from."""
    strange = dataclasses.replace(survey, peak_hertz=STRANGE_HERTZ)
    wave = Wave(strange, strange.first_velocity() ** 2)
    shots = [_shot(strange, share) for share in HELD_OUT_COLUMNS]
    method = Method(f"autoencoder, {STRANGE_HERTZ:g} Hz", codec)
    measure(method, shots, wave, [stored_gradient(shot, wave, SeriesStore()) for shot in shots])
    return method


def print_table(compared: list[Method], revolve: dict[int, Recomputation], survey: Survey) -> None:
    print()
    table = Table(COLUMNS)
    for method in compared:
        at_equal_memory = revolve[slots_in(method.memory_bytes, survey)]
        seconds, recomputing = map(statistics.median, (method.seconds, at_equal_memory.seconds))
        table.row(
            method.name, method.memory_bytes / 1e6, method.compression, method.error, method.cosine, seconds,
            recomputing, at_equal_memory.slots, at_equal_memory.solved_steps, method.fallback_share,
            method.corrected_share, method.codec.training_seconds,
        )  # fmt: skip


def print_strange(method: Method) -> None:
    print(
        f"\n{method.name}, trained at {FAMILIAR_HERTZ:g} Hz: compression {method.compression:.1f}, error "
        f"{method.error:.1e}, fallbacks {method.fallback_share:.1%}, corrected {method.corrected_share:.1%}, "
        f"violations {method.violations}"
    )


def _point(method: Method, revolve: dict[int, Recomputation], survey: Survey) -> Point:
    at_equal_memory = revolve[slots_in(method.memory_bytes, survey)]
    seconds = statistics.median(method.seconds), statistics.median(at_equal_memory.seconds)
    return method.name, method.compression, method.error, *seconds


def summary(
    compared: list[Method], revolve: dict[int, Recomputation], survey: Survey, strange: Method
) -> dict[str, float]:
    """Return the figures. The speedup is that of the best lossy codec that stores every step."""
    points = {method.name: _point(method, revolve, survey) for method in compared}
    speedups = {
        name: recomputed / stored
        for (name, _, error, stored, recomputed), method in zip(points.values(), compared, strict=True)
        if error <= GOAL_ERROR and method.every == 1 and method.codec.tolerance
    }
    best = max(speedups, key=lambda name: speedups[name])
    print(f"best against revolve at equal memory: {best}")
    autoencoder, pca = points["autoencoder, 0.03"], points["PCA, 0.03"]
    return {
        "autoencoder_ratio": autoencoder[1],
        "gradient_error": autoencoder[2],
        "gradient_speedup_vs_revolve": speedups[best],
        "autoencoder_speedup_vs_revolve": autoencoder[4] / autoencoder[3],
        "pca_ratio": pca[1],
        "pca_gradient_error": pca[2],
        "strange_source_ratio": strange.compression,
        "strange_source_error": strange.error,
        "bound_violations": sum(method.violations for method in [*compared, strange]),
    }


if __name__ == "__main__":
    run(main)
