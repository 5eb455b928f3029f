"""What the checkpoints of a job take in its store, as their manifests say."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast import restore
from holdfast.errors import HoldfastError
from holdfast.store import Store


class Sizes:
    """Of one job. A committed checkpoint does not change: each manifest is read once."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._known: dict[str, int] = {}

    def of(self, checkpoints: Iterable[str]) -> dict[str, int]:
        """In bytes, by checkpoint; without those whose manifest cannot be used. OSError: the store is away."""
        found = {}
        for checkpoint in checkpoints:
            if checkpoint not in self._known:
                try:
                    files = restore.manifest(self._store, self._job, checkpoint).files
                except HoldfastError:
                    continue
                self._known[checkpoint] = sum(file.size_bytes for file in files)
            found[checkpoint] = self._known[checkpoint]
        self._known = {each: self._known[each] for each in found}
        return found
