"""How an outlook is told in a terminal: a sentence, a table of the choices, the curve, the premises."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.commands.console import percent, print_table
from holdfast.commands.plan_inputs import Premise
from holdfast.commands.plot import WIDTH, ettr, print_plot
from holdfast.pacing import Failures, History, Profile, Settings
from holdfast.pacing.policy import duration, plural
from holdfast.pacing.what_if import HOURS_A_DAY, Choice, Outlook
from holdfast.simulation import FORESEEN_FAILURES, RUNS, Simulated, compare_policies

HOPELESS = 0.01
"""An ETTR below which no interval is worth a recommendation."""
NEGLIGIBLE = 1e-4
"""A difference in ETTR that is not worth acting on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is printed, and with --json all that is."""

    outlook: Outlook
    in_force: str
    """How a sentence on the interval in force begins."""
    rests_on: list[Premise]
    simulated: list[Simulated] | None = None
    """With --simulate."""


def tell(answer: Answer) -> None:
    found = answer.outlook
    for sentence in _sentences(answer):
        print(_wrapped(sentence))
    print()
    header = ("", "EVERY", "TIME", "OVERHEAD", "ETTR", "AT RISK", "GPU-HOURS A DAY")
    print_table(header, [_row(each) for each in _rows(found)])
    for each in found.policies:
        if each.interval is None:
            print(f"{each.name}: {each.reason}")
        elif each.decided_by:
            print(f"{each.name}: {each.decided_by} decides in its place here")
    print()
    print_plot(found)
    print()
    if answer.simulated is not None:
        print(
            _wrapped(
                f"Simulated: {RUNS} runs of each policy, each for about {FORESEEN_FAILURES} mean times between "
                "failures, with the same failures for all; the rate is what it is assumed to be."
            )
        )
        print()
        columns = ("", "ETTR", "QUARTILES", "CHECKPOINTS", "HOURS LOST A DAY")
        print_table(columns, [_simulated_row(each) for each in answer.simulated])
        print()
    width = max(len(premise.value) for premise in answer.rests_on)
    for premise in answer.rests_on:
        print(f"{premise.name:<14}{premise.value:<{width}}  {premise.origin}")


def _wrapped(sentence: str) -> str:
    """In lines of the plot's width, with no number torn from its unit."""
    bound = re.sub(r"(\d) (?=(?:\w?s|min|h)\b)", "\\1\N{NO-BREAK SPACE}", sentence)
    return textwrap.fill(bound, WIDTH, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


def _rows(found: Outlook) -> Iterator[Choice]:
    yield found.best
    yield from found.around
    yield from (each for each in found.policies if each.interval is not None and not each.decided_by)
    yield from found.asked
    if found.present is not None:
        yield found.present


def _row(each: Choice) -> tuple[str, ...]:
    return (
        each.name,
        f"{each.interval:,}",
        duration(each.interval_seconds or 0.0),
        percent(each.overhead) + ("" if each.within_budget else " !"),
        ettr(each.effective or 0.0),
        duration(each.exposure_seconds or 0.0),
        _amount(each.gpu_hours_a_day or 0.0),
    )


def _sentences(answer: Answer) -> Iterator[str]:
    """The answer first, then what is in force and asked for, then what a failure now would take."""
    found, best = answer.outlook, answer.outlook.best
    assert best.interval is not None
    if (best.effective or 0.0) < HOPELESS:
        often = duration(found.mtbf_seconds)
        yield f"No interval helps: with a failure every {often} hardly anything that is trained is ever kept."
        return
    yield (
        f"A checkpoint every {plural(best.interval)} ({duration(best.kept_seconds or 0.0)}) is best: "
        f"{ettr(best.effective or 0.0)} of the time moves training forward."
    )
    if not best.within_budget:
        yield f"That is {percent(best.overhead)} overhead, more than the budget of {percent(found.budget)}."
    if found.present is not None:
        yield f"{answer.in_force} {_compared(found, found.present)}"
    for each in found.asked:
        yield f"You ask for one every {_compared(found, each)}"
    held = found.present or best
    hours = f" ({_amount(held.lost_gpu_hours or 0.0)} GPU-hours)" if (held.lost_gpu_hours or 0.0) >= 0.01 else ""
    yield (
        f"Killed now, it loses {duration(held.lost_seconds or 0.0)} of work on average{hours}, at most "
        f"{duration(held.exposure_seconds or 0.0)}; the next checkpoint is durable before the next failure with a "
        f"probability of {ettr(held.safe or 0.0)}."
    )


def _compared(found: Outlook, held: Choice) -> str:
    """An interval with its price: `143 (2.38 min): 92.5%, …`."""
    time = duration(held.interval_seconds or 0.0)
    if held.kept_seconds != held.interval_seconds:
        time = f"{time}, in fact {duration(held.kept_seconds or 0.0)}, as writing one takes so long"
    said = f"{held.interval:,} ({time}): {ettr(held.effective or 0.0)}"
    price, idle = held.gpu_hours_a_day or 0.0, held.idle_gpus or 0.0
    if price < NEGLIGIBLE * HOURS_A_DAY * found.world_size:
        return f"{said}, as good as the best."
    still = f" as if {idle:,.0f} of {found.world_size:,} GPUs stood still," if idle >= 1 else ""
    return f"{said},{still} {_amount(price)} GPU-hours a day behind the best."


def _amount(number: float) -> str:
    """Three digits, and no more noise than that."""
    if number == 0:
        return "-"
    if number < 0.01:
        return "<0.01"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def simulated(found: Outlook) -> list[Simulated]:
    """Run every policy through the same failures; takes some seconds of processor time."""
    profile = Profile(
        iteration_seconds=found.iteration_seconds,
        persist_seconds=max(0.0, found.lag_seconds),
        cost_seconds=found.cost_seconds,
    )
    history = History(
        failures=Failures(world_size=found.world_size, mean_seconds=found.mtbf_seconds),
        restart_seconds=found.restart_seconds,
    )
    return compare_policies(profile, Settings(budget=found.budget), history)


def _simulated_row(each: Simulated) -> tuple[str, ...]:
    return (
        each.policy,
        ettr(each.ettr),
        f"{ettr(each.ettr_low)} to {ettr(each.ettr_high)}",
        f"{each.checkpoints:,.0f}",
        f"{each.lost_hours_a_day:.2f}",
    )
