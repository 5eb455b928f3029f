"""Stages of a pipeline: those of one rank as one module, and which stages the ranks of a job have.

Imported only for a session that was given stages, `Session(model=[stage, …])`.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.state.adapter import StateAdapter
from holdfast.state.matching import plain_name
from holdfast.state.optimizers import OptimizerAdapter
from holdfast.state.sharding import is_sharded, storages
from holdfast.state.wrappers import given_modules
from holdfast.torch_internals import learns_shapes, metadata_of, with_metadata

_LEARNING = (
    "a PipelineStage without input_args and output_args runs each stage once more in the first iteration of a "
    "process, to learn shapes. Before torch 2.14, this changes buffers such as those of BatchNorm, and in older "
    "releases it also draws random numbers, so that losses after a resume may differ: give both, with the shapes "
    "of a microbatch"
)
Names = dict[str, list[str]]
"""Names of parameters and other entries of stages, by keyword of the session."""


class PipelineStages(nn.Module):
    """The stages of one rank as one module, whose names are those of the full model.

    Raises:
        ValueError: there is no stage, or two have an entry of the same name; names it.
    """

    def __init__(self, keyword: str, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # a tuple: submodules would add its number to their names
        if not self.parts:
            raise ValueError(f"Session({keyword}=[]): give the stages of this rank; each rank has at least one")
        owners: dict[str, int] = {}
        for number, part in enumerate(self.parts):
            for name in part.state_dict():
                if (other := owners.setdefault(name, number)) != number:
                    raise ValueError(
                        f"Session({keyword}=[…]): stages {other} and {number} of this list both have {name!r}: "
                        "stages must keep the names of the full model, as torch.distributed.pipelining.pipeline "
                        "and a copy of the model without the other layers do"
                    )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers; the name of one that an earlier stage has as well ends with `@` and its stage's number.

        Stages may each have a buffer that the state of a model lacks, such as a cache of the root module.
        """
        taken, seen = set[str](), set[int]()
        for number, part in enumerate(self.parts):
            for name, buffer in part.named_buffers(prefix, recurse, remove_duplicate):
                if remove_duplicate and id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                name = f"{name}@{number}" if name in taken else name
                taken.add(name)
                yield name, buffer

    def holder_of(self, buffer: str) -> tuple[nn.Module, str]:
        """Return the module of a buffer, and the name of the buffer in it."""
        name, _, number = buffer.partition("@")
        path, _, last = name.rpartition(".")
        parts = [self.parts[int(number)]] if number else self.parts
        holders = [
            module for part in parts for at, module in part.named_modules(remove_duplicate=False) if at == path
        ]
        return next((each for each in holders if hasattr(each, last)), holders[0]), last

    def get_parameter(self, target: str) -> nn.Parameter:
        return dict(self.named_parameters(remove_duplicate=False))[target]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        states = [part.state_dict(*args, **kwargs) for part in self.parts]
        metadata = dict(collections.ChainMap(*map(metadata_of, states)))
        return with_metadata(itertools.chain.from_iterable(state.items() for state in states), metadata)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        for part in self.parts:
            entries = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            part.load_state_dict(with_metadata(entries, metadata_of(state_dict)), strict, assign)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Which ranks have which stages."""

    group: tuple[int, ...]
    """The ranks with the same stages as this one, itself included."""
    names: Mapping[str, frozenset[str]]
    """The names that any rank has, by keyword."""
    keywords: frozenset[str]
    """Keywords of the modules that were given as stages."""
    limitations: tuple[str, ...] = ()
    """The guarantees that the stages of this rank do not allow."""

    def storages(self, modules: Mapping[str, nn.Module]) -> Iterator[int]:
        """Yield the storages of the entries of stages, if no other rank has them: they are stored once."""
        parts = (
            module for keyword, module in modules.items() if keyword in self.keywords and len(self.group) == 1
        )
        entries = itertools.chain.from_iterable(part.state_dict().values() for part in parts)
        return storages(each for each in entries if isinstance(each, torch.Tensor) and not is_sharded(each))


class _OfRank(msgspec.Struct, frozen=True):
    """The stages of one rank."""

    names: Names
    """Names of their entries."""
    numbers: dict[str, list[int]]
    """The numbers of stages given as `PipelineStage`."""
    optimizers: Names
    """Names of the parameters that its optimizers train."""
    is_replicable: bool
    """All parameters are sharded or below a DistributedDataParallel, so that other ranks may have the same."""


def agree_on_stages(
    given: Mapping[str, Any],
    adapters: Mapping[str, StateAdapter],
    rank: int,
    gather: Callable[[bytes], list[bytes]],
) -> StageLayout:
    """Return which ranks have which stages. Collective over all ranks, if any of them has stages.

    Args:
        given: what the session was given as stages, by keyword; empty on a rank without stages.
        adapters: those of its objects, by keyword.

    Raises:
        ValueError: the stages of two ranks have entries of the same name, but are not the same stages; or some
            ranks were not given stages. It is raised on all ranks.
    """
    own = msgspec.msgpack.encode(_described(given, parameters_of(adapters)))
    of_ranks = [msgspec.msgpack.decode(data, type=_OfRank) for data in gather(own)]
    _require_disjoint(of_ranks)
    known: dict[str, set[str]] = {}
    for each in of_ranks:
        for keyword, entries in (*each.names.items(), *each.optimizers.items()):
            known.setdefault(keyword, set()).update(entries)
    names = of_ranks[rank].names
    group = tuple(other for other, each in enumerate(of_ranks) if each.names == names)
    by_keyword = {keyword: frozenset(each) for keyword, each in known.items()}
    limitations = tuple(f"{keyword}: {_LEARNING}" for keyword, item in given.items() if _any_learns_shapes(item))
    return StageLayout(group, by_keyword, frozenset(names), limitations)


def _any_learns_shapes(item: Any) -> bool:
    return any(map(learns_shapes, item if isinstance(item, (list, tuple)) else [item]))


def parameters_of(adapters: Mapping[str, StateAdapter]) -> dict[str, list[list[Any]]]:
    """Return the labels of the parameters that each optimizer trains, by group."""
    return {keyword: each.labels() for keyword, each in adapters.items() if isinstance(each, OptimizerAdapter)}


def _described(given: Mapping[str, Any], parameters: Mapping[str, list[list[Any]]]) -> _OfRank:
    names: Names = {}
    numbers: dict[str, list[int]] = {}
    is_replicable = True
    for keyword, item in given.items():
        parts = given_modules(item) or []
        names[keyword] = sorted({plain_name(name) for part in parts for name in part.state_dict()})
        items = item if isinstance(item, (list, tuple)) else [item]
        numbers[keyword] = sorted(each.stage_index for each in items if not isinstance(each, nn.Module))
        for part in parts:
            is_reduced = any(isinstance(each, DistributedDataParallel) for each in part.modules())
            is_replicable = is_replicable and (is_reduced or all(map(is_sharded, part.parameters())))
    labels = {keyword: itertools.chain.from_iterable(groups) for keyword, groups in parameters.items()}
    optimizers = {keyword: [each for each in flat if isinstance(each, str)] for keyword, flat in labels.items()}
    return _OfRank(names, numbers, optimizers, is_replicable)


def _require_disjoint(of_ranks: Sequence[_OfRank]) -> None:
    owners: dict[tuple[str, str], int] = {}
    for rank, each in enumerate(of_ranks):
        if each.names.keys() != of_ranks[0].names.keys():
            raise ValueError(
                f"holdfast.Session: rank 0 was given stages of a pipeline as {_listed(of_ranks[0])}, rank {rank} "
                f"as {_listed(each)}: every rank gives a list of its stages, Session(model=[stage, …])"
            )
        for keyword, name in ((keyword, name) for keyword, names in each.names.items() for name in names):
            other = owners.setdefault((keyword, name), rank)
            first = of_ranks[other]
            is_same = first.names == each.names and first.numbers == each.numbers
            if other != rank and not (is_same and first.is_replicable and each.is_replicable):
                raise ValueError(
                    f"Session({keyword}=[…]): {name!r} is in stages of the ranks {other} and {rank}. Different "
                    "stages must keep the names of the full model, as torch.distributed.pipelining.pipeline and a "
                    "copy of the model without the other layers do, and have no parameter in common, such as tied "
                    "weights. The same stage on several ranks must be given as a DistributedDataParallel, or be "
                    "sharded by fully_shard. Nothing was changed"
                )


def _listed(of_rank: _OfRank) -> str:
    return ", ".join(of_rank.names) or "nothing"
