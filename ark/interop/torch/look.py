"""Checks the tensors of a kernel's call with one call of a compiled function.

Fixed tensors must be at the same addresses as before, with the same strides; the others must have
the kernel's shapes and types, and their addresses are returned. The function uses torch's C
interface and is compiled once (look.cpp). For 122 tensors it takes a quarter of the time of torch's
Python functions. Without a compiler, or if torch lacks that interface, the Python functions are
used (calls.py). Called by program.py.
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
# The mangled name of at::native::is_neg(const at::Tensor&), a function of torch's C++ interface;
# the C interface has none for this. A conjugate bit need not be checked, because no type that a
# kernel reads has one.
IS_NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"
WORDS = range(2, 4)  # words after an object's header that may be the handle


def nothing(tensors: list[torch.Tensor]) -> None:
    """A check that always returns None, so that the caller makes all checks in Python."""


def looker(tensors: Sequence[torch.Tensor], moving: Sequence[int]) -> Look:
    """Returns a function of a call's tensors. It returns the addresses of the moving tensors, or
    None if anything has changed: type, shape, strides, dtype, device or layout of a moving tensor,
    or the address, shape or strides of another one. It also returns None if the memory of a tensor
    does not have its plain values. moving: the indices of the moving tensors.
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
    """The offset of the handle in a tensor's Python object. The handle is one word, the address of
    the implementation.
    """
    words = (ctypes.c_void_p * WORDS.stop).from_address(id(tensor))
    at = next((i for i in WORDS if words[i] == tensor._cdata), None)
    return None if at is None else at * ctypes.sizeof(ctypes.c_void_p)


@cache
def _functions() -> tuple[int, ...] | None:
    """The addresses of FUNCTIONS and of IS_NEGATIVE; None if torch lacks one."""
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
