"""The data types of the products in the gradients of a product."""

from __future__ import annotations

import ark


def test_gradients_of_a_wide_product_multiply_the_operands_own_16_bit_type() -> None:
    with ark.use_model(ark.Model()) as model:
        a, b = ark.tensor([4, 32, 16], ark.bf16), ark.tensor([4, 16, 32], ark.bf16)
        c = ark.matmul(a, b, dtype=ark.fp32)
        ark.grad(ark.reduce_sum(ark.reshape(ark.mul(c, c), [4 * 32 * 32]), 0), [a, b])
    products = [node for node in model.graph.nodes if node.type == "matmul"]
    assert len(products) == 3
    for node in products:
        assert [value.dtype for value in node.inputs[:2]] == [ark.bf16, ark.bf16]


def test_gradients_of_all_columns_of_a_product_are_concatenated() -> None:
    """Three slices of a product's columns, seen with one more dimension: their gradients form the
    product's gradient by one concatenation, without padding.
    """
    with ark.use_model(ark.Model()) as model:
        a, b = ark.tensor([8, 16]), ark.tensor([16, 12])
        rows = ark.reshape(ark.matmul(a, b), [2, 4, 12])
        total = ark.mul(ark.mul(rows[:, :, 0:4], rows[:, :, 4:8]), rows[:, :, 8:12])
        ark.grad(ark.reduce_sum(ark.reshape(total, [32]), 0), [a])
    types = [node.type for node in model.graph.nodes]
    assert types.count("concat") == 1
    assert "pad" not in types
