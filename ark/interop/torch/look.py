"""Checks the tensors of a kernel's call with one call of a compiled function.

Fixed tensors (parameters) must be at the same addresses as before, with the same strides. All other
tensors must have the kernel's shapes and types; their addresses are returned. The function uses
torch's C interface and is compiled once (look.cpp). For 122 tensors it takes a quarter of the time
of torch's Python functions. Without a compiler, or if torch lacks that interface, the Python
functions are used (calls.py). Called by program.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ark import log
from ark.frontend.foreign import dense
from ark.runtime.extension import optional

Look = Callable[[list[torch.Tensor]], "tuple[int, ...] | None"]

# Functions of torch's aoti_torch/c/shim.h, in the order of the struct Functions in look.cpp.
FUNCTIONS = tuple(
    f"aoti_torch_get_{name}"
    for name in (
        "data_ptr", "dim", "sizes", "strides", "dtype", "layout", "device_type", "device_index",
        "storage_size", "storage_offset",
    )
)  # fmt: skip
# The mangled name of at::native::is_neg(const at::Tensor&), which reads a tensor's negative bit. It
# is from torch's C++ interface, because the C interface has no such function. The conjugate bit
# need not be checked, because only complex tensors have one, and no kernel reads them.
IS_NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"
WORDS = range(2, 4)  # words after an object's header that may be the handle


def nothing(tensors: list[torch.Tensor]) -> None:
    """Stands in for the compiled check: it always returns None, so that the caller makes all checks
    in Python.
    """


def looker(tensors: Sequence[torch.Tensor], moving: Sequence[int]) -> Look:
    """Returns a function that checks the tensors of a call. moving: the indices of the tensors that
    may have another address in each call; all other tensors are fixed. If the tensors fit, the
    function returns the addresses of the moving tensors. Otherwise it returns None: if the type,
    shape, strides, dtype, device or layout of a moving tensor has changed, if the address, shape or
    strides of a fixed tensor has changed, or if the bytes of a tensor are not its values (negated
    or conjugated).
    """
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return nothing
    known = _functions()
    module = _module() if known is not None else None
    offsets = {_offset(t) for t in tensors}
    if module is None or len(offsets) != 1 or None in offsets:
        return nothing
    places = set(moving)
    examples = [dense(t) if i in places else t for i, t in enumerate(tensors)]
    sizes = [t.nbytes if i in places else -1 for i, t in enumerate(examples)]
    look: Look = module.looker(known, offsets.pop(), examples, sizes)
    return look


def _offset(tensor: torch.Tensor) -> int | None:
    """The offset of torch's handle in a tensor's Python object. The handle is one word that holds
    the address of the tensor's implementation.
    """
    words = (ctypes.c_void_p * WORDS.stop).from_address(id(tensor))
    at = next((i for i in WORDS if words[i] == tensor._cdata), None)
    return None if at is None else at * ctypes.sizeof(ctypes.c_void_p)


@cache
def _functions() -> tuple[int, ...] | None:
    """The addresses of torch's functions in FUNCTIONS and of IS_NEGATIVE; None if torch lacks one
    of them.
    """
    names = (*FUNCTIONS, IS_NEGATIVE)
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        pointers = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names]
    except (OSError, AttributeError) as error:
        log.info(f"torch's C interface is not available, so calls take longer: {error}")
        return None
    return tuple(int(f.value or 0) for f in pointers)


@cache
def _module() -> ModuleType | None:
    """The compiled module of look.cpp; None if it cannot be compiled."""
    return optional(
        "ark_look",
        "ark.interop.torch",
        "look.cpp",
        "a look at tensors",
        "calls of torch modules take longer",
    )
