"""All private torch API that Holdfast uses, with a fallback for each.

One module, since this is the place to check when a new version of torch appears.
No other module of the agent uses a name of torch that begins with an underscore; a test enforces that. An entry of
`PRIVATE_APIS` says what is used, on which versions it was checked and what is missing without it. `supported`
looks for the names themselves, so unchecked versions of torch that have them work as well.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., object])
CHECKED_ON = ("2.13",)
"""Versions on which the whole test suite passed."""


@dataclass(frozen=True, slots=True)
class PrivateApi:
    """A private API of torch."""

    name: str
    names: tuple[str, ...]
    """Attributes that are required."""
    owner: Callable[[], object]
    """Return the object with these attributes; ImportError or AttributeError if torch lacks it."""
    without: str
    """Consequence for the user if it is missing, for a notice."""
    checked_on: tuple[str, ...] = CHECKED_ON

    def supported(self) -> bool:
        return _has_all(self)


@functools.cache
def _has_all(internal: PrivateApi) -> bool:
    try:
        owner = internal.owner()
    except (ImportError, AttributeError):
        return False
    return all(hasattr(owner, name) for name in internal.names)


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def _calls_assignment() -> bool:
    """Whether the reducer is made with the function of `torch.distributed` that is replaced below."""
    names = DistributedDataParallel._ddp_init_helper.__code__.co_names
    return {"dist", "_compute_bucket_assignment_by_size"} <= set(names)


def _device_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh


MODULE_CONTENTS = PrivateApi(
    "the dicts and hooks of a Module",
    ("_modules", "_parameters", "_buffers", "_state_dict_hooks", "_state_dict_pre_hooks", "_save_to_state_dict"),
    nn.Module,
    "models are walked in full at each checkpoint, which takes longer",
)
MODULE_LOADING = PrivateApi(
    "the load hooks of a Module",
    ("_load_from_state_dict", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    nn.Module,
    "a checkpoint in memory is copied once more before a model is loaded from it",
)
OPTIMIZER_HOOKS = PrivateApi(
    "the hooks of an Optimizer",
    ("_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    lambda: torch.optim.SGD([nn.Parameter(torch.empty(0, device="cpu"))], lr=0.1),
    "training waits while a checkpoint is copied",
)
DDP_PARAMETERS = PrivateApi(
    "the parameters that DistributedDataParallel reduces",
    ("_get_ddp_logging_data",),
    lambda: DistributedDataParallel,
    "each rank stores its own copy of what DistributedDataParallel keeps equal on all ranks",
)
DDP_BUCKETS = PrivateApi(
    "the buckets of DistributedDataParallel",
    ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "_autograd_hook", "prepare_for_backward"),
    lambda: torch.distributed.Reducer,  # type: ignore[attr-defined]
    "on three ranks or more the losses after a resume may differ in their last bits",
)
DDP_REDUCER = PrivateApi(
    "the function that creates the reducer of DistributedDataParallel",
    (
        "_build_params_for_reducer",
        "_build_debug_param_to_name_mapping",
        "_remove_autograd_hooks",
        "_ddp_init_helper",
    ),
    lambda: _calls_assignment() and DistributedDataParallel,
    "on three ranks or more, with static_graph, the losses after a resume may differ in their last bits",
)
DTENSOR_CHUNKS = PrivateApi(
    "the position of a DTensor's local shard",
    ("__create_chunk_list__",),
    _dtensor,
    "checkpoints of sharded tensors are refused",
)
MESH_ROOT = PrivateApi(
    "the parent mesh of a DeviceMesh",
    ("_get_root_mesh",),
    _device_mesh,
    "checkpoints of tensors that are sharded over a submesh are refused",
)
DEFAULT_STORE = PrivateApi(
    "the store of the default process group",
    ("_get_default_store",),
    lambda: torch.distributed.distributed_c10d,
    "the ranks of a job cannot find each other",
)
FOREACH_COPY = PrivateApi(
    "the copy of many tensors in one call",
    ("_foreach_copy_",),
    lambda: torch,
    "copies from CUDA devices take longer",
)
LOADER_ITERATORS = PrivateApi(
    "the iterators of a DataLoader",
    ("__next__",),
    lambda: torch.utils.data.dataloader._BaseDataLoaderIter,
    "a script that draws its batches directly from torch's DataLoader gets no warning",
)
_after_batches: list[Callable[[], None]] = []
"""Functions to call after each batch of a DataLoader."""
_counting: list[Any] = []
"""The function that calls them, in place of torch's. Where another one wraps it, it stays, without effect."""
PRIVATE_APIS = (
    FOREACH_COPY, MODULE_CONTENTS, MODULE_LOADING, OPTIMIZER_HOOKS, DDP_PARAMETERS, DDP_BUCKETS, DDP_REDUCER,
    DTENSOR_CHUNKS, MESH_ROOT, DEFAULT_STORE, LOADER_ITERATORS,
)  # fmt: skip
"""API that a version of torch may lack. `_version` of a tensor, `_metadata` of a state_dict, `_orig_mod` of a
compiled module and `_user_meta` of a PipelineStage are as old as the feature that they belong to."""


