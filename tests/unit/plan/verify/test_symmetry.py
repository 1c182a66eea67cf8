"""If all ranks do the same, one of them is planned and verified for all. The result must be the one
that planning and verifying every rank gives. A rank that differs from the others must be detected.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import by_name
from ark.lower import registry as operations
from ark.lower.pipeline import plan as make_plan
from ark.lower.ranks import plan_ranks
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.plans import plans as plans_of
from ark.ops.tokens import TokenState
from ark.plan.rotated import Rotated
from ark.plan.types import Plan
from ark.plan.verify import check, verify
from ark.plan.verify.rank_set import RankSet
from ark.plan.verify.structure import _check_moved
from ark.plan.verify.symmetry import alone, symmetry_of
from ark.tasks.tokens import SETTINGS
from tests.cases import verify as damaged
from tests.cases import verify_ranks as damaged_ranks
from tests.cases.rank_plans import execute
from tests.slow import examples, slow
from tests.unit.plan.shapes import CONFIG, decoder_graphs, machine

MACHINES = {
    "one": machine(1),
    "five": machine(5),
    "gpu": machine(4, Capability.PACKETS, warps=2),
}
MUTATIONS = [*damaged.MUTATIONS, *damaged_ranks.MUTATIONS]


@pytest.fixture(scope="module", params=sorted(MACHINES))
def isomorphic(request: pytest.FixtureRequest) -> Rotated:
    """Returns plans of a decoder with lockstep between ranks. Every wait in them is necessary."""
    rank_plans = plan_ranks(decoder_graphs(4), MACHINES[request.param], {"lockstep": True})
    assert isinstance(rank_plans, Rotated)
    return rank_plans


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=slow), 4])
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_one_plan_equals_the_plan_of_each_rank(ranks: int, name: str) -> None:
    graphs = decoder_graphs(ranks)
    rank_plans = plan_ranks(graphs, MACHINES[name])
    assert isinstance(rank_plans, Rotated)
    assert list(rank_plans) == [make_plan(graph, MACHINES[name]) for graph in graphs]
    verify(rank_plans)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=slow), 4])
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_tied_heads_view_is_shifted_by_rank(ranks: int, name: str) -> None:
    """With tied embeddings, each rank computes its part of the logits from its own rows of the
    embedding, of which it holds the whole.
    """
    graphs = decoder_graphs(ranks, tied=True)
    rank_plans = plan_ranks(graphs, MACHINES[name])
    assert isinstance(rank_plans, Rotated) and len(rank_plans.moved) == 1
    assert list(rank_plans) == [make_plan(graph, MACHINES[name]) for graph in graphs]
    heads = [plan.tensors[next(iter(rank_plans.moved))] for plan in rank_plans]
    assert [h.offsets for h in heads] == [(640 // ranks * rank, 0) for rank in range(ranks)]
    verify(rank_plans)
    verify(list(rank_plans))


@cache
def tied() -> Rotated:
    rank_plans = plan_ranks(decoder_graphs(4, tied=True), MACHINES["five"])
    assert isinstance(rank_plans, Rotated)
    return rank_plans


@pytest.mark.parametrize(
    ("steps", "words"),
    [((161, 0), "does not fit"), ((-1, 0), "does not fit"), ((160, 1), "does not fit")],
)
def test_view_that_leaves_its_memory_on_some_rank_is_refused(
    steps: tuple[int, int], words: str
) -> None:
    """A plan whose tensors begin at another offset on each rank is refused if a tensor exceeds its
    memory on some rank, although the first rank's plan is valid.
    """
    plans = tied()
    (tensor,) = plans.moved
    with pytest.raises(PlanError, match=words):
        verify(Rotated(plans.first, {tensor: steps}))


def test_written_tensors_do_not_move_between_ranks() -> None:
    plans = tied()
    memory = {t.id: plans.first.buffers[t.buffer] for t in plans.first.tensors}
    for arena in ("activation", "state"):
        other = next(t for t, b in memory.items() if b.arena == arena)
        steps = (0,) * len(plans.first.tensors[other].shape)
        with pytest.raises(
            PlanError, match="expected a parameter of this rank that no task writes"
        ):
            verify(Rotated(plans.first, {**plans.moved, other: steps}))
    # Adds a second buffer for the tensor's memory, which a task writes.
    (tensor,) = plans.moved
    head = plans.first.tensors[tensor]
    at = plans.first.buffers[head.buffer].offset
    buffers = [
        dataclasses.replace(b, offset=at, arena="parameter", initial=True)
        if b.arena == "state"
        else b
        for b in plans.first.buffers
    ]
    changed = dataclasses.replace(plans.first, buffers=tuple(buffers))
    with pytest.raises(PlanError):
        verify(Rotated(changed, plans.moved))


def test_view_of_half_a_wide_read_is_refused() -> None:
    """All ranks run the same code, which reads 16 bytes at once where an operand is aligned. So a
    plan in which an operand's alignment differs between ranks is refused.
    """
    plans = tied()
    (tensor,) = plans.moved
    shorter = dataclasses.replace(plans.first.tensors[tensor], shape=(160, 62))
    tensors = tuple(shorter if t.id == tensor else t for t in plans.first.tensors)
    changed = Rotated(dataclasses.replace(plans.first, tensors=tensors), {tensor: (160, 0)})
    rank_set = RankSet(changed, symmetry_of(changed))
    _check_moved(changed, set())
    with pytest.raises(PlanError, match="multiple of 16"):
        _check_moved(Rotated(changed.first, {tensor: (150, 1)}), set())
    assert max(rank_set.first_bytes(shorter)) == 480 * 64 * 4


def test_plans_with_a_moved_view_come_back_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))
    shape = Shape(CONFIG, by_name("fp32"), 64, 4, 0, 2)
    rank_plans = plans_of(shape, MACHINES["five"])
    cached = plans_of(shape, MACHINES["five"])
    assert cached is not rank_plans and list(cached) == list(rank_plans)
    assert isinstance(cached, Rotated) and cached.moved == rank_plans.moved and cached.moved


def test_symmetry_is_found_again_in_the_plans_of_all_ranks(isomorphic: Rotated) -> None:
    assert symmetry_of(list(isomorphic)) == symmetry_of(isomorphic)
    assert symmetry_of(isomorphic).checked == (0,)
    assert symmetry_of(isomorphic).renaming[3] == (3, 0, 1, 2)


def accepted(rank_set: RankSet) -> bool:
    try:
        check(rank_set)
    except PlanError as error:
        assert str(error).startswith("the plan is refused: ")
        return False
    return True


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_mutation_of_all_ranks_alike_is_refused_by_one_rank_as_by_all(
    isomorphic: Rotated, mutate: Callable[[Plan, random.Random], Plan]
) -> None:
    """If all ranks have the same mutation, verifying one rank refuses the plans, as verifying all
    does. Every mutation on every machine: one seed, 2 in `nox -s slow`, 12 times as many in `nox -s
    plan_fuzz`.
    """
    for seed in range(examples(2) * damaged.MORE):
        changed = Rotated(mutate(isomorphic.first, random.Random(seed)))
        by_one = accepted(RankSet(changed, symmetry_of(changed)))
        by_all = accepted(RankSet(list(changed), alone(4)))
        assert (by_one, by_all) == (False, False)


@pytest.fixture(scope="module")
def by_themselves() -> Rotated:
    """Returns plans without lockstep between ranks. Some of their waits are redundant."""
    rank_plans = plan_ranks(decoder_graphs(2), MACHINES["five"])
    assert isinstance(rank_plans, Rotated)
    return rank_plans


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_without_lockstep_a_mutation_of_all_ranks_is_refused_by_one_as_by_all(
    by_themselves: Rotated, mutate: Callable[[Plan, random.Random], Plan]
) -> None:
    """Mutated plans without lockstep between ranks: verifying one rank for all and verifying every
    rank give the same verdict. Some mutations are harmless.
    """
    plans = by_themselves
    for seed in range(examples(2) * damaged.MORE):
        changed = Rotated(mutate(plans.first, random.Random(seed)))
        by_one = accepted(RankSet(changed, symmetry_of(changed)))
        assert by_one == accepted(RankSet(list(changed), alone(2)))


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_mutation_of_one_rank_ends_the_symmetry_and_is_refused(
    isomorphic: Rotated, mutate: Callable[[Plan, random.Random], Plan]
) -> None:
    for seed in range(examples(2) * damaged.MORE):
        rank = seed % 4
        plans = list(isomorphic)
        plans[rank] = mutate(plans[rank], random.Random(seed))
        assert rank in symmetry_of(plans).checked
        with pytest.raises(PlanError):
            verify(plans)


def test_rank_that_differs_harmlessly_is_accepted_beside_the_others(isomorphic: Rotated) -> None:
    plans = list(isomorphic)
    counters = (*plans[2].counters, dataclasses.replace(plans[2].counters[-1], name="more"))
    counters = tuple(dataclasses.replace(c, id=i) for i, c in enumerate(counters))
    plans[2] = dataclasses.replace(plans[2], counters=counters)
    assert symmetry_of(plans) == alone(4)
    verify(plans)


def test_names_that_meet_another_ranks_are_no_symmetry(isomorphic: Rotated) -> None:
    """Plans in which two receive buffers of one rank have exchanged names, so that puts would reach
    the wrong buffers, are not treated as plans of equal ranks.
    """
    plans = list(isomorphic)
    own = [b for b in plans[1].buffers if b.arena == "symmetric" and b.rank == 1][:2]
    names = {own[0].id: own[1].name, own[1].id: own[0].name}
    buffers = [dataclasses.replace(b, name=names.get(b.id, b.name)) for b in plans[1].buffers]
    plans[1] = dataclasses.replace(plans[1], buffers=tuple(buffers))
    assert symmetry_of(plans) == alone(4)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.7, 0), (1.3, 5)])
def test_logits_with_the_ranks_own_share_first_give_the_same_token(
    temperature: float, top_k: int
) -> None:
    """Sampling from logits in which each rank stores its own part of the vocabulary first gives the
    token of the NumPy reference, which has the whole row. Most logits occur more than once.
    """
    world, own = 3, 700
    graphs, random_ = [], np.random.default_rng(top_k)
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            share = ark.mul(ark.tensor((own,), name="share"), 1.0)
            logits = ark.reshape(ark.all_gather(share, rank, world), (1, world * own))
            ark.sample(logits, TokenState.make(16))
        graphs.append(model.graph)
    plans = plan_ranks(graphs, registry.machine("cpu-2"))
    assert isinstance(plans, Rotated)
    assert [op.params["first"] for op in plans[2].ops if op.kind == "choose"] == [2]
    verify(plans)
    logits_ = random_.integers(0, 40, world * own).astype(np.float32) / 8
    settings = np.zeros(len(SETTINGS), np.int32)
    settings[:3] = np.float32(temperature).view(np.int32), top_k, 77
    settings[SETTINGS.index("limit")] = 16
    given = {"settings": settings, "position": np.array([4]), "tokens": np.zeros(16)}
    shares = logits_.reshape(world, own)
    inputs = [{"share": row, **{n: a.astype(np.int32) for n, a in given.items()}} for row in shares]
    outputs = execute(list(plans), inputs, [["tokens"]] * world, iterations=1)
    state = [given[n].astype(np.int64) for n in ("settings", "position", "tokens")]
    reference = operations.get("sample").reference
    assert reference is not None
    _, tokens, _ = reference([logits_[None].astype(np.float64), *state, state[2], state[2]], {})
    for rank in range(world):
        assert outputs[rank]["tokens"].tolist() == tokens.tolist()
