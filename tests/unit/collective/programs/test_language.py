"""The language for collective programs. Classic algorithms written in it are correct in every
order, also as plans, and faulty programs are refused with a reason.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.collective.programs import CollectiveProgram, Kind, execute, steps
from ark.collective.programs.execute import reference_result
from ark.errors import InvalidUsageError, PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify

PATH = Path(__file__).parents[4] / "examples" / "collectives.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collectives_example", PATH)
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


EXAMPLES = _load().ALGORITHMS


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", EXAMPLES, ids=lambda a: a.__name__)
def test_classic_programs_compute_their_collective(algorithm, ranks: int) -> None:
    program: CollectiveProgram = algorithm(ranks)
    random = np.random.default_rng(ranks)
    inputs = [random.integers(-99, 99, 24 * ranks) for _ in range(ranks)]
    want = reference_result(program.collective, inputs, root=program.root)
    for seed in (None, 1, 2):
        for got, right in zip(execute(program, inputs, seed), want, strict=True):
            if right is not None:
                np.testing.assert_array_equal(got, right)


CALLS = {
    "all_gather": ark.all_gather,
    "all_reduce": ark.all_reduce,
    "all_to_all": ark.all_to_all,
    "broadcast": ark.broadcast,
    "reduce_scatter": ark.reduce_scatter,
}


@pytest.mark.parametrize(
    "algorithm",
    [a for a in EXAMPLES if a(4).collective.value in CALLS],
    ids=lambda a: a.__name__,
)
def test_classic_programs_become_plans_that_the_verifier_accepts(algorithm) -> None:
    program, plans = algorithm(4), []
    root = {} if program.root is None else {"root": program.root}
    for rank in range(4):
        model = Model(rank, 4)
        with use_model(model):
            x = ark.add(ark.tensor([44, 7], name="x"), 1.0)
            CALLS[program.collective.value](x, rank, 4, algorithm=program, **root)
        plans.append(make_plan(model.graph, registry.machine("cpu-2")))
    verify(plans)


def test_other_numbers_of_ranks() -> None:
    names = {a.__name__: a for a in EXAMPLES}
    for name in (
        "ring_all_gather",
        "ring_all_reduce",
        "two_shot_all_reduce",
        "binomial_broadcast",
        "bruck_all_gather",
        "bruck_all_to_all",
        "double_binary_tree_all_reduce",
    ):
        for ranks in (3, 5, 7):
            size = 6 * ranks if "all_to_all" in name else 30
            inputs = [np.arange(size) + r for r in range(ranks)]
            program = names[name](ranks)
            got = execute(program, inputs)
            for mine, right in zip(
                got, reference_result(program.collective, inputs, root=program.root), strict=True
            ):
                np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize(
    ("name", "steps_taken", "sent"),
    [
        ("bruck_all_gather", 3, 7),
        ("recursive_halving_reduce_scatter", 3, 7),
        ("rabenseifner_all_reduce", 6, 14),
        ("recursive_doubling_all_reduce", 3, 3),
        ("bruck_all_to_all", 3, 12),
        ("pairwise_all_to_all", 1, 7),
        ("hierarchical_all_reduce", 3, 7),
    ],
)
def test_steps_and_bytes_are_the_published_ones(name: str, steps_taken: int, sent: int) -> None:
    """The examples have the published numbers on 8 ranks: the length of the longest chain of puts,
    and the chunks that each rank sends.
    """
    program = {a.__name__: a for a in EXAMPLES}[name](8)
    before = steps(program)
    puts = [ref for ref in program.refs() if program.op(ref).kind is Kind.PUT]
    assert 1 + max(before[ref] for ref in puts) == steps_taken
    each = Counter[int]()
    for ref in puts:
        each[ref.rank] += program.op(ref).dst.count
    assert each == dict.fromkeys(range(8), sent)


@pytest.mark.parametrize(
    "algorithm", [a for a in EXAMPLES if "all_reduce" in a.__name__], ids=lambda a: a.__name__
)
def test_all_ranks_get_the_same_bits(algorithm) -> None:
    random = np.random.default_rng(5)
    outputs = execute(algorithm(8), [random.normal(size=96) for _ in range(8)], seed=3)
    for other in outputs[1:]:
        assert other is not None and other.tobytes() == outputs[0].tobytes()


@pytest.mark.parametrize("ranks", [6, 7, 8])
def test_inner_ranks_of_one_tree_are_leaves_of_the_other(ranks: int) -> None:
    program = {a.__name__: a for a in EXAMPLES}["double_binary_tree_all_reduce"](ranks)
    for ops in program.operations:
        assert sum(op.kind is Kind.REDUCE for op in ops) <= 1


def test_missing_data_is_reported() -> None:
    with pytest.raises(PlanError, match="rank 1"):

        @ark.comm.program("broadcast", 2, chunks=1, root=0)
        def without_rank_1(p) -> None:
            p.input(0).to(p.output(0))


def test_contribution_counted_twice_is_found() -> None:
    with pytest.raises(PlanError):

        @ark.comm.program("all_reduce", 2, chunks=1, scratch=1)
        def twice(p) -> None:
            for rank in p.ranks:
                p.input(rank).to(p.scratch(1 - rank))
            for rank in p.ranks:
                mine = p.input(rank)
                p.reduce(mine, p.scratch(rank), mine, into=p.output(rank))


def test_mean_is_divided_once() -> None:
    @ark.comm.program("all_reduce", 2, chunks=1, scratch=1, reduction="mean")
    def mean(p) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.scratch(1 - rank))
        for rank in p.ranks:
            p.reduce(p.input(rank), p.scratch(rank), into=p.output(rank))

    for got in execute(mean, [np.array([1.0, 2.0]), np.array([3.0, 8.0])]):
        np.testing.assert_array_equal(got, [2.0, 5.0])


def elsewhere() -> object:
    """Returns a chunk of another collective program."""
    kept = []
    with pytest.raises(PlanError):
        ark.comm.program("all_reduce", 2)(lambda p: kept.append(p.output(1)))
    return kept[0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ranks": "2"}, "'2' is not a whole number"),
        ({"ranks": 1 << 40}, "the most slots of all buffers"),
        ({"ranks": 2, "chunks": 1.5}, "1.5 is not a whole number"),
        ({"ranks": 2, "pieces": None}, "None is not a whole number"),
        ({"ranks": 2, "scratch": 1 << 40}, "the most slots of all buffers"),
        ({"ranks": 2, "scratch": -1}, "scratch=-1 must be at least 0"),
        ({"ranks": 2, "root": "0"}, "'0' is not a whole number"),
        ({"ranks": 2, "reduction": ["sum"]}, "name and reduction must be strings"),
        ({"ranks": 2, "name": 3}, "name and reduction must be strings"),
    ],
)
def test_invalid_program_arguments_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidUsageError, match=re.escape(words)):
        ark.comm.program("all_reduce", **asked)(lambda p: None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda p: p.scratch(0), "no scratch memory"),
        (lambda p: p.input(2), "numbered from 0"),
        (lambda p: p.input(0, 0, 2).to(p.output(1, 0)), "must have equal sizes"),
        (lambda p: p.reduce(p.input(0), p.input(1), into=p.output(0)), "move the others there"),
        (lambda p: p.input(0, 2), "1 slots of 'in' from slot 2 on are out of range; it has 2"),
        (lambda p: p.input(0, 0, 1 << 40), "it has 2 slots, numbered from 0"),
        (lambda p: p.output(0, -1), "it has 2 slots, numbered from 0"),
        (lambda p: p.input(0, 0.5), "0.5 is not a whole number"),
        (lambda p: p.input("one"), "'one' is not a whole number"),
        (lambda p: p.input(0).to(1), "expected a chunk, got 1"),
        (lambda p: p.reduce(p.input(0), None, into=p.output(0)), "expected a chunk, got None"),
        (lambda p: p.input(0).to(elsewhere()), "of rank 1 belongs to another program"),
    ],
)
def test_invalid_statements_are_refused(body, words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        ark.comm.program("all_reduce", 2)(body)
