"""Reductions other than sums: known values, equal results of both algorithms of Adasum, means by
any program.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective import classics
from ark.collective.programs import check, execute
from ark.collective.programs.reductions import REDUCTIONS, reference
from ark.errors import InvalidUsageError, ModelError


def vectors(*rows):
    return [np.array(row, np.float64) for row in rows]


def test_known_answers_of_adasum():
    assert reference("adasum", vectors([1, 0], [1, 1])).tolist() == [1.25, 0.75]
    assert reference("adasum", vectors([3, 0], [0, 5])).tolist() == [3, 5]  # orthogonal: the sum
    np.testing.assert_allclose(reference("adasum", vectors([2, 4], [2, 4])), [2, 4])  # equal: mean
    np.testing.assert_allclose(reference("adasum", vectors([1, 2], [3, 6])), [2, 4])  # mean
    assert reference("adasum", vectors([0, 0], [4, 2])).tolist() == [4, 2]  # one is zero: the other


def test_known_answers_of_the_combiner():
    assert reference("combiner", vectors([1, 0], [1, 1])).tolist() == [1, 1]
    assert reference("combiner", vectors([0, 0], [1, 1])).tolist() == [1, 1]
    assert reference("combiner", vectors([3, 0], [0, 5])).tolist() == [3, 5]
    assert reference("combiner", vectors([2, 2], [2, 2])).tolist() == [2, 2]


def test_combiner_is_not_symmetric_so_order_matters():
    a, b, c = vectors([1, 0], [1, 1], [2, 1])
    first, second = reference("combiner", [a, b, c]), reference("combiner", [c, b, a])
    assert not np.allclose(first, second)


def by_hand(rows):
    """Returns Adasum of vectors, whose number is a power of two, by the paper's formula."""
    if len(rows) == 1:
        return rows[0]
    half = len(rows) // 2
    a, b = by_hand(rows[:half]), by_hand(rows[half:])
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 50), st.integers(0, 1000))
def test_tree_and_vector_halving_agree_with_the_formula(ranks, length, seed):
    rows = np.random.default_rng(seed).normal(size=(ranks, length))
    for name in ("adasum_tree", "adasum_halving"):
        program = classics.build(name, "all_reduce", ranks)
        assert program.reduction == "adasum"
        check(program)
        for out in execute(program, list(rows), seed=seed):
            np.testing.assert_allclose(out, by_hand(rows), rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 1000))
def test_combiner_programs_fold_in_rank_order(ranks, length, seed):
    rows = np.random.default_rng(seed).normal(size=(ranks, length))
    total = rows[0]
    for row in rows[1:]:
        total = total + row - (total @ row) / (total @ total) * total
    for name in ("combiner_chain", "combiner_one_shot"):
        program = classics.build(name, "all_reduce", ranks, parts=3)
        check(program)
        for out in execute(program, list(rows), seed=seed):
            np.testing.assert_allclose(out, total, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_scale_does_not_matter(scale):
    rows = np.random.default_rng(3).normal(size=(4, 9))
    want = scale * by_hand(list(rows))
    np.testing.assert_allclose(reference("adasum", list(scale * rows)), want, rtol=1e-9)


def test_programs_refuse_products_that_overflow():
    program = classics.build("adasum_halving", "all_reduce", 2)
    with pytest.raises(ModelError, match="must be finite in fp64: scale the tensors down"):
        execute(program, [np.full(4, 1e200), np.full(4, 1e200)])


def test_dot_products_are_in_fp64():
    """The dot products would overflow in fp16; the coefficients must not."""
    rows = [np.full(64, 300, np.float16), np.full(64, 300, np.float16)]
    for name in ("adasum_tree", "adasum_halving"):
        for out in execute(classics.build(name, "all_reduce", 2), rows):
            assert out.dtype == np.float16
            np.testing.assert_array_equal(out, rows[0])


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["ring", "two_shot", "recursive_halving", "double_binary_tree"])
def test_mean_max_min_of_programs(dtype, name):
    rows = np.random.default_rng(5).integers(-8, 8, (4, 16)).astype(dtype)
    exact = rows.astype(np.float64)
    wanted = {"max": exact.max(0), "min": exact.min(0), "sum": exact.sum(0), "mean": exact.mean(0)}
    if np.issubdtype(dtype, np.integer):
        wanted["mean"] = np.floor(wanted["mean"])
    for reduction, want in wanted.items():
        program = classics.build(name, "all_reduce", 4, reduction=reduction)
        check(program)
        for out in execute(program, list(rows)):
            assert out.dtype == rows.dtype
            np.testing.assert_array_equal(out.astype(np.float64), want)


def test_bad_input_is_named():
    with pytest.raises(InvalidUsageError, match="'median' is not a reduction"):
        reference("median", vectors([1], [2]))
    with pytest.raises(InvalidUsageError, match="power of two, but there are 3"):
        reference("adasum", vectors([1], [2], [3]))
    with pytest.raises(InvalidUsageError, match="floating-point"):
        execute(classics.build("adasum_tree", "all_reduce", 2), [np.array([1, 2])] * 2)
    assert set(REDUCTIONS) == {
        "sum",
        "product",
        "max",
        "min",
        "mean",
        "adasum",
        "combiner",
    }
