"""Checks the results of driver API calls and raises errors as ark's exceptions.

Called by device.py and peer.py only.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ark.errors import GpuError, SystemError

try:
    from cuda.bindings import driver as cu
except ImportError as error:
    raise SystemError(
        "the Python package cuda-python is not installed; install it with "
        '`pip install "ark-gpu[cuda]"`'
    ) from error

__all__ = ["check", "cu", "current", "fill_struct", "struct_bytes", "words"]

# Faults of a kernel. After one of them the process's context on the device is unusable.
_FAULTS = (
    cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    cu.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    cu.CUresult.CUDA_ERROR_ASSERT,
    cu.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
    cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    cu.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    cu.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    cu.CUresult.CUDA_ERROR_INVALID_PC,
    cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,
    cu.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    cu.CUresult.CUDA_ERROR_NVLINK_UNCORRECTABLE,
)


def words(code: Any) -> str:
    """The driver's name and description of a result code."""
    _, name = cu.cuGetErrorName(code)
    _, text = cu.cuGetErrorString(code)
    if not name or not text:
        return str(code)
    return f"{name.decode()}: {text.decode()}"


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Unpacks a driver call's result. Raises GpuError for a device fault and SystemError for other
    errors.

    `doing` is the beginning of the error message: what was tried, and on which device.
    """
    code, *values = result
    if code == cu.CUresult.CUDA_SUCCESS:
        return values[0] if len(values) == 1 else tuple(values)
    if code in _FAULTS:
        raise GpuError(
            f"{doing}: the GPU reported {words(code)}. Its context in this process is lost; start "
            "the process again. compute-sanitizer names the faulting instruction"
        )
    raise SystemError(f"{doing}: {words(code)}")


def struct_bytes(struct: Any, nbytes: int) -> bytes:
    """The bytes of one of the driver's structs. Its memory is read instead of its members, because
    the members that the bindings expose differ between minor versions (CUipcMemHandle.reserved
    exists up to 13.3 only).
    """
    return ctypes.string_at(int(struct.getPtr()), nbytes)


def fill_struct(struct: Any, data: bytes) -> None:
    """Writes one of the driver's structs; see `struct_bytes`."""
    ctypes.memmove(int(struct.getPtr()), data, len(data))


class current:  # noqa: N801 (used like a function: `with current(context)`)
    """A context manager that makes a CUDA context current in the calling thread and restores the
    previous one at the end. It does nothing if the context is current already, as in threads that
    use PyTorch.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        code, context = cu.cuCtxGetCurrent()
        if code == cu.CUresult.CUDA_SUCCESS and int(context) == int(self._context):
            return
        check(cu.cuCtxPushCurrent(self._context), "entering the device's context")
        self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            cu.cuCtxPopCurrent()
