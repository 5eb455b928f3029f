"""Import of the model in a torch.distributed.checkpoint directory, as the first checkpoint of a new job.

A job continues from it like from a checkpoint of its own; objects that it lacks start as the script makes them.
One file of the new checkpoint is in memory at a time. No code in the directory is run: its metadata, a pickle, may
name only the types that torch stores there.
"""

from __future__ import annotations

import io
import pickle
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.checkpoint import stored_manifest
from holdfast.checkpoint.export import DCP_METADATA
from holdfast.checkpoint.reading import Progress
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.manifest_files import ManifestFile, index_of, structure_of
from holdfast.protocol.ids import checkpoint_id, validate_job
from holdfast.state.encoder import Encoder
from holdfast.state.rng import rng_state
from holdfast.store import Attempt, CheckpointWriter, Ending, Lineage, Store
from holdfast.store.records import FORK_UID
from holdfast.system.host_memory import bytes_of

SHARD_BYTES = 5 * 10**9
IMPORTED = "imported"
"""The reason with which the attempt of an import ends."""
_TRUSTED = {
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.api",
}  # fmt: skip
_TRUSTED_NAMES = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"), ("builtins", "set"), ("builtins", "frozenset"),
    ("builtins", "slice"),
}  # fmt: skip


class ImportRefused(HoldfastError):
    """The directory is not a DCP checkpoint with such a model, or the job exists."""


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an import."""

    job: str
    checkpoint: str
    tensors: int
    size_bytes: int
    left_out: list[str]
    """Top-level entries of the directory that are not part of the model."""


def import_dcp(
    source: Path,
    store: Store,
    job: str,
    *,
    model: str | None = None,
    keyword: str = "model",
    iteration: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ImportResult:
    """Write the model of a DCP directory as the first checkpoint of `job`.

    Args:
        model: the entry with the model's state_dict(); "" if its names are at the top. Default: "model", or the
            top if there are only tensors.
        keyword: the keyword of the model in the session.
        iteration: the iteration at which the job begins.

    Raises:
        ImportRefused: as its docstring says; the message names the available entries.
        ValueError: the name of the job is invalid.
        OSError: a file cannot be read or written.
    """
    validate_job(job)
    attempts = store.records(job, Attempt)
    if store.checkpoints(job) or not all(
        each.uid.startswith(FORK_UID) for each in attempts
    ):  # interrupted imports
        raise ImportRefused(f"{job} exists in {store.url}: choose another name for the new job")
    reader = _Reader(source)
    names, left_out = _names_of_model(reader.metadata, model)
    uid = f"{FORK_UID}{uuid.uuid4().hex}"
    attempt = store.acquire_attempt(job, uid)
    checkpoint = checkpoint_id(iteration, 1)
    total_bytes = sum(_size_bytes(reader.metadata.state_dict_metadata[key]) for key in names)
    writer = store.begin(job, checkpoint, attempt.number, total_bytes)
    try:
        written = _Import(writer, keyword, shard_bytes, progress, total_bytes)
        written.write_model(reader, names)
        stored_manifest.commit(writer, written.manifest(job, iteration, attempt.number))
    except BaseException:  # also on Ctrl-C: remove the partial checkpoint
        writer.abort()
        raise
    store.append(
        job,
        Lineage(
            number=2, iteration=iteration, parent=checkpoint, order=None, attempt=attempt.number,
            created_at=time.time(),
        ),
    )  # fmt: skip
    store.append(job, Ending(attempt=attempt.number, reason=IMPORTED, iterations=0, at=time.time()))
    return ImportResult(
        job=job, checkpoint=checkpoint, tensors=len(names), size_bytes=total_bytes, left_out=left_out
    )


class _Reader(FileSystemReader):
    """Reads a directory without running code that its metadata may name."""

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._file = source / DCP_METADATA
        if not (source / DCP_METADATA).is_file():
            raise ImportRefused(
                f"{source} has no {DCP_METADATA}: give the directory that torch.distributed.checkpoint.save wrote"
            )
        self.metadata = self.read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = self._file
        try:
            found = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        except OSError:
            raise
        except Exception as error:  # a pickle of any other content
            raise ImportRefused(f"{file} is not the metadata of a DCP checkpoint: {error}") from error
        if not isinstance(found, Metadata):
            raise ImportRefused(f"{file} is not the metadata of a DCP checkpoint: it has a {type(found).__name__}")
        for each in dict(found.storage_data or {}).values():
            name = str(getattr(each, "relative_path", ""))
            if name != Path(name).name:  # torch would open the path
                raise ImportRefused(f"{file} names {name!r}, which is not a file in its directory")
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # as Python 3.13 names it
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in _TRUSTED and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif is_dtype or (module, name) in _TRUSTED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a type that DCP metadata may contain")


def _names_of_model(metadata: Metadata, model: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the name in the model of each tensor to import, and the entries that are left out."""
    tensors = [
        key for key, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)
    ]
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    top = {key: str(paths[key][0]) if paths.get(key) else key for key in metadata.state_dict_metadata}
    others = metadata.state_dict_metadata.keys() - set(tensors)
    if model is None:
        model = "model" if "model" in top.values() else "" if not others else None
    if model is None:
        raise ImportRefused(
            f"there is no entry 'model', but {_few(top.values())}: choose the model's entry with --model, or give "
            "--model '' if the names of its parameters are at the top level"
        )
    if model:
        names = {key: key.removeprefix(f"{model}.") for key in tensors if top[key] == model and key != model}
    else:
        names = {key: key for key in tensors if top[key] == key}
    if not names:
        raise ImportRefused(f"it has no tensors in an entry {model!r}; its entries are {_few(top.values())}")
    return names, sorted({top[key] for key in top if key not in names})


