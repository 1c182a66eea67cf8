"""How many vectors a thread of an elementwise op loads at once."""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.tasks.box_writer import BoxWriter
from ark.tasks.elementwise import ElementwiseParams


def rounds(rows: int) -> int:
    """The number for a normalisation of columns by four tensors with this number of rows."""
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor([4096, 4096])
        a, b, c, d = (ark.tensor([rows, 4096]) for _ in range(4))
        ark.add(ark.mul(ark.mul(ark.sub(x, a), b), c), d)
    planned = plan(model.graph, registry.machine("h200"), {"variant": "matrix"})
    sig = kinds.signature(planned, planned.ops[-1])
    params = sig.read(ElementwiseParams)
    writer = BoxWriter(sig, params.expr, params.tile, {})
    return writer.rounds(writer.vectors(), machine_of(planned))


def test_operands_that_stay_in_the_nearest_cache_do_not_limit_loads() -> None:
    assert rounds(1) == 4
    assert rounds(4096) == 1
