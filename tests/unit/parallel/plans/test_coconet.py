"""CoCoNet's transformations: on integers results are equal bit for bit; also their conditions and
the state that is preserved.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.collective.programs.attributes import program_of
from ark.errors import ModelError
from ark.frontend.model import Model, use_model
from ark.ir.graph import Node
from ark.parallel import ParallelGraph, autotune, materialise, spread
from ark.parallel.plans import coconet
from ark.parallel.plans.times import Rates
from ark.parallel.transform import part_of, whole_of
from tests.cases.coconet import RANKS, ROWS, WAYS, WIDTH, named, product, reordered, started
from tests.cases.transform import on_cpu_ranks
from tests.unit.parallel.ranks_in_numpy import Ranks


def result(plan: ParallelGraph, steps: int = 2) -> dict[str, np.ndarray]:
    """Runs some iterations of the ranks' graphs in NumPy. Returns the final contents, by name, of
    the memory that outlives an iteration.
    """
    result = materialise(plan)
    ranks, random = Ranks(result.graphs), np.random.default_rng(1)
    whole: dict[str, np.ndarray] = {}
    for tensor in plan.graph.tensors:
        if tensor.buffer.arena != "activation" and tensor.shape == tensor.extents:
            whole.setdefault(tensor.buffer.name, random.integers(-3, 4, tensor.shape) * 1.0)
    for name, value in whole.items():
        if "square" in name:
            whole[name] = np.abs(value)
    for rank, held in enumerate(result.held):
        for name, view in held.items():
            ranks.fill(rank, name, part_of(whole[name], view))
    for _ in range(steps):
        ranks.run()
    results: dict[str, np.ndarray] = {}
    for buffer in {v.buffer for held in result.held for v in held.values()}:
        parts = [
            (v, ranks.read(r, n))
            for r, held in enumerate(result.held)
            for n, v in held.items()
            if v.buffer == buffer
        ]
        name = next(t.name for t in plan.graph.tensors if t.buffer.id == buffer)
        results[name] = whole_of(plan.graph, parts)
    return results


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("way", WAYS)
def test_every_sequence_of_transforms_gives_the_same_result(kind: str, way: str) -> None:
    plan, want = started(kind), result(started(kind))
    WAYS[way](plan)
    got = result(plan)
    assert set(got) == set(want) and {"w", "state"} <= set(got)
    for name, array in want.items():
        if kind == "momentum":
            np.testing.assert_array_equal(got[name], array)
        np.testing.assert_allclose(got[name], array, rtol=1e-12)


def moved(plan: ParallelGraph, algorithm: str = "one_shot") -> list[list[str]]:
    """Returns, for each rank in order, the names of the ops that move data between ranks."""
    kinds = ("all_reduce", "collective", "send", "recv")
    graphs = materialise(plan, algorithm).graphs
    return [[n.name for n in graph.nodes if n.type in kinds] for graph in graphs]


def test_split_gives_collectives() -> None:
    for way, want in (
        ("AR-compute", ["all_reduce"]),
        ("RS-AG-compute", ["reduce_scatter", "all_gather"]),
        ("RS-compute-AG", ["reduce_scatter"]),  # no op reads all of the weight
    ):
        plan = started("adam")
        WAYS[way](plan)
        assert moved(plan) == [want] * RANKS
    ring = materialise(plan, "ring").graphs[0]
    programs = [p for p in map(program_of, ring.nodes) if p is not None]
    assert [p.name for p in programs] == ["ring"]


def test_split_value_is_split_again() -> None:
    """A value that is split along one dimension is split again along another one, so that ranks
    exchange data by sends.
    """
    plan, want = started("adam"), result(started("adam"))
    for dimension in (0, 1):
        coconet.split(plan, named(plan, "gradient"), dimension)
    for name, array in result(plan).items():
        np.testing.assert_allclose(array, want[name], rtol=1e-12)


def test_lamb_sums_its_norms_in_parts() -> None:
    plan, want = started("lamb"), result(started("lamb"))
    parts = coconet.split(plan, named(plan, "gradient"))
    moved = next(n for n in plan.nodes if n.type == "add" and n.outputs[0].name == "state")
    new = moved.outputs[0].buffer.id
    square = next(n for n in plan.nodes if [t.buffer.id for t in n.inputs] == [new, new])
    rows = next(n for n in plan.nodes if n.inputs[0].buffer.id == square.outputs[0].buffer.id)
    whole = next(n for n in plan.nodes if n.inputs[0].buffer.id == rows.outputs[0].buffer.id)
    coconet.reorder(plan, parts, [moved, square, rows, whole])
    assert coconet.layout(plan, whole) == coconet.LOCAL
    for name, array in result(plan).items():
        np.testing.assert_allclose(array, want[name], rtol=1e-12)


def test_optimizer_memory_is_divided() -> None:
    """`as_slice` divides Adam's moments among the ranks: of 2 N elements each of n ranks keeps 2 N
    / n.
    """
    plan = started("adam")
    reordered(plan)
    names = {t.name: t.buffer.name for t in plan.graph.tensors}
    whole = 16 * WIDTH
    kept = coconet.as_slice(plan, names["state"]) + coconet.as_slice(plan, names["square"])
    assert kept == 2 * whole // RANKS
    for held in materialise(plan).held:
        sizes = [np.prod(held[names[n]].shape) for n in ("state", "square")]
        assert sizes == [whole // RANKS] * 2
    np.testing.assert_allclose(result(plan)["w"], result(started("adam"))["w"], rtol=1e-12)
    with pytest.raises(ModelError, match="cannot be kept in slices"):
        coconet.as_slice(product(), "x.0", 0)
    with pytest.raises(ModelError, match="the graph reads no tensor"):
        coconet.as_slice(plan, "nobody")


def test_product_and_its_all_reduce_in_chunks() -> None:
    plan = product()
    want = result(product())["result"]
    coconet.overlap(plan, named(plan, "product"), named(plan, "relu"), 0, 2)
    np.testing.assert_array_equal(result(plan)["result"], want)
    for graph in materialise(plan).graphs:
        assert [n.type for n in graph.nodes].count("all_reduce") == 2
        order = [n.type for n in graph.nodes if n.type in ("matmul", "all_reduce")]
        assert order == ["matmul", "matmul", "all_reduce", "all_reduce"]


def test_slices_are_sent_down_a_pipeline() -> None:
    """A value that crosses from one pipeline stage to the next is sent in slices. There are two
    stages on two ranks each. Both ranks of a stage hold the same value, and each sends half of it.
    """
    model = Model(0, 1)
    with use_model(model):
        first = ark.relu(ark.tensor((ROWS, WIDTH), name="x"), name="first")
        then = ark.mul(first, 3.0, name="then")
        ark.copy(then, output=ark.tensor((ROWS, WIDTH), name="result"))
    plan = ParallelGraph(model.graph, 4)
    for node in plan.nodes:
        at = (0, 1) if node.name == "first" else (2, 3)
        plan.op_assign(plan.pieces(node)[0], *at)
    want = result(plan)["result"]
    sent = plan.op_copy(named(plan, "first"))
    for i, part in enumerate(plan.op_trans(plan.pieces(sent)[0], "a", 2)):
        plan.op_assign(part, i)
    np.testing.assert_array_equal(result(plan)["result"], want)
    for rank in (0, 1):
        graph = materialise(plan).graphs[rank]
        shapes = [n.inputs[0].shape for n in graph.nodes if n.type == "send"]
        assert shapes == [(ROWS // 2, WIDTH)] * 2


def test_stage_of_two_ranks_is_transformed_by_itself() -> None:
    """CoCoNet's third program: a stage's sum is computed in slices, which the stage's ranks send
    on.
    """

    def staged() -> ParallelGraph:
        model = Model(0, 1)
        with use_model(model):
            weight = ark.parameter((16, WIDTH), name="w")
            one = ark.linear(ark.tensor((ROWS, WIDTH), name="x"), weight, name="one")
            two = ark.mul(ark.relu(one, name="relu"), 3.0, name="two")
            ark.copy(two, output=ark.tensor((ROWS, 16), name="result"))
        plan = ParallelGraph(model.graph, 4)
        for node in plan.nodes:
            (piece,) = plan.pieces(node)
            if node.name != "one":
                plan.op_assign(piece, *((0, 1) if node.name == "relu" else (2, 3)))
                continue
            for rank, part in enumerate(plan.op_trans(piece, "z", 2)):
                plan.op_assign(part, rank)
        return plan

    plan, want = staged(), result(staged())["result"]
    parts = coconet.split(plan, named(plan, "one"))
    with pytest.raises(ModelError, match=r"two is not replicated on the ranks \[0, 1\] of one"):
        coconet.reorder(plan, parts, [named(plan, "relu"), named(plan, "two")])
    coconet.reorder(plan, parts, [named(plan, "relu")])
    assert coconet.layout(plan, named(plan, "relu")) == 0
    np.testing.assert_array_equal(result(plan)["result"], want)
    for graph in materialise(plan).graphs[:2]:
        sent = [n.inputs[0].shape for n in graph.nodes if n.type == "send"]
        assert sent == [(ROWS // 2, 16)] * 3  # 1 within the stage, 2 to the next


def test_dropout_is_computed_in_slices() -> None:
    """CoCoNet's Dropout(AR(x)) + r: each rank draws the mask for its rows only."""

    def dropped() -> ParallelGraph:
        model = Model(0, 1)
        with use_model(model):
            x, weight = ark.tensor((ROWS, WIDTH), name="x"), ark.parameter((16, WIDTH), name="w")
            one = ark.linear(x, weight, name="one")
            kept = ark.dropout(one, 0.5, seed=3, name="drop")
            total = ark.add(kept, ark.tensor((ROWS, 16), name="r"), name="total")
            ark.copy(total, output=ark.tensor((ROWS, 16), name="result"))
        plan = ParallelGraph(model.graph, RANKS)
        for node in plan.nodes:
            (piece,) = plan.pieces(node)
            ranks = range(RANKS)
            if node.name != "one":
                plan.op_assign(piece, *ranks)
                continue
            for rank, part in enumerate(plan.op_trans(piece, "z", RANKS)):
                plan.op_assign(part, rank)
        return plan

    plan, want = dropped(), result(dropped())["result"]
    assert 0 < np.count_nonzero(want) < want.size
    parts = coconet.split(plan, named(plan, "one"))
    chosen = [n for n in plan.nodes if n.type in ("dropout", "reshape", "mul", "add")]
    coconet.reorder(plan, parts, chosen)
    np.testing.assert_array_equal(result(plan)["result"], want)
    assert moved(plan) == [["reduce_scatter", "all_gather"]] * RANKS
    for graph in materialise(plan).graphs:
        (mask,) = (n.outputs[0] for n in graph.nodes if n.type == "dropout")
        assert mask.elements == ROWS * 16 // RANKS
    other = dropped()
    parts = coconet.split(other, named(other, "one"))
    with pytest.raises(ModelError, match=r"drop\.mask .* does not read the sliced value"):
        coconet.reorder(other, parts, [n for n in other.nodes if n.type in ("dropout", "reshape")])


