"""Cases and helpers of tests/multi/test_phases_of_ranks.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable

import ark
from ark.frontend.model import Model, use_model
from ark.plan.types import Plan
from tests.cases.pipeline import planned

WIDTH, EACH = 3000, (4, 7)
SLOW_PRODUCT_SIZE = 1000  # width of a slow rank's product: takes far longer than a thread spins for


def messages(model: Model, rank: int, world: int, slow: int) -> None:
    """The model of one rank in two phases. Rank 0 adds 1 in each iteration of the first phase to a
    count, and 1000 in the second, and sends the count. Each other rank receives it; all ranks add
    it to their total, and all but the last pass it on. Rank `slow` computes a large product first.
    """
    batch, total = ark.tensor([WIDTH], name="batch"), ark.tensor([WIDTH], name="total")
    for number, step in enumerate((1.0, 1000.0)):
        with model.graph.entry(f"phase{number}"):
            if rank == 0:
                ark.add(batch, step, output=batch)
                here = batch
            else:
                here = ark.recv(batch, rank - 1, tag=number)
            ark.add(total, _late(here) if rank == slow else here, output=total)
            if rank + 1 < world:
                ark.send(here, rank + 1, tag=number)


def sums(model: Model, rank: int, world: int, slow: int) -> None:
    """The model of one rank. Every rank increments a count in each iteration, and adds the mean of
    all ranks' counts to its total.
    """
    batch, total = ark.tensor([WIDTH], name="batch"), ark.tensor([WIDTH], name="total")
    for number, step in enumerate((1.0, 1000.0)):
        with model.graph.entry(f"phase{number}"):
            ark.add(batch, step, output=batch)
            here = ark.mul(ark.all_reduce(ark.copy(batch), rank, world), 1.0 / world)
            ark.add(total, _late(here) if rank == slow else here, output=total)


def _late(x: ark.Tensor) -> ark.Tensor:
    product = ark.mul(
        ark.matmul(
            ark.tensor([SLOW_PRODUCT_SIZE, SLOW_PRODUCT_SIZE]),
            ark.tensor([SLOW_PRODUCT_SIZE, SLOW_PRODUCT_SIZE]),
        ),
        0.0,
    )
    row = ark.reduce_sum(ark.reduce_sum(product, axis=0), axis=1)
    return ark.add(x, ark.reshape(row, (1,)))


Body = Callable[[Model, int, int, int], None]


def build(body: Body, world: int, slow: int, machine: object = "cpu-2") -> list[Plan]:
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            body(model, rank, world, slow)
        graphs.append(model.graph)
    return planned(graphs, machine)  # type: ignore[arg-type]
