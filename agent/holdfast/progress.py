"""Sixteen bytes that tell a supervisor a job that moves from one that crashes in a loop."""

from __future__ import annotations

import logging
import mmap
import os
import struct

logger = logging.getLogger("holdfast")

VARIABLE = "HOLDFAST_PROGRESS"
LAYOUT = struct.Struct("<qq")
"""The last finished iteration, and how many times that was told: negative once training is over."""


class Progress:
    """The file named by HOLDFAST_PROGRESS, mapped; without one it does nothing."""

    def __init__(self, path: str | None = None) -> None:
        self._memory: mmap.mmap | None = None
        self._updates = 0
        path = path if path is not None else os.environ.get(VARIABLE)
        if not path:
            return
        try:
            with open(path, "r+b") as handle:
                self._memory = mmap.mmap(handle.fileno(), LAYOUT.size)
        except (OSError, ValueError) as error:
            logger.warning("%s=%s cannot be used: %s", VARIABLE, path, error)

    def update(self, iteration: int) -> None:
        if self._memory is not None:
            self._updates += 1
            LAYOUT.pack_into(self._memory, 0, iteration, self._updates)

    def rest(self) -> None:
        """Training is over; what comes now may take as long as it likes."""
        if self._memory is not None:
            iteration, updates = LAYOUT.unpack_from(self._memory, 0)
            LAYOUT.pack_into(self._memory, 0, iteration, -abs(updates))

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
