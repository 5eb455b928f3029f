"""Whether the values in a manifest can be those of a checkpoint. Does not import torch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import (
    CHUNK_BYTES,
    DIGEST,
    ITEM_BYTES,
    MANIFEST,
    PAIRS,
    File,
    FileSummary,
    Manifest,
    Tensor,
    digest_of_chunks,
)
from holdfast.protocol.field_types import MAX_ITERATION, MAX_LINEAGE
from holdfast.protocol.ids import is_checkpoint_id

MOST_BYTES = 2**53
"""Maximum size of a file or a tensor."""
MOST_HEADER_BYTES = 1 << 30
MOST_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor that torch can copy."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_VIEW = re.compile(r"[a-z][a-z0-9_]{0,99}")
_RANK = re.compile(r"[0-9]{1,9}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def require_sound(manifest: Manifest) -> None:
    """Raise DamagedCheckpoint when the values in a manifest contradict each other or are out of range.

    A digest shows that bytes are unchanged, not that a correct program wrote them.
    """
    if reason := _fault(manifest):
        raise DamagedCheckpoint(MANIFEST, reason)


def require_sound_files(files: Sequence[File | FileSummary]) -> None:
    """Raise DamagedCheckpoint when the names or sizes of files are impossible."""
    if reason := _names_fault(files) or _file_fault([file for file in files if isinstance(file, File)]):
        raise DamagedCheckpoint(MANIFEST, reason)


def _fault(manifest: Manifest) -> str | None:
    if not (0 <= manifest.iteration <= MAX_ITERATION and 0 <= manifest.lineage <= MAX_LINEAGE):
        return f"iteration {manifest.iteration} or lineage {manifest.lineage} is out of range"
    if manifest.attempt < 0 or manifest.world_size < 1:
        return f"attempt {manifest.attempt} or world size {manifest.world_size} is out of range"
    if manifest.digest != DIGEST:
        return f"its digests are {manifest.digest!r}, not {DIGEST}"
    if manifest.parent is not None and not is_checkpoint_id(manifest.parent):
        return f"its parent {manifest.parent!r} is not the name of a checkpoint"
    for rank in manifest.rank_states:
        if not (_RANK.fullmatch(rank) and int(rank) < manifest.world_size):
            return f"it has the state of rank {rank!r}, but {manifest.world_size} ranks"
    if reason := _names_fault(manifest.files) or _file_fault(manifest.files):
        return reason
    files = {file.name: file for file in manifest.files}
    faults = (_tensor_fault(tensor, files.get(tensor.file), manifest.world_size) for tensor in manifest.tensors)
    return next(filter(None, faults), None) or _gap(manifest)


def _names_fault(files: Sequence[File | FileSummary]) -> str | None:
    names = set[str]()
    for file in files:
        if not _PLAIN_NAME.fullmatch(file.name) or file.name.endswith(".json"):
            return f"{file.name!r} is not a valid name of a payload file"
        if file.name in names:
            return f"{file.name} is listed twice"
        names.add(file.name)
        if min(file.size_bytes, file.stored_bytes, file.raw_bytes) < 0 or file.stored_bytes > 2 * MOST_BYTES:
            return f"{file.name} has an invalid size of {file.size_bytes} bytes"
        if file.written_by is not None and not is_checkpoint_id(file.written_by):
            return f"{file.name} is from {file.written_by!r}, which is not the name of a checkpoint"
    return None


def _file_fault(files: Sequence[File]) -> str | None:
    stored = {(file.name, file.size_bytes, file.header_digest) for file in files}
    for file in files:
        for layer in (file.encoding.layers or ()) if file.encoding is not None else ():
            if (layer.name, layer.size_bytes, layer.digest) not in stored:
                return f"{file.name} has the layer {layer.name!r}, which is not a file of the checkpoint"
        if file.encoding is not None and (reason := file.encoding.fault(file.name, file.size_bytes)):
            return reason
        if not 0 <= file.header_bytes <= file.raw_bytes <= MOST_BYTES:
            return f"{file.name} has an invalid size of {file.raw_bytes} bytes, {file.header_bytes} of them header"
        if file.header_bytes > MOST_HEADER_BYTES:
            return f"{file.name} has too large a header of {file.header_bytes} bytes"
        if file.parity is not None and (reason := file.parity.fault(file.name, file.size_bytes)):
            return reason
    return None


def _gap(manifest: Manifest) -> str | None:
    """Describe bytes of a file that no digest covers, or that two cover."""
    at = {file.name: file.header_bytes for file in manifest.files}
    for tensor in sorted(manifest.tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != at[tensor.file]:
            return f"tensor {tensor.name} does not begin where the previous one ends in {tensor.file}"
        at[tensor.file] = tensor.end
    short = (file for file in manifest.files if at[file.name] != file.raw_bytes)
    return next((f"no tensor covers {file.name} from byte {at[file.name]:,} on" for file in short), None)


@functools.lru_cache(maxsize=1 << 12)
def _is_possible(shape: tuple[int, ...], item_bytes: int) -> bool:
    """Return whether a tensor may have this shape; the shards of many ranks have the same."""
    # empty tensors have strides as well
    return min(shape, default=0) >= 0 and item_bytes * math.prod(side or 1 for side in shape) <= MOST_BYTES


def _tensor_fault(tensor: Tensor, file: File | None, world_size: int) -> str | None:
    name, shape, size_bytes = tensor.name, tensor.shape, tensor.end - tensor.start
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    if file is None:
        return f"tensor {name} is in {tensor.file!r}, which is not a file of the checkpoint"
    if item_bytes is None:
        return f"tensor {name} has the unknown dtype {tensor.dtype!r}"
    if not len(shape) == len(tensor.offsets) == len(tensor.global_shape) <= MOST_DIMENSIONS:
        return f"tensor {name} has shape {shape} at {tensor.offsets} of {tensor.global_shape}"
    for sides in (shape, tensor.global_shape):
        if not _is_possible(sides, item_bytes):
            return f"tensor {name} has the invalid shape {sides}"
    if not file.header_bytes <= tensor.start <= tensor.end <= file.raw_bytes:
        return f"tensor {name} is outside of {file.name}: bytes {tensor.start} to {tensor.end}"
    if math.prod(shape) * item_bytes != size_bytes:
        return f"tensor {name} has {size_bytes} bytes, which do not match {tensor.dtype} of shape {shape}"
    if tensor.rank is not None and not 0 <= tensor.rank < world_size:
        return f"tensor {name} belongs to rank {tensor.rank}, but there are {world_size} ranks"
    if tensor.chunks is not None:
        count = -(-size_bytes // CHUNK_BYTES)
        if len(tensor.chunks) != count or not all(map(_DIGEST.fullmatch, tensor.chunks)):
            return f"tensor {name} does not have one digest for each of {count} chunks"
        if digest_of_chunks(tensor.chunks) != tensor.digest:
            return f"the chunks of tensor {name} do not match its digest"
    elif size_bytes > CHUNK_BYTES:
        return f"tensor {name} has no chunk digests for {size_bytes:,} bytes"
    if tensor.view is None:
        return None
    if (stored := PAIRS.get(tensor.view)) is not None:
        is_sound = tensor.dtype == stored and shape[-1:] == tensor.global_shape[-1:] == (2,)
    else:
        is_sound = tensor.dtype == "U8" and _VIEW.fullmatch(tensor.view) is not None
    return (
        None
        if is_sound
        else f"tensor {name} cannot be viewed as {tensor.view!r}: it has {tensor.dtype} of shape {shape}"
    )
