"""What the newest profile says of the interval in force."""

from __future__ import annotations

import msgspec

from holdfast.pacing import Plan, Profile, Settings, plan, policies
from holdfast.pacing.policy import duration, percent, plural
from holdfast.protocol.messages import Paced
from holdfast_server import models

CHECKFREQ, FIXED = "checkfreq", "fixed"

_decoder = msgspec.msgpack.Decoder(Paced)


def paced_of(job: models.JobRecord) -> Paced | None:
    """What the agent said last of its pace."""
    return _decoder.decode(job.paced) if job.paced else None


def profile_of(paced: Paced | None) -> Profile | None:
    """None until an iteration was timed."""
    if paced is None or "iteration_seconds" not in paced.profile:
        return None
    known = {name: value for name, value in paced.profile.items() if name in Profile.__dataclass_fields__}
    return Profile(**known)  # type: ignore[arg-type]


def in_force(paced: Paced | None) -> Plan | None:
    """What is to be expected of the interval in force; None while there is none, or nothing to expect it from."""
    profile = profile_of(paced)
    if paced is None or profile is None or paced.interval is None:
        return None
    return plan(profile, Settings(budget=paced.budget, every=paced.interval))


def reason_of(paced: Paced | None) -> str:
    """Why the interval is what it is.

    The agent gave its reason when it decided, and costs have moved since: told anew with the newest profile, it
    does not contradict the other figures of that. Where the policy would decide otherwise by now, both are said.
    """
    if paced is None:
        return ""
    profile, held = profile_of(paced), in_force(paced)
    if profile is None or held is None or held.overhead is None or paced.policy not in policies:
        return paced.reason
    if paced.policy == FIXED:
        return held.reason
    if paced.policy != CHECKFREQ:  # others look at the job's life, of which the agent knows more
        return paced.reason
    now = plan(profile, Settings(budget=paced.budget, policy=paced.policy))
    if now.interval == held.interval:
        return now.reason
    price = f"a checkpoint costs {duration(held.cost_seconds)}"
    share = f"{percent(held.overhead)} of {plural(paced.interval or 1)}"
    other = "none" if now.interval is None else f"every {plural(now.interval)}"
    return f"{price}, {share}; by the newest figures alone it would be {other}"
