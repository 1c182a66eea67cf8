"""A network with products for matrix units, one of which reads unaligned rows, and a product with
too few columns for matrix units. One kernel runs all of them, and on a GPU the results equal
NumPy's.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import bf16
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

H100 = machines.MODELS["h100"]
needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
ROWS, FIRST, WIDE, CLASSES = 512, 333, 1024, 10


def network(machine: Machine, wide: int = WIDE) -> Plan:
    """Multiplies x (512, 333) by weights to `wide` columns, then again to `wide` columns, and to
    ten.
    """
    graph = Graph()
    source = graph.tensor((ROWS, FIRST), bf16, arena="state", name="x")
    for i, (n, k) in enumerate(((wide, FIRST), (wide, wide), (CLASSES, wide))):
        weight = graph.tensor((n, k), bf16, arena="parameter", name=f"w{i}")
        out = graph.tensor((ROWS, n), bf16, arena="state", name=f"y{i}")
        graph.add("matmul", [source, weight], [out], {"transpose_a": False, "transpose_b": True})
        source = out
    planned = plan(graph, machine)
    verify([planned])
    return planned


def test_large_products_use_box_copies_beside_small_convolutions() -> None:
    """Rows of 333 elements are copied to aligned rows, from which boxes can be loaded. The product
    with ten columns does not use matrix units, because a tile has more.
    """
    task_plan = network(H100, 4096)
    assert task_plan.variant == "matrix"
    machine = machine_of(task_plan)
    emitted = write(task_plan, machine, backend.dialect(machine.arch))
    text = emitted.source.text
    assert text.count("  ark_matrix_product<") == 2
    assert text.count("  ark_matrix_tile<") == 0
    assert text.count("ark_matmul_thin_along<") == 1
    kept.binary(backend, emitted.source, Target(H100.arch, machine.threads))


def test_if_small_convolutions_dominate_the_plan_uses_block() -> None:
    assert network(H100, 32).variant == "block"


@needs_gpu
def test_results_equal_numpy() -> None:
    rng = np.random.default_rng(3)
    with contextlib.closing(backend.open(0)) as device:
        task_plan = network(device.machine, 4096)
        shapes = {"x": (ROWS, FIRST), "w0": (4096, FIRST), "w1": (4096, 4096), "w2": (10, 4096)}
        given = {
            name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(bf16.numpy)
            for name, shape in shapes.items()
        }
        with Executor(task_plan, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = [executor.read(f"y{i}").astype(np.float32) for i in range(3)]
    x = given["x"].astype(np.float32)
    for i, y in enumerate(got):
        want = x @ given[f"w{i}"].astype(np.float32).T
        assert np.linalg.norm(y - want) < 4e-3 * np.linalg.norm(want)
        x = y
