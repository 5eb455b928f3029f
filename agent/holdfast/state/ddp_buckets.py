"""Gradient buckets of DistributedDataParallel: how to read their layout and restore it.

A new module orders its buckets by the definition of its parameters, and rebuilds them after its first backward
pass by the order in which gradients were ready. The buckets determine the order of sums over three or more ranks.
So the first iteration after a resume in new processes differs in the last bits, unless they are restored first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakKeyDictionary

from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch_internals import (
    DDP_REDUCER,
    buckets_of,
    communication_hooks,
    give_static_reducer,
    has_run,
    obstacle_to_buckets,
    rebuild_buckets,
    run_backward,
)

Layout = list[list[int]]

STATELESS_HOOKS = {
    ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", f"{name}_hook")
    for name in ("allreduce", "bf16_compress", "fp16_compress")
}

_known: WeakKeyDictionary[DistributedDataParallel, Layout] = WeakKeyDictionary()
"""Layouts read before: reading takes memory for all gradients, and buckets are rebuilt only once."""


def bucket_layout(module: DistributedDataParallel) -> Layout | None:
    """Return the numbers of the parameters in each bucket.

    `None` before the first backward pass, and where buckets are never rebuilt. After that pass, the first call
    rebuilds them as the next forward pass would: it is collective over the module's group, and gradients that are
    views of buckets become views of the new ones.
    """
    if _obstacle(module):
        return None
    if module not in _known and rebuild_buckets(module):
        _known[module] = _buckets(module)
    return _known.get(module)


def restore_buckets(module: DistributedDataParallel, layout: Layout) -> str | None:
    """Restore this layout in a new module by one all-reduce of zeros. Collective over its group.

    Gradients stay as they are, no hook of a parameter runs, and no random number is drawn.

    Returns:
        `None` on success, else why the layout is not restored.
    """
    if obstacle := _obstacle(module):
        return obstacle
    if (found := bucket_layout(module)) is None:
        if obstacle := _obstacle_to_change(module):
            return obstacle
        count = sum(map(len, _buckets(module)))
        if sorted(chain(*layout)) != list(range(count)):
            return f"it reduces {count} parameters, not the {sum(map(len, layout))} of the checkpoint"
        if module.static_graph:
            # its reducer learns the graph from its first pass, so that pass must be a real one. It will rebuild
            # the buckets to the same layout
            give_static_reducer(module, layout)
            found = _known[module] = _buckets(module)
        else:
            with _without_gradients(module.module.parameters()):
                run_backward(module, chain(*layout))
                found = bucket_layout(module)  # here, or gradients would become views of the new buckets
    # the order of buckets does not matter: each is summed separately
    same = found is not None and sorted(found) == sorted(layout)
    return None if same else "its buckets contain other parameters: has bucket_cap_mb changed?"


def _obstacle(module: DistributedDataParallel) -> str | None:
    """Say why its buckets are not rebuilt, or cannot be known."""
    if obstacle := obstacle_to_buckets(module):
        return obstacle
    if module.find_unused_parameters and not module.static_graph:
        return "with find_unused_parameters its buckets are never rebuilt"
    if any(isinstance(each, Embedding | EmbeddingBag) and each.sparse for each in module.modules()):
        return "it has sparse gradients"
    return None


def _obstacle_to_change(module: DistributedDataParallel) -> str | None:
    for hook in communication_hooks(module):
        origin = hook.__module__, hook.__qualname__
        if module.static_graph or origin not in STATELESS_HOOKS:
            return f"its communication hook {hook.__qualname__} may have a state, which an all-reduce changes"
    if module.static_graph and has_run(module):
        return "with static_graph it must not have been called before the resume"
    if module.static_graph and not DDP_REDUCER.supported():
        return f"with static_graph torch must have {DDP_REDUCER.name}"
    return None


def _buckets(module: DistributedDataParallel) -> Layout:
    buckets = buckets_of(module)
    reduced = set(map(id, chain(*buckets)))
    parameters = (parameter for parameter in module.module.parameters() if id(parameter) in reduced)
    number = {id(parameter): number for number, parameter in enumerate(parameters)}
    return [[number[id(parameter)] for parameter in bucket] for bucket in buckets]


@contextmanager
def _without_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
