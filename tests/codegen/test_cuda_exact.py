"""fp32 products on NVIDIA GPUs, in full precision and as tf32, with both operands in any memory
layout: their tiles, the compiler's output, and on a GPU their sums compared with NumPy's in fp64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from typing import Any

import numpy as np
import pytest

from ark.backend.codegen import layout
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests import kept
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]
UNITS, ORDINARY = "  ark_unit_tile<", "  ark_exact_tile<"
Batch = tuple[int, ...]

# The products: (batches of a and b, m, n, k, transposes, True if an op is applied to the sums).
CASES: list[tuple[Batch, Batch, int, int, int, tuple[bool, bool], bool]] = [
    ((), (), 2048, 2048, 512, (False, True), False),  # 128 x 128
    ((), (), 512, 4096, 512, (False, False), False),
    ((), (), 1024, 1024, 256, (True, False), True),
    ((), (), 1000, 1001, 333, (True, True), False),  # ragged, and rows that begin anywhere
    ((), (), 1000, 1001, 333, (False, False), True),
    ((), (), 128, 4096, 512, (False, True), True),  # 64 x 64
    ((), (), 20, 4096, 1030, (False, True), False),
    ((), (), 40, 1090, 1030, (True, False), True),
    ((3, 1), (1, 2), 300, 260, 270, (False, True), True),
    ((256,), (256,), 64, 64, 64, (False, False), False),
]


def product(
    machine: Machine,
    left: Batch,
    right: Batch,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    scaled: bool,
    tf32: bool = False,
) -> Plan:
    """A plan of c = a b, or of c = a b / 2 + d for each column, with ordinary tiles."""
    ta, tb = transposes
    graph = Graph()
    a = graph.tensor((*left, *((k, m) if ta else (m, k))), fp32, arena="state", name="a")
    b = graph.tensor((*right, *((n, k) if tb else (k, n))), fp32, arena="state", name="b")
    d = graph.tensor((n,), fp32, arena="state", name="d")
    shape = (*np.broadcast_shapes(left, right), m, n)
    c = graph.tensor(shape, fp32, arena="state", name="c")
    sums = graph.tensor(shape, fp32) if scaled else c
    flags = {"transpose_a": ta, "transpose_b": tb, **({"tf32": True} if tf32 else {})}
    graph.add("matmul", [a, b], [sums], flags)
    if scaled:
        half = graph.tensor(shape, fp32)
        graph.add("mul", [sums], [half], {"scalar": 0.5})
        graph.add("add", [half, d], [c], {})
    planned = plan(graph, machine, {"variant": "block"})
    verify([planned])
    return planned


def source(planned: Plan) -> Any:
    machine = machine_of(planned)
    return write(planned, machine, backend.dialect(machine.arch))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[slow] * (i > 1)) for i, c in enumerate(CASES)]
)
@pytest.mark.parametrize("tf32", [False, pytest.param(True, marks=slow)])
def test_tiles_are_compiled_without_many_spills(case: Any, tf32: bool) -> None:
    """The tiles of fp32 products compile with sums in registers; only addresses may be spilled."""
    planned = product(H100, *case, tf32)
    emitted = source(planned)
    assert UNITS in emitted.source.text
    assert [op.kind for op in planned.ops] == ["matmul"]
    target = Target(H100.arch, machine_of(planned).threads)
    log = kept.binary(backend, emitted.source, target).log.splitlines()
    (spilled,) = (b for a, b in itertools.pairwise(log) if "task_0_matmul" in a)
    assert int(spilled.split(" bytes spill stores")[0].rpartition(" ")[2]) <= 128


@pytest.mark.parametrize("name", ["a100", "h200", "b200", "rtx5090"])
def test_every_machine_has_exact_tiles(name: str) -> None:
    """On every machine, the body of fp32 products has as many stages of operands as shared memory
    can hold.
    """
    machine = machines.MODELS[name]
    planned = product(machine, *CASES[0])
    emitted = source(planned)
    assert (UNITS if machine.has(Capability.FP32_PARTS) else ORDINARY) in emitted.source.text
    assert emitted.scratch_bytes <= machine.shared_bytes + layout.LOOP_BYTES
    target = Target(machine.arch, machine_of(planned).threads)
    log = kept.binary(backend, emitted.source, target).log
    static = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
    assert static and max(static) + layout.LOOP_BYTES <= machines.RESERVED


def test_tiles_are_about_as_many_as_processors() -> None:
    """Tile sizes of fp32 products are chosen so that large products have about as many tiles as
    there are processors. Small products and products of other types use other bodies with their own
    tiles.
    """
    tiles = [product(H100, *case).ops[0].params["tile"] for case in CASES[:3]]
    assert tiles == [[128, 128], [128, 128], [128, 64]]
    small = product(H100, (), (), 64, 64, 64, (False, True), False)
    assert UNITS not in source(small).source.text
    graph = Graph()
    a, b = (graph.tensor((512, 512), t, arena="state", name=t.name) for t in (fp32, bf16))
    c = graph.tensor((512, 512), fp32, arena="state", name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True})
    mixed = plan(graph, H100)
    assert UNITS not in source(mixed).source.text


def run(planned: Plan, arrays: dict[str, Any]) -> list[Any]:
    """Runs the plan on the arrays twice and returns both results."""
    runs = []
    opened = contextlib.closing(backend.open(0))
    with opened as device, Executor(planned, backend, device) as executor:
        for name, array in arrays.items():
            executor.write(name, array)
        for _ in range(2):
            executor.start(2).wait()
            runs.append(executor.read("c"))
    return runs


@needs_gpu
@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_fp64(case: Any, tf32: bool, ordinary: bool) -> None:
    """On a GPU, fp32 products agree with NumPy's in fp64 within k roundings of partial sums, or for
    tf32 within the roundings of the factors. Two runs give the same bits.
    """
    if tf32 and ordinary:
        pytest.skip("tf32 is of matrix units")
    rng = np.random.default_rng(5)
    left, right, m, n, k, (ta, tb), scaled = case
    a = rng.standard_normal((*left, *((k, m) if ta else (m, k)))).astype(np.float32)
    b = rng.standard_normal((*right, *((n, k) if tb else (k, n)))).astype(np.float32)
    d = rng.standard_normal(n).astype(np.float32)
    with contextlib.closing(backend.open(0)) as device:
        machine = device.machine
    if ordinary:
        machine = machine.without_capabilities(Capability.FP32_PARTS)
        machine = dataclasses.replace(machine, exact_tiles=machines.EXACT_TILES)
    product_plan = product(machine, *case, tf32)
    assert (ORDINARY if ordinary else UNITS) in source(product_plan).source.text
    runs = run(product_plan, {"a": a, "b": b, **({"d": d} if scaled else {})})
    x, y = (np.swapaxes(v, -1, -2) if t else v for v, t in ((a, ta), (b, tb)))
    x, y = x.astype(np.float64), y.astype(np.float64)
    exact = x @ y * 0.5 + d if scaled else x @ y
    spread = np.sqrt(x**2 @ y**2)
    bound = 8 * 2.0**-24 * (np.sqrt(k) * spread + np.abs(exact))
    if tf32:
        bound = bound + 8 * 2.0**-11 * spread
    assert (np.abs(runs[0] - exact) <= bound).all(), (np.abs(runs[0] - exact) / bound).max()
    assert runs[0].tobytes() == runs[1].tobytes()


@needs_gpu
@pytest.mark.parametrize("transposes", [(False, True), (True, False)])
def test_infinities_and_the_largest_numbers_are_kept(transposes: tuple[bool, bool]) -> None:
    """On a GPU, products of infinities and of the largest numbers are right, although these numbers
    are split into parts in tf32 that may be infinite or NaN.
    """
    ta, tb = transposes
    m, n, k = 300, 260, 300
    rng = np.random.default_rng(6)
    x = rng.standard_normal((m, k)).astype(np.float32)
    y = rng.standard_normal((k, n)).astype(np.float32) / 8
    most = np.finfo(np.float32).max
    x[3, 5], x[7], x[7, 9], x[11, 250], x[299, 299] = np.inf, 0, most, np.nan, -np.inf
    y[5, 255], y[9] = -np.inf, np.sign(y[9]) * 2.0**-3
    with contextlib.closing(backend.open(0)) as device:
        product_plan = product(device.machine, (), (), m, n, k, transposes, False)
    arrays = {
        "a": np.ascontiguousarray(x.T if ta else x),
        "b": np.ascontiguousarray(y.T if tb else y),
    }
    got, _ = run(product_plan, arrays)
    with np.errstate(all="ignore"):
        wanted = (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)
    assert np.isnan(wanted).any() and np.isinf(wanted).any()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
