"""The DistributedDataParallel modules of this process, whether or not the script has given them to a session."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_known: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_watching = False
_made = 0


def look_around() -> None:
    """Find those that there are: a tenth of a second, for a million objects. Those made later are told."""
    global _watching
    if not _watching:
        _watching = True
        register_module_module_registration_hook(_note)
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    # by its type: an object may give another class for itself, or act when it is asked; and a type need not hash
    _known.update(item for item in gc.get_objects() if id(type(item)) in kinds)


def made() -> int:
    """How many there have been made since somebody first looked around."""
    return _made


def of_all_ranks() -> list[DistributedDataParallel]:
    """Of those that are known, the ones that span all ranks of the job."""
    if not torch.distributed.is_initialized():
        return []
    world_size = torch.distributed.get_world_size()
    # one whose making has failed has no logger
    return [ddp for ddp in _known if hasattr(ddp, "logger") and ddp.process_group.size() == world_size]


def _note(module: torch.nn.Module, name: str, inside: torch.nn.Module | None) -> None:
    global _made
    if isinstance(module, DistributedDataParallel):
        _known.add(module)
        _made += 1


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
