"""Who takes part. Libraries are imported by the process that measures them, and only there."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contender import Contender
    from .training import Training

PLAIN, TORCH_SAVE = "plain", "torch.save"
BACKENDS = {backend: f"holdfast, {backend}" for backend in ("thread", "process")}
"""Each is measured by itself: a session left to choose would change its mind with what it is put through here."""
OURS = frozenset(BACKENDS.values())


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    where: str
    """module:class"""
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, training: Training, folder: Path) -> Contender:
        module, _, name = self.where.partition(":")
        kind = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return kind(training, folder, **self.options)


def _dcp(name: str, **options: Any) -> Entry:
    return Entry(f"DCP async, {name}", "dcp_async:DcpAsync", options)


CONTENDERS = (
    Entry(PLAIN, "contender:Plain"),
    Entry(TORCH_SAVE, "in_loop:TorchSave"),
    Entry("safetensors", "in_loop:Safetensors"),
    Entry("DCP sync", "in_loop:DcpSync"),
    _dcp("thread", process=False),
    _dcp("thread, kept memory", process=False, staging="kept"),
    _dcp("thread, overlapped copy", process=False, staging="overlapped"),
    _dcp("process", process=True),
    _dcp("process, overlapped copy", process=True, staging="overlapped"),
    Entry("torch_checkpointing", "libraries:TorchCheckpointing", {"direct": False}),
    Entry("torch_checkpointing, direct I/O", "libraries:TorchCheckpointing", {"direct": True}),
    Entry("torchsnapshot", "libraries:TorchSnapshot"),
    Entry("nvidia-resiliency-ext", "libraries:NvidiaResiliency"),
    Entry("Lightning async", "libraries:Lightning"),
    *(Entry(name, "ours:Holdfast", {"backend": backend}) for backend, name in BACKENDS.items()),
)


@functools.cache
def by_name(name: str) -> Entry:
    return next(entry for entry in CONTENDERS if entry.name == name)
