"""Replaces the weights of a decoder's linear layers by quantised weights. Called by
ark.models.build, after the weights are divided among ranks; decoders do not depend on this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ark
from ark.errors import InvalidUsageError
from ark.ir.dtype import CODE_STEP
from ark.models.formats.layout import Layout

Share = tuple[slice, ...]


class QuantizedWeight(ark.Module):
    """The weight of a linear layer, stored as rows of codes with scales. shape: ([experts,]
    outputs, inputs). dtype: the type to which the weight is dequantised for matmuls of many rows.
    """

    def __init__(self, shape: list[int], layout: Layout, dtype: ark.DataType) -> None:
        super().__init__()
        self.rows = ark.parameter(shape, layout.row_type(shape[-1], dtype))
        self.order = ark.parameter((shape[-1],), ark.int32) if layout.ordered else None

    def linear(self, input: Any, output: Any = None, name: str = "") -> ark.Tensor:
        """Computes ark.linear with this weight."""
        x = input if self.order is None else ark.gather(input, self.order, axis=1)
        return ark.linear(x, self.rows, output, name or self._name)

    def expert_linear(
        self, input: Any, experts: Any, output: Any = None, name: str = ""
    ) -> ark.Tensor:
        """Computes ark.expert_linear with this weight, whose shape is (experts, outputs,
        inputs).
        """
        return ark.expert_linear(input, self.rows, experts, output, name or self._name)


def quantise(
    model: ark.Module,
    dtype: ark.DataType,
    layouts: Mapping[str, Layout],
    shares: dict[ark.Parameter, Share],
) -> dict[str, Layout]:
    """Replaces the parameters listed in `layouts` by quantised ones, and returns the layouts of
    this rank's parameters. A layout has smaller groups if the rank's number of inputs is not a
    multiple of the group. shares: a dict to which the new parameters are added, each with the part
    that the rank holds.
    """
    own = {}
    for name, module, attribute in list(_parameters(model)):
        if name not in layouts:
            continue
        whole = module.parameters.pop(attribute)
        share = shares.pop(whole, ())
        inputs = whole.shape()[-1]
        layout = own[name] = layouts[name].grouped(inputs)
        cut = len(share) == len(whole.shape()) and share[-1] != slice(None)
        if layout.ordered and cut:
            raise InvalidUsageError(
                f"the inputs of {name} are reordered (act-order), and ranks cannot share a weight "
                "like that; use one rank, or a checkpoint without act-order"
            )
        if layout.group % CODE_STEP:
            raise InvalidUsageError(
                f"a rank's share of {name} has {inputs} inputs, which are not whole groups of "
                f"{CODE_STEP} of a quantised weight; use fewer ranks"
            )
        weight = QuantizedWeight(whole.shape(), layout, dtype)
        setattr(module, attribute, weight)
        if share:
            shares[weight.rows] = share
    return own


def _parameters(module: ark.Module, prefix: str = "") -> Iterator[tuple[str, ark.Module, str]]:
    """Yields, for each parameter, its dotted name, its module and the name of its attribute."""
    for name in module.parameters:
        yield prefix + name, module, name
    for name, inner in module.sub_modules.items():
        yield from _parameters(inner, f"{prefix}{name}.")
