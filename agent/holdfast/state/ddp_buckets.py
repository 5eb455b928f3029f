"""How DistributedDataParallel groups the gradients that it reduces together, and how to have it so again.

A fresh module starts with buckets by the order in which its parameters are defined, and rebuilds them after its
first backward pass by the order in which gradients were ready. What shares a bucket decides in which order sums
over three or more ranks are made. So a job that goes on in new processes differs in its first iteration from one
that was never interrupted, in the last bits, unless its buckets are rebuilt before.
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
"""Of modules that were asked: an answer takes memory for all gradients, and buckets are rebuilt once."""


def bucket_layout(module: DistributedDataParallel) -> Layout | None:
    """The parameters, by number, that are reduced together, bucket by bucket.

    None before the first backward pass, and where buckets are never rebuilt. After that pass it rebuilds them, as
    the next forward pass would have: that one time it is collective over the module's group, and gradients that
    are views of buckets become views of the new ones.
    """
    if _obstacle(module):
        return None
    if module not in _known and rebuild_buckets(module):
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
        if module.static_graph:
            # its reducer learns from its first pass, which therefore must not be a false one; it will rebuild its
            # buckets to the same, the graph being the same
            give_static_reducer(module, layout)
            found = _known[module] = _buckets(module)
        else:
            with _without_gradients(module.module.parameters()):
                run_backward(module, chain(*layout))
                found = bucket_layout(module)  # now, or gradients would become views of the new buckets
    # the order of buckets is no matter: each is summed up by itself
    same = found is not None and sorted(found) == sorted(layout)
    return None if same else "its buckets hold other parameters together: has bucket_cap_mb changed?"


def _obstacle(module: DistributedDataParallel) -> str | None:
    """Why its buckets are not rebuilt, or cannot be known."""
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
            return f"its communication hook {hook.__qualname__} may have a state, which sums of zeros would change"
    if module.static_graph and has_run(module):
        return "with static_graph it must not have been called before"
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
