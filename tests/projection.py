"""A projection of a prompt's rows to queries, keys and values, for the variant `matrix`, and its
expected result by NumPy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.backend import registry
from ark.ir.dtype import DataType, bf16, fp32, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.variant import COMPUTE, Role, Variant
from ark.plan.types import Plan
from ark.plan.verify import verify


def with_matrix(machine: Machine) -> Machine:
    """A machine with one thread per processor and the variant `matrix`. It runs the common
    (vendor-independent) bodies, but has the tile sizes of a machine with warpgroups.
    """
    variants = (*machine.variants, Variant("matrix", (Role(COMPUTE, 1),)))
    tiles = registry.machine("h100").box_tiles
    return dataclasses.replace(machine, variants=variants, box_tiles=tiles)


@dataclass(frozen=True)
class Projection:
    """The shape of a projection of rows of k elements to heads + 2 kv_heads of `width` columns.
    Caches have `context` rows. each: True if each row belongs to a sequence of its own, with its
    own position and its own heads of the caches; the new keys and values are then also copied to
    `newest`. page: positions of a page, if such caches are in pages; a pool has one page more than
    the sequences need, and their pages follow each other in descending order.
    """

    rows: int
    k: int
    heads: int
    kv_heads: int
    width: int
    context: int
    dtype: DataType = bf16
    each: bool = False
    page: int = 0

    @property
    def cache(self) -> tuple[int, ...]:
        """The shape of each cache."""
        if self.page:
            return (self.table.size + 1, self.kv_heads, self.page, self.width)
        return (self.sequences * self.kv_heads, self.context, self.width)

    @property
    def table(self) -> np.ndarray:
        """The numbers of each sequence's pages."""
        most = self.context // self.page
        return np.arange(self.rows * most, 0, -1, np.int32).reshape(self.rows, most)

    @property
    def sequences(self) -> int:
        return self.rows if self.each else 1

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.width

    def plan(self, machine: Machine, **options: Any) -> Plan:
        """Returns a verified plan of x w^T, rotated and stored to `queries`, `keys` and
        `values`.
        """
        graph = Graph()

        def state(name: str, shape: tuple[int, ...], dtype: DataType = self.dtype) -> Any:
            return graph.tensor(shape, dtype, arena="state", name=name)

        x, w = state("x", (self.rows, self.k)), state("w", (self.columns, self.k))
        position, frequencies = (
            state("position", (self.sequences,), int32),
            state("frequencies", (self.width // 2,), fp32),
        )
        caches = [state(name, self.cache) for name in ("keys", "values")]
        if self.page:
            caches.append(state("pages", self.table.shape, int32))
        outputs = [state("queries", (self.rows, self.heads * self.width))]
        if self.each:
            outputs.append(state("newest", (self.rows, 2 * self.kv_heads * self.width), fp32))
        product = graph.tensor((self.rows, self.columns), fp32)
        attrs = {"transpose_a": False, "transpose_b": True}
        graph.add("matmul", [x, w], [product], attrs, "product")
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.width}
        graph.add("rope_kv", [product, position, frequencies, *caches], outputs, sizes, "rotation")
        result = plan(graph, machine, {"variant": "matrix", **options})
        verify([result])
        return result

    def random(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random contents by name of all tensors that are read or appended to, except the
        position.
        """
        shapes = {"x": (self.rows, self.k), "w": (self.columns, self.k)}
        shapes |= {"keys": self.cache, "values": self.cache}
        actual = {
            name: rng.standard_normal(shape).astype(self.dtype.numpy)
            for name, shape in shapes.items()
        }
        if self.page:
            actual["pages"] = self.table
        actual["frequencies"] = 10.0 ** -rng.uniform(0, 3, self.width // 2).astype(np.float32)
        return actual

    def positions(self, first: int) -> np.ndarray:
        """The contents of the operand `position`."""
        return first + 3 * np.arange(self.sequences)

    def expected(self, given: dict[str, np.ndarray], position: int) -> dict[str, np.ndarray]:
        """The expected queries, keys and values in fp64, for the positions from `position` on. The
        two elements of each rotated pair are adjacent.
        """
        product = given["x"].astype(np.float64) @ given["w"].astype(np.float64).T
        product = product.reshape(self.rows, -1, self.width)
        places = self.positions(position) if self.each else position + np.arange(self.rows)
        angles = (places[:, None] * given["frequencies"].astype(np.float64))[:, None, :]
        turned = self.heads + self.kv_heads
        pairs = (product[:, :turned, 0::2] + 1j * product[:, :turned, 1::2]) * np.exp(1j * angles)
        product[:, :turned, 0::2], product[:, :turned, 1::2] = pairs.real, pairs.imag
        actual = {"queries": product[:, : self.heads].reshape(self.rows, -1)}
        if self.each:
            actual["newest"] = product[:, self.heads :].reshape(self.rows, -1)
            for i, name in enumerate(("keys", "values")):
                first = self.heads + i * self.kv_heads
                cache = given[name].astype(np.float64)
                for row in np.flatnonzero(places < self.context):
                    new, place = product[row, first : first + self.kv_heads], places[row]
                    if self.page:
                        cache[self.table[row, place // self.page], :, place % self.page] = new
                    else:
                        cache[row * self.kv_heads : (row + 1) * self.kv_heads, place] = new
                actual[name] = cache
            # Rows outside of the caches are dropped.
            actual["newest"][places >= self.context] = 0.0
            return actual
        count = max(0, min(self.rows, self.context - position))
        for i, name in enumerate(("keys", "values")):
            first = self.heads + i * self.kv_heads
            cache = given[name].astype(np.float64)
            rows = product[:count, first : first + self.kv_heads]
            cache[:, position : position + count] = rows.swapaxes(0, 1)
            actual[name] = cache
        return actual
