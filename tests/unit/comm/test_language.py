"""The language for programs: classic algorithms written in it are right in every order, in plans
too, and what is wrong is refused in words.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.collective import CollectiveProgram, execute
from ark.collective.execute import reference_result
from ark.errors import InvalidUsageError, PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify

PATH = Path(__file__).parents[3] / "examples" / "collectives.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collectives_example", PATH)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


EXAMPLES = _load().ALGORITHMS


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", EXAMPLES, ids=lambda a: a.__name__)
def test_a_classic_gives_what_its_collective_asks_for(algorithm, ranks: int) -> None:
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
def test_it_becomes_a_plan_that_the_verifier_accepts(algorithm) -> None:
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
    for name in ("ring_all_gather", "ring_all_reduce", "two_shot_all_reduce", "binomial_broadcast"):
        for ranks in (3, 5, 7):
            inputs = [np.arange(30) + r for r in range(ranks)]
            program = names[name](ranks)
            got = execute(program, inputs)
            for mine, right in zip(
                got, reference_result(program.collective, inputs, root=program.root), strict=True
            ):
                np.testing.assert_array_equal(mine, right)


def test_what_is_forgotten_is_found() -> None:
    with pytest.raises(PlanError, match="rank 1"):

        @ark.comm.program("broadcast", 2, chunks=1, root=0)
        def nobody_tells_rank_1(p) -> None:
            p.input(0).to(p.output(0))


def test_a_contribution_counted_twice_is_found() -> None:
    with pytest.raises(PlanError):

        @ark.comm.program("all_reduce", 2, chunks=1, scratch=1)
        def twice(p) -> None:
            for rank in p.ranks:
                p.input(rank).to(p.scratch(1 - rank))
            for rank in p.ranks:
                mine = p.input(rank)
                p.reduce(mine, p.scratch(rank), mine, into=p.output(rank))


def test_a_mean_is_divided_once() -> None:
    @ark.comm.program("all_reduce", 2, chunks=1, scratch=1, reduction="mean")
    def mean(p) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.scratch(1 - rank))
        for rank in p.ranks:
            p.reduce(p.input(rank), p.scratch(rank), into=p.output(rank))

    for got in execute(mean, [np.array([1.0, 2.0]), np.array([3.0, 8.0])]):
        np.testing.assert_array_equal(got, [2.0, 5.0])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda p: p.scratch(0), "no scratch memory"),
        (lambda p: p.input(2), "numbered from 0"),
        (lambda p: p.input(0, 0, 2).to(p.output(1, 0)), "must be of one size"),
        (lambda p: p.reduce(p.input(0), p.input(1), into=p.output(0)), "move the chunks there"),
    ],
)
def test_what_cannot_be_is_said(body, words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        ark.comm.program("all_reduce", 2)(body)
