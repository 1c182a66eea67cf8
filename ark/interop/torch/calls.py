"""What a call of a kernel looks at and makes, in as few steps of the host as can be: whether its
tensors are what the plan is for, whether those that stay still lie where they lay (look.py asks
both in one step, where it can), and memory for the results. Called by program.py.

torch's own compiler has a function in C++ for that memory; where a build of torch lacks it, a
public one does the same.
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
    """The inputs that are the same tensors in nearly every call. which: their places."""

    def __init__(self, which: Sequence[int]) -> None:
        self.which = sorted(which)
        self.addresses: dict[int, int] = {}  # by place, where they lay when they were looked at
        self._pick = itemgetter(*self.which) if len(self.which) > 1 else None

    def learn(self, inputs: Sequence[torch.Tensor]) -> None:
        """Looks where they lie."""
        self.addresses = {i: inputs[i].data_ptr() for i in self.which}

    def lie(self, inputs: list[torch.Tensor]) -> bool:
        """Do they still lie there, and are their bytes still their values?"""
        if not self.which:
            return True
        picked = [inputs[i] for i in self.which] if self._pick is None else self._pick(inputs)
        if list(map(torch.Tensor.data_ptr, picked)) != list(self.addresses.values()):
            return False
        return all(map(is_literal, picked))


def kinds(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of each: what the kernel is made for. AttributeError for what is no tensor."""
    return [(type(t), t.shape, t.dtype, t.device, t.layout) for t in tensors]


def maker(memory: Memory, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that gives a new tensor whose contents are any: of that memory, or contiguous
    where a kernel cannot fill it.
    """
    if memory.order is None:
        memory = contiguous(memory.shape)
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is None or device.index not in (None, 0) or _several(device):
        strided = partial(torch.empty_strided, memory.shape, memory.strides)
        return partial(strided, dtype=dtype, device=device)
    return partial(quick, memory.shape, memory.strides, dtype)


def _several(device: torch.device) -> bool:
    """Are there others of the kind? The quick way takes the one that is current."""
    return device.type != "cpu" and torch.get_device_module(device).device_count() > 1