def unsupported(*, distributed: bool) -> list[str]:
    """Describe what this torch lacks, with the consequences; with `distributed`, for several ranks as well."""
    internals = PRIVATE_APIS if distributed else (FOREACH_COPY, MODULE_CONTENTS, MODULE_LOADING, OPTIMIZER_HOOKS)
    return [
        f"torch {torch.__version__} lacks {each.name}, as torch {each.checked_on[-1]} has it: {each.without}"
        for each in internals
        if not each.supported()
    ]


version_of = operator.attrgetter("_version")
"""Return the number of writes to a tensor."""


def never_compiled(function: F) -> F:
    """Exclude a function, and what it calls, from torch.compile.

    For finalizers: garbage is collected in the middle of compiled functions as well, and everything that they call
    would be traced, with warnings. Unlike `torch.compiler.disable`, this does not import the compiler.
    """
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in one call without the interpreter lock; devices may still be copying."""
    if FOREACH_COPY.supported() and targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def compiled_from(item: Any) -> Any:
    """Return the module inside a compiled one; `None` for any other object."""
    return getattr(item, "_orig_mod", None)


def metadata_of(state: object) -> dict[str, Any]:
    """Return the versions of modules in a module's `state_dict()`."""
    return dict(getattr(state, "_metadata", {}))


def with_metadata(items: Any, metadata: Any) -> collections.OrderedDict[Any, Any]:
    """Return a module's `state_dict()` from its items and versions."""
    state: Any = collections.OrderedDict(items)
    state._metadata = metadata
    return state  # type: ignore[no-any-return]


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict of a module's own buffers."""
    return module._buffers


