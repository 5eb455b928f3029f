"""What a supervised trainer has imported, published for the supervisor's warm starts. Does not import torch."""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings
from pathlib import Path

BEFORE_HOLDFAST = frozenset(sys.modules)
"""The modules that were imported when the import of Holdfast began: it imports this module first."""

import msgspec  # noqa: E402

logger = logging.getLogger("holdfast")

IMPORTS = "imports.json"
"""File in the supervisor's folder. It is empty if the supervisor wants to know the imports, else missing."""
UPDATES_BEFORE = 3
"""Updates after which imports are published: the first ones import modules, such as torch's compiler."""


ImportState = tuple[dict[str, str], list[str], list[str]]
"""What an import may read and a script may set before it: environment, `sys.path`, warning filters as text."""


def state_now() -> ImportState:
    return dict(os.environ), [str(entry) for entry in sys.path], [repr(each) for each in warnings.filters]


_FIRST_STATE, _PID = state_now(), os.getpid()


class PublishedImports(msgspec.Struct, frozen=True, kw_only=True):
    """The imports of a process after its first iterations."""

    pid: int
    executable: str
    orig_argv: list[str]
    main: str | None
    """File of the script."""
    modules: list[tuple[str, str, int]]
    """Name and file of each module in the order in which the imports ended, and its stage: 0 before the import of
    Holdfast began, 1 from then to the beginning of the session, 2 from then on."""
    folders: list[str]
    """Folders of modules in the order in which imports from them began."""
    first_state: ImportState
    """When the import of Holdfast began."""
    state: ImportState
    """When this was published."""


class ImportsPublisher:
    """Publishes the imports of this process once, if the supervisor wants to know them. Never raises.

    Args:
        folder: the supervisor's folder; empty without a supervisor.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, IMPORTS)
        wanted = bool(folder) and self._path.exists() and os.getpid() == _PID  # a fork has the state of another
        self._before_session = frozenset(sys.modules) if wanted else None
        """The modules that were imported before the session; `None` if there is nothing to publish."""

    def update(self, updates: int) -> None:
        """Publish the imports once the process has made enough updates."""
        if self._before_session is None or updates < UPDATES_BEFORE:
            return
        before, self._before_session = self._before_session, None
        try:
            written = self._path.with_suffix(f".{os.getpid()}")
            written.write_bytes(msgspec.json.encode(_imports(before)))
            written.rename(self._path)
        except Exception as error:  # any object may be in sys.modules
            logger.debug("cannot publish the imports of this process to the supervisor: %s", error)


def _imports(before: frozenset[str]) -> PublishedImports:
    modules = []
    for name, module in list(sys.modules.items()):
        spec = vars(module).get("__spec__") if isinstance(module, types.ModuleType) else None
        if spec is not None and spec.name == name and isinstance(spec.origin, str):
            ours = name not in BEFORE_HOLDFAST or name.partition(".")[0] == "holdfast"
            modules.append((name, spec.origin, int(ours) + (name not in before)))
    return PublishedImports(
        pid=os.getpid(),
        executable=sys.executable,
        orig_argv=sys.orig_argv,
        main=getattr(sys.modules.get("__main__"), "__file__", None),
        modules=modules,
        folders=list(sys.path_importer_cache),
        first_state=_FIRST_STATE,
        state=state_now(),
    )


def published_imports(folder: Path) -> PublishedImports | None:
    """Return what the trainer has published, or `None` if there is nothing yet."""
    try:
        return msgspec.json.decode(Path(folder, IMPORTS).read_bytes(), type=PublishedImports)
    except (OSError, msgspec.DecodeError):
        return None
