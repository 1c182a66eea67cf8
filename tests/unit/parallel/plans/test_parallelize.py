"""`parallelize`: named plans and the search, executed on ranks and compared with all possible
choices.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry as backends
from ark.errors import InvalidUsageError, ModelError, PlanError
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.parallel import ParallelGraph, parallelize
from ark.parallel.pipeline.named import PIPELINES
from ark.parallel.plans import PLANS
from ark.parallel.plans.choices import Costs
from ark.parallel.plans.search import evaluate, search
from ark.parallel.plans.times import Rates
from ark.parallel.transform import whole_of
from tests.cases.transform import (
    inputs_of,
    on_cpu_ranks,
    on_ranks_in_numpy,
    one_device,
    perceptron,
    traced,
)
from tests.slow import slow

ROWS, WIDTH, INNER = 8, 16, 32


def block(x: Any, name: str) -> Any:
    """Returns x + down(relu(up(x)))."""
    up = ark.parameter((INNER, WIDTH), name=f"{name}.up")
    down = ark.parameter((WIDTH, INNER), name=f"{name}.down")
    return ark.add(ark.linear(ark.relu(ark.linear(x, up)), down), x)


def two_blocks() -> Any:
    return block(block(ark.tensor((ROWS, WIDTH), name="x"), "first"), "second")


def mixing() -> Any:
    """Returns a program of products between activations, transposed and summed, as in attention."""
    x = ark.tensor((ROWS, WIDTH), name="x")
    query, key, value = (
        ark.linear(x, ark.parameter((WIDTH, WIDTH), name=name)) for name in ("q", "k", "v")
    )
    scores = ark.relu(ark.matmul(query, key, transpose_other=True))
    mixed = ark.matmul(scores, value)
    return ark.add(ark.linear(mixed, ark.parameter((WIDTH, WIDTH), name="o")), x)


MODELS = {"two blocks": traced(two_blocks), "mixing": traced(mixing)}


@pytest.mark.parametrize(
    ("name", "mesh"), [("two blocks", (2, 2)), ("mixing", (2,)), ("mixing", (4,))]
)
def test_plans_give_the_one_device_result(name: str, mesh: tuple[int, ...]) -> None:
    graph = MODELS[name]
    inputs = inputs_of(graph, 11)
    want, best = one_device(graph, inputs), parallelize(graph, mesh, "auto").solution
    for plan in PLANS:
        split = parallelize(graph, mesh, plan)
        np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), want)
        assert split.solution and best and best.us <= split.solution.us * (1 + 1e-6)


def kinds(graph: Graph) -> list[str]:
    return [node.type for node in graph.nodes if node.type in ("all_reduce", "send", "recv")]


def test_megatron_is_one_all_reduce_a_block() -> None:
    whole = 2 * 2 * INNER * WIDTH * 4
    split = parallelize(MODELS["two blocks"], 4, "megatron")
    assert split.solution and split.solution.parameter_bytes == whole // 4
    assert [kinds(graph) for graph in split.ranks.graphs] == [["all_reduce"] * 2] * 4


def test_data_parallel_inference_communicates_nothing() -> None:
    split = parallelize(MODELS["two blocks"], 4, "data")
    assert split.solution and split.solution.parameter_bytes == 2 * 2 * INNER * WIDTH * 4
    assert not any(kinds(graph) for graph in split.ranks.graphs)


def test_sequence_leaves_no_op_to_all_ranks() -> None:
    split = parallelize(MODELS["two blocks"], 4, "sequence")
    assert split.solution and all(split.solution.choices[n.id] != (None,) for n in split.plan.nodes)
    assert split.solution.parameter_bytes == 2 * 2 * INNER * WIDTH


@pytest.mark.parametrize("plan", [p for p in PIPELINES if p != "chimera"])
def test_pipelines_deal_out_a_model_without_scopes(plan: str) -> None:
    """Pipelines of a model without scopes: a stage consists of consecutive ops, and there is one
    micro-batch.
    """
    graph = MODELS["two blocks"]
    inputs, want = inputs_of(graph, 3), one_device(graph, inputs_of(graph, 3))
    split = parallelize(graph, 2, plan)
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), want)
    assert all(any(n.type == "matmul" for n in own.nodes) for own in split.ranks.graphs)
    assert sum(len(own.nodes) for own in split.ranks.graphs) > len(graph.nodes)  # more: sends


EXECUTED = [*PLANS, *(p for p in PIPELINES if p != "chimera")]


@slow
@pytest.mark.parametrize("plan", EXECUTED)
def test_named_plans_run_on_cpu_ranks(plan: str) -> None:
    """Named plans give the one-device result on two CPU ranks. test_training.py covers chimera,
    ZeRO and co-shard.
    """
    graph = MODELS["two blocks"]
    inputs = inputs_of(graph, 5)
    split = parallelize(graph, 2, plan)
    parts = on_cpu_ranks(split.ranks, inputs, {graph.nodes[-1].outputs[0].buffer.id})
    np.testing.assert_array_equal(whole_of(graph, parts), one_device(graph, inputs))


def staged(stages: int, micro_batches: int = 4) -> Graph:
    """Returns a graph in which micro-batches pass a block for each stage, and the results are
    summed.
    """
    model = Model(0, 1)
    with use_model(model):
        sizes = ((INNER, WIDTH), (WIDTH, INNER))
        weights = [
            [ark.parameter(size, name=f"w{stage}.{i}") for i, size in enumerate(sizes)]
            for stage in range(stages)
        ]
        total = None
        for m in range(micro_batches):
            h = ark.tensor((ROWS, WIDTH), name=f"x{m}")
            for stage, (up, down) in enumerate(weights):
                with model.graph.scope(f"f{stage}-{m}"):
                    h = ark.add(ark.linear(ark.relu(ark.linear(h, up)), down), h)
                    if stage == stages - 1:
                        total = h if total is None else ark.add(total, h)
                    if stage == stages - 1 and m == micro_batches - 1:
                        ark.copy(total, output=ark.tensor((ROWS, WIDTH), name="result"))
    return model.graph


STAGED = [((2, 2), "1f1b"), ((4, 2), "gpipe"), ((2, 4), "zero-bubble"), ((2, 2), "interleaved")]


@pytest.mark.parametrize(("mesh", "pipeline"), STAGED)
@pytest.mark.parametrize("split", ["megatron", "column"])
def test_stages_whose_ops_are_split(mesh: tuple[int, int], pipeline: str, split: str) -> None:
    """Pipelines whose stages are split over several ranks: a rank holds its part of the parameters
    of its stage, and sums only with ranks of that stage.
    """
    stages = mesh[0] * (2 if pipeline == "interleaved" else 1)
    graph = staged(stages)
    inputs = inputs_of(graph, 7)
    result = parallelize(graph, mesh, (pipeline, split))
    np.testing.assert_array_equal(on_ranks_in_numpy(result.plan, inputs), one_device(graph, inputs))
    for rank, held in enumerate(result.ranks.held):
        mine = {name.partition(".")[0] for name in held if name.startswith("w")}
        assert mine == {f"w{s}" for s in range(rank // mesh[1], stages, mesh[0])}
        sizes = {view.shape for name, view in held.items() if name.startswith("w")}
        assert all(np.prod(size) == INNER * WIDTH // mesh[1] for size in sizes)


@slow
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)])
def test_split_stages_run_on_cpu_ranks(mesh: tuple[int, int]) -> None:
    graph = staged(mesh[0])
    inputs = inputs_of(graph, 9)
    split = parallelize(graph, mesh, ("1f1b", "megatron"))
    parts = on_cpu_ranks(split.ranks, inputs, {graph.nodes[-1].outputs[0].buffer.id})
    want = one_device(graph, inputs)
    np.testing.assert_allclose(whole_of(graph, parts), want, rtol=0, atol=1e-6 * want.max())


def scoped(first: str, second: str) -> Graph:
    """Returns a graph with a product in each of two scopes."""
    model = Model(0, 1)
    with use_model(model):
        h = ark.tensor((ROWS, WIDTH), name="x")
        for i, scope in enumerate((first, second)):
            with model.graph.scope(scope):
                h = ark.linear(h, ark.parameter((WIDTH, WIDTH), name=f"w{i}"))
    return model.graph


@pytest.mark.parametrize(
    ("graph", "plan", "cuts", "error", "says"),
    [
        (MODELS["mixing"], "zero1", None, InvalidUsageError, "name the tensors that hold it"),
        (MODELS["mixing"], "megatron", {"x": 0}, InvalidUsageError, "are for copies"),
        (MODELS["mixing"], "chimera", None, InvalidUsageError, "name the tensors that hold"),
        (MODELS["mixing"], "zero1", {"nobody": 0}, InvalidUsageError, "no input named 'nobody'"),
        (scoped("f0-0", "head"), "1f1b", None, ModelError, "has no pipeline scope"),
        (scoped("f0-0", "f7-0"), "1f1b", None, ModelError, "not in the schedule"),
    ],
)
def test_named_plans_that_do_not_go_with_a_graph_are_refused(
    graph: Graph, plan: str, cuts: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        parallelize(graph, 2, plan, cuts=cuts)


def test_data_along_one_axis_and_tensors_along_the_other() -> None:
    graph = MODELS["two blocks"]
    split = parallelize(graph, (2, 2), ("data", "megatron"))
    assert split.solution and split.solution.parameter_bytes == 2 * INNER * WIDTH * 4
    inputs = inputs_of(graph, 2)
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), one_device(graph, inputs))


def test_too_little_memory_splits_parameters_or_is_refused() -> None:
    whole = 2 * 2 * INNER * WIDTH * 4
    free = parallelize(MODELS["two blocks"], 4, machine=backends.machine("cpu-1"), link_gbps=1e-3)
    tight = parallelize(
        MODELS["two blocks"],
        4,
        machine=backends.machine("cpu-1"),
        link_gbps=1e-3,
        memory_bytes=whole // 4,
    )
    assert free.solution and tight.solution and tight.solution.parameter_bytes == whole // 4
    assert free.solution.us < tight.solution.us and free.solution.parameter_bytes > whole // 4
    with pytest.raises(PlanError, match="use more ranks"):
        parallelize(MODELS["two blocks"], 4, memory_bytes=whole // 4 - 1)


@pytest.mark.parametrize("rates", [Rates(1e5, 1e4, 1e4), Rates(1e3, 1e6, 10.0, 0.0)])
def test_no_choice_is_better_than_the_one_found(rates: Rates) -> None:
    """The plan of `search` is as fast as the best of all combinations of choices for a
    small graph.
    """
    graph = traced(perceptron)
    plan = ParallelGraph(graph, 2)
    costs = Costs((2,), rates)
    options = {node.id: costs.options(node) for node in plan.nodes}
    actual = search(plan.nodes, options, costs)
    each = [
        evaluate(plan.nodes, dict(zip(options, chosen, strict=True)), costs).us
        for chosen in itertools.product(*options.values())
    ]
    assert len(each) > 100 and actual.optimal
    assert actual.us == pytest.approx(min(each), abs=1e-2)


def test_plan_of_the_users() -> None:
    graph = traced(perceptron)

    def rows_in_turn(plan: ParallelGraph) -> None:
        for node in plan.nodes:
            (piece,) = plan.pieces(node)
            for i, part in enumerate(plan.op_trans(piece, piece.annotation.operands[0][0], 6)):
                plan.op_assign(part, i % plan.ranks)

    split = parallelize(graph, 4, rows_in_turn)
    inputs = inputs_of(graph, 9)
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), one_device(graph, inputs))
    assert split.solution is None


@pytest.mark.parametrize(
    ("mesh", "plan", "says"),
    [
        (0, "data", "mesh"),
        ((2, 2, 2, 2), "data", "mesh"),
        (2, "pipeline", "does not fit"),
        ((2, 2), ("data",), "does not fit"),
    ],
)
def test_bad_arguments_are_refused(mesh: Any, plan: Any, says: str) -> None:
    with pytest.raises(InvalidUsageError, match=says):
        parallelize(MODELS["mixing"], mesh, plan)


def test_parallelize_is_exported_by_ark() -> None:
    assert ark.parallelize is parallelize
