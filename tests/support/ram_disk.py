"""A directory in memory for tests that need no disk, where fsync takes no time."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")


def place(room_bytes: int) -> Path:
    """Where to put them; where temporary files go, when memory has not that much room."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= room_bytes:
        return MEMORY
    return Path(tempfile.gettempdir())