def contents_of(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the dicts that a module's `state_dict()` is made from, including those of its submodules."""
    for each in module.modules():
        yield from (each._modules, each._parameters, each._buffers)
        yield from (each._state_dict_hooks, each._state_dict_pre_hooks)


def has_plain_state_dict(module: nn.Module) -> bool:
    """Whether its `state_dict()`, without submodules, has only parameters and buffers and runs no custom code."""
    kind, plain = type(module), nn.Module
    return (
        MODULE_CONTENTS.supported()
        and kind.state_dict is plain.state_dict
        and kind._save_to_state_dict is plain._save_to_state_dict
        and kind.get_extra_state is plain.get_extra_state
        and not module._state_dict_hooks
        and all(map(_only_reshards, module._state_dict_pre_hooks.values()))
    )


def only_copies(module: nn.Module) -> bool:
    """Whether loading a state only copies numbers into existing parameters and buffers."""
    kind, plain = type(module), nn.Module
    return (
        MODULE_LOADING.supported()
        and kind.load_state_dict is plain.load_state_dict
        and kind._load_from_state_dict is plain._load_from_state_dict
        and kind.set_extra_state is plain.set_extra_state
        and all(_only_reshards(getattr(each, "hook", each)) for each in module._load_state_dict_pre_hooks.values())
        and not module._load_state_dict_post_hooks
    )


def is_loaded_by_torch(item: nn.Module | Optimizer) -> bool:
    """Whether loading a state runs no code but that of torch."""
    if isinstance(item, nn.Module):
        return all(map(_runs_only_torch, item.modules()))
    hooks = (
        getattr(item, "_optimizer_load_state_dict_pre_hooks", {}),
        getattr(item, "_optimizer_load_state_dict_post_hooks", {}),
    )
    return not any(hooks) and _is_of_torch(type(item).load_state_dict) and _is_of_torch(type(item).__setstate__)


def _runs_only_torch(module: nn.Module) -> bool:
    kind = type(module)
    functions = kind.load_state_dict, kind._load_from_state_dict, kind.set_extra_state
    hooks = [getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values()]
    return all(map(_is_of_torch, (*functions, *hooks, *module._load_state_dict_post_hooks.values())))


def _is_of_torch(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _only_reshards(hook: object) -> bool:
    """Whether a hook is that of `fully_shard`, which has nothing to do at the end of an iteration."""
    name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return name[0].startswith("torch.distributed.fsdp.") and name[1].endswith(".to_sharded_hook")


def runs_step_hooks(item: object) -> bool:
    """Whether an Optimizer runs hooks around `step`; subclasses that skip Optimizer.__init__ run none."""
    # torch wraps the `step` of a class when its first instance is made, and sets `hooked` on it
    return (
        isinstance(item, Optimizer)
        and hasattr(item, "_optimizer_step_pre_hooks")
        and getattr(item.__class__.step, "hooked", False)
    )


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether an LRScheduler was created for it, which wraps its `step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def state_dict_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks that may change an optimizer's `state_dict()`."""
    pre, post = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return [*pre.values(), *post.values()]


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it."""
    return hasattr(module, "_get_fsdp_state")


def has_unsynchronized_gradients(module: Any) -> bool:
    """Whether a fully sharded module has gradients that are not yet summed over the ranks and replicas."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
        waiting = [getattr(group, "_partial_reduce_output", None)]  # summed over the shards, not the replicas
        for parameter in getattr(group, "fsdp_params", ()):
            gathered = getattr(parameter, "_unsharded_param", None)
            waiting += [parameter.unsharded_accumulated_grad, getattr(gathered, "grad", None)]
        if any(each is not None for each in waiting):
            return True
    return False


def chunks_of(dtensor: Any) -> Sequence[Any]:
    """Return the parts of a DTensor on this rank, each with `offsets` and `sizes`."""
    if not DTENSOR_CHUNKS.supported():
        raise TypeError(unsupported(distributed=True)[0])
    return dtensor.__create_chunk_list__()  # type: ignore[no-any-return]


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one is a part of; itself if there is none, or if unknown."""
    return mesh._get_root_mesh() if MESH_ROOT.supported() else mesh


def replicated_parameters(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters that are equal on all ranks: broadcast at the start, then reduced or unchanged."""
    if not DDP_PARAMETERS.supported() or not hasattr(ddp, "_module_parameters"):
        return []
    held = {id(parameter) for parameter in ddp.module.parameters()}
    known = [parameter for parameter in ddp._module_parameters if id(parameter) in held]
    trained = sum(parameter.requires_grad for parameter in known)
    reduced = int(ddp._get_ddp_logging_data()["num_parameter_tensors"])  # type: ignore[no-untyped-call]
    if trained > reduced:  # it does not reduce some trained parameters
        return [parameter for parameter in known if not parameter.requires_grad]
    return known


def obstacle_to_buckets(ddp: DistributedDataParallel) -> str | None:
    """Say why its buckets cannot be known; `None` if they can."""
    if not DDP_BUCKETS.supported():
        return f"torch {torch.__version__} lacks {DDP_BUCKETS.name}"
    return "it has no buckets" if ddp._delay_all_reduce_all_params or ddp._use_python_reducer else None


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    return [hook for hook, _ in ddp._comm_hooks]


def has_run(ddp: DistributedDataParallel) -> bool:
    """Whether it was called at least once."""
    return bool(ddp._lazy_init_ran)


def rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Rebuild buckets if due, as the next forward pass would. Return whether they are rebuilt."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    return ddp._has_rebuilt_buckets


def buckets_of(ddp: DistributedDataParallel) -> list[list[torch.Tensor]]:
    """Return the parameters of each bucket. Allocates memory for all gradients temporarily."""
    return [bucket.parameters() for bucket in ddp.reducer._get_zeros_like_grad_buckets()]


def run_backward(ddp: DistributedDataParallel, order: Iterable[int]) -> None:
    """Simulate a backward pass for the reducer, with gradients ready in this order of parameters."""

    def report(_: torch.Tensor) -> None:
        for number in order:
            ddp.reducer._autograd_hook(number)  # type: ignore[attr-defined]

    anchor = torch.zeros((), device="cpu", requires_grad=True)
    anchor.register_hook(report)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward([])
    anchor.backward()  # type: ignore[no-untyped-call]  # the reducer finishes in a callback of this pass
    if getattr(ddp, "require_manual_backward_finalization", False):  # since torch 2.15
        ddp.finalize_backward()  # type: ignore[operator]


def give_static_reducer(ddp: DistributedDataParallel, layout: Sequence[Sequence[int]]) -> None:
    """Replace the reducer by one for a static graph with these buckets, in the way that unpickling does."""
    maker: Any = ddp
    parameters, sparse = maker._build_params_for_reducer()
    names = maker._build_debug_param_to_name_mapping(parameters)
    maker._remove_autograd_hooks()
    # the reducer numbers buckets in reverse
    assigned = list(map(list, reversed(layout))), [maker.bucket_bytes_cap] * len(layout)
    view = types.SimpleNamespace(**vars(torch.distributed))
    view._compute_bucket_assignment_by_size = lambda *_: assigned
    # the same function, with `view` in place of torch.distributed
    helper = DistributedDataParallel._ddp_init_helper
    helper_here = types.FunctionType(helper.__code__, {**helper.__globals__, "dist": view}, helper.__name__)
    helper_here(ddp, parameters, sparse, names, True)
    if getattr(ddp, "require_manual_backward_finalization", False):
        maker.require_manual_backward_finalization = True  # tells the new reducer
    maker.reducer._set_static_graph()
    maker.logger._set_static_graph()


def learns_shapes(stage: Any) -> bool:
    """Whether a PipelineStage changes its state in the first iteration of a process, when it learns shapes.

    Since torch 2.14, random numbers and buffers are put back after that.
    """
    if known := getattr(stage, "_user_meta", None):
        changes = not hasattr(stage, "_pre_metadata_inference_backup")
        return changes and (known.inputs is None or known.outputs is None)
    return getattr(stage, "inputs_meta", ()) is None  # torch 2.6; a module has neither


def default_store() -> Any:
    """Return the torch Store of the default process group, which all ranks share."""
    return torch.distributed.distributed_c10d._get_default_store()


def rendezvous_store() -> Any:
    """Return the Store of the default process group without the prefixes of torch, which differ by release."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def kept_iterator(loader: Any) -> Any:
    """Return the iterator that a torch DataLoader with persistent workers keeps; `None` without one."""
    return getattr(loader, "_iterator", None)


def after_each_batch(note: Callable[[], None]) -> Callable[[], None]:
    """Call `note` whenever a DataLoader of torch has given a batch; return a function that ends this.

    As torch has no hook for it, this replaces a function of its iterators until all have ended.
    """
    if not LOADER_ITERATORS.supported():
        return lambda: None
    owner: Any = LOADER_ITERATORS.owner()
    if not _counting:
        own = owner.__next__

        @functools.wraps(own)
        def counting(iterator: Any) -> Any:
            batch = own(iterator)
            for each in _after_batches:
                each()
            return batch

        owner.__next__ = counting
        _counting.append(counting)
    _after_batches.append(note)

    def end() -> None:
        if note in _after_batches:
            _after_batches.remove(note)
        if not _after_batches and _counting and owner.__next__ is _counting[0]:
            owner.__next__ = _counting.pop().__wrapped__

    return end


def limit_wait(iterator: Any, seconds: float) -> None:
    """Set how long an iterator of a DataLoader with workers waits for its next batch."""
    iterator._timeout = seconds