def test_fused_ops_stand_together_and_circles_are_refused() -> None:
    plan = started("momentum")
    moved = [n for n in plan.nodes if n.type in ("mul", "add", "sub")]
    coconet.fuse(plan, moved)
    order = [p.node.id for p in plan.in_order()]
    places = [order.index(n.id) for n in moved]
    assert max(places) - min(places) == len(moved) - 1
    with pytest.raises(ModelError, match=r"fuse .+ too"):
        coconet.fuse(plan, [moved[0], moved[-1]])


def test_transforms_check_their_side_conditions() -> None:
    plan = started("momentum")
    gradient, add = named(plan, "gradient"), named(plan, "add")
    with pytest.raises(ModelError, match="no all-reduce to split"):
        coconet.split(plan, add)
    with pytest.raises(ModelError, match="not sliced"):
        coconet.reorder(plan, add, [])
    summed_product = product()
    with pytest.raises(ModelError, match="at once"):
        coconet.overlap(
            summed_product, named(summed_product, "product"), _summed(summed_product), 1, 2
        )
    parts = coconet.split(plan, gradient)
    with pytest.raises(ModelError, match="does not read the sliced value"):
        coconet.reorder(plan, parts, [n for n in plan.nodes if n.type == "mul"])


def _summed(plan: ParallelGraph) -> Node:
    """Adds to the graph an op that sums the product over its columns."""
    tensor = named(plan, "product").outputs[0]
    out = plan.graph.tensor((ROWS, 1), tensor.dtype)
    attrs = {"function": "sum", "axis": 1, "keepdims": True}
    return plan.graph.add("reduce_sum", [tensor], [out], attrs)


