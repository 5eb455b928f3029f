"""A session's settings, each declared once: argument, else environment, else default.

An operator's orders come above all these, live.
"""

from __future__ import annotations

import dataclasses
import difflib
import getpass
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Self

from holdfast import disabled
from holdfast.disabled import is_disabled
from holdfast.format.encoding import CODEC
from holdfast.format.parity_file import ParityCode, parse_parity
from holdfast.pacing import PacingSettings, parse_budget, parse_every, parse_mtbf, parse_policy, policy_names
from holdfast.pacing.settings import (
    DEFAULT_BUDGET,
    DEFAULT_POLICY,
    DEFAULT_UNSAVED_SECONDS,
    parse_unsaved_work,
    parse_write_budget,
)
from holdfast.protocol.orders import OnTrouble, parse_on_trouble
from holdfast.protocol.wire import MAX_LABELS
from holdfast.retention import Retention, parse_retention
from holdfast.units import FixedInterval

DEFAULT_STORE = "checkpoints"
DEFAULT_KEEP = 12
MOST_LABEL = 64
"""Characters."""
DEFAULT_GRACE_SECONDS = 30.0
"""Default time between SIGTERM and SIGKILL, that of Kubernetes and Slurm."""
HOST_STATES = ("auto", "copy", "fork")
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _user() -> str:
    try:
        return os.environ.get("SLURM_JOB_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container in which the number of the user has no name
        return ""


def _parse_labels(value: Mapping[str, str] | str) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {key.strip(): text.strip() for key, _, text in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(f"labels={value!r}: give names and values, as in team=vision")
    labels = {str(key): str(text) for key, text in value.items()}
    short = all(key and len(key) <= MOST_LABEL and len(text) <= MOST_LABEL for key, text in labels.items())
    if len(labels) > MAX_LABELS or not short:
        raise ValueError(
            f"labels {value!r}: give at most {MAX_LABELS}, as in team=vision, with a name and up to {MOST_LABEL} "
            "characters on either side"
        )
    return labels


def _number(name: str, kind: type[float], least: float, most: float, advice: str) -> Callable[[Any], float]:
    """A parser for a number within bounds; its error names the setting and the value, and advises."""

    def parse(value: float | str) -> float:
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"{name}={value!r}: give {advice}")
        return number

    return parse


def _count(name: str, what: str) -> Callable[[Any], float]:
    return _number(name, int, 1, math.inf, f"a whole number of {what}, at least 1")


def _parse_flag(name: str, value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    if (found := FLAGS.get(value.strip().lower())) is None:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(FLAGS)}")
    return found


def _parse_drain_every(value: FixedInterval | str) -> FixedInterval:
    try:
        return parse_every(value)
    except ValueError:
        raise ValueError(
            f"drain_every={value!r}: give a time such as 10min, or a whole number n for every n-th checkpoint"
        ) from None


def _parse_compress(value: bool | str) -> bool | str:
    if isinstance(value, str) and value.strip().lower() not in FLAGS:
        from holdfast.format.file_transforms import transform_names

        if value not in (names := transform_names()):
            known = ", ".join([*FLAGS, *sorted(names)])
            raise ValueError(f"compress={value!r}: give one of {known}, or install the package that adds it")
        return value
    found = _parse_flag("compress", value)
    if found and find_spec("numpy") is None:
        raise ValueError(f"compress={value!r}: compression needs numpy: pip install numpy, or give off")
    return found


def _parse_incremental(value: bool | str) -> bool | Literal["auto"]:
    found: bool | Literal["auto"] = "auto" if value == "auto" else _parse_flag("incremental", value)
    if found and find_spec("numpy") is None:
        raise ValueError(f"incremental={value!r}: it needs numpy: pip install numpy, or give off")
    return found


def _parse_host_state(value: str) -> str:
    if value not in HOST_STATES:
        raise ValueError(f"host_state={value!r}: give one of {', '.join(HOST_STATES)}")
    return value


def setting(
    default: Any,
    meaning: str,
    parse: Callable[[Any], Any] = lambda value: value,
    *,
    shown: str | None = None,
    computed: Callable[[], Any] | None = None,
) -> Any:
    """Declare a setting. Its default is a value, or is computed.

    `shown` is the default as the documentation has it, and `meaning` its sentence there.
    """
    declared = {"meaning": meaning, "shown": f"`{default}`" if shown is None else shown, "parse": parse}
    if computed is not None:
        return dataclasses.field(default_factory=computed, metadata=declared)
    return dataclasses.field(default=default, metadata=declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a session was started with. `NAME` is also read from HOLDFAST_NAME."""

    store: str | os.PathLike[str] = setting(
        DEFAULT_STORE, "a directory, or a bucket: [`s3://`, `gs://` or `az://`](object-stores.md)"
    )
    drain: str | os.PathLike[str] | None = setting(
        None, "a store that later [gets copies](tiers.md) of the checkpoints in a directory", shown="none"
    )
    drain_every: FixedInterval = setting(
        timedelta(minutes=10),
        "how often: `10min`, or 5 for every fifth checkpoint",
        _parse_drain_every,
        shown="`10min`",
    )
    drain_retention: Retention | None = setting(
        None,
        "which copies stay there, by the [rules](training.md#which-checkpoints-stay) of `retention`",
        parse_retention,
        shown="as `retention` or `keep` says",
    )
    server: str | None = setting(None, "the server to report to", shown="none")
    token: str | None = setting(
        None, "the server's [key](accounts.md) for agents, or its shared secret", shown="none"
    )
    budget: float = setting(DEFAULT_BUDGET, "overhead that checkpoints may cause", parse_budget, shown="`3.5%`")
    write_budget: float | None = setting(
        None,
        "the most that checkpoints may [send to the store](pacing.md#ceilings): `2TB/day`, `500GB/h`",
        parse_write_budget,
        shown="`2TB/day`, or 2,000 times the state a day if that is more",
    )
    max_unsaved_work: float = setting(
        DEFAULT_UNSAVED_SECONDS,
        "work that a failure may lose, as far as both budgets allow",
        parse_unsaved_work,
        shown="`10min`",
    )
    total: int | None = setting(
        None,
        "iterations of the whole job, for its progress and the policy [`coci`](pacing.md#the-policy-coci)",
        _count("total", "iterations"),
        shown="unknown",
    )
    policy: str = setting(DEFAULT_POLICY, "the policy that [chooses the interval](pacing.md)", parse_policy)
    every: FixedInterval | None = setting(
        None,
        "a fixed interval instead of a policy: iterations, or a time such as `10min` or `2h30min`",
        parse_every,
        shown="none",
    )
    mtbf: float | None = setting(
        None,
        "mean time between failures of the whole job, `3.1h`; corrected by observed failures",
        parse_mtbf,
        shown="the rate that clusters report",
    )
    keep: int = setting(
        DEFAULT_KEEP,
        "about how many checkpoints to keep; the newest close together, older ones further apart",
        _count("keep", "checkpoints"),
    )
    retention: Retention | None = setting(
        None,
        "[rules](training.md#which-checkpoints-stay) instead of `keep`: `last 5, every 1000, "
        "best 3 by val_loss, size 200GB`",
        parse_retention,
        shown="as `keep` says",
    )
    max_in_flight: int = setting(
        1,
        "most snapshots in flight, each of which takes host memory of the state's size",
        _count("max_in_flight", "snapshots in flight"),
    )
    peers: int = setting(
        0,
        "number of other hosts that also [hold in memory](ranks.md#memory-of-other-hosts) the newest snapshot "
        "of each rank: 0 or 1",
        _number("peers", int, 0, 1, "0 or 1"),
    )
    parity: ParityCode | None = setting(
        None,
        "[parity](parity.md) to repair damaged checkpoints: data and parity blocks, as in `10+2`, or "
        "`important 10+2` for only the [important bytes](parity.md#important-bytes)",
        parse_parity,
        shown="off",
    )
    compress: bool | str = setting(
        False,
        "[compress](stores.md#compressed-checkpoints) files without loss, as byte planes; or the name of "
        "another package's [file transform](internals/extending.md#a-file-transform)",
        _parse_compress,
        shown="`off`",
    )
    incremental: bool | Literal["auto"] = setting(
        "auto",
        "write only the [rows that changed](incremental.md): `auto` for tensors in which few rows change, "
        "`on` for all large tensors, or `off`",
        _parse_incremental,
    )
    host_state: Literal["auto", "copy", "fork"] = setting(
        "auto",
        "how to save large arrays outside of models and optimizers: `copy`, or from a "
        "[fork](host-state.md) of the process without a second copy; `auto` chooses",
        _parse_host_state,
    )
    debug: bool = setting(
        False,
        "digest every tensor before and after its copy, while training waits",
        partial(_parse_flag, "debug"),
        shown="`off`",
    )
    owner: str = setting(
        None, "who launched the job, shown on the fleet page", shown="the user it runs as", computed=_user
    )
    labels: dict[str, str] = setting(
        None,
        'labels shown on the fleet page: `{"team": "vision"}`, or `team=vision, data=v3`',
        _parse_labels,
        shown="none",
        computed=dict,
    )
    restorable_in_place: bool | None = setting(
        None,
        "whether a restore may happen [while the script runs](training.md#three-shapes-of-loop); "
        "otherwise the script restarts for it",
        partial(_parse_flag, "restorable_in_place"),
        shown="detected from the loop",
    )
    on_trouble: OnTrouble = setting(
        OnTrouble(),
        "what the job does when its loss is not finite, or rises and does not recover: `restore` the "
        "[last good checkpoint](operating.md#restore-without-an-operator) and leave out the data of those "
        "iterations, at most twice in 1,000 iterations, or `restore 3 in 2000`; `observe` reports what it would "
        "do. After the last restore, `restore 3 in 2000 then pause` pauses training, and `then end` ends it",
        parse_on_trouble,
        shown="`off`",
    )
    grace: float = setting(
        DEFAULT_GRACE_SECONDS,
        "seconds from SIGTERM to the kill, within which the job saves and ends; 0: no handler for SIGTERM",
        _number(
            "grace",
            float,
            0,
            sys.float_info.max,
            "the seconds from SIGTERM to the kill, or 0 to leave SIGTERM alone",
        ),
        shown="`30`",
    )

    @classmethod
    def from_arguments_and_environment(cls, **arguments: Any) -> Self:
        """Read the settings: for `None`, the environment variable applies, else the default.

        ValueError names an invalid setting, and its variable if it came from one; TypeError names a setting that
        was given an object to checkpoint.
        """
        for name, value in arguments.items():
            if _is_object(value):
                raise TypeError(
                    f"Session({name}=...): {name} is a setting, and {type(value).__name__} is an object to "
                    f'checkpoint: give it as state={{"{name}": ...}}'
                )
        if arguments.get("keep") is not None and (rules := arguments.pop("retention", None)) is not None:
            raise ValueError(f"keep={arguments['keep']!r} and retention={str(rules)!r}: give one of them")
        found = {}
        for declared in dataclasses.fields(cls):
            if declared.name in arguments:
                value = _read(declared, arguments[declared.name])
                if value is not None:
                    found[declared.name] = value
        return cls(**found)

    def without_disabled(self) -> Self:
        """Return the settings without those that HOLDFAST_DISABLE switches off."""
        compress = False if is_disabled("planes") else self.compress
        return dataclasses.replace(
            self,
            compress=compress,
            incremental=False if is_disabled("incremental") else self.incremental,
            parity=None if is_disabled("parity") else self.parity,
            peers=0 if is_disabled("peers") else self.peers,
            host_state="copy" if is_disabled("fork") else self.host_state,
        )

    @property
    def transform(self) -> str:
        """Name of the file transform that compresses checkpoints."""
        return self.compress if isinstance(self.compress, str) else CODEC

    @property
    def pacing(self) -> PacingSettings:
        return PacingSettings(
            budget=self.budget,
            policy=self.policy,
            every=self.every,
            mtbf_seconds=self.mtbf,
            write_bytes_per_second=self.write_budget,
            max_unsaved_seconds=self.max_unsaved_work,
        )

    @property
    def retention_rules(self) -> Retention:
        return self.retention or Retention.keeping(self.keep)


SETTINGS = tuple(declared.name for declared in dataclasses.fields(Config))


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"HOLDFAST_{name.upper()}"


def misspelled_variables(names: Iterable[str]) -> list[str]:
    """Describe the environment variables among `names` that have almost the name of a setting's variable.

    Others that begin with HOLDFAST_ may belong to the server, or to tools.
    """
    found = []
    for name in sorted(names):
        setting_name = name.removeprefix("HOLDFAST_").lower()
        if name.startswith("HOLDFAST_") and setting_name not in SETTINGS:
            close = difflib.get_close_matches(setting_name, SETTINGS, n=1, cutoff=0.82)
            found += [
                f"{name} is not a setting and has no effect: did you mean {variable(each)}?" for each in close
            ]
    return found


def environment_notices(names: Iterable[str]) -> list[tuple[Literal["info", "warning"], str, str]]:
    """Return notices (level, code, text) about variables that switch strategies off or have no effect."""
    off, unknown = disabled.describe(policy_names())
    return [
        *(("warning", "environment", each) for each in misspelled_variables(names)),
        *(("info", "disabled", each) for each in off),
        *(("warning", "disabled", each) for each in unknown),
    ]


def _read(declared: dataclasses.Field[Any], given: Any) -> Any:
    """The value, or None for the default."""
    parse = declared.metadata["parse"]
    if given is not None:
        return parse(given)
    name = variable(declared.name)
    if not (text := os.environ.get(name)):
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_object(value: Any) -> bool:
    """Whether a session can checkpoint it."""
    from holdfast.state.rng import is_generator  # with torch, which the command line does without

    return hasattr(value, "state_dict") or is_generator(value)


def named_objects(state: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a session by name. TypeError or ValueError names an invalid one."""
    if not isinstance(state, Mapping | None):
        raise TypeError(
            f'state={type(state).__name__}: give names and objects, as in state={{"policy": policy_net}}'
        )
    for name in state or ():
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"state={{{name!r}: ...}}: give a name without dots")
        if name in keywords:
            raise ValueError(f"{name!r} is given twice, in state= and as a keyword: give it once")
    for name, item in keywords.items():
        close = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.82)
        if close and not _is_object(item):
            raise TypeError(f"Session({name}={repr(item)[:80]}): did you mean {close[0]}=?")
    return {**(state or {}), **keywords}
