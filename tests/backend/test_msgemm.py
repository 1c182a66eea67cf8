"""examples/msgemm: products of integers, by tables and by multiplication, equal NumPy's bit for
bit.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from examples.msgemm import msgemm as example
from tests.emulated import few_emulated


@pytest.mark.parametrize("d", few_emulated((1, 2, 3), 3))
def test_integers_are_exact(backend: str, d: int) -> None:
    weight, _, _ = example.draw(24, 12, 3, 12)
    x = np.random.default_rng(1).integers(-1000, 1000, (12, 3)).astype(np.int32)
    product, _ = example.run(example.by_tables(weight, x, d, None))
    np.testing.assert_array_equal(product, weight.astype(np.int64) @ x)


@pytest.mark.emulated("slow")
def test_both_ways_are_exact_where_scales_are_powers_of_two(backend: str) -> None:
    weight, _, _ = example.draw(32, 128, 4, 64)
    random = np.random.default_rng(2)
    x = random.integers(-100, 100, (128, 4)).astype(np.float32)
    scales = (2.0 ** random.integers(-2, 3, (32, 2))).astype(np.float32)
    want = (weight * np.repeat(scales, 64, 1)).astype(np.float64) @ x
    np.testing.assert_array_equal(example.run(example.by_multiplying(weight, x, scales))[0].T, want)
    np.testing.assert_array_equal(example.run(example.by_tables(weight, x, 2, scales))[0], want)


def test_unsigned_weights_and_any_numbers(backend: str) -> None:
    weight, x, scales = example.draw(32, 128, 4, 64)
    weight = weight + 8
    want = (weight * np.repeat(scales, 64, 1)).astype(np.float64) @ x
    multiplied, _ = example.run(example.by_multiplying(weight, x, scales, ark.uint4))
    looked_up, _ = example.run(example.by_tables(weight, x, 2, scales, ark.uint4))
    np.testing.assert_allclose(multiplied.T, want, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(looked_up, want, rtol=1e-4, atol=2e-3)


def test_codes_are_the_bytes_of_the_type() -> None:
    """A byte of the example's codes holds two weights like a packed int4 tensor: the first one in
    the low four bits.
    """
    weight = np.array([[1, -1, 7, -8]], np.int8)
    assert example.packed(weight, 2).tolist() == [[0xF1, 0x87]]
    with pytest.raises(ValueError, match="not divisible into groups of 3"):
        example.packed(weight, 3)


def test_operations_are_those_of_the_paper() -> None:
    counted = [round(example.formulas(12288, d), 3) for d in (2, 3, 4)]
    assert counted == [1.959, 2.25, 0.632]


def test_instructions_of_a_loop_are_counted() -> None:
    """The counter of instructions finds the inner of two nested loops of a listing: three products
    in five instructions.
    """
    from bench.msgemm_instructions import elements, loops

    listing = """
.L_x_1:
        /*0000*/                   LDS.128 R4, [R2] ;
.L_x_2:
        /*0010*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0020*/                   FFMA R1, R4, R8, R1 ;
        /*0030*/                   FFMA R1, R5, R9, R1 ;
        /*0040*/                   FFMA R1, R6, R10, R1 ;
        /*0050*/              @P0  BRA `(.L_x_2) ;
        /*0060*/             @!P1  BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""
    ((*inner,),) = loops(listing)
    assert inner == ["LDG.E.128", "FFMA", "FFMA", "FFMA", "BRA"]
    assert (elements(inner, "FFMA"), elements(inner, "LD LDG"), elements(inner, "ST")) == (3, 4, 0)
