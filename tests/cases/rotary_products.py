"""Products whose results are rotated by halves of heads, written op by op as in torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ark
from ark.ir.dtype import DataType, bf16
from ark.ir.graph import Graph


@dataclass(frozen=True)
class Projection:
    """Queries of `batch` sequences: heads of `width` elements from rows of `depth` elements.
    positions: sequences in the tables of cosines and sines, 1 if all have the same positions.
    """

    batch: int = 2
    rows: int = 128
    depth: int = 512
    heads: int = 4
    width: int = 64
    bias: bool = False
    positions: int = 1
    dtype: DataType = bf16

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the rows, the weight, the bias, the cosines and the sines."""
        columns, table = self.heads * self.width, (self.positions, self.rows, self.width // 2)
        return (self.batch * self.rows, self.depth), (columns, self.depth), (columns,), table, table

    def product(self, x: ark.Tensor, weight: ark.Tensor, bias: ark.Tensor) -> ark.Tensor:
        """Adds the ops of the heads (batch, heads, rows, width) before their rotation."""
        product = ark.matmul(x, weight, transpose_other=True)
        if self.bias:
            product = ark.add(product, bias)
        shape = [self.batch, self.rows, self.heads, self.width]
        return ark.transpose(ark.reshape(product, shape), [0, 2, 1, 3])

    def table(self, angles: ark.Tensor) -> ark.Tensor:
        """Adds the ops that compute the cosines or sines of all columns of a head, as torch's
        decoders do in the graph: both halves of a head have the same angles.
        """
        flat = [self.positions, 1, self.rows, self.width]
        return ark.reshape(ark.mul(ark.concat([angles, angles], 2), 1.0), flat)

    def rotated(self, heads: ark.Tensor, cosines: ark.Tensor, sines: ark.Tensor) -> ark.Tensor:
        """Adds the ops that rotate heads."""
        half = self.width // 2
        turned = ark.concat([ark.neg(heads[:, :, :, half:]), heads[:, :, :, :half]], 3)
        return ark.add(ark.mul(heads, cosines), ark.mul(turned, sines))

    def build(self, *given: ark.Tensor) -> ark.Tensor:
        """Adds all ops. given: tensors with the shapes of `shapes`. The rotated heads are read by
        another op.
        """
        heads = self.product(*given[:3])
        return ark.relu(self.rotated(heads, *(self.table(t) for t in given[3:])))

    def graph(self) -> Graph:
        """The graph of `build`, with parameters as inputs."""
        model = ark.Model()
        with ark.use_model(model):
            names = ("x", "weight", "bias", "cosines", "sines")
            pairs = zip(names, self.shapes, strict=True)
            self.build(*(ark.parameter(s, self.dtype, name=n) for n, s in pairs))
        return model.graph

    def values(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Random values of the inputs."""
        x, weight, bias, *_ = (rng.standard_normal(s) for s in self.shapes)
        turns = rng.uniform(0, 6, self.shapes[3])
        return [x, weight / self.depth**0.5, bias, np.cos(turns), np.sin(turns)]

    def expected(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *tables: np.ndarray):
        """The result of `build` by NumPy."""
        product = x @ weight.T + bias * self.bias
        shape = (self.batch, self.rows, self.heads, self.width)
        heads = product.reshape(shape).transpose(0, 2, 1, 3)
        low, high = np.split(heads, 2, 3)
        cosines, sines = (np.tile(t[:, None], 2) for t in tables)
        turned = np.concatenate([-high, low], 3)
        return np.maximum(heads * cosines + turned * sines, 0)
