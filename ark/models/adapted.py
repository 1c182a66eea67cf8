"""Adds low-rank adapters to a decoder's graph (LoRA, Hu et al. 2021). Each row of a batch may use
another adapter. The two low-rank matmuls of the row's adapter are computed, and their result is
added to the result of a linear layer. Called by ark.models.build; decoders do not depend on this
module.

The matmuls use the op for a mixture of experts (ark.expert_linear), in which each adapter is an
expert. The matrices of adapter 0 are zeros; rows without an adapter use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ark
from ark.models.quantized import QuantizedWeight
from ark.ops.views import new_tensor, refer

DOWN, UP = ".adapters_down", ".adapters_up"
"""Suffixes added to a weight's name for the matrices of all adapters: (count, rank, inputs) and
(count, outputs, rank).
"""


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters of a graph. count: the number of adapters, including adapter 0, which has
    no effect. rank: the highest rank of any adapter. targets: the names of the parameters that
    adapters change.
    """

    count: int
    rank: int
    targets: tuple[str, ...]


class AdaptedWeight:
    """The weight of a linear layer to which adapters apply. chosen: the number of the adapter of
    each row, (rows, 1) int32, for the entry point that is being traced.
    """

    chosen: ark.Tensor

    def __init__(
        self, base: Any, shape: tuple[int, int], adapters: Adapters, dtype: ark.DataType, name: str
    ) -> None:
        outputs, inputs = shape
        self.base, self.rank, self.outputs = base, adapters.rank, outputs
        self.down = ark.parameter((adapters.count, adapters.rank, inputs), dtype)
        self.up = ark.parameter((adapters.count, outputs, adapters.rank), dtype)
        self.down.rename(name + DOWN)
        self.up.rename(name + UP)

    def linear(self, input: Any, output: Any = None, name: str = "") -> ark.Tensor:
        """The result of ark.linear, plus the result of each row's adapter."""
        rows = input.shape()[0]
        thin = ark.expert_linear(input, self.down, self.chosen)
        thin = ark.reshape(thin, (rows, self.rank))
        added = ark.expert_linear(thin, self.up, self.chosen)
        product = ark.linear(input, self.base, name=name)
        return ark.add(product, ark.reshape(added, (rows, self.outputs)), output)


def adapt(model: ark.Module, adapters: Adapters | None, dtype: ark.DataType) -> list[AdaptedWeight]:
    """Replaces the weights that adapters change by AdaptedWeight objects, and returns these. The
    model's tensors must already have names.
    """
    weights = []
    for name in adapters.targets if adapters else ():
        *path, attribute = name.split(".")
        module: Any = model
        for part in _joined(path):
            module = module.sub_modules[part]
        base = getattr(module, attribute)
        shape = base.rows.shape() if isinstance(base, QuantizedWeight) else base.shape()
        module.parameters.pop(attribute, None)
        module.sub_modules.pop(attribute, None)
        weight = AdaptedWeight(base, tuple(shape), adapters, dtype, name)  # type: ignore[arg-type]
        setattr(module, attribute, weight)
        weights.append(weight)
    return weights


def choose(weights: list[AdaptedWeight], chosen: ark.Tensor) -> None:
    """Sets the tensor that has the number of each row's adapter, for the entry point that is traced
    next.
    """
    for weight in weights:
        weight.chosen = chosen


def chosen_state(rows: int, name: str) -> ark.Tensor:
    """The state tensor that has the number of each row's adapter."""
    tensor = new_tensor("adapters", "state", (rows, 1), ark.int32, (), (), (), name)
    tensor.rename(name)
    return tensor


def first(chosen: ark.Tensor, rows: int) -> ark.Tensor:
    """The adapter numbers of the first `rows` rows. chosen: the adapter numbers of all rows."""
    if rows == chosen.shape()[0]:
        return chosen
    return refer(chosen, (rows, 1), (0, 0), f"{chosen.ir.name}.first{rows}")


def _joined(path: list[str]) -> list[str]:
    """The names of the modules on a path, for example ["layers.3", "attention"] for a module of
    layer 3. A layer's number belongs to its name.
    """
    joined: list[str] = []
    for part in path:
        if part.isdigit():
            joined[-1] += f".{part}"
        else:
            joined.append(part)
    return joined
