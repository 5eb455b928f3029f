"""A session's settings: argument, else environment, else default. Operators' orders come above all these, live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from holdfast.pacing import Settings, parse_budget, parse_every, policies
from holdfast.pacing.settings import DEFAULT_BUDGET

DEFAULT_STORE = "checkpoints"
DEFAULT_KEEP = 12
DEFAULT_POLICY = "checkfreq"


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
            keep=_parse_keep(_first(arguments, "keep", DEFAULT_KEEP)),
        )


def _first(arguments: dict[str, Any], name: str, default: Any) -> Any:
    if (given := arguments[name]) is not None:
        return given
    return os.environ.get(f"HOLDFAST_{name.upper()}") or default


def _parse_keep(value: int | str) -> int:
    try:
        keep = int(value)
    except ValueError:
        keep = 0
    if keep < 1:
        raise ValueError(f"keep={value!r}: give a whole number of checkpoints, at least 1")
    return keep
