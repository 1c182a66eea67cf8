"""The parameters, buffers and constants of a module that a kernel reads in place. Called by
module.py and iterate.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ark.errors import InvalidUsageError


class Kept:
    """The tensors of a module that a kernel reads. It also stores where the module refers to each
    of them (the dictionary of a submodule and the key), so that a replaced tensor is noticed.

    names: the tensors' names, as in named_parameters and named_buffers, or keys of `constants`.
    missing: the requested names for which the module has no tensor. tensors: the tensors that the
    kernel reads at present. If `same` finds that the module has replaced some, `checked` returns
    the new ones.
    """

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], constants: Mapping[str, Any]
    ) -> None:
        places: dict[str, tuple[dict[str, Any], str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for owner in (part._buffers, part._parameters):
                for key, value in owner.items():
                    if value is not None:
                        places[f"{path}.{key}" if path else key] = owner, key
        fixed = {n: t for n, t in constants.items() if isinstance(t, torch.Tensor)}
        self.missing = [n for n in names if n not in places and n not in fixed]
        self.names = [n for n in names if n not in self.missing]
        locations = [places.get(name, (fixed, name)) for name in self.names]
        self._owners, self._keys = [owner for owner, _ in locations], [k for _, k in locations]
        self.tensors: list[torch.Tensor] = self.now()
        self._kinds = [(t.shape, t.dtype) for t in self.tensors]

    def now(self) -> list[Any]:
        """The tensors to which the module refers now; None for a tensor that was removed."""
        return list(map(dict.get, self._owners, self._keys))

    def same(self) -> bool:
        """True if the module has not replaced any of the tensors by another one, as
        `load_state_dict(assign=True)` does.
        """
        return all(map(operator.is_, self.now(), self.tensors))

    def checked(self) -> list[torch.Tensor]:
        """The module's present tensors. Raises InvalidUsageError if one was removed, or has another
        shape or type.
        """
        now = self.now()
        for name, tensor, (shape, dtype) in zip(self.names, now, self._kinds, strict=True):
            kind = "removed" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            if tensor is None or (tensor.shape, tensor.dtype) != (shape, dtype):
                raise InvalidUsageError(
                    f"the module's {name!r} is {kind}; the kernel was compiled for {dtype} "
                    f"{list(shape)}; create another kernel"
                )
        return now
