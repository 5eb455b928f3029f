"""What a supervised trainer has imported, published for the supervisor's warm starts. Does not import torch."""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings
from pathlib import Path

import msgspec

logger = logging.getLogger("holdfast")

IMPORTS = "imports.json"
"""File in the supervisor's folder. It is empty if the supervisor wants to know the imports, else missing."""
UPDATES_BEFORE = 3
"""Updates after which imports are published: the first ones import modules, such as torch's compiler."""


class PublishedImports(msgspec.Struct, frozen=True, kw_only=True):
    """The imports of a process after its first iterations."""

    pid: int
    executable: str
    orig_argv: list[str]
    main: str | None
    """File of the script."""
    modules: list[tuple[str, str, bool]]
    """Name and file of each module in the order in which the imports ended, and whether before the session."""
    folders: list[str]
    """Folders of modules in the order in which imports from them began."""
    environment: dict[str, str]
    path: list[str]
    filters: list[str]
    """The warning filters, as text."""


class ImportsPublisher:
    """Publishes the imports of this process once, if the supervisor wants to know them. Never raises.

    Args:
        folder: the supervisor's folder; empty without a supervisor.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, IMPORTS)
        wanted = bool(folder) and self._path.exists()
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
            modules.append((name, spec.origin, name in before))
    return PublishedImports(
        pid=os.getpid(),
        executable=sys.executable,
        orig_argv=sys.orig_argv,
        main=getattr(sys.modules.get("__main__"), "__file__", None),
        modules=modules,
        folders=list(sys.path_importer_cache),
        environment=dict(os.environ),
        path=[str(entry) for entry in sys.path],
        filters=[repr(each) for each in warnings.filters],
    )


def published_imports(folder: Path) -> PublishedImports | None:
    """Return what the trainer has published, or `None` if there is nothing yet."""
    try:
        return msgspec.json.decode(Path(folder, IMPORTS).read_bytes(), type=PublishedImports)
    except (OSError, msgspec.DecodeError):
        return None
