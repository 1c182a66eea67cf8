"""The host's work in each call of a kernel on torch's tensors, in as few steps as possible. The
host checks whether the tensors fit the plan, checks whether fixed tensors (parameters) are still at
the same addresses, and allocates results. The function that look.py compiles makes all checks in
one step, if it is available. Results are allocated by a C++ function that torch has for its own
compiler or, in builds of torch without it, by a public function. Called by program.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ark.frontend.foreign import is_literal
from ark.interop.torch.strides import Memory, contiguous
from ark.interop.torch.values import Value


class Fixed:
    """The inputs of a kernel that are the same tensors in nearly every call (parameters). which:
    the indices of these inputs.
    """

    def __init__(self, which: Sequence[int]) -> None:
        self.which = sorted(which)
        self.addresses: dict[int, int] = {}  # by index, as of the last check
        self._strides: list[tuple[int, ...]] = []
        self._pick = itemgetter(*self.which) if len(self.which) > 1 else None

    def learn(self, inputs: Sequence[torch.Tensor]) -> None:
        """Records the addresses and strides of the fixed inputs."""
        self.addresses = {i: inputs[i].data_ptr() for i in self.which}
        self._strides = [inputs[i].stride() for i in self.which]

    def lie(self, inputs: list[torch.Tensor]) -> bool:
        """True if the fixed inputs are at the recorded addresses, with the recorded strides, and
        the bytes in memory are their values (not negated or conjugated).
        """
        if not self.which:
            return True
        picked = [inputs[i] for i in self.which] if self._pick is None else self._pick(inputs)
        if list(map(torch.Tensor.data_ptr, picked)) != list(self.addresses.values()):
            return False
        if list(map(torch.Tensor.stride, picked)) != self._strides:
            return False
        return all(map(is_literal, picked))


def kinds(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each tensor, the properties for which a kernel is compiled. Raises AttributeError for
    objects that are not tensors.
    """
    return [(type(t), t.shape, t.dtype, t.device, t.layout) for t in tensors]


def makers(
    outputs: Sequence[Any], memory: Sequence[Memory | None] | None, device: torch.device
) -> list[Callable[[], Any]]:
    """Returns a function for each output of a kernel. If the kernel computes the output, the
    function allocates a new tensor for it. If the output is a constant, the function returns the
    constant. memory: the memory layout (strides) of each output; by default all outputs are
    contiguous.
    """
    strides = memory or [None] * len(outputs)
    return [
        _maker(m or contiguous(v.shape), v.dtype, device)
        if isinstance(v, Value)
        else partial(_same, v)
        for v, m in zip(outputs, strides, strict=True)
    ]


def _same(value: Any) -> Any:
    """Returns a constant result unchanged."""
    return value


def _maker(memory: Memory, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Returns a function that returns a new, uninitialised tensor. It has the strides of `memory`,
    or is contiguous if a kernel cannot fill memory with those strides.
    """
    if memory.order is None:
        memory = contiguous(memory.shape)
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is None or device.index not in (None, 0) or _several(device):
        strided = partial(torch.empty_strided, memory.shape, memory.strides)
        return partial(strided, dtype=dtype, device=device)
    return partial(quick, memory.shape, memory.strides, dtype)


def _several(device: torch.device) -> bool:
    """True if the machine has several devices of this type. The fast allocation function uses the
    current device only.
    """
    return device.type != "cpu" and torch.get_device_module(device).device_count() > 1
