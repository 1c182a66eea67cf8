"""The per-call work of a kernel on the host, in as few steps as possible.

Checks whether a call's tensors fit the plan and whether fixed tensors are still at the same
addresses (look.py does both in one step, if it is available), and allocates results. Called by
program.py. torch's own compiler has a C++ function for that allocation; in builds of torch without
it, a public function is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ark.frontend.foreign import is_literal
from ark.interop.torch.strides import Memory, contiguous


class Fixed:
    """The inputs that are the same tensors in nearly every call. which: their indices."""

    def __init__(self, which: Sequence[int]) -> None:
        self.which = sorted(which)
        self.addresses: dict[int, int] = {}  # by index, their addresses at the last check
        self._pick = itemgetter(*self.which) if len(self.which) > 1 else None

    def learn(self, inputs: Sequence[torch.Tensor]) -> None:
        """Records their addresses."""
        self.addresses = {i: inputs[i].data_ptr() for i in self.which}

    def lie(self, inputs: list[torch.Tensor]) -> bool:
        """True if the inputs are at the recorded addresses and their bytes are their values."""
        if not self.which:
            return True
        picked = [inputs[i] for i in self.which] if self._pick is None else self._pick(inputs)
        if list(map(torch.Tensor.data_ptr, picked)) != list(self.addresses.values()):
            return False
        return all(map(is_literal, picked))


def kinds(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The properties of each tensor that a kernel is compiled for. Raises AttributeError for
    objects that are not tensors.
    """
    return [(type(t), t.shape, t.dtype, t.device, t.layout) for t in tensors]


def maker(memory: Memory, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that returns a new uninitialised tensor: with these strides, or contiguous if a
    kernel cannot fill them.
    """
    if memory.order is None:
        memory = contiguous(memory.shape)
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is None or device.index not in (None, 0) or _several(device):
        strided = partial(torch.empty_strided, memory.shape, memory.strides)
        return partial(strided, dtype=dtype, device=device)
    return partial(quick, memory.shape, memory.strides, dtype)


def _several(device: torch.device) -> bool:
    """True if the machine has several devices of this type; the quick function uses the current
    one.
    """
    return device.type != "cpu" and torch.get_device_module(device).device_count() > 1
