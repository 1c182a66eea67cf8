"""All-to-all of unequal parts: right in every order and as fast as a flow, or refused."""

import dataclasses
import random

import numpy as np
import pytest

from ark.cli import main
from ark.collective.bounds import least_us
from ark.collective.exchange import exchange
from ark.collective.programs import (
    OUT,
    Kind,
    Span,
    check,
    execute,
    from_json,
    reference_result,
    to_execution_plan,
    to_json,
    to_xml,
)
from ark.collective.programs.values import coarsened
from ark.collective.simulate import simulate
from ark.collective.synthesis import synthesize
from ark.collective.topology import named
from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.ops.communication.collectives import choose_program
from tests.unit.collective.networks import random_eulerian


def counts_of(seed, ranks):
    rng = random.Random(seed)
    result = tuple(tuple(rng.choice([0, 0, 1, 2, 5]) for _ in range(ranks)) for _ in range(ranks))
    return result if any(map(any, result)) else ((1,) * ranks,) * ranks


def split_and_joined(inputs, counts, unit):
    """Returns the expected result by NumPy: every rank's parts, concatenated."""
    result = []
    for rank in range(len(counts)):
        parts = [
            array[sum(row[:rank]) * unit :][: row[rank] * unit]
            for array, row in zip(inputs, counts, strict=True)
        ]
        result.append(np.concatenate(parts))
    return result


@pytest.mark.parametrize("seed", range(0, 24, 8))
@pytest.mark.parametrize("algorithm", ["one_shot", "flow"])
def test_unequal_exchanges_are_right_in_every_order(seed, algorithm):
    for each in range(seed, seed + 8):
        topology = random_eulerian(each)
        ranks = len(topology.ranks)
        if ranks < 2:
            continue
        counts, unit = counts_of(each, ranks), 48
        pieces = random.Random(each).choice([1, 3])
        program = synthesize(topology, "all_to_all", algorithm, counts=counts, pieces=pieces)
        numbers = np.random.default_rng(each)
        inputs = [numbers.integers(-999, 999, sum(row) * unit) for row in counts]
        want = split_and_joined(inputs, counts, unit)
        received = reference_result("all_to_all", inputs, counts=counts)
        for direct, right in zip(received, want, strict=True):
            np.testing.assert_array_equal(direct, right)
        for result in (program, coarsened(program), from_json(to_json(program))):
            check(result)
            for order in (None, 1):
                for got, right in zip(execute(result, inputs, order), want, strict=True):
                    np.testing.assert_array_equal(got, right)
        assert from_json(to_json(program)) == program
        bound = least_us(topology, "all_to_all", 1 << 24, counts=counts)
        assert simulate(program, topology, 1 << 24).time_us >= bound * (1 - 1e-9)


def test_known_times():
    """Rank 0 of a star sends 3, 1 and 2 chunks to the others. Its port is the bottleneck: 6 GB at 1
    GB/s.
    """
    counts = ((9, 3, 1, 2), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0))
    assert exchange(named("star4"), counts).lower_bound == 6
    # Of 8 chunks from rank 0 to rank 2 of a ring of 4, half go either way: 4 GB on a link.
    counts = ((0, 0, 8, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    actual = exchange(named("ring4"), counts)
    assert actual.lower_bound == actual.inv_rate == 4


def test_flow_reaches_the_bound_where_direct_puts_do_not():
    topology = named("ring8")
    counts = tuple(tuple(8 if (s - r) % 8 == 4 else 0 for s in range(8)) for r in range(8))
    bound = least_us(topology, "all_to_all", 1 << 28, counts=counts)
    times = {}
    for name in ("one_shot", "flow"):
        program = synthesize(topology, "all_to_all", name, counts=counts, pieces=64)
        times[name] = simulate(program, topology, 1 << 28).time_us
    assert bound / times["flow"] > 0.95 and bound / times["one_shot"] < 0.6


def test_damaged_programs_are_refused():
    counts = ((0, 2), (1, 0))
    program = synthesize(named("full2"), "all_to_all", "one_shot", counts=counts)
    (put,) = (op for op in program.operations[0] if op.kind is Kind.PUT)
    short = dataclasses.replace(put, srcs=(Span("in", 0, 1),), dst=Span(OUT, 0, 1))
    damaged = dataclasses.replace(program, operations=((short,), program.operations[1]))
    with pytest.raises(PlanError, match="rank 1 must hold"):
        check(damaged)
    with pytest.raises(PlanError, match="busiest rank sends 3"):
        check(dataclasses.replace(program, counts=((0, 3), (1, 0))))
    for write in (to_xml, to_execution_plan):
        with pytest.raises(UnsupportedError, match="unequal"):
            write(program)
    with pytest.raises(UnsupportedError, match="unequal"):
        choose_program("all_to_all", 2, program, None, None, None)
    with pytest.raises(InvalidUsageError, match="proportions"):
        execute(program, [np.zeros(3), np.zeros(3)])


@pytest.mark.parametrize(
    ("collective", "algorithm", "counts"),
    [
        ("all_gather", "one_shot", ((1, 1), (1, 1))),
        ("all_to_all", "one_shot", ((1, 1),)),
        ("all_to_all", "one_shot", ((1,), (1,))),
        ("all_to_all", "flow", ((0, 0), (0, 0))),
        ("all_to_all", "flow", ((0, -1), (2, 0))),
        ("all_to_all", "taccl", ((0, 1), (2, 0))),
    ],
)
def test_invalid_counts_are_refused(collective, algorithm, counts):
    with pytest.raises(InvalidUsageError, match="counts"):
        synthesize(named("full2"), collective, algorithm, counts=counts)


def test_from_the_command_line(tmp_path, capsys):
    table, page = tmp_path / "counts.json", tmp_path / "page.html"
    table.write_text("[[0, 4, 0, 1], [0, 0, 4, 1], [1, 0, 0, 4], [4, 1, 0, 0]]")
    words = ["topo", "compare", "ring4", "--collective", "all_to_all", "--html", str(page)]
    assert main([*words, "--counts", str(table)]) == 0
    errors = capsys.readouterr().out
    assert (
        "flow" in errors
        and "one_shot" in errors
        and "taccl does not support counts" in " ".join(errors.split())
    )
    table.write_text('[["1"]]')
    assert main([*words, "--counts", str(table)]) == 2
    assert "the table of counts" in capsys.readouterr().err