def _few(names: Any) -> str:
    known = sorted(set(names))
    return ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")


class _Import:
    """Writes the files of the checkpoint, one after the other."""

    def __init__(
        self,
        writer: CheckpointWriter,
        keyword: str,
        shard_bytes: int,
        progress: Progress | None,
        total_bytes: int,
    ) -> None:
        self._writer, self._keyword, self._shard_bytes = writer, keyword, shard_bytes
        self._progress, self._total_bytes, self._done_bytes = progress, total_bytes, 0
        self._files: list[fmt.File] = []
        self._tensors: list[fmt.Tensor] = []
        self._state: dict[str, Any] = {}

    def write_model(self, reader: _Reader, names: Mapping[str, str]) -> None:
        metadata: dict[str, Any] = reader.metadata.state_dict_metadata
        entries = {name: {"$tensor": f"{self._keyword}.{name}"} for name in names.values()}
        self._state[self._keyword] = {"state": entries, "metadata": {}, "buffers": {}, "frozen": []}
        for shard in self._shards(names, lambda key: _size_bytes(metadata[key])):
            empty = {key: torch.empty(metadata[key].size, dtype=metadata[key].properties.dtype) for key in shard}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process
                load(empty, storage_reader=reader)
            self._write({f"{self._keyword}.{names[key]}": tensor for key, tensor in empty.items()})

    def _shards(self, names: Mapping[str, str], size_bytes: Callable[[str], int]) -> Iterator[list[str]]:
        shard, filled = list[str](), 0
        for key in names:
            if shard and filled + size_bytes(key) > self._shard_bytes:
                yield shard
                shard, filled = [], 0
            shard.append(key)
            filled += size_bytes(key)
        yield shard

    def _write(self, named: Mapping[str, torch.Tensor]) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in named.items()}
        stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
        slots = fmt.lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
        header = fmt.payload_header(slots, {})
        data = [bytes_of(tensors[slot.name]) for slot in slots]
        size_bytes = sum(len(part) for part in data)
        file = fmt.File(
            name=f"rank-0-{len(self._files):05}.safetensors",
            size_bytes=len(header) + size_bytes,
            header_bytes=len(header),
            header_digest=fmt.digest(header),
        )
        for slot, part in zip(slots, data, strict=True):
            whole, chunks = fmt.digest_tensor(part)
            self._tensors.append(
                fmt.Tensor(
                    name=slot.name, dtype=slot.dtype, shape=slot.shape, global_shape=slot.shape,
                    offsets=(0,) * len(slot.shape), file=file.name, start=len(header) + slot.start,
                    end=len(header) + slot.end, digest=whole, chunks=chunks, view=stored[slot.name][2],
                )
            )  # fmt: skip
        self._writer.write(file.name, [header, *data])
        self._files.append(file)
        self._done_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)

    def manifest(self, job: str, iteration: int, attempt: int) -> ManifestFile:
        """Return the manifest, with a position at the beginning of the data and seeded random numbers."""
        encoder = Encoder((), set())
        before = random.getstate()
        with torch.random.fork_rng(devices=[]):
            random.seed(iteration)
            torch.manual_seed(iteration)
            rng = {kind: each for kind, each in rng_state().items() if kind in ("python", "torch")}
        random.setstate(before)
        position = {"iteration": iteration, "lineage": 1, "loaders": [], "loader": -1, "controller": {}}
        self._state["session"] = encoder.encode("session", position)
        self._state["rng"] = encoder.encode("rng", rng)
        self._write(encoder.tensors)
        return ManifestFile(
            job=job, iteration=iteration, lineage=1, attempt=attempt, kind="requested", created_at=time.time(),
            parent=None, world_size=1, structure=[list(map(structure_of, self._tensors))],
            index=index_of(self._files, self._tensors, self._state),
        )  # fmt: skip


def _size_bytes(stored: Any) -> int:
    return int(stored.size.numel()) * int(stored.properties.dtype.itemsize)
