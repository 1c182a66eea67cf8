"""Cases and helpers of tests/unit/parallel/test_transform.py, which other tests use too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ark
from ark.backend import registry as backends
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.parallel.transform import (
    ParallelGraph,
    RankGraphs,
    View,
    materialise,
    part_of,
    whole_of,
)
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.interpreter import Interpreter
from tests.ranks import ThreadRanks, run_ranks
from tests.unit.parallel.ranks_in_numpy import Ranks


def traced(build: Callable[[], Any]) -> Graph:
    """Returns the graph for one device that `build` builds; the tensor that `build` returns is
    copied to a tensor "result".
    """
    model = Model(0, 1)
    with use_model(model):
        result = build()
        target = ark.tensor(result.shape(), result.dtype(), name="result")
        ark.copy(result, output=target)
    return model.graph


def inputs_of(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """Returns random contents, by buffer name, of the tensors that the graph reads and does not
    write.
    """
    random = np.random.default_rng(seed)
    written = {n.outputs[0].buffer.id for n in graph.nodes}
    results = {}
    for tensor in (t for n in graph.nodes for t in n.inputs):
        if tensor.buffer.id not in written and tensor.buffer.name not in results:
            results[tensor.buffer.name] = random.integers(-3, 4, tensor.extents).astype(np.float32)
    return results


def one_device(graph: Graph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    memory = Interpreter()
    for tensor in graph.tensors:
        array = inputs.get(tensor.buffer.name)
        if array is not None and tensor.shape == tensor.extents == array.shape:
            memory.view(tensor)[...] = array
    memory.run(graph, 0)
    return memory.view(graph.nodes[-1].outputs[0]).copy()


def on_ranks_in_numpy(plan: ParallelGraph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    result = materialise(plan)
    ranks = Ranks(result.graphs)
    written = plan.graph.nodes[-1].outputs[0].buffer
    for rank, held in enumerate(result.held):
        for name, view in held.items():
            if name in inputs:
                ranks.fill(rank, name, part_of(inputs[name], view))
    ranks.run()
    parts = [
        (view, ranks.read(rank, name))
        for rank, held in enumerate(result.held)
        for name, view in held.items()
        if view.buffer == written.id
    ]
    return whole_of(plan.graph, parts)


def on_cpu_ranks(
    rank_graphs: RankGraphs, inputs: dict[str, np.ndarray], results: set[int]
) -> list[tuple[View, np.ndarray]]:
    """Plans and verifies the ranks' graphs and runs them concurrently. Returns the parts of the
    results that the ranks hold.
    """
    plans = [make_plan(g, backends.machine("cpu-1")) for g in rank_graphs.graphs]
    verify(plans)
    backend, _ = backends.choose("cpu")

    def work(own: ThreadRanks) -> list[tuple[View, np.ndarray]]:
        held = rank_graphs.held[own.rank]
        with Executor(
            plans[own.rank], backend, backend.open(0), ranks=own, budget_s=20.0
        ) as executor:
            for name, view in held.items():
                if name in inputs:
                    executor.write(name, part_of(inputs[name], view))
            executor.start(2).wait(60.0)
            actual = [
                (v, executor.read(n).reshape(v.shape))
                for n, v in held.items()
                if v.buffer in results
            ]
            own.barrier()
            return actual

    return list(itertools.chain(*run_ranks(len(plans), work)))


def random_graph(data: st.DataObject) -> Graph:
    def build() -> Any:
        values = [ark.tensor((8, 12)), ark.tensor((12, 8)), ark.tensor((8, 12))]
        for _ in range(data.draw(st.integers(1, 4))):
            a = data.draw(st.sampled_from(values))
            same = [v for v in values if v.shape() == a.shape()]
            wide = [v for v in values if v.shape()[-1] == a.shape()[-1]]
            choices = [
                lambda a=a: ark.relu(a),
                lambda a=a: ark.transpose(a, [1, 0]),
                lambda a=a, s=same: ark.add(a, data.draw(st.sampled_from(s))),
                lambda a=a, t=wide: ark.linear(a, data.draw(st.sampled_from(t))),
                lambda a=a: ark.sub(a, ark.reduce_sum(a, axis=1)),
                lambda a=a: ark.mul(a[:, 0:4], 2.0),
            ]
            values.append(data.draw(st.sampled_from(choices))())
        return values[-1]

    return traced(build)


def random_plan(data: st.DataObject, graph: Graph, ranks: int) -> ParallelGraph:
    plan = ParallelGraph(graph, ranks)
    for node in plan.nodes:
        for _ in range(data.draw(st.integers(0, 2))):
            piece = data.draw(st.sampled_from(plan.pieces(node)))
            assert piece.annotation is not None
            operands = zip(piece.annotation.operands, (*piece.inputs, piece.output), strict=True)
            sizes = {x: n for names, v in operands for x, n in zip(names, v.shape, strict=True)}
            letter = data.draw(st.sampled_from(sorted(sizes)))
            if letter == "1" or letter in piece.annotation.frozen:
                continue
            parts = [n for n in (2, 3, 4) if sizes[letter] % n == 0]
            if parts:
                plan.op_trans(piece, letter, data.draw(st.sampled_from(parts)))
        for piece in plan.pieces(node):
            chosen = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks))
            plan.op_assign(piece, *chosen)
    return plan


def perceptron() -> Any:
    """Returns x + down(relu(up(x))) + bias."""
    x, up = ark.tensor((6, 16), name="x"), ark.parameter((24, 16), name="up")
    down, bias = ark.parameter((16, 24), name="down"), ark.tensor((16,), name="bias")
    hidden = ark.relu(ark.linear(x, up))
    return ark.add(ark.add(ark.linear(hidden, down), bias), x)
