"""Which dtypes safetensors has a word for, and what the others are stored as."""

from __future__ import annotations

import torch

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
"""Complex dtypes that safetensors lacks, and that of their two parts."""


def stored_as(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str | None]:
    """(dtype, shape) as safetensors can name them, and the torch dtype to view that as when it comes back."""
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if dtype in DTYPE_NAMES:
        return DTYPE_NAMES[dtype], shape, None
    view = str(dtype).removeprefix("torch.")
    if dtype in PAIRED:
        return DTYPE_NAMES[PAIRED[dtype]], (*shape, 2), view
    if dtype.itemsize == 1:  # the younger kinds of float8 and float4: bytes by another name
        return "U8", shape, view
    raise TypeError(f"{name}: tensors of {dtype} cannot be stored")


def dtype_of_view(view: str) -> torch.dtype:
    """The dtype that a checkpoint names, from a closed table: no name in a file is looked up in a module.

    ValueError for a name that this torch has no dtype of.
    """
    found = _BY_NAME.get(view)
    if found is None:
        raise ValueError(f"this torch has no dtype {view!r}: restore with the torch that wrote it, or a newer one")
    return found
