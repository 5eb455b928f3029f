"""A session's settings: argument, else environment, else default. Operators' orders come above all these, live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from holdfast.pacing import Settings, parse_budget, parse_every, policies
from holdfast.pacing.settings import DEFAULT_BUDGET
from holdfast.persist.choice import SIMPLEST_FIRST

DEFAULT_STORE = "checkpoints"
DEFAULT_KEEP = 12
DEFAULT_POLICY = "checkfreq"
DEFAULT_BACKEND = "auto"
BACKENDS = ("auto", *SIMPLEST_FIRST)
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a session was started with."""

    store: str | os.PathLike[str]
    """HOLDFAST_STORE."""
    server: str | None
    """HOLDFAST_SERVER; None: no server, everything else works."""
    token: str | None
    """HOLDFAST_TOKEN."""
    settings: Settings
    """HOLDFAST_BUDGET, HOLDFAST_POLICY, HOLDFAST_EVERY."""
    keep: int
    """HOLDFAST_KEEP."""
    slots: int
    """HOLDFAST_SLOTS."""
    backend: str
    """HOLDFAST_BACKEND."""
    spread: float
    """HOLDFAST_SPREAD."""
    debug: bool
    """HOLDFAST_DEBUG."""

    @classmethod
    def weigh(cls, **arguments: Any) -> Self:
        """Fill what was not given (None) from the environment; ValueError names a setting that makes no sense."""
        policy = _first(arguments, "policy", DEFAULT_POLICY)
        if policy not in policies:
            raise ValueError(f"policy {policy!r}: choose one of {', '.join(policies)}")
        every = _first(arguments, "every", None)
        return cls(
            store=_first(arguments, "store", DEFAULT_STORE),
            server=_first(arguments, "server", None),
            token=_first(arguments, "token", None),
            settings=Settings(
                budget=parse_budget(_first(arguments, "budget", DEFAULT_BUDGET)),
                policy=policy,
                every=parse_every(every) if every is not None else None,
            ),
            keep=_parse_count("keep", _first(arguments, "keep", DEFAULT_KEEP), "checkpoints"),
            slots=_parse_count("slots", _first(arguments, "slots", 1), "snapshots in flight"),
            backend=_parse_backend(_first(arguments, "backend", DEFAULT_BACKEND)),
            spread=_parse_spread(_first(arguments, "spread", 0.0)),
            debug=_parse_flag("debug", _first(arguments, "debug", False)),
        )


def _first(arguments: dict[str, Any], name: str, default: Any) -> Any:
    if (given := arguments[name]) is not None:
        return given
    return os.environ.get(f"HOLDFAST_{name.upper()}") or default


def _parse_count(name: str, value: int | str, what: str) -> int:
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of {what}, at least 1")
    return count


def _parse_backend(value: str) -> str:
    if value not in BACKENDS:
        raise ValueError(f"backend {value!r}: choose one of {', '.join(BACKENDS)}")
    return value


def _parse_spread(value: float | str) -> float:
    try:
        spread = float(value)
    except ValueError:
        spread = -1.0
    if not 0 <= spread <= 1:
        raise ValueError(f"spread={value!r}: give a share of the interval between checkpoints, from 0 to 1")
    return spread


def _parse_flag(name: str, value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    if (found := FLAGS.get(value.strip().lower())) is None:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(FLAGS)}")
    return found
