"""The bytes that a kind declares (`accesses`, `scratch`) compared with those that its compiled body
accesses, on the CPU.

Planner, verifier and the brute-force oracle all rely on the declaration, so they cannot detect an
error in it. Here random ops of every kind are planned, compiled with a recorder before every memory
access, and run task by task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ark.ir.dtype import fp32
from ark.lower import tiling
from ark.lower.rewrite import overlap_collectives
from ark.plan import kind as kinds
from ark.plan.types import Plan
from tests.cases import accesses
from tests.cases.accesses import LARGER, check
from tests.projection import Projection, with_matrix
from tests.slow import slow
from tests.unit.tasks.random_plans import (
    FAMILIES,
    SEEDS,
    Family,
    batch_plan,
    caches,
    channel_plan,
    custom_packets,
    decoder_plan,
    family_plan,
    groups_plan,
    long_products,
    movement,
    sum_plan,
    target,
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "least_elements", lambda _: 7)
    monkeypatch.setattr(overlap_collectives, "in_packets", lambda *_: False)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__.strip("_"))
def test_accesses_of_public_ops_equal_declarations(family: Family, seed: int) -> None:
    check(family_plan(family, seed), seed, runs=2)


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_accesses_of_sums_over_ranks_equal_declarations(seed: int) -> None:
    check(sum_plan(seed), seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_accesses_of_channels_equal_declarations(seed: int) -> None:
    check(channel_plan(seed), seed)
    check(groups_plan(seed), seed)


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_accesses_of_decoders_equal_declarations(seed: int) -> None:
    check(decoder_plan(seed), seed, runs=3)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_accesses_of_batches_equal_declarations(seed: int) -> None:
    check(batch_plan(seed), seed, runs=8)


def test_packets_of_custom_ops_are_touched_as_declared() -> None:
    planned = custom_packets()
    packed = {t.name for t in planned.tensors if t.packet}
    assert packed == {"blur"}  # `shares` must read plain memory
    check(planned)


def test_accesses_of_long_thin_products_equal_declarations() -> None:
    check(family_plan(long_products, 0, dtypes=[fp32], times=1))


def test_accesses_of_a_projection_equal_declarations() -> None:
    projection = Projection(rows=140, k=9, heads=2, kv_heads=1, width=64, context=300)
    check(projection.plan(with_matrix(target(3))), runs=3)


def _of_every_kind() -> list[Plan]:
    plans = [family_plan(family, 0) for family in FAMILIES]
    plans += [sum_plan(seed) for seed in range(2)] + [decoder_plan(seed) for seed in range(4)]
    return [*plans, channel_plan(0), batch_plan(0), groups_plan(0)]


def test_every_kind_is_among_them() -> None:
    """The plans above have tasks of every kind, so a new kind needs a call there. Transfers access
    no memory themselves (the host's proxy does), nor does an iteration's end. Claimed tiles are of
    other kinds and do not occur on a CPU; tests/backend/test_claims.py runs them.
    """
    used = {op.kind for planned in _of_every_kind() for op in planned.ops}
    nothing = {"transfer", "iteration_end", "claimed"}
    assert used - nothing == set(kinds.names()) - nothing


def _half(access: kinds.Access) -> kinds.Access:
    """Returns the access halved along its longest dimension."""
    sizes = [hi - lo for lo, hi in zip(access.lo, access.hi, strict=True)]
    d = sizes.index(max(sizes))
    hi = list(access.hi)
    hi[d] -= sizes[d] // 2
    return dataclasses.replace(access, hi=tuple(hi))


@slow
@pytest.mark.parametrize("write", [False, True], ids=["reads", "writes"])
def test_declarations_cut_in_half_are_detected(
    write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halving the declaration of any kind whose tasks touch more than one element is detected.
    Tasks of the kind `arrival` are exempt, because peers write the memory that they declare.
    """
    plans, missed = _of_every_kind(), set()
    names = {op.kind for planned in plans for op in planned.ops} - {"transfer", "iteration_end"}
    for name in names:
        kind, true, halved = kinds.get(name), kinds.get(name).accesses, []

        def half(
            sig: kinds.Signature, coord: Sequence[int], true: Any = true, halved: Any = halved
        ) -> list[kinds.Access]:
            declared = true(sig, coord)
            planned = [_half(a) if a.write == write else a for a in declared]
            halved += [planned != declared]
            return planned

        with monkeypatch.context() as patch:
            patch.setattr(kind, "accesses", half)
            try:
                for plan in (p for p in plans if any(op.kind == name for op in p.ops)):
                    for seed in range(3):
                        check(plan, seed, runs=6)
                if any(halved):
                    missed.add(name)
            except AssertionError as error:
                assert "undeclared bytes" in str(error)
    assert missed == ({"arrival"} if write else set())


def _smaller(access: kinds.Access) -> kinds.Access:
    return dataclasses.replace(access, hi=(*access.hi[:-1], max(1, access.hi[-1] - 1)))


@pytest.mark.parametrize("which", ["reads", "writes"])
def test_declaration_that_is_too_small_is_found(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_plan = family_plan(movement, 0)
    kind, true = kinds.get("transpose"), kinds.get("transpose").accesses

    def less(sig: kinds.Signature, coord: Sequence[int]) -> list[kinds.Access]:
        declared = true(sig, coord)
        return [_smaller(a) if a.write == (which == "writes") else a for a in declared]

    monkeypatch.setattr(kind, "accesses", less)
    with pytest.raises(AssertionError, match=f"{which} .* undeclared bytes .* transpose"):
        check(small_plan)


def test_declarations_that_are_too_large_or_in_the_future_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache_plan = family_plan(caches, 0)
    kind, true = kinds.get("attention"), kinds.get("attention").accesses

    def past(sig: kinds.Signature, coord: Sequence[int]) -> list[kinds.Access]:
        return [dataclasses.replace(a, append_only=a.operand in (1, 2)) for a in true(sig, coord)]

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="from the past"):
        patch.setattr(kind, "accesses", past)
        check(cache_plan)
    monkeypatch.delitem(LARGER, "kv_append")
    with pytest.raises(
        AssertionError, match=r"declared bytes of .* it never (reads|writes): kv_append"
    ):
        check(cache_plan)
    # The lowered declaration of 8 bytes of scratch is used by the comparison only; the body gets
    # the scratch that it needs.
    needed = kind.scratch
    monkeypatch.setattr(accesses, "machine_of", lambda plan: None)
    monkeypatch.setattr(
        kind, "scratch", lambda sig, machine: needed(sig, machine) if machine else 8
    )
    monkeypatch.setitem(LARGER, "kv_append", "")
    with pytest.raises(AssertionError, match="more scratch than 8 bytes"):
        check(cache_plan)
