"""Random programs of layers, whose results are also read in other shapes and in parts, and partly
overwritten. Each pass that changes such a program must keep its results.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import INTEGERS, bf16, fp32
from ark.ir.graph import Graph
from ark.ir.text import to_text
from ark.lower.observe import observed
from ark.lower.prepare import prepare
from ark.lower.rewrite.context import Context
from tests.interpreter import Interpreter
from tests.slow import examples

MACHINES = ("h200", "mi300x", "cpu-2")
MAX_SIZE = 512  # of a dimension
MAX_RELATIVE_ERROR = 1e-5  # of a result in float64, relative to its largest element
Contents = dict[int, np.ndarray]


class Layers:
    """Builds a program. values: the results that later ops may read."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        rows, self.columns = (
            int(self.rng.choice([1, 2, 8, 64, 128])),
            int(self.rng.choice([32, 64])),
        )
        self.dtype = fp32 if self.rng.random() < 0.5 else bf16
        self.weights: list[ark.Tensor] = []
        self.values = [ark.mul(ark.tensor([rows, self.columns]), 2.0)]
        self.values.append(ark.tensor([rows, self.columns]))
        for _ in range(self.rng.integers(3, 9)):
            self.access(0.35)
            self.values.append(self.layer())
            self.access(0.2)

    def weight(self, outputs: int, inputs: int) -> ark.Tensor:
        """Returns a new weight, or one that other layers have, too."""
        alike = [w for w in self.weights if w.shape() == [outputs, inputs]]
        if alike and self.rng.random() < 0.3:
            return alike[self.rng.integers(len(alike))]
        self.weights.append(ark.parameter([outputs, inputs], self.dtype))
        return self.weights[-1]

    def pick(self, shape: list[int] | None = None) -> ark.Tensor:
        """Returns an earlier result, of this shape if given; more often a late one."""
        given = [v for v in self.values if shape in (None, v.shape())]
        late = given[-3:] if self.rng.random() < 0.7 else given
        return late[self.rng.integers(len(late))]

    def part(self, value: ark.Tensor) -> ark.Tensor:
        """Returns a random box of a result."""
        index = []
        for size in value.shape():
            begin = int(self.rng.integers(size))
            index.append(slice(begin, int(self.rng.integers(begin + 1, size + 1))))
        return value[tuple(index)]

    def access(self, chance: float) -> None:
        """Reads or writes an earlier result, or a part of it, with this probability."""
        if self.rng.random() > chance:
            return
        value = self.pick()
        elements = int(np.prod(value.shape()))
        rows = int(self.rng.choice([n for n in (1, 2, 4, 8) if elements % n == 0]))
        ways: list[Callable[[], object]] = [
            lambda: ark.mul(value, 0.5),
            lambda: ark.mul(ark.reshape(value, [rows, elements // rows]), 0.5),
            lambda: ark.mul(self.part(value), 0.5),
            lambda: ark.copy(0.5, output=self.part(value)),
            lambda: ark.mul(value, 0.75, output=value),
            lambda: ark.mul(self.pick(value.shape()), 1.25, output=value),
        ]
        ways[self.rng.integers(len(ways))]()

    def normed(self, x: ark.Tensor) -> ark.Tensor:
        self.values.append(ark.rmsnorm(x, ark.parameter([x.shape()[1]]), 1e-5))
        self.access(0.3)
        return self.values[-1]

    def gated(self, x: ark.Tensor) -> ark.Tensor:
        """Returns a gated activation of two products."""
        gate, up = (ark.linear(x, self.weight(32, x.shape()[1])) for _ in range(2))
        if self.rng.random() < 0.5:
            self.values += [gate, up]
            self.access(0.4)
        return ark.swiglu(gate, up)

    def layer(self) -> ark.Tensor:
        x = self.pick()
        rows, columns = x.shape()
        outputs = int(self.rng.choice([columns, self.columns, 2 * self.columns]))
        same = self.pick(x.shape())
        ways: list[Callable[[], ark.Tensor]] = [
            lambda: ark.linear(x, self.weight(outputs, columns)),
            lambda: ark.linear(self.normed(x), self.weight(outputs, columns)),
            lambda: self.gated(x),
            lambda: ark.add(ark.linear(x, self.weight(columns, columns)), same),
            lambda: ark.add(ark.linear(x, self.weight(columns, columns)), ark.parameter([columns])),
            lambda: ark.mul(x, ark.sigmoid(same)),
            lambda: ark.softmax(x),
            lambda: ark.layernorm(x, 1e-5),
            lambda: ark.transpose(x, [1, 0]),
            lambda: ark.mul(x, ark.reduce_sum(x, int(self.rng.integers(2)))),
            lambda: ark.sub(ark.sigmoid(ark.mul(x, 0.1)), ark.reduce_mean(x, 1)),
            lambda: ark.softmax(ark.topk(ark.softmax(x), min(4, columns))[0]),
            lambda: ark.mul(ark.matmul(x, same, transpose_other=True), 1 / columns),
            lambda: ark.concat([x, same], int(self.rng.integers(2))),
        ]
        if max(2 * rows, 2 * columns) > MAX_SIZE:
            ways = ways[:-1]
        return ways[self.rng.integers(len(ways))]()


def inputs_of(graph: Graph) -> Contents:
    """Returns random contents of all buffers that an op reads before another one writes them."""
    rng, written, contents = np.random.default_rng(0), set[int](), Contents()
    for node in graph.nodes:
        for tensor in node.inputs:
            buffer = tensor.buffer
            if buffer.id not in written and buffer.id not in contents:
                contents[buffer.id] = rng.normal(size=buffer.nbytes // tensor.dtype.itemsize)
        written |= {t.buffer.id for t in node.outputs}
    return contents


def results_of(graph: Graph, contents: Contents, results: list[int]) -> Contents:
    """Returns the contents of the buffers `results` after the program. contents: those before. The
    contents of packed weights are those of the weights in them.
    """
    memory = Interpreter()
    memory.buffers = {number: array.copy() for number, array in contents.items()}
    parameters = {t.buffer.name: t for t in graph.tensors if t.buffer.arena == "parameter"}
    packings = {packing.name: packing for packing in graph.packings}
    for node in graph.nodes:
        for tensor in node.inputs:
            packing = packings.get(tensor.buffer.name)
            if packing is not None:
                memory.view(tensor)[...] = packing.apply(lambda n: memory.view(parameters[n]))
    memory.run(graph, 0)
    return {number: memory.buffers[number] for number in results}


@pytest.mark.parametrize("seed", range(examples(300)))
def test_passes_keep_results_that_others_read(seed: int) -> None:
    with ark.use_model(ark.Model()) as model:
        Layers(seed)
    graph = model.graph
    reads = graph.view.reads
    written = {t.buffer.id for n in graph.nodes for t in n.outputs if t.dtype not in INTEGERS}
    results = sorted(i for i in written if not reads[i] or i in inputs_of(graph))
    contents = inputs_of(graph)
    wanted = results_of(graph, contents, results)
    for machine in MACHINES:

        def look(name: str, before: Graph, after: Graph, context: Context) -> None:
            if name == "cut_products" or to_text(after) == to_text(before):
                return  # parts of k have no definition in NumPy
            got = results_of(after, contents, results)
            for number, want in wanted.items():
                bound = MAX_RELATIVE_ERROR * max(1.0, np.abs(want).max())
                assert np.abs(got[number] - want).max() < bound, (name, context.machine.name)

        with observed(look):
            prepare(graph, registry.machine(machine), {"external": results})