def test_local_operand_is_refused() -> None:
    model = Model(0, 1)
    with use_model(model):
        x, y = ark.tensor((ROWS, WIDTH), name="x"), ark.tensor((ROWS, 16), name="y")
        one = ark.matmul(y, x, transpose_input=True, name="one")
        two = ark.matmul(y, ark.relu(x), transpose_input=True, name="two")
        ark.copy(ark.mul(one, two, name="both"), output=ark.tensor((16, WIDTH), name="result"))
    plan = ParallelGraph(model.graph, RANKS)
    names = {t.name: t.buffer.name for t in plan.graph.tensors}
    spread({names["x"]: 0, names["y"]: 0})(plan)
    parts = coconet.split(plan, named(plan, "one"))
    with pytest.raises(ModelError, match="which is Local"):
        coconet.reorder(plan, parts, [named(plan, "both")])


def test_autotune_chooses_the_least_traffic() -> None:
    """`autotune` chooses by the machine's rates. If memory is slow, the update of slices is the
    fastest, because each rank updates a quarter. If each communication step is slow and slices are
    excluded, one all-reduce is faster than a reduce-scatter and an all-gather.
    """
    slow_memory = autotune(lambda: started("adam"), WAYS, Rates(1e6, 1.0, 1e9, 0.0))
    assert slow_memory.name == "RS-compute-AG" and len(slow_memory.us) == 3
    two = {name: WAYS[name] for name in ("AR-compute", "RS-AG-compute")}
    dear_steps = autotune(lambda: started("adam"), two, Rates(1e6, 1e9, 1e9, 10.0))
    assert dear_steps.name == "AR-compute"

    def wrong(plan: ParallelGraph) -> None:
        coconet.split(plan, plan.nodes[-1])

    tuned = autotune(lambda: started("adam"), {**WAYS, "wrong": wrong}, Rates(1e6, 1.0, 1e9))
    assert "no all-reduce" in tuned.refused["wrong"]


def test_on_cpu_ranks() -> None:
    plan = product()
    want = result(product(), 1)["result"]
    parts = coconet.split(plan, named(plan, "product"))
    coconet.reorder(plan, parts, [named(plan, "relu")])
    built = materialise(plan)
    random = np.random.default_rng(1)
    inputs = {}
    for tensor in plan.graph.tensors:
        if tensor.buffer.arena != "activation" and tensor.shape == tensor.extents:
            inputs.setdefault(tensor.buffer.name, random.integers(-3, 4, tensor.shape) * 1.0)
    inputs = {n: a.astype(np.float32) for n, a in inputs.items() if "result" not in n}
    target = {n.outputs[0].buffer.id for n in plan.nodes if n.outputs[0].name == "result"}
    for view, array in on_cpu_ranks(built, inputs, target):
        np.testing.assert_array_equal(array, part_of(want, view))
