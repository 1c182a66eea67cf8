"""Predicts the time of an op on a rank: the time of its arithmetic or of its memory traffic,
whichever is longer.

On machines whose kernels load tiles by box copies (TMA), the prediction is more detailed. A
matmul with 16-bit weights takes the predicted time of its cut into tiles (ark.lower.cuts). Several
matmuls of one input count as one, because lowering joins them. Elementwise ops on a matmul's result
take no time. Every other op and matmul has a start and an end in which processors wait. Called by
ark.parallel.plans.choices.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ark.ir.graph import Node
from ark.lower.cuts import candidates, choose_cut, predicted_us
from ark.machine import Machine
from ark.machine.variant import LOAD
from ark.ops.math import GATED

FREE = ("kv_append",)  # ops that are executed as a part of the previous op
JOINED = ("add", "mul", "sub", *GATED, "gelu", "silu", "relu", "sigmoid")


@dataclass(frozen=True)
class Rates:
    """The work that a rank does per microsecond. step_us: the fixed time of every collective.
    tiled: the machine model with the kernel variant that loads tiles by box copies (TMA), or
    None if it has no such variant.
    """

    flops_per_us: float
    memory_bytes_per_us: float
    link_bytes_per_us: float
    step_us: float = 5.0
    tiled: Machine | None = None


def rates_of(machine: Machine, link_gbps: float) -> Rates:
    """The rates of a machine. link_gbps: GB/s at which a rank sends."""
    boxed = next((v for v in machine.variants if v.role(LOAD) and not v.stages), None)
    tiled = dataclasses.replace(machine, variants=(boxed,)) if boxed else None
    bandwidth = machine.bandwidth_gbps * 1e3
    return Rates(machine.tflops * 1e6, bandwidth, link_gbps * 1e3, tiled=tiled)


class Times:
    """The times of the nodes of a graph. A node's time may depend on its neighbours."""

    def __init__(self, rates: Rates, nodes: Sequence[Node] = ()) -> None:
        self.rates = rates
        self.widths: dict[int, float] = {}
        self.joined: set[int] = set()
        if rates.tiled is None:
            return
        columns: Counter[int] = Counter()
        uses = Counter(t.buffer.id for n in nodes for t in n.inputs)
        products = set()
        for node in nodes:
            if _boxes(node):
                columns[node.inputs[0].id] += node.outputs[0].shape[-1]
                products.add(node.outputs[0].buffer.id)
            elif node.type in JOINED:
                written = (t.buffer.id for t in node.inputs)
                if any(b in products and uses[b] == 1 for b in written):
                    self.joined.add(node.id)
        for node in nodes:
            if _boxes(node):
                self.widths[node.id] = columns[node.inputs[0].id] / node.outputs[0].shape[-1]

    def added_us(self, elements: float, itemsize: int, shares: int) -> float:
        """The time in which a rank adds the partial sums of its part of a tensor. A single op reads
        all partial sums and writes the total.
        """
        moved = elements * itemsize * (shares + 1) / self.rates.memory_bytes_per_us
        return moved + (self.rates.tiled.costs.op_us if self.rates.tiled is not None else 0.0)

    def us(
        self, node: Node, flops: float, moved: float, rows: float, columns: float, depth: float
    ) -> float:
        """Microseconds of a rank's share of a node. flops, moved: the operations of the share and
        its bytes of memory traffic. rows, columns, depth: the sizes of this rank's part of a
        matmul.
        """
        rates = self.rates
        plain = max(flops / rates.flops_per_us, moved / rates.memory_bytes_per_us)
        if rates.tiled is None:
            return plain
        costs = rates.tiled.costs
        if node.id in self.joined:
            return 0.0
        if not _boxes(node):
            return plain + (0.0 if node.type in FREE else costs.op_us)
        wide = self.widths.get(node.id, 1.0)
        shape = (1, 1, max(1, round(rows)), max(1, round(columns * wide)))
        size = node.inputs[1].dtype.itemsize
        # The result has fewer columns than the narrowest tile. So no tile fits, and the op takes
        # the time of a product without matrix units.
        if not candidates(shape, round(depth), size, rates.tiled, False):
            return plain + costs.op_us
        cut = choose_cut(shape, round(depth), size, rates.tiled, False, {})
        tiles = math.ceil(shape[2] / cut.rows) * math.ceil(shape[3] / cut.columns)
        rounds = math.ceil(tiles / rates.tiled.processors)
        us = predicted_us(cut, shape, round(depth), size, rates.tiled)
        us += rounds * costs.product_tile_us + costs.op_us
        return max(us / wide, moved / rates.memory_bytes_per_us)


def _boxes(node: Node) -> bool:
    """True if the node is a matmul of rows with a matrix of a 16-bit type."""
    return (
        node.type == "matmul"
        and node.inputs[1].dtype.itemsize == 2
        and len(node.inputs[1].shape) == 2
        and node.outputs[0].shape[-2] > 1
    )
