"""Products of few rows or columns on NVIDIA GPUs: their bodies and tiles, and the compiler's
output.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests import kept

H100 = machines.MODELS["h100"]


def product(
    m: int, n: int, k: int, transposes: tuple[bool, bool], dtype: DataType, arena: str = "state"
) -> Plan:
    ta, tb = transposes
    graph = Graph()
    a = graph.tensor((k, m) if ta else (m, k), dtype, arena="state", name="a")
    b = graph.tensor((n, k) if tb else (k, n), dtype, arena=arena, name="b")
    c = graph.tensor((m, n), dtype, arena="state", name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb})
    planned = plan(graph, H100)
    verify([planned])
    return planned


CASES: list[tuple[int, int, int, tuple[bool, bool], DataType, str, list[int]]] = [
    (4096, 1, 4096, (False, False), fp32, "along", [32, 1]),
    (1, 4096, 4096, (False, True), bf16, "along", [1, 32]),
    (512, 10, 512, (False, True), bf16, "along", [4, 10]),
    (8, 4096, 4096, (False, True), fp32, "along", [8, 32]),
    (1, 4096, 4096, (False, False), bf16, "across", [1, 32]),
    (8, 4096, 4096, (False, False), bf16, "across", [8, 32]),
    (4096, 1, 4096, (True, False), fp32, "across", [32, 1]),
]


@pytest.mark.parametrize("case", CASES)
def test_thin_operands_are_loaded_at_once_and_kept_in_registers(case: Any) -> None:
    *shape, form, tile = case
    planned = product(*shape)
    assert [op.params["tile"] for op in planned.ops] == [tile]
    machine = machine_of(planned)
    emitted = write(planned, machine, backend.dialect(machine.arch))
    assert f"  ark_matmul_thin_{form}<" in emitted.source.text
    log = kept.binary(backend, emitted.source, Target(H100.arch, machine.threads)).log
    lines = itertools.pairwise(log.splitlines())
    (spilled,) = (b for a, b in lines if "task_0_matmul" in a)
    assert " 0 bytes spill stores" in spilled


def test_k_is_cut_where_tiles_are_few() -> None:
    """The sum over k is split if there are fewer tiles than processors: the partial sums are
    matrices of fp32, which a second op adds.
    """
    planned = product(16, 1, 1 << 18, (False, False), fp32)
    assert [op.kind for op in planned.ops] == ["matmul", "elementwise"]
    assert planned.ops[0].params["splits"] == 8
    assert len(product(4096, 1, 4096, (False, False), fp32).ops) == 1


def test_few_columns_of_many_rows_are_planned() -> None:
    """A product of 512 rows and 10 columns in 16 bits is one op, the product of a matrix and few
    columns. The smallest tile that the tensor memory accelerator (TMA) loads has more columns.
    """
    planned = product(512, 10, 512, (False, True), bf16, "parameter")
    assert [op.kind for op in planned.ops] == ["matmul"]


def test_other_products_have_other_bodies() -> None:
    for case in (
        (64, 64, 64, (False, True), fp32),  # as many rows as columns
        (20, 20, 512, (False, True), fp32),
        (2, 4096, 32, (False, True), fp32),  # shallow
        (1, 4096, 3, (False, True), fp32),  # a vector, more shallow
        (4, 8, 512, (False, False), fp32),  # small
    ):
        planned = product(*case)
        machine = machine_of(planned)
        text = write(planned, machine, backend.dialect(machine.arch)).source.text
        assert "ark_matmul_thin_along<" not in text and "ark_matmul_thin_across<" not in text
