"""Plans many calls of attention with many query rows as one plan, for tests of vendors' bodies
(device functions). The shapes are those of tests.backend, and some that fill whole tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import ark
from ark.frontend.tensor import Tensor
from ark.ir.dtype import DataType
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan, PlanOp
from ark.plan.verify import verify
from tests.cases import paged
from tests.cases.attention import Shape, case
from tests.opcheck import Case, rounded

# Attention in tiles of 128 rows, with several tiles per task. The cases have whole blocks of keys,
# incomplete last blocks, and all ways in which warps share a tile. In the first case the maxima of
# scores grow from block to block.
WIDE = (
    Shape(280, 333, 4, 2, 64, position=40, scale=1.0),
    Shape(130, 130, 2, 1, 128, batch=2, window=100),
    Shape(150, 260, 2, 1, 96, causal=False, softcap=5.0),
    Shape(129, 300, 2, 2, 256, position=0, sinks=True),
    Shape(200, 200, 2, 1, 40),
    Shape(150, 170, 4, 2, 64, batch=2, causal=False, mask=(2, 1, 1, 170)),
    Shape(150, 170, 2, 2, 128, softcap=3.0, mask=(2, 150, 170), added=True, sinks=True),
)


# Calls of paged attention: consecutive rows of one sequence, with various page sizes. If there is a
# window, the page table's entries for pages before all windows are not valid page numbers.
PAGES = (
    paged.Shape((90,), 9, 4, 1, 32, 5, 20, 20),
    paged.Shape((70,), 40, 2, 1, 16, 16, 7, 9, window=33),
    paged.Shape((0,), 21, 4, 2, 64, 4, 6, 6, softcap=3.0, sinks=True),
    paged.Shape((111,), 130, 2, 1, 128, 32, 8, 9),
    paged.Shape((300,), 150, 2, 2, 192, 64, 8, 9, window=100),
)


def planned(
    shapes: Sequence[Any],
    machine: Machine,
    dtype: DataType,
    variant: str = "block",
    cached: DataType | None = None,
) -> tuple[Plan, list[tuple[Case, list[str], PlanOp]]]:
    """Returns one plan with a call of attention for each shape, and for each call its case, the
    names of its inputs and its op. cached: the type of keys and values, if it differs from the
    queries' type.
    """
    model, result = ark.Model(0, 1), []

    def kept(shape: Sequence[int], kind: DataType, name: str) -> Tensor:
        """Returns a tensor whose memory no other tensor of the plan shares."""
        return Tensor(model.graph.tensor(tuple(shape), kind, arena="state", name=name), model)

    with ark.use_model(model):
        for i, s in enumerate(shapes):
            made_of = paged.case if isinstance(s, paged.Shape) else case
            one = made_of(s, dtype, i, cached)
            named = [f"{i}.{n}" for n in range(len(one.inputs))]
            pairs = zip(named, one.inputs, strict=True)
            one.result = one.build(*(kept(a.shape, kind, n) for n, (a, kind) in pairs))
            ark.copy(one.result, kept(one.result.shape(), dtype, f"{i}.out"))
            result.append((one, named))
    plan = make_plan(model.graph, machine, {"variant": variant})
    verify([plan])
    ops = [op for op in plan.ops if op.kind == "attention_tiles"]
    return plan, [(*pair, op) for pair, op in zip(result, ops, strict=True)]


def given(case: Case, named: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns a case's inputs by name."""
    return {n: a.astype(d.numpy) for n, (a, d) in zip(named, case.inputs, strict=True)}


def expected(case: Case) -> np.ndarray:
    return case.expected(*(rounded(a, d) for a, d in case.inputs))
