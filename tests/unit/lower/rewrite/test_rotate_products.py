"""The rotary embedding of a product's result is computed in the product's epilogue only where the
body can do so, and where this does not change the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import fp32, int64
from ark.ir.graph import Graph
from ark.lower.observe import observed
from ark.lower.pipeline import plan
from ark.lower.prepare import prepare
from ark.lower.rewrite.context import Context
from ark.machine.capability import Capability
from ark.ops.selection import iota
from ark.plan.kind import signature
from ark.plan.verify import verify
from tests.cases.rotary_products import Projection
from tests.unit.lower.computed import computed

SMALL = Projection(batch=2, rows=6, depth=8, heads=3, width=4, dtype=fp32)


def rotating(graph: Graph, machine: str) -> list[str]:
    """Returns the kinds of the ops that rotate in the plan for a machine."""
    planned = plan(graph, registry.machine(machine))
    verify([planned])
    named = [op for op in planned.ops if op.name == "rotary" or op.params.get("rotary")]
    return [op.kind for op in named]


@pytest.mark.parametrize("machine", ["cpu-2", "h200", "b200", "a100", "mi300x", "mi355x"])
def test_products_rotate_where_their_bodies_hold_whole_heads(machine: str) -> None:
    features = {*registry.machine(machine).capabilities}
    whole = {Capability.WGMMA, Capability.TCGEN05, Capability.ONE_PRODUCT_BODY} & features
    wanted = ["matmul"] if whole else ["elementwise"] * 2
    for width in (64, 128):
        for bias in (False, True):
            projection = Projection(rows=256, width=width, bias=bias, positions=1 + bias)
            assert rotating(projection.graph(), machine) == wanted, projection


def test_tiles_of_warpgroups_have_whole_heads() -> None:
    """Both warpgroups of a tile of 64 rows have whole heads, too."""
    for width in (64, 128):
        for batch, rows, heads in ((1, 40, 16), (1, 100, 64), (2, 512, 16), (8, 512, 8)):
            shape = Projection(batch, rows, 512, heads, width)
            planned = plan(shape.graph(), registry.machine("h200"), {"variant": "matrix"})
            for op in (o for o in planned.ops if o.params.get("rotary")):
                high, wide = op.params["tile"]
                assert wide % (width if high > 64 else 2 * width) == 0
                assert signature(planned, op).operands[3].shape == (rows, width // 2)


def before_and_after(build: Callable[[], Any]) -> tuple[Graph, Graph, Any]:
    """Returns the graph before the pass and after it, and the result of `build`."""
    seen: dict[str, tuple[Graph, Graph]] = {}

    def keep(name: str, before: Graph, after: Graph, context: Context) -> None:
        seen[name] = (before, after)

    model = ark.Model()
    with ark.use_model(model):
        result = build()
    with observed(keep):
        prepare(model.graph, registry.machine("cpu-2"))
    return *seen["rotate_products"], result


def inputs() -> list[ark.Tensor]:
    return [ark.tensor(s, fp32) for s in SMALL.shapes]


def _read_elsewhere() -> Any:
    heads = SMALL.product(*(given := inputs())[:3])
    rotated = SMALL.rotated(heads, *(SMALL.table(t) for t in given[3:]))
    return ark.matmul(rotated, ark.transpose(heads, [0, 1, 3, 2]))


def _halves_that_differ() -> Any:
    tables = [ark.tensor([1, 1, SMALL.rows, SMALL.width], fp32) for _ in range(2)]
    heads = SMALL.product(*inputs()[:3])
    return ark.relu(SMALL.rotated(heads, *(ark.mul(t, 2.0) for t in tables)))


def _one_half_turned() -> Any:
    given = inputs()
    joined = ark.concat([given[3], ark.neg(given[3])], 2)
    flat = [1, 1, SMALL.rows, SMALL.width]
    tables = ark.reshape(ark.mul(joined, 1.0), flat), SMALL.table(given[4])
    return ark.relu(SMALL.rotated(SMALL.product(*given[:3]), *tables))


def _by_heads() -> Any:
    angles = ark.tensor([SMALL.heads, SMALL.rows, SMALL.width // 2], fp32)
    table = ark.mul(ark.concat([angles, angles], 2), 1.0)
    table = ark.reshape(table, [1, SMALL.heads, SMALL.rows, SMALL.width])
    return ark.relu(SMALL.rotated(SMALL.product(*inputs()[:3]), table, table))


def _by_columns() -> Any:
    given, flat = inputs(), [1, 1, SMALL.rows, SMALL.width]
    place = ark.cast(iota([SMALL.width], 0, int64), fp32)
    tables = [ark.add(SMALL.table(t), place) for t in given[3:]]
    return ark.relu(
        SMALL.rotated(SMALL.product(*given[:3]), *(ark.reshape(t, flat) for t in tables))
    )


def _few_rows() -> Any:
    few = dataclasses.replace(SMALL, batch=1, rows=2)
    return few.build(*(ark.tensor(s, fp32) for s in few.shapes))


@pytest.mark.parametrize(
    "build",
    [_read_elsewhere, _halves_that_differ, _one_half_turned, _by_heads, _by_columns, _few_rows],
)
def test_other_rotations_stay_nodes(build: Callable[[], Any]) -> None:
    before, after, _ = before_and_after(build)
    assert "rotary" in [n.name for n in before.nodes]
    assert after.nodes == before.nodes


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_the_nodes(positions: int, bias: bool) -> None:
    shape = dataclasses.replace(SMALL, positions=positions, bias=bias)
    values = [a.astype(np.float32) for a in shape.values(np.random.default_rng(positions))]
    given: list[ark.Tensor] = []

    def build() -> Any:
        given.extend(ark.tensor(s, fp32) for s in shape.shapes)
        return shape.build(*given)

    before, after, result = before_and_after(build)
    assert "rotary" not in [n.name for n in after.nodes]
    memory = {t.ir.buffer.id: v for t, v in zip(given, values, strict=True)}
    for graph in (before, after):
        got = computed(graph, dict(memory), graph.nodes[-1].outputs[0])
        np.testing.assert_allclose(
            got.reshape(result.shape()), shape.expected(*values), rtol=1e-5, atol=1e-5
        )
