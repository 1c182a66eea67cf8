"""Pipeline schedules, executed with several micro-batches in flight in one launch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ark
from ark.errors import ModelError
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph, Node
from ark.parallel import parallelize, pipelined, shape, tessel
from ark.parallel.transform import whole_of
from tests.cases.transform import inputs_of, on_cpu_ranks
from tests.interpreter import Interpreter
from tests.pages import python_blocks

ROWS, WIDTH, MICRO_BATCHES = 4, 12, 4


def there_and_back(stages: int) -> Graph:
    """Returns a graph in which micro-batches pass forward through all stages and back. Each
    backward stage reads the result of its forward stage.
    """
    model = Model(0, 1)
    with use_model(model):
        names = [f"{way}{stage}" for way in "fb" for stage in range(stages)]
        weights = {name: ark.parameter((WIDTH, WIDTH), name=name) for name in names}
        for m in range(MICRO_BATCHES):
            h = ark.tensor((ROWS, WIDTH), name=f"x{m}")
            results = {}
            for stage in range(stages):
                with model.graph.scope(f"f{stage}-{m}"):
                    h = results[stage] = ark.relu(ark.linear(h, weights[f"f{stage}"]))
            for stage in reversed(range(stages)):
                with model.graph.scope(f"b{stage}-{m}"):
                    h = ark.sub(ark.linear(h, weights[f"b{stage}"]), results[stage])
                    if stage == 0:
                        ark.copy(h, output=ark.tensor((ROWS, WIDTH), name=f"result{m}"))
    return model.graph


def block_of(node: Node) -> tuple[str, int]:
    """Returns the pipeline block and the micro-batch of a node, parsed from the name of its
    scope.
    """
    block, _, number = node.name.partition(".")[0].partition("-")
    return block, int(number)


def test_1f1b_runs_on_cpu_ranks() -> None:
    graph = there_and_back(2)
    schedule = tessel(shape("V", 2, 1, 2), 2, MICRO_BATCHES)
    split = parallelize(graph, 2, pipelined(schedule, block_of))
    for rank, own in enumerate(split.ranks.graphs):
        computed = [n for n in own.nodes if n.type not in ("send", "recv")]
        blocks = list(dict.fromkeys(block_of(n) for n in computed))
        assert blocks == [
            (e.block, e.micro_batch) for e in schedule.entries if e.devices == (rank,)
        ]
    # The last stage starts the backward pass of the first micro-batch before it receives the last
    # one.
    order = [(e.block, e.micro_batch) for e in schedule.entries]
    assert order.index(("b1", 0)) < order.index(("f1", MICRO_BATCHES - 1))
    results = {n.outputs[0].buffer.id: n for n in graph.nodes if n.type == "copy"}
    inputs = inputs_of(graph, 4)
    memory = Interpreter()
    for tensor in graph.tensors:
        if tensor.buffer.name in inputs:
            memory.view(tensor)[...] = inputs[tensor.buffer.name]
    memory.run(graph, 0)
    parts = on_cpu_ranks(split.ranks, inputs, set(results))
    assert len(parts) == MICRO_BATCHES
    for view, array in parts:
        want = memory.view(results[view.buffer].outputs[0])
        np.testing.assert_array_equal(whole_of(graph, [(view, array)]), want)


def test_schedule_of_the_page() -> None:
    (text,) = (b for b in python_blocks("parallel.md") if "schedule = tessel(" in b)
    graph = there_and_back(2)
    space = {"ark": ark, "tessel": tessel, "shape": shape, "pipelined": pipelined}
    space |= {"model": graph, "place_of": block_of}
    exec(text, space)
    assert all(own.nodes for own in space["made"].ranks.graphs)  # type: ignore[attr-defined]
    assert space["schedule"].makespan == (4 + 2 - 1) * (1 + 2)  # type: ignore[attr-defined]


def test_schedule_that_contradicts_the_data_is_refused() -> None:
    graph = there_and_back(2)
    schedule = tessel(shape("V", 2, 1, 2), 2, MICRO_BATCHES)
    backwards = dataclasses.replace(
        schedule,
        entries=tuple(dataclasses.replace(e, start=-e.start) for e in schedule.entries),
    )
    with pytest.raises(ModelError, match="has a cycle"):
        parallelize(graph, 2, pipelined(backwards, block_of))
    short = tessel(shape("V", 2, 1, 2), 2, MICRO_BATCHES - 1)
    with pytest.raises(ModelError, match="not in the schedule"):
        parallelize(graph, 2, pipelined(short, block_of))
