"""Puts with routes over other ranks become puts from rank to rank. The resulting programs are right
in every order and use the same links.
"""

import dataclasses

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.collective import classics
from ark.collective.programs import (
    IN,
    OUT,
    Kind,
    ProgramBuilder,
    Span,
    check,
    execute,
    reference_result,
)
from ark.collective.programs.routed import routed
from ark.collective.simulate import Routes, simulate
from ark.collective.topology import named
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify


def with_routes(program, topology):
    """Returns the program with an explicit route in every put, the default one."""
    routes = Routes(topology)
    lists = [
        [
            dataclasses.replace(
                op, route=routes.default(topology.ranks[rank], topology.ranks[op.peer])
            )
            if op.kind is Kind.PUT
            else op
            for op in ops
        ]
        for rank, ops in enumerate(program.operations)
    ]
    return dataclasses.replace(program, operations=tuple(map(tuple, lists)))


@pytest.mark.parametrize("network", ["ring5", "mesh2x3", "dgx1v"])
@pytest.mark.parametrize("name", ["one_shot", "two_shot", "double_binary_tree", "combiner_chain"])
def test_every_hop_between_ranks_is_a_put(network, name):
    topology = named(network)
    ranks = len(topology.ranks)
    reduction = "combiner" if name.startswith("combiner") else "sum"
    result = classics.build(name, "all_reduce", ranks, reduction=reduction)
    program = with_routes(result, topology)
    split = routed(program)
    check(split)
    puts = [op for ops in split.operations for op in ops if op.kind is Kind.PUT]
    assert all(set(op.route[1:-1]).isdisjoint(topology.ranks) for op in puts)
    assert len(puts) > sum(op.kind is Kind.PUT for ops in program.operations for op in ops)
    whole, hops = (simulate(p, topology, 1 << 20).link_bytes for p in (program, split))
    assert whole == pytest.approx(hops)
    random = np.random.default_rng(1)
    inputs = [random.integers(-9, 9, 8 * ranks).astype(float) for _ in range(ranks)]
    want = reference_result("all_reduce", inputs, reduction)
    for seed in (None, 1, 2):
        for got, right in zip(execute(split, inputs, seed), want, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-12)


def test_operations_without_a_route_are_unchanged():
    topology = named("h100x2")
    program = with_routes(classics.build("one_shot", "all_gather", 16), topology)
    assert routed(program) is program


def line():
    """Returns a broadcast of rank 0's data to ranks 1 and 2. The data for rank 2 pass through rank
    1.
    """
    b = ProgramBuilder("line", "broadcast", 3, 1, root=0)
    b.copy(0, Span(IN, 0), Span(OUT, 0))
    b.put(0, 1, Span(OUT, 0), Span(OUT, 0), ("g0", "g1"))
    b.put(0, 2, Span(OUT, 0), Span(OUT, 0), ("g0", "g1", "g2"))
    return b.build()


def test_plan_passes_data_on_through_the_rank_that_a_route_names():
    plans = []
    for rank in range(3):
        model = Model(rank, 3)
        with use_model(model):
            x = ark.add(ark.tensor([64], name="x"), 1.0)
            ark.broadcast(x, rank, 3, root=0, algorithm=line())
        plans.append(make_plan(model.graph, registry.machine("cpu-2")))
    verify(plans)
    to = [
        {b.rank for b in plan.buffers if b.arena == "symmetric" and b.rank >= 0} for plan in plans
    ]
    assert [peers - {rank} for rank, peers in enumerate(to)] == [{1}, {2}, set()]


def test_rank_with_two_names_is_refused():
    program = line()
    ops = list(program.operations[0])
    ops[1] = dataclasses.replace(ops[1], route=("x0", "g1"))
    with pytest.raises(PlanError, match="rank 0"):
        routed(dataclasses.replace(program, operations=(tuple(ops), *program.operations[1:])))
