"""How DistributedDataParallel groups the gradients that it reduces together, and how to have it so again.

A fresh module starts with buckets by the order in which its parameters are defined, and rebuilds them after its
first backward pass by the order in which gradients were ready. What shares a bucket decides in which order sums
over three or more ranks are made. So a job that goes on in new processes differs in its first iteration from one
that was never interrupted, in the last bits, unless its buckets are rebuilt before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel

Layout = list[list[int]]

STATELESS_HOOKS = {
    ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", f"{name}_hook")
    for name in ("allreduce", "bf16_compress", "fp16_compress")
}

_known: WeakKeyDictionary[DistributedDataParallel, Layout] = WeakKeyDictionary()
"""Of modules that were asked: an answer takes memory for all gradients, and buckets are rebuilt once."""


def bucket_layout(module: DistributedDataParallel) -> Layout | None:
    """The parameters, by number, that are reduced together, bucket by bucket.

    None before the first backward pass, and where buckets are never rebuilt. After that pass it rebuilds them, as
    the next forward pass would have: that one time it is collective over the module's group, and gradients that
    are views of buckets become views of the new ones.
    """
    if _obstacle(module):
        return None
    if module not in _known and _is_rebuilt(module):
        _known[module] = _buckets(module)
    return _known.get(module)


def warm_up(module: DistributedDataParallel, layout: Layout) -> str | None:
    """Bring a fresh module to this layout: collective over its group, which sums up zeros once.

    Gradients are afterwards what they were; no hook of a parameter is called, and no random number is drawn.
    Returns None when the layout is there, else why not, for people.
    """
    if obstacle := _obstacle(module):
        return obstacle
    if (found := bucket_layout(module)) is None:
        if obstacle := _obstacle_to_change(module):
            return obstacle
        count = sum(map(len, _buckets(module)))
        if sorted(chain(*layout)) != list(range(count)):
            return f"it reduces {count} parameters, not the {sum(map(len, layout))} of the checkpoint"
        found = _begin_with(module, layout) if module.static_graph else _rebuild_as(module, layout)
    # the order of buckets is no matter: each is summed up by itself
    same = found is not None and sorted(found) == sorted(layout)
    return None if same else "its buckets hold other parameters together: has bucket_cap_mb changed?"


def _obstacle(module: DistributedDataParallel) -> str | None:
    """Why its buckets are not rebuilt, or cannot be known."""
    if module._delay_all_reduce_all_params or module._use_python_reducer:
        return "it has no buckets"
    if module.find_unused_parameters and not module.static_graph:
        return "with find_unused_parameters its buckets are never rebuilt"
    if any(isinstance(each, Embedding | EmbeddingBag) and each.sparse for each in module.modules()):
        return "it has sparse gradients"
    return None


def _obstacle_to_change(module: DistributedDataParallel) -> str | None:
    for hook, _ in module._comm_hooks:
        origin = hook.__module__, hook.__qualname__
        if module.static_graph or origin not in STATELESS_HOOKS:
            return f"its communication hook {hook.__qualname__} may have a state, which sums of zeros would change"
    if module.static_graph and module._lazy_init_ran:
        return "with static_graph it must not have been called before"
    return None


def _is_rebuilt(module: DistributedDataParallel) -> bool:
    if module.reducer._rebuild_buckets():  # where it is due
        module._has_rebuilt_buckets = True
    return module._has_rebuilt_buckets


def _buckets(module: DistributedDataParallel) -> Layout:
    buckets = [bucket.parameters() for bucket in module.reducer._get_zeros_like_grad_buckets()]
    reduced = set(map(id, chain(*buckets)))
    parameters = (parameter for parameter in module.module.parameters() if id(parameter) in reduced)
    number = {id(parameter): number for number, parameter in enumerate(parameters)}
    return [[number[id(parameter)] for parameter in bucket] for bucket in buckets]


def _rebuild_as(module: DistributedDataParallel, layout: Layout) -> Layout | None:
    """By a backward pass, as the reducer sees it, in which gradients of zero are ready in this order."""

    def report(_: torch.Tensor) -> None:
        for number in chain(*layout):
            module.reducer._autograd_hook(number)  # type: ignore[attr-defined]

    anchor = torch.zeros((), device="cpu", requires_grad=True)
    anchor.register_hook(report)  # type: ignore[no-untyped-call]
    with _without_gradients(module.module.parameters()):
        module.reducer.prepare_for_backward([])
        anchor.backward()  # type: ignore[no-untyped-call]  # the reducer ends its work in a callback of this
        return bucket_layout(module)  # rebuilt while there are none, or gradients would become views of buckets


def _begin_with(module: DistributedDataParallel, layout: Layout) -> Layout:
    """By a new reducer, made as unpickling makes it: that of a static graph learns from its first backward pass,
    which therefore must not be a false one. It will rebuild its buckets to the same, the graph being the same."""

    ddp: Any = module
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._remove_autograd_hooks()
    with _assigning(
        layout[::-1], [ddp.bucket_bytes_cap] * len(layout)
    ):  # as it counts them, the last bucket first
        ddp._ddp_init_helper(parameters, sparse, names, True)
    ddp.reducer._set_static_graph()
    ddp.logger._set_static_graph()
    _known[module] = _buckets(module)
    return _known[module]


@contextmanager
def _assigning(layout: Layout, limits_bytes: list[int]) -> Iterator[None]:
    """Parameters to these buckets, where a reducer is made meanwhile."""
    torch_distributed: Any = torch.distributed
    compute = torch_distributed._compute_bucket_assignment_by_size
    torch_distributed._compute_bucket_assignment_by_size = lambda *_: (layout, limits_bytes)
    try:
        yield
    finally:
        torch_distributed._compute_bucket_assignment_by_size = compute


@contextmanager
def _without_gradients(parameters: Iterator[Parameter]) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
