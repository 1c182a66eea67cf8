"""Cases and helpers of tests/codegen/test_cuda_matrix.py, which other tests use too."""

from __future__ import annotations

import numpy as np

from ark.ir.dtype import DataType, bf16, fp8_e4m3, fp8_e5m2, fp16, fp32, int8, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify

# The products: (batches of a and b, m, n, k, transposes, type).
CASES = [
    ((), (), 512, 512, 1024, (False, True), bf16),
    ((), (), 1000, 1096, 520, (False, False), fp16),
    ((), (), 1000, 1096, 520, (True, False), bf16),
    ((), (), 1000, 1096, 520, (True, True), fp16),
    ((), (), 136, 3000, 1000, (False, True), fp16),
    ((3,), (3,), 256, 512, 1024, (False, True), bf16),
    ((2, 1), (1, 3), 200, 328, 1032, (False, False), bf16),
    ((), (), 16, 4096, 1096, (False, True), bf16),  # few rows, tiles of 32 columns
    ((), (), 16, 4096, 4096, (False, True), bf16),  # stages of several 128-byte lines
    ((), (), 16, 4096, 1096, (False, False), fp16),  # few rows, tiles of 64
    ((), (), 40, 1096, 4096, (True, False), fp16),
    ((), (), 100, 1000, 2056, (False, False), bf16),
    ((), (), 128, 1024, 4096, (True, True), bf16),
    ((), (), 1000, 777, 333, (False, False), bf16),  # rows whose addresses are not aligned
    ((), (), 1001, 1003, 517, (True, True), fp16),
    ((3,), (3,), 200, 327, 1001, (False, True), fp16),
    ((), (), 128, 5025, 768, (False, True), bf16),
    ((), (), 12544, 40, 120, (False, True), bf16),  # results narrower than wide tiles
    ((), (), 5000, 24, 72, (False, True), bf16),  # and than all tiles
    ((), (), 30001, 16, 16, (False, True), fp16),
    ((), (), 6000, 8, 264, (False, True), bf16),
    ((), (), 2048, 2304, 768, (False, False), bf16),  # tiles of 192 columns
]


def product(
    machine: Machine,
    left: tuple[int, ...],
    right: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtype: DataType,
    variant: str | None = None,
) -> Plan:
    """Returns a plan of c = a b and e = relu(c), where relu waits for c's tiles."""
    ta, tb = transposes
    graph = Graph()
    a = graph.tensor((*left, *((k, m) if ta else (m, k))), dtype, arena="state", name="a")
    b = graph.tensor((*right, *((n, k) if tb else (k, n))), dtype, arena="state", name="b")
    shape = (*np.broadcast_shapes(left, right), m, n)
    c = graph.tensor(shape, dtype, arena="state", name="c")
    e = graph.tensor(shape, dtype, arena="state", name="e")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb}, "product")
    graph.add("relu", [c], [e], {}, "after")
    result = plan(graph, machine, {"variant": variant})
    verify([result])
    return result


def few_bits(
    machine: Machine, m: int, n: int, k: int, types: tuple[DataType, DataType], scaled: bool
) -> Plan:
    """Returns a plan of c = a b^T for operands of 8 bits, or of fp32 computed as tf32. scaled: c is
    half the product, in fp32.
    """
    graph = Graph()
    a = graph.tensor((m, k), types[0], arena="state", name="a")
    b = graph.tensor((n, k), types[1], arena="state", name="b")
    result = int32 if types[0] == int8 else fp32
    c = graph.tensor((m, n), fp32 if scaled else result, arena="state", name="c")
    product = graph.tensor((m, n), result) if scaled else c
    attrs = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [a, b], [product], attrs | ({"tf32": True} if types[0] == fp32 else {}))
    if scaled:
        whole = product
        if result == int32:
            whole = graph.tensor((m, n), fp32)
            graph.add("cast", [product], [whole], {})
        graph.add("mul", [whole], [c], {"scalar": 0.5})
    actual = plan(graph, machine)
    verify([actual])
    return actual


# The products: (m, n, k, types of a and b, True if the sums are scaled, the end of the
# instruction's name).
FEW_BITS = [
    (512, 512, 1024, (fp8_e4m3, fp8_e4m3), False, "k32.f32.e4m3.e4m3"),
    (520, 1096, 528, (fp8_e4m3, fp8_e5m2), True, "k32.f32.e4m3.e5m2"),
    (16, 4096, 4096, (fp8_e5m2, fp8_e5m2), False, "k32.f32.e5m2.e5m2"),
    (16, 4096, 4096, (int8, int8), False, "k32.s32.s8.s8"),
    (1000, 1096, 528, (int8, int8), True, "k32.s32.s8.s8"),
    (1000, 1096, 520, (fp32, fp32), False, "k8.f32.tf32.tf32"),
]
