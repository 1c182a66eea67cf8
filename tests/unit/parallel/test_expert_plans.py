"""Routed experts under an expert plan: each rank holds some of the experts, and each mixture of
experts ends with one sum over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model, use_model
from ark.parallel import ParallelGraph, materialise, parallelize
from ark.parallel.transform import annotate
from tests.cases.transform import inputs_of, on_cpu_ranks, on_ranks_in_numpy, one_device, traced

ROWS, HIDDEN, INNER, EXPERTS, CHOSEN = 6, 8, 12, 4, 2


def mixture() -> Any:
    """Returns a mixture like ark.models.mixtral's, with further ops."""
    x = ark.tensor((ROWS, HIDDEN), name="x")
    router = ark.parameter((EXPERTS, HIDDEN), name="router")
    gate, up = (ark.parameter((EXPERTS, INNER, HIDDEN), name=name) for name in ("gate", "up"))
    down = ark.parameter((EXPERTS, HIDDEN, INNER), name="down")
    scores, experts = ark.topk(ark.linear(x, router), CHOSEN)
    gated = ark.mul(
        ark.relu(ark.expert_linear(x, gate, experts)), ark.expert_linear(x, up, experts)
    )
    outputs = ark.expert_linear(gated, down, experts)
    weighted = ark.mul(outputs, ark.reshape(scores, (ROWS, CHOSEN, 1)))
    return ark.add(ark.reduce_sum(weighted, axis=1, keepdims=False), x)


GRAPH = traced(mixture)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_shared_and_summed_once(ranks: int) -> None:
    inputs = inputs_of(GRAPH, 3)
    split = parallelize(GRAPH, ranks, "expert")
    names = {t.name: t.buffer.name for t in GRAPH.tensors if t.buffer.arena == "parameter"}
    for rank, held in enumerate(split.ranks.held):
        for name in ("gate", "up", "down"):
            first, last = held[names[name]].box[0]
            assert (first, last) == (rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    for graph in split.ranks.graphs:
        moving = [n.type for n in graph.nodes if n.type in ("all_reduce", "send", "recv")]
        assert moving == ["all_reduce"]
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), one_device(GRAPH, inputs))


@pytest.mark.parametrize("plan", ["replicated", "data", "column", "row", "megatron", "auto"])
def test_other_plans_of_a_mixture(plan: str) -> None:
    inputs = inputs_of(GRAPH, 4)
    split = parallelize(GRAPH, 2, plan)
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), one_device(GRAPH, inputs))


def test_on_cpu_ranks() -> None:
    inputs = inputs_of(GRAPH, 5)
    split = parallelize(GRAPH, 2, "expert")
    want = one_device(GRAPH, inputs)
    parts = on_cpu_ranks(split.ranks, inputs, {GRAPH.nodes[-1].outputs[0].buffer.id})
    assert len(parts) == 2
    for _, array in parts:
        np.testing.assert_array_equal(array, want)


def test_shares_pass_only_where_they_may() -> None:
    """An op may read a rank's partial sum instead of the whole sum only if it is linear, or maps
    zeros to zeros.
    """
    plan = ParallelGraph(GRAPH, 2)
    by_type: dict[str, list[dict]] = {}
    for node in plan.nodes:
        by_type.setdefault(node.type, []).append(dict(plan.carried.get(node.id, {})))
    assert by_type["expert_linear"] == [{}, {}, {"e": {0}}]
    assert by_type["relu"] == [{"+": {0}}]
    assert by_type["mul"] == [{"+": {0, 1}}, {"+": {0}}]
    assert by_type["reduce_sum"] == [{"+": {0}}]
    assert by_type["add"] == [{}] and by_type["matmul"] == [{}]

    def after(op: Any) -> dict:
        def build() -> Any:
            x = ark.tensor((ROWS, HIDDEN), name="x")
            _, chosen = ark.topk(x, 1)
            return op(ark.expert_linear(x, ark.parameter((EXPERTS, 4, HIDDEN)), chosen))

        result = ParallelGraph(traced(build), 2)
        last = result.nodes[-2]
        return dict(result.carried.get(last.id, {}))

    assert after(ark.exp) == {} and after(lambda t: ark.mul(t, t)) == {"+": {0, 1}}
    assert after(lambda t: ark.add(t, 1.0)) == {} == after(lambda t: ark.softmax(t))
    assert after(lambda t: ark.mul(t, 3.0)) == {"+": {0}}


def test_share_of_a_whole_tensor_is_refused() -> None:
    plan = ParallelGraph(GRAPH, 2)
    for node in plan.nodes:
        (piece,) = plan.pieces(node)
        if node.type == "relu":
            for rank, part in enumerate(plan.op_trans(piece, "+", 2)):
                plan.op_assign(part, rank)
        else:
            plan.op_assign(piece, 0, 1)
    with pytest.raises(ModelError, match="add up"):
        materialise(plan)
    add = plan.nodes[-2]
    with pytest.raises(InvalidUsageError, match="no dimension"):
        plan.op_trans(plan.pieces(add)[0], "+", 2)


def test_part_of_the_experts_gives_zeros_for_others() -> None:
    """An op that computes a part of the experts gives zeros for rows that chose other experts, as
    the NumPy reference does. The number of a part that does not exist is refused.
    """
    product = next(n for n in GRAPH.nodes if n.type == "expert_linear")
    assert str(annotate(product)) == "r k+, e+ n k+, r s -> r s n"
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(ROWS, HIDDEN)), random.normal(size=(2, INNER, HIDDEN))
    chosen = random.integers(0, EXPERTS, (ROWS, CHOSEN))
    model = Model(0, 1)
    with use_model(model):
        tensors = ark.tensor(x.shape), ark.tensor(weight.shape), ark.tensor(chosen.shape, ark.int32)
        result = ark.expert_linear(*tensors, first=1, of=EXPERTS)
        with ark.Runtime() as runtime:
            runtime.launch(loop_mode=False)
            for tensor, array in zip(tensors, (x, weight, chosen), strict=True):
                tensor.from_numpy(array.astype(tensor.dtype().numpy))
            runtime.run()
            actual = result.to_numpy()
        for row in range(ROWS):
            for slot in range(CHOSEN):
                own = chosen[row, slot] - 1
                want = weight[own] @ x[row] if 0 <= own < 2 else np.zeros(INNER)
                np.testing.assert_allclose(actual[row, slot], want, rtol=1e-5, atol=1e-5)
        for first, of in ((3, EXPERTS), (-1, EXPERTS), (0, 1)):
            with pytest.raises(InvalidUsageError, match="2 experts"):
                ark.expert_linear(*tensors, first=first, of=of)
