"""The configuration of an attempt: values that the script reports, and its environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.disabled import disabled_names
from holdfast.protocol.wire import MAX_CONFIGURATION_ENTRIES, MAX_CONFIGURATION_NAME, MAX_CONFIGURATION_VALUE
from holdfast.system.masking import MASK, is_secret, mask_command, mask_text
from holdfast.telemetry import fingerprint

MAX_DEPTH = 12
GIT_SECONDS = 5.0
"""Time limit of `git status`, which takes long in a large work tree on a network file system."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def flatten(values: object) -> dict[str, str]:
    """Return values as text by name, with the names of nested values joined by dots, and secrets masked.

    Args:
        values: a mapping, an `argparse.Namespace` or a dataclass, which may contain others.

    Raises:
        TypeError: it has no names.
    """
    if _fields(values) is None:
        raise TypeError(
            f"config({type(values).__name__}): give keywords, a mapping, an argparse.Namespace or a dataclass"
        )
    return dict(islice(_flattened("", values, MAX_DEPTH), MAX_CONFIGURATION_ENTRIES))


def _fields(value: object) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _flattened(name: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    fields = _fields(value) if depth else None
    if fields:
        for key in fields:
            path = f"{name}.{key}" if name else str(key)
            try:
                below = fields[key]
            except Exception as error:  # an interpolation of OmegaConf that cannot be resolved
                below = f"unreadable: {type(error).__name__}"
            yield from _flattened(path, below, depth - 1)
    elif name:
        shown = _shown(value)
        hides = is_secret(name, shown) and shown not in ("", "None", "False")
        yield name[:MAX_CONFIGURATION_NAME], MASK if hides else shown


def _shown(value: object) -> str:
    if hasattr(value, "shape"):  # the elements of an array are no configuration
        return f"{type(value).__name__} {tuple(value.shape)}"
    try:
        found = str(value)
    except Exception as error:  # the __str__ of any object of the script
        found = f"unreadable: {type(error).__name__}"
    cut = found[: 4 * MAX_CONFIGURATION_VALUE].encode(errors="replace").decode()
    return mask_text(_ADDRESS.sub("", cut))[:MAX_CONFIGURATION_VALUE]


def environment() -> dict[str, str]:
    """Return fingerprint, machine and command of this process. Call it on the training thread."""
    return fingerprint.fingerprint() | {
        "host": platform.node(),
        "system": platform.platform(),
        "command": mask_command(sys.orig_argv)[:MAX_CONFIGURATION_VALUE],
        "directory": str(Path.cwd()),
        **({"disabled": ", ".join(names)} if (names := disabled_names()) else {}),
    }


def code_changes() -> dict[str, str]:
    """Return whether the work tree of the script has uncommitted changes; nothing if git does not answer."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    command = ("git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no")
    try:
        status = subprocess.run(  # noqa: S603  a fixed command
            command,
            cwd=Path(script).resolve().parent,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    changed = [line[3:] for line in status.stdout.splitlines()]
    if not changed:
        return {"code changes": "none"}
    names = ", ".join(changed[:8]) + (" …" if len(changed) > 8 else "")
    return {"code changes": f"{len(changed)} {'file' if len(changed) == 1 else 'files'}: {names}"}
