"""Accesses the memory of other libraries' arrays: finds an array's address, and checks whether the
bytes in memory can be read as the array's values. All code that reads the address or the bytes of a
torch tensor or of a NumPy array calls this module first (ark.frontend.tensor, ark.interop,
ark.distributed). The check is necessary because a tensor may have a flag that changes the meaning
of its bytes (negative, conjugate), a layout that is not strided, no memory, or less memory than its
shape needs. If torch is needed, the caller imports it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType

if TYPE_CHECKING:
    import torch

ArrayLike: TypeAlias = "np.ndarray | torch.Tensor"
"""An array of another library whose values can be written to a tensor."""


def is_torch(value: Any) -> bool:
    """True if the value is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_memory(tensor: Any) -> None:
    """Raises InvalidUsageError unless a torch tensor is dense and has the memory that its shape
    needs.
    """
    torch, kind = sys.modules["torch"], type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidUsageError(
            f"a tensor is of the class {kind.__name__}, which computes its own values; pass a "
            "plain torch.Tensor"
        )
    if tensor.layout != torch.strided:
        raise InvalidUsageError(f"a tensor has the layout {tensor.layout}; call to_dense() first")
    if tensor.is_nested:
        raise InvalidUsageError("a tensor is nested; call to_padded_tensor(...) first")
    if tensor.is_quantized:
        raise InvalidUsageError("a tensor is quantized; call dequantize() first")
    try:
        address, present = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidUsageError(
            f"a tensor has no memory ({str(error).splitlines()[0]}); call ark outside of "
            "transformations such as torch.func.vmap and torch.func.grad"
        ) from error
    needed = (tensor.storage_offset() + _span(tensor)) * tensor.element_size()
    if _span(tensor) and (present < needed or not address):
        raise InvalidUsageError(
            f"a tensor of shape {list(tensor.shape)} on {tensor.device} needs {needed} bytes of "
            f"storage, but its storage has {present if address else 0}; pass a tensor whose "
            "storage has memory"
        )


def _span(tensor: Any) -> int:
    """The distance in memory from a tensor's first element to its last, in elements."""
    count = int(tensor.numel())
    if count == 0 or tensor.is_contiguous():
        return count
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum(int((size - 1) * step) for size, step in dims)


def is_literal(tensor: Any) -> bool:
    """True if the bytes of a torch tensor are its values. With its negative or conjugate bit set
    the values are the negatives or conjugates of the bytes.
    """
    return not (tensor.is_neg() or tensor.is_conj())


def dense(tensor: Any) -> Any:
    """A contiguous torch tensor with the values of `tensor`, whose bytes are the values: `tensor`
    itself, or a copy.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def address_of(tensor: Any) -> int:
    """The address of a torch tensor that is used in place. Raises InvalidUsageError unless its
    values are contiguous in memory.
    """
    check_memory(tensor)
    if not is_literal(tensor):
        raise InvalidUsageError(
            "a torch tensor has its negative or conjugate bit set, so that its memory holds other "
            "values; pass tensor.resolve_neg().resolve_conj()"
        )
    if not tensor.is_contiguous():
        raise InvalidUsageError("the torch tensor is not contiguous; pass tensor.contiguous()")
    return int(tensor.data_ptr())


def written(tensor: Any) -> None:
    """Tells torch that a tensor's memory was written, so that torch refuses gradients that need the
    previous values.
    """
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def torch_to_numpy(value: Any) -> np.ndarray:
    """A torch tensor of any device as a NumPy array (bf16 and fp8 in ml_dtypes' types)."""
    torch = sys.modules["torch"]
    check_memory(value)
    host = dense(value.detach()).cpu()
    named = str(host.dtype)
    if named == "torch.bfloat16" or named.startswith("torch.float8"):
        kind = DataType.from_torch(host.dtype)
        word = torch.int16 if kind.bits == 16 else torch.uint8
        return host.view(word).numpy().view(kind.numpy)  # type: ignore[no-any-return]
    return host.numpy()  # type: ignore[no-any-return]


def as_array(value: Any) -> np.ndarray:
    """An array with the values of a torch tensor, a NumPy array or an object that NumPy converts.

    Raises InvalidUsageError for a masked array.
    """
    if is_torch(value):
        return torch_to_numpy(value)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidUsageError(
            "the array has a mask, which would be lost; pass array.filled(value), or array.data"
        )
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InvalidUsageError(f"the value cannot be converted to an array: {error}") from error


def check_native(array: np.ndarray) -> None:
    """Raises InvalidUsageError unless the bytes of a NumPy array are its values on this machine."""
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidUsageError(
            "the array has a mask, which would be lost; pass array.filled(value), or array.data"
        )
    if not array.dtype.isnative:
        raise InvalidUsageError(
            f"the array's elements ({array.dtype.str}) are in the byte order of another machine; "
            "pass array.astype(array.dtype.newbyteorder('='))"
        )
    if not array.flags.c_contiguous:
        raise InvalidUsageError("the array is not contiguous; pass numpy.ascontiguousarray(array)")
