"""Export a checkpoint in the format of other programs: one file, or a directory by `sharded_export`."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.degraded import LostNumbers, describe_lost
from holdfast.checkpoint.reading import Progress
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import dtype_of_view, stored_as
from holdfast.format.shards import is_module, names_in, state_for
from holdfast.state.stage_selection import whole
from holdfast.state.tree import decode
from holdfast.state.wrappers import RESERVED
from holdfast.store import Store
from holdfast.system.files import Files
from holdfast.system.host_memory import bytes_of
from holdfast.torch_internals import with_metadata

logger = logging.getLogger("holdfast")

Format = Literal["safetensors", "torch", "dcp", "hf"]
DCP_METADATA = ".metadata"
"""The file that identifies a torch.distributed.checkpoint directory, which `force` may replace."""
EXPORTED_RANK = 0


@dataclass(slots=True)
class ExportResult:
    """Result of an export: files written, and content that the format cannot hold."""

    objects: list[str]
    tensors: int = 0
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Names of damaged tensors, which a degraded export leaves out."""
    inexact: list[LostNumbers] = field(default_factory=list)
    """Numbers in the other tensors whose less significant bytes a degraded export replaced."""


def export(
    store: Store,
    job: str,
    checkpoint: str,
    target: Path,
    format: Format,  # noqa: A002
    *,
    only: str | None = None,
    force: bool = False,
    degraded: bool = False,
    config: Path | None = None,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Verify a checkpoint and write it to `target` atomically.

    The directory of `dcp` and `hf` has files of at most `shard_bytes` of tensors, of which one is in memory at a
    time; that of `hf` also has the files of a model directory from `config`.

    The tensors of a module have the names of its state_dict(). With `only`, one object of the session is written.
    Shards of several ranks are assembled; of state that each rank had for itself, that of rank 0 is written.

    With `degraded`, lost bytes of numbers whose important bytes are left are replaced, and tensors with any other
    damage are left out of a safetensors file. Its metadata then names the one as `inexact`, and counts the others
    as `lost`. All other bytes are verified like those of any export.

    Raises:
        FileExistsError: `target` exists; with `force`, it is not an export.
        LookupError: the checkpoint has no object `only`.
        OSError: the store cannot be read, or `target` cannot be written; the error names the file.
        ValueError: `degraded` for a format that is not safetensors, no `config` for hf, or an invalid one.
        Whatever `restore.load` raises.
    """
    _require_options(format, degraded, config)
    _require_free(target, format, force)
    stored = read_stored(store, job, checkpoint).seen_as(whole)
    manifest = stored.manifest
    state = state_for(manifest, EXPORTED_RANK)
    trees = {keyword: tree for keyword, tree in state.items() if keyword not in RESERVED}
    if only is not None:
        if only not in trees:
            raise LookupError(f"{checkpoint} has no object {only!r}; it has {', '.join(trees)}")
        trees = {only: trees[only]}
    wanted, written = names_in(list(trees.values())), ExportResult(list(trees))

    def load(names: Collection[str]) -> dict[str, torch.Tensor]:
        loaded = restore.load(
            *(store, job, checkpoint),
            only=names,
            rank=EXPORTED_RANK,
            known=stored,
            degraded=degraded,
            progress=progress,
        )
        written.inexact.extend(loaded.lost)
        return dict(loaded.tensors)

    if format in ("hf", "dcp"):
        from holdfast.checkpoint import sharded_export

        shapes = restore.shapes(manifest, EXPORTED_RANK)
        source = sharded_export.ShardedSource(trees, shapes, load, shard_bytes or sharded_export.SHARD_BYTES)
        with atomic_write(target, force) as temporary:
            if config is not None:
                sharded_export.write_hf(temporary, source, written, config)
            else:
                sharded_export.write_dcp(temporary, source, written)
            written.size_bytes = sync(temporary)
        return written
    tensors = _load_sound(load, sorted(wanted), manifest) if degraded else load(wanted)
    chosen = _Selection(manifest, trees, tensors, alone=only is not None)
    with atomic_write(target, force) as temporary:
        _WRITERS[format](temporary, chosen, written)
        written.size_bytes = sync(temporary)
    return written


def _load_sound(
    load: Callable[[Collection[str]], dict[str, torch.Tensor]], names: Sequence[str], manifest: fmt.Manifest
) -> dict[str, torch.Tensor]:
    """Load tensors in ever smaller groups until only damaged ones fail; these are on the device `meta`."""
    try:
        return load(names)
    except DamagedCheckpoint as error:
        if len(names) == 1:
            logger.warning("%s is lost: %s", names[0], error)
            dtype, shape = restore.shapes(manifest, EXPORTED_RANK)[names[0]]
            return {names[0]: torch.empty(shape, dtype=dtype_of_view(dtype.removeprefix("torch.")), device="meta")}
    middle = len(names) // 2
    return _load_sound(load, names[:middle], manifest) | _load_sound(load, names[middle:], manifest)


@dataclass(frozen=True, slots=True)
class _Selection:
    manifest: fmt.Manifest
    trees: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    alone: bool
    """Only one object is exported: names do not begin with its keyword."""

    def states(self) -> dict[str, Any]:
        """Return the state_dict() of each object by keyword."""
        return {keyword: state_dict_of(tree, self.tensors) for keyword, tree in self.trees.items()}

    def named(self) -> dict[str, torch.Tensor]:
        """Return tensors by their names in the state_dict() of a module, or in the checkpoint for others."""
        found: dict[str, torch.Tensor] = {}
        for keyword, tree in self.trees.items():
            if is_module(tree):
                entries = dict(_leaves(state_dict_of(tree, self.tensors), keyword))
                found |= {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
            else:
                found |= {name: self.tensors[name] for name in names_in(tree)}
        (keyword, *_) = self.trees
        return {n.removeprefix(f"{keyword}."): t for n, t in found.items()} if self.alone else found


def state_dict_of(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state_dict() of an object from its tree."""
    if is_module(tree):
        metadata = _plain(decode(tree["metadata"], tensors, copy=False))
        return with_metadata(_plain(decode(tree["state"], tensors, copy=False)), metadata)
    return _plain(decode(tree, tensors, copy=False))


def _plain(value: Any) -> Any:
    """Convert to types that torch.load(weights_only=True) accepts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, collections.deque)):
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    if isinstance(value, frozenset):
        return set(value)
    if type(value).__module__ == "numpy":
        return torch.as_tensor(value) if getattr(value, "ndim", 0) else value.item()
    return value


def _write_safetensors(path: Path, chosen: _Selection, written: ExportResult) -> None:
    named = chosen.named()
    written.lost = [name for name, tensor in named.items() if tensor.is_meta]
    about = {"format": "pt", "job": chosen.manifest.job, "iteration": str(chosen.manifest.iteration)}
    lost = {"lost": f"{len(written.lost)} of {len(named)} tensors"} if written.lost else {}
    lost |= {"inexact": describe_lost(written.inexact)} if written.inexact else {}
    tensors = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    write_tensors(path, tensors, about | lost)
    written.tensors = len(tensors)
    leaves = _leaves(chosen.states(), "")
    written.left_out = [name for name, value in leaves if not isinstance(value, torch.Tensor)]


def write_tensors(path: Path, named: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, str]:
    """Write a safetensors file; return the dtypes of tensors whose dtype that format does not have, by name."""
    tensors = {name: tensor.contiguous() for name, tensor in named.items()}
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    slots = fmt.lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
    views = {name: view for name, (_, _, view) in stored.items() if view is not None}
    with path.open("xb") as file:
        file.write(fmt.payload_header(slots, metadata | {f"view of {name}": view for name, view in views.items()}))
        for slot in slots:
            file.write(bytes_of(tensors[slot.name]))
    return views


def _write_torch(path: Path, chosen: _Selection, written: ExportResult) -> None:
    states = chosen.states()
    torch.save(states, path)
    written.tensors = _count_tensors(states)


_WRITERS: dict[Format, Callable[..., None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that are not lists or dicts, by path."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _count_tensors(states: dict[str, Any]) -> int:
    return sum(isinstance(value, torch.Tensor) for _, value in _leaves(states, ""))


def _require_options(format: Format, degraded: bool, config: Path | None) -> None:  # noqa: A002
    if degraded and format != "safetensors":
        raise ValueError(
            f"a {format} export cannot leave out lost tensors: use --format safetensors with --degraded"
        )
    if (config is None) == (format == "hf"):
        raise ValueError(
            "--format hf needs --config, and other formats do not take it: give the model's config.json, or its "
            "directory"
        )


def _require_free(target: Path, format: Format, force: bool) -> None:  # noqa: A002
    if not os.path.lexists(target):
        return
    if not force:
        raise FileExistsError(f"{target} exists; use --force to replace it")
    marks = {"dcp": [DCP_METADATA], "hf": ["model.safetensors", "model.safetensors.index.json"]}.get(format, [])
    if target.is_dir() and not any((target / each).is_file() for each in marks):
        raise FileExistsError(f"{target} is a directory, but not a {format} export, and is not replaced")


@contextlib.contextmanager
def atomic_write(target: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary path that replaces `target` at the end, and is removed on an error."""
    if not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the directory to write to does not exist", str(target.parent))
    temporary = _temporary_name(target)
    try:
        yield temporary
        if not force and os.path.lexists(target):
            raise FileExistsError(f"{target} was created during the export; use --force to replace it")
        if target.is_dir():
            _replace_directory(temporary, target)
        else:
            temporary.rename(target)
        Files().sync_directory(target.parent)
    finally:
        _remove(temporary)


def _replace_directory(temporary: Path, target: Path) -> None:
    old = _temporary_name(target)
    target.rename(old)  # a rename cannot replace a directory that is not empty
    try:
        temporary.rename(target)
    except BaseException:  # put it back, also on Ctrl-C
        old.rename(target)
        raise
    _remove(old)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> int:
    """Make a file, or a directory and its files, durable, and return their size in bytes."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    for each in files:
        with each.open("rb") as file:
            os.fsync(file.fileno())
    if path.is_dir():
        Files().sync_directory(path)
    return sum(each.stat().st_size for each in files)
