"""All-reduces in a plan with reductions other than sums: elementwise ones compared with NumPy;
Adasum and the model combiner with the papers' formulas in fp64, and small vectors by hand.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.collective.programs.reductions import reference
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.collectives import build, devices, keep
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import slow

COUNTS = (1, 3, 517)
BY_ELEMENT = {
    "product": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "mean": np.mean,
}
NUMPY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}


def shares(world: int, count: int, kind: str) -> np.ndarray:
    """Returns the ranks' inputs. The first of them has a single element, 0, so that a norm of 0 is
    tested.
    """
    result = np.random.default_rng(count).standard_normal((world, count)).astype(NUMPY[kind])
    if count == 1:
        result[0] = 0
    return result


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param("cpu", 2, marks=slow),
        pytest.param("cpu", 3, marks=slow),
        ("cpu", 4),
        pytest.param("cpu", 8, marks=slow),
        ("cuda", 2),
        pytest.param("rocm", 2, marks=slow),
    ],
)
def test_reductions_other_than_sums_equal_numpy(name: str, world: int) -> None:
    pairs = world & (world - 1) == 0
    reductions = [*BY_ELEMENT, "combiner", *(["adasum"] if pairs else [])]
    cases = [(kind, count) for kind in NUMPY for count in COUNTS]

    def body(rank: int) -> None:
        for kind, count in cases:
            x = ark.tensor([count], getattr(ark, kind), name=f"{kind} {count}")
            for reduction in reductions:
                result = ark.all_reduce(x, rank, world, reduction=reduction)
                keep(result, f"{reduction} {kind} {count}")

    with devices(name, world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)

        def work(ranks: ThreadRanks) -> dict[str, np.ndarray]:
            plan, device = plans[ranks.rank], opened[ranks.rank]
            with Executor(plan, registry.get(name), device, ranks=ranks, budget_s=200.0) as ready:
                for kind, count in cases:
                    ready.write(f"{kind} {count}", shares(world, count, kind)[ranks.rank])
                ready.start(2).wait(250.0)
                actual = {
                    f"{reduction} {kind} {count}": ready.read(f"{reduction} {kind} {count}")
                    for kind, count in cases
                    for reduction in reductions
                }
                ranks.barrier()
                return actual

        actual = run_ranks(world, work)
    for kind, count in cases:
        wide = shares(world, count, kind).astype(np.float64)
        near = 2e-6 if kind == "fp32" else 2.0**-8
        for reduction in reductions:
            by_element = BY_ELEMENT.get(reduction)
            want = by_element(wide, axis=0) if by_element else reference(reduction, list(wide))
            label = f"{reduction} {kind} {count}"
            got = actual[0][label].reshape(count)
            np.testing.assert_allclose(got.astype(np.float64), want, near * 8, near, label)
            for other in actual:
                np.testing.assert_array_equal(other[label].reshape(count), got, label)


SMALL = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint32": np.uint32,
    "int64": np.int64,
}


@pytest.mark.parametrize(
    ("name", "world"), [("cpu", 3), ("cuda", 2), pytest.param("rocm", 2, marks=slow)]
)
def test_sums_of_small_types_and_integers(name: str, world: int) -> None:
    """Sums over ranks of small types: fp8 is added in fp32 in rank order and rounded once, as in
    ml_dtypes, also for NaN; integers wrap. The sums are all-reduces and reduce-scatters.
    """
    count = 345 * world

    def body(rank: int) -> None:
        for kind in SMALL:
            x = ark.tensor([count], getattr(ark, kind), name=kind)
            keep(ark.all_reduce(x, rank, world), f"sum {kind}")
            keep(ark.reduce_scatter(x, rank, world), f"share {kind}")
            keep(ark.all_reduce(x, rank, world, reduction="max"), f"max {kind}")

    def given(kind: str) -> np.ndarray:
        dtype = np.dtype(SMALL[kind])
        nbytes = world * count * dtype.itemsize
        result = np.random.default_rng(9).integers(0, 256, nbytes, np.uint8)
        return result.view(dtype).reshape(world, count)

    with devices(name, world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)

        def work(ranks: ThreadRanks) -> dict[str, np.ndarray]:
            plan, device = plans[ranks.rank], opened[ranks.rank]
            with Executor(plan, registry.get(name), device, ranks=ranks, budget_s=200.0) as ready:
                for kind in SMALL:
                    ready.write(kind, given(kind)[ranks.rank])
                ready.start(2).wait(250.0)
                names = [
                    f"{reduction} {kind}" for kind in SMALL for reduction in ("sum", "share", "max")
                ]
                actual = {label: ready.read(label) for label in names}
                ranks.barrier()
                return actual

        actual = run_ranks(world, work)
    for kind, dtype in SMALL.items():
        shares = given(kind)
        wide = np.float32 if kind.startswith("fp8") else dtype
        total, most = shares[0].astype(wide), shares[0].astype(wide)
        with np.errstate(all="ignore"):
            for share in shares[1:]:
                total, most = total + share.astype(wide), np.maximum(most, share.astype(wide))
            total, most = total.astype(dtype), most.astype(dtype)
        own = count // world
        for rank, got in enumerate(actual):
            _same(got[f"sum {kind}"], total, kind)
            _same(got[f"max {kind}"], most, kind)
            _same(got[f"share {kind}"], total[rank * own : (rank + 1) * own], kind)


def _same(got: np.ndarray, want: np.ndarray, kind: str) -> None:
    """Compares byte by byte, except that all encodings of NaN are equal."""
    numbers = np.ones(want.shape, bool)
    if kind.startswith("fp8"):
        numbers = ~np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(~np.isnan(got.reshape(-1).astype(np.float32)), numbers)
    got = np.ascontiguousarray(got.reshape(-1))
    bits = np.dtype(f"u{got.itemsize}")
    np.testing.assert_array_equal(got.view(bits)[numbers], want.view(bits)[numbers], kind)


def test_types_that_have_no_sum_are_named() -> None:
    for dtype in (ark.bool, ark.int4):
        with pytest.raises(ark.ModelError, match=r"needs one of .*fp8_e4m3.*use ark\.cast"):
            build(2, lambda rank, dtype=dtype: ark.all_reduce(ark.tensor([8], dtype), rank, 2))


def test_mean_of_integers_is_named() -> None:
    for reduce in (ark.all_reduce, ark.reduce_scatter):
        with pytest.raises(ark.ModelError, match=r"a mean of int32 is not supported.*may be more"):
            build(2, lambda r, f=reduce: f(ark.tensor([8], ark.int32), r, 2, reduction="mean"))


HUGE_VALUE, TINY_VALUE = 2.0**126, 2.0**-100


def by_hand() -> None:
    """The body of each rank: Adasum and combiner of [1, 0] and [1, 1] (the papers' example),
    orthogonal vectors, equal vectors, whole matrices, and numbers whose squares overflow or
    underflow.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    given = {
        "parts": ([[1, 0], [1, 1]], [1.25, 0.75], [1, 1]),
        "orthogonal": ([[2, 0], [0, 3]], [2, 3], [2, 3]),
        "equal": ([[2, 4], [2, 4]], [2, 4], [2, 4]),
        "opposed": ([[2, 0], [-2, 0]], [0, 0], [2, 0]),
        "huge": (
            [[HUGE_VALUE, 0], [HUGE_VALUE, HUGE_VALUE]],
            [1.25 * HUGE_VALUE, 0.75 * HUGE_VALUE],
            [HUGE_VALUE, HUGE_VALUE],
        ),
        "tiny": (
            [[TINY_VALUE, 0], [TINY_VALUE, TINY_VALUE]],
            [1.25 * TINY_VALUE, 0.75 * TINY_VALUE],
            [TINY_VALUE, TINY_VALUE],
        ),
    }
    results = {}
    for name, (vectors, _, _) in given.items():
        x = ark.tensor([2, 1], name=name)
        sums = [ark.all_reduce(x, rank, 2, reduction=r) for r in ("adasum", "combiner")]
        results[name] = x, vectors[rank], sums
    with ark.Runtime() as runtime:
        runtime.launch()
        for x, vector, _ in results.values():
            x.from_numpy(np.array(vector, np.float32).reshape(2, 1))
        runtime.barrier()
        runtime.run(1)
        for name, (_, adasum, combined) in given.items():
            actual = [t.to_numpy().ravel().tolist() for t in results[name][2]]
            assert actual == [adasum, combined], (name, actual)
        runtime.barrier()


def test_pairs_by_hand() -> None:
    assert ark.launch(2, by_hand) == 0


def test_unsupported_reductions_are_refused() -> None:
    def integers(rank: int) -> None:
        ark.all_reduce(ark.tensor([8], ark.int32), rank, 2, reduction="adasum")

    def three(rank: int) -> None:
        ark.all_reduce(ark.tensor([8]), rank, 3, reduction="adasum")

    with pytest.raises(ark.ModelError, match="adasum scales tensors, so it needs fp32"):
        build(2, integers)
    with pytest.raises(ark.InvalidUsageError, match="there are 3 ranks"):
        build(3, three)
