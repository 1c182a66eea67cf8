"""Checks the tensors of a kernel's call in one step of the interpreter.

Fixed tensors must be at the same addresses, the others must have the kernel's shapes and types; the
check returns the others' addresses. Called by program.py. It uses torch's C interface, through a
function that is compiled once (look.cpp): for 122 tensors it takes a quarter of the time of torch's
Python functions. Without a compiler, or if torch lacks that interface, the Python functions are
used (calls.py).
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

# From torch's aoti_torch/c/shim.h, in the order of look.cpp's Functions.
FUNCTIONS = tuple(
    f"aoti_torch_get_{name}"
    for name in (
        "data_ptr", "dim", "sizes", "strides", "dtype", "layout", "device_type", "device_index",
        "storage_size", "storage_offset",
    )
)  # fmt: skip
# From torch's C++ interface, since the C interface lacks it: at::native::is_neg(const at::Tensor&).
# None of the types that a kernel reads has a conjugate bit.
IS_NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"
WORDS = range(2, 4)  # words of an object after its header that may be the handle


def nothing(tensors: list[torch.Tensor]) -> None:
    """A check that always fails."""


def looker(tensors: Sequence[torch.Tensor], moving: Sequence[int]) -> Look:
    """A function of a call's tensors that returns the addresses of the moving ones, or None if
    anything has changed: type, shape, strides, dtype, device or layout of a moving one, or the
    address of another; or if the bytes of one are not its values. moving: their indices.
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
    """The offset of the handle in a tensor's object; the handle is one word, the address of the
    implementation.
    """
    words = (ctypes.c_void_p * WORDS.stop).from_address(id(tensor))
    at = next((i for i in WORDS if words[i] == tensor._cdata), None)
    return None if at is None else at * ctypes.sizeof(ctypes.c_void_p)


@cache
def _functions() -> tuple[int, ...] | None:
    """Addresses of FUNCTIONS and of IS_NEGATIVE."""
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
    """look.cpp, compiled."""
    return optional(
        "ark_look",
        "ark.interop.torch",
        "look.cpp",
        "a look at tensors",
        "calls of torch modules take longer",
    )
