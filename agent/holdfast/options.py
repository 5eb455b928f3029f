"""A session's settings: argument, else environment, else default. Operators' orders come above all these, live."""

from __future__ import annotations

import getpass
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from holdfast.pacing import Settings, parse_budget, parse_every, parse_mtbf, parse_policy
from holdfast.pacing.settings import DEFAULT_BUDGET
from holdfast.persist.choice import SIMPLEST_FIRST
from holdfast.protocol import MOST_LABELS
from holdfast.retention import Retention, parse_retention

DEFAULT_STORE = "checkpoints"
DEFAULT_KEEP = 12
DEFAULT_POLICY = "checkfreq"
DEFAULT_BACKEND = "auto"
BACKENDS = ("auto", *SIMPLEST_FIRST)
MOST_LABEL = 64
"""Characters."""
T = TypeVar("T")

DEFAULT_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, where nobody says otherwise: that of Kubernetes and of Slurm."""
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
    """HOLDFAST_BUDGET, HOLDFAST_POLICY, HOLDFAST_EVERY, HOLDFAST_MTBF."""
    retention: Retention
    """HOLDFAST_RETENTION; else what HOLDFAST_KEEP says."""
    slots: int
    """HOLDFAST_SLOTS."""
    backend: str
    """HOLDFAST_BACKEND."""
    spread: float
    """HOLDFAST_SPREAD."""
    debug: bool
    """HOLDFAST_DEBUG."""
    owner: str
    """HOLDFAST_OWNER; else whom Slurm or the system says it runs as."""
    labels: dict[str, str]
    """HOLDFAST_LABELS, as in `team=vision, data=v3`."""
    grace_seconds: float
    """HOLDFAST_GRACE."""
    rewinds: bool | None
    """HOLDFAST_REWINDS; None: the session judges by what the loop looks like."""

    @classmethod
    def weigh(cls, **arguments: Any) -> Self:
        """Fill what was not given (None) from the environment.

        ValueError names a setting that makes no sense, and the variable where it came from one; TypeError one that
        was given an object to checkpoint.
        """
        for name, value in arguments.items():
            if hasattr(value, "state_dict"):
                raise TypeError(
                    f"Session({name}=...): {name} is a setting, and {type(value).__name__} is an object to "
                    f'checkpoint: give it as state={{"{name}": ...}}'
                )

        def read(name: str, default: Any, parse: Callable[[Any], T]) -> T:
            return _read(arguments[name], name, default, parse)

        return cls(
            store=read("store", DEFAULT_STORE, _as_it_is),
            server=read("server", None, _as_it_is),
            token=read("token", None, _as_it_is),
            settings=Settings(
                budget=read("budget", DEFAULT_BUDGET, parse_budget),
                policy=read("policy", DEFAULT_POLICY, parse_policy),
                every=read("every", None, _or_none(parse_every)),
                mtbf_seconds=read("mtbf", None, _or_none(parse_mtbf)),
            ),
            retention=weigh_retention(arguments["retention"], arguments["keep"]),
            slots=read("slots", 1, partial(_parse_count, "slots", "snapshots in flight")),
            backend=read("backend", DEFAULT_BACKEND, _parse_backend),
            spread=read("spread", 0.0, _parse_spread),
            debug=read("debug", False, partial(_parse_flag, "debug")),
            owner=read("owner", _user(), _as_it_is),
            labels=read("labels", {}, _parse_labels),
            grace_seconds=read("grace", DEFAULT_GRACE_SECONDS, _parse_grace),
            rewinds=read("rewinds", None, _or_none(partial(_parse_flag, "rewinds"))),
        )


def weigh_retention(retention: str | Retention | None, keep: int | str | None) -> Retention:
    """The rules, or `keep` as one; what is not given comes from the environment. ValueError for both at once."""
    if retention is not None and keep is not None:
        raise ValueError(f"keep={keep!r} and retention={str(retention)!r}: give one of them")
    parse_keep = partial(_parse_count, "keep", "checkpoints")
    if keep is not None:
        return Retention.keeping(parse_keep(keep))
    found = _read(retention, "retention", None, _or_none(parse_retention))
    return found or Retention.keeping(_read(None, "keep", DEFAULT_KEEP, parse_keep))


def _read(given: Any, name: str, default: Any, parse: Callable[[Any], T]) -> T:
    if given is not None:
        return parse(given)
    variable = f"HOLDFAST_{name.upper()}"
    said = os.environ.get(variable)
    if not said:
        return parse(default)
    try:
        return parse(said)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def _as_it_is(value: Any) -> Any:
    return value


def _or_none(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else parse(value)


def _user() -> str:
    try:
        return os.environ.get("SLURM_JOB_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container in which the number of the user has no name
        return ""


def _parse_labels(value: Mapping[str, str] | str) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {key.strip(): text.strip() for key, _, text in pairs}
    labels = {str(key): str(text) for key, text in value.items()}
    short = all(key and len(key) <= MOST_LABEL and len(text) <= MOST_LABEL for key, text in labels.items())
    if len(labels) > MOST_LABELS or not short:
        raise ValueError(
            f"labels {value!r}: give at most {MOST_LABELS}, as in team=vision, with a name and up to {MOST_LABEL} "
            "characters on either side"
        )
    return labels


def _parse_count(name: str, what: str, value: int | str) -> int:
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


def _parse_grace(value: float | str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"grace={value!r}: give the seconds from SIGTERM to the kill, or 0 to leave SIGTERM alone"
        )
    return seconds


def _parse_flag(name: str, value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    if (found := FLAGS.get(value.strip().lower())) is None:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(FLAGS)}")
    return found
