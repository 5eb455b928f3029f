"""Entry point of Lightning, which loads it in every `Trainer`, also of scripts without Holdfast."""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """Return the callback for the job in `HOLDFAST_JOB`; none without it.

    ImportError: with `HOLDFAST_JOB`, a version of Lightning that is not supported.
    """
    if not os.environ.get("HOLDFAST_JOB"):
        return []
    from holdfast.integrations.lightning import from_environment  # it imports private names of Lightning

    return from_environment()
