"""Holdfast: checkpoint PyTorch training within an overhead budget, and restore any iteration.

    session = holdfast.Session("char-gpt", model=model, optimizer=optimizer)
    loader = holdfast.DataLoader(dataset, batch_size=64, shuffle=True, seed=1)
    for batch in session.batches(loader, epochs=10):
        ...
        session.step(loss=loss)

Names are imported when they are first used: the server shares `holdfast.protocol.wire` and `holdfast.pacing`
without torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if "HOLDFAST_SUPERVISION" in os.environ:  # note what the script has set before it imports Holdfast
    import holdfast.system.published_imports  # noqa: F401

if TYPE_CHECKING:
    from holdfast.data.loader import DataLoader
    from holdfast.errors import (
        DamagedCheckpoint,
        Fenced,
        HoldfastError,
        IncompatibleCheckpoint,
        NoSuchCheckpoint,
        RestoreFailed,
        UnknownFormat,
    )
    from holdfast.learning_rate import scale_learning_rate
    from holdfast.save.run import CheckpointOutcome
    from holdfast.session import Session
    from holdfast.state.variables import Variables

    __version__: str

__all__ = [
    "CheckpointOutcome",
    "DamagedCheckpoint",
    "DataLoader",
    "Fenced",
    "HoldfastError",
    "IncompatibleCheckpoint",
    "NoSuchCheckpoint",
    "RestoreFailed",
    "Session",
    "UnknownFormat",
    "Variables",
    "__version__",
    "scale_learning_rate",
]

_HOMES = {
    "CheckpointOutcome": "holdfast.save.run",
    "DataLoader": "holdfast.data.loader",
    "Session": "holdfast.session",
    "scale_learning_rate": "holdfast.learning_rate",
    "Variables": "holdfast.state.variables",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # takes longer than all else here

        return version("holdfast")
    try:
        return getattr(importlib.import_module(_HOMES.get(name, "holdfast.errors")), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"holdfast.{name} needs torch: pip install torch, or install Holdfast with its extra `torch`"
        ) from None


def __dir__() -> list[str]:
    return __all__
