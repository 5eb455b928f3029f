"""The contenders. Only the process that measures a library imports it."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contender import Contender
    from .training import BenchmarkTraining

PLAIN, TORCH_SAVE = "plain", "torch.save"
OURS = "holdfast"


@dataclass(frozen=True, slots=True)
class ContenderEntry:
    name: str
    where: str
    """module:class"""
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, training: BenchmarkTraining, folder: Path) -> Contender:
        module, _, name = self.where.partition(":")
        kind = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return kind(training, folder, **self.options)


def _dcp(name: str, **options: Any) -> ContenderEntry:
    return ContenderEntry(f"DCP async, {name}", "dcp_async:DcpAsync", options)


CONTENDERS = (
    ContenderEntry(PLAIN, "contender:NoCheckpoints"),
    ContenderEntry(TORCH_SAVE, "in_loop:TorchSave"),
    ContenderEntry("safetensors", "in_loop:Safetensors"),
    ContenderEntry("DCP sync", "in_loop:DcpSync"),
    _dcp("thread", process=False),
    _dcp("thread, kept memory", process=False, staging="kept"),
    _dcp("thread, overlapped copy", process=False, staging="overlapped"),
    _dcp("process", process=True),
    _dcp("process, overlapped copy", process=True, staging="overlapped"),
    ContenderEntry("torch_checkpointing", "libraries:TorchCheckpointing", {"direct": False}),
    ContenderEntry("torch_checkpointing, direct I/O", "libraries:TorchCheckpointing", {"direct": True}),
    ContenderEntry("torchsnapshot", "libraries:TorchSnapshot"),
    ContenderEntry("nvidia-resiliency-ext", "libraries:NvidiaResiliency"),
    ContenderEntry("Lightning async", "libraries:Lightning"),
    ContenderEntry(OURS, "ours:HoldfastContender"),
)


FORK = "fork"
ONLY_BY_NAME = (ContenderEntry(FORK, "forked:ForkedSave"),)
"""Contenders that run only where they are named."""


@functools.cache
def by_name(name: str) -> ContenderEntry:
    return next(entry for entry in (*CONTENDERS, *ONLY_BY_NAME) if entry.name == name)
