"""The dtypes that safetensors supports, and how others are stored."""

from __future__ import annotations

import functools

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format import manifest as fmt

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_BY_NAME = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}
PAIRED = {torch.complex128: torch.float64, torch.complex32: torch.float16}
"""Complex dtypes that safetensors lacks, and the dtype of their two parts."""


def stored_as(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str | None]:
    """Return (dtype, shape) in terms of safetensors, and the torch dtype to view it as when it is read."""
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if dtype in DTYPE_NAMES:
        return DTYPE_NAMES[dtype], shape, None
    view = str(dtype).removeprefix("torch.")
    if dtype in PAIRED:
        return DTYPE_NAMES[PAIRED[dtype]], (*shape, 2), view
    if dtype.itemsize == 1:  # newer kinds of float8 and float4
        return "U8", shape, view
    raise TypeError(f"{name}: tensors of {dtype} cannot be stored")


def dtype_of_view(view: str) -> torch.dtype:
    """Return the dtype of this name, from a fixed table, so that a file cannot name any attribute of torch.

    Raises:
        ValueError: this torch has no such dtype.
    """
    found = _BY_NAME.get(view)
    if found is None:
        raise ValueError(f"this torch has no dtype {view!r}: restore with the torch that wrote it, or a newer one")
    return found


def shape_of(stored: fmt.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and global shape of a stored tensor in torch."""
    dtype, is_paired = _kind(stored.dtype, stored.view)
    return dtype, stored.global_shape[:-1] if is_paired else stored.global_shape


@functools.cache
def _kind(dtype: str, view: str | None) -> tuple[str, bool]:
    """Return the name of the torch dtype, and whether each element is stored as a pair."""
    found = dtype_of(dtype, view)
    return str(found), found in PAIRED


def dtype_of(dtype: str, view: str | None) -> torch.dtype:
    """Return the torch dtype of a stored tensor.

    Raises:
        IncompatibleCheckpoint: this torch has no dtype of that name.
        DamagedCheckpoint: `dtype` cannot be viewed as `view`.
    """
    if view is None:
        return DTYPES[dtype]
    try:
        found = dtype_of_view(view)
    except ValueError as error:
        raise IncompatibleCheckpoint(str(error)) from error
    if found not in PAIRED and found.itemsize != 1:
        raise DamagedCheckpoint(fmt.MANIFEST, f"a tensor stored as {dtype} cannot be viewed as {view}")
    return found
