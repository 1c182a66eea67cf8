"""Tiles of large products on machines with warpgroups: all tiles of a processor are one task,
unless a peer waits for them. If a peer waits, each tile is a task, so that it is sent as soon as it
is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.plan.verify import verify

ROWS, WIDTH, INNER = 512, 512, 32768  # 512 tiles of 128 by 256


def planned(work: Callable[[Any, int], Any]) -> tuple[int, int]:
    """Returns the numbers of the product's tasks and of processors."""
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            x = ark.tensor((ROWS, WIDTH), ark.bf16, name="x")
            product = ark.linear(x, ark.parameter((INNER, WIDTH), ark.bf16, name="w"))
            work(product, rank)
        graphs.append(model.graph)
    plans = plan_ranks(graphs, registry.machine("h100"), {"overlap": False, "variant": "matrix"})
    verify(plans)
    (op,) = [i for i, o in enumerate(plans[0].ops) if o.kind == "matmul"]
    tasks = Counter(t.op for p in plans[0].phases for row in p.processors for t in row)
    return tasks[op], plans[0].processors


@pytest.mark.parametrize("travels", [False, True])
def test_tiles_are_joined_where_no_peer_waits(travels: bool) -> None:
    def work(product: Any, rank: int) -> Any:
        if travels:
            return ark.all_reduce(product, rank, 2)
        small = ark.reduce_sum(product, axis=1)
        return ark.all_reduce(ark.mul(small, 2.0), rank, 2)

    tasks, processors = planned(work)
    assert tasks == (512 if travels else processors)
