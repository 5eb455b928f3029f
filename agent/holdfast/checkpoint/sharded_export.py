"""Exports in several files: a model directory of Transformers, and a torch.distributed.checkpoint directory.

One file of the export is in memory at a time.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.export import DCP_METADATA, ExportResult, state_dict_of, write_tensors
from holdfast.format.dtypes import dtype_of_view
from holdfast.format.shards import is_module, names_in

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a file, unless a single one is larger."""
HF_INDEX, HF_CONFIG = "model.safetensors.index.json", "config.json"
_OF_TRANSFORMERS = (
    HF_CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "chat_template*", "preprocessor_config.json", "*.py",
)  # fmt: skip
"""Files of a model directory that are not weights."""

Load = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Verifies and loads tensors of the checkpoint by their names."""


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """Content of a checkpoint without its tensors."""

    trees: Mapping[str, Any]
    """The state of each object by keyword."""
    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of each tensor by name."""
    load: Load
    shard_bytes: int = SHARD_BYTES

    def size_bytes(self, name: str) -> int:
        dtype, shape = self.shapes[name]
        return dtype_of_view(dtype.removeprefix("torch.")).itemsize * math.prod(shape)

    def shards(self, names: Collection[str]) -> list[list[str]]:
        """Divide tensors among files, in their order."""
        found: list[list[str]] = [[]]
        filled = 0
        for name in names:
            size = self.size_bytes(name)
            if found[-1] and filled + size > self.shard_bytes:
                found.append([])
                filled = 0
            found[-1].append(name)
            filled += size
        return found


def write_hf(path: Path, source: ShardedSource, written: ExportResult, config: Path) -> None:
    """Write a directory for `from_pretrained`: safetensors files with an index, and the files of `config`.

    Raises:
        LookupError: there is no module, or there are several.
        ValueError: Transformers cannot read the dtype of a tensor; or there is no config.json.
    """
    keyword = _model_in(source.trees)
    state = source.trees[keyword]["state"]
    written.objects = [keyword]
    written.left_out = [name for name, tree in state.items() if not _is_tensor(tree)]
    names = {name: tree["$tensor"] for name, tree in state.items() if _is_tensor(tree)}
    path.mkdir()
    copy_config(config, path)
    shards = source.shards(list(dict.fromkeys(names.values())))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = source.load(shard)
        here = {name: tensors[tensor] for name, tensor in names.items() if tensor in tensors}
        if foreign := write_tensors(path / file, here, {"format": "pt"}):
            raise ValueError(f"{min(foreign)}: Transformers cannot read its dtype {foreign[min(foreign)]}")
        files |= dict.fromkeys(here, file)
    written.tensors = len(files)
    if len(shards) > 1:
        total = sum(source.size_bytes(tensor) for tensor in names.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (path / HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _model_in(trees: Mapping[str, Any]) -> str:
    modules = [keyword for keyword, tree in trees.items() if is_module(tree)]
    if len(modules) == 1:
        return modules[0]
    if "model" in modules:
        return "model"
    there = ", ".join(modules) or "no module"
    raise LookupError(f"hf is the format of one model, and the checkpoint has {there}: choose one with --only")


def copy_config(config: Path, target: Path) -> None:
    """Copy config.json, and the other files of a model directory that are not weights."""
    if config.is_dir():
        for pattern in _OF_TRANSFORMERS:
            for each in sorted(path for path in config.glob(pattern) if path.is_file()):
                shutil.copyfile(each, target / each.name)
    else:
        shutil.copyfile(config, target / HF_CONFIG)
    try:
        found = json.loads((target / HF_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--config {config}: it must be a model's config.json, or a directory with one, as `model.config."
            f"save_pretrained` and a model directory of Transformers have it ({error})"
        ) from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError(f"--config {config}: it has no model_type, so Transformers cannot load it")


def write_dcp(path: Path, source: ShardedSource, written: ExportResult) -> None:
    """Write a torch.distributed.checkpoint directory, whose files hold `shard_bytes` each."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    lazy = set(_lazy_names(source.trees))
    rest = source.load(sorted(names_in(list(source.trees.values())) - lazy))
    empty = {name: _empty(*source.shapes[name]) for name in lazy}
    names = {id(tensor): name for name, tensor in empty.items()}
    states = {keyword: state_dict_of(tree, {**rest, **empty}) for keyword, tree in source.trees.items()}
    loaded: dict[str, torch.Tensor] = {}

    class LazyPlanner(DefaultSavePlanner):
        """Gives the writer the tensors of the file that it writes."""

        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            name = names.get(id(found))
            return found if name is None else loaded[name]

    planner, writer = LazyPlanner(), FileSystemWriter(path)
    planner.set_up_planner(states, is_coordinator=True)
    writer.set_up_storage_writer(True)
    items = planner.create_local_plan().items
    of_tensors: dict[str, list[WriteItem]] = {}
    others: list[WriteItem] = []
    for item in items:
        found = (
            None if item.type == WriteItemType.BYTE_IO else DefaultSavePlanner.lookup_object(planner, item.index)
        )
        name = names.get(id(found))
        (others if name is None else of_tensors.setdefault(name, [])).append(item)
    shards = [shard for shard in source.shards(list(of_tensors)) if shard]
    parts = [[item for name in shard for item in of_tensors[name]] for shard in shards]
    plans = [SavePlan(part, planner_data=planner.mappings) for part in [others, *parts]]
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    plans = writer.prepare_global_plan(plans)
    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        for plan, shard in zip(plans, [[], *shards], strict=True):
            loaded.clear()
            loaded.update(source.load(shard) if shard else {})
            if plan.items:
                planner.finish_plan(plan)
                results.append(writer.write_data(plan, planner).wait())
    loaded.clear()
    writer.finish(metadata, results)
    assert (path / DCP_METADATA).is_file()
    written.tensors = len([item for item in items if item.type != WriteItemType.BYTE_IO])


def _lazy_names(trees: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of tensors that the objects' states refer to as they are."""
    left: list[Any] = list(trees.values())
    while left:
        item = left.pop()
        if _is_tensor(item):
            if item.keys() <= {"$tensor", "device"}:
                yield item["$tensor"]
        elif isinstance(item, dict) and not any(key in item for key in ("$ndarray", "$shared")):
            left += item.values()
        elif isinstance(item, list):
            left += item


def _is_tensor(tree: Any) -> bool:
    return isinstance(tree, dict) and "$tensor" in tree


def _empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype_of_view(dtype.removeprefix("torch.")), device="meta")
