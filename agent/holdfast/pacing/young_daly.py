"""Young's and Daly's rule: √(2δM) - δ between checkpoints, from their cost δ and the mean time M between failures.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, whose first-order
form is used. It is the rule that schedulers and papers compare with; `goodput` is the exact one, and for short
stalls and rare failures they agree. The rule knows neither budget nor pipeline; both are kept to here, as by
every policy.
"""

from __future__ import annotations

from .bounds import checkpoint_cost
from .expectation import expect_within
from .policy import History, cost_in_words, duration, failures_in_words, failures_of, usable_iteration
from .profile import Plan, Profile
from .renewal import daly_interval_seconds
from .settings import MAX_INTERVAL, Settings


def young_daly(profile: Profile, settings: Settings, history: History) -> Plan:
    """Daly's first-order interval, or as near above as the budget and the pipeline allow."""
    failures, cost = failures_of(settings, history), checkpoint_cost(profile)
    seconds = daly_interval_seconds(failures.rate, cost)
    iterations = seconds / profile.iteration_seconds if usable_iteration(profile) else 1
    reason = (
        f"for the least time lost to checkpoints and failures, by Young's and Daly's approximation: every "
        f"{duration(seconds)}, as {cost_in_words(profile, cost)} and {failures_in_words(failures)}"
    )
    wanted = max(1, round(min(MAX_INTERVAL, iterations)))
    return expect_within(profile, settings, history, wanted, policy="young-daly", reason=reason)
