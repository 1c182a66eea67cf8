"""Products of few rows or columns on NVIDIA GPUs: their bodies and tiles, and the compiler's
output.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests import kept
from tests.block_on_host import Block

GPU = bool(backend.probe().devices)
needs_gpu = pytest.mark.skipif(
    not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]


def product(
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtype: DataType,
    arena: str = "state",
    machine: Machine = H100,
) -> Plan:
    ta, tb = transposes
    graph = Graph()
    a = graph.tensor((k, m) if ta else (m, k), dtype, arena="state", name="a")
    b = graph.tensor((n, k) if tb else (k, n), dtype, arena=arena, name="b")
    c = graph.tensor((m, n), dtype, arena="state", name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb})
    planned = plan(graph, machine)
    verify([planned])
    return planned


CASES: list[tuple[int, int, int, tuple[bool, bool], DataType, str, list[int]]] = [
    (4096, 1, 4096, (False, False), fp32, "along", [32, 1]),
    (1, 4096, 4096, (False, True), bf16, "along", [1, 32]),
    (512, 10, 512, (False, True), bf16, "along", [4, 10]),
    (8, 4096, 4096, (False, True), fp32, "along", [8, 32]),
    (16, 4096, 4096, (False, True), fp32, "staged", [16, 32]),
    (12, 2056, 1400, (False, True), fp32, "staged", [12, 16]),
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


# Sizes of staged products. Except for the first, they are not multiples of a tile or of a stage.
STAGED = [(16, 4096, 4096), (12, 2054, 1400), (11, 1030, 6000), (1030, 9, 4100)]


def check_product(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("late", "downwards"), [(True, False), (False, True)])
def test_staged_products_equal_numpy_in_blocks_on_the_host(
    tmp_path: Path, late: bool, downwards: bool
) -> None:
    """Products whose operands are staged in shared memory equal NumPy's. late: copies to shared
    memory are done as late as allowed. downwards: threads run in descending order.
    """
    rng = np.random.default_rng(7)
    for number, (m, n, k, processors) in enumerate([(13, 70, 1400, 2), (90, 9, 1828, 1)]):
        planned = product(m, n, k, (False, True), fp32, machine=H100.with_processors(processors))
        folder = tmp_path / str(number)
        folder.mkdir()
        block = Block(planned, folder)
        assert "  ark_matmul_thin_staged<" in (folder / "block.cpp").read_text()
        for name in "ab":
            block.named(name)[...] = rng.uniform(-1, 1, block.named(name).shape)
        block.run(planned.ops[0], late, downwards)
        check_product(block.named("c"), block.named("a"), block.named("b"))


@needs_gpu
@pytest.mark.parametrize(("m", "n", "k"), STAGED)
def test_staged_products_equal_numpy(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m + n)
    with contextlib.closing(backend.open(0)) as device:
        planned = product(m, n, k, (False, True), fp32)
        source = write(planned, machine_of(planned), backend.dialect("sm_90a")).source.text
        assert "  ark_matmul_thin_staged<" in source
        with Executor(planned, backend, device) as executor:
            a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((m, k), (n, k)))
            executor.write("a", a)
            executor.write("b", b)
            executor.start(3).wait(60)
            check_product(executor.read("c"), a, b)


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
