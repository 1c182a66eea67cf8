"""A sum over ranks, its residual and its rmsnorm in one task: the sum has the same bits as with
separate ops, on all ranks, and the normalised rows equal NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.collectives import build, devices, keep
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import slow
from tests.unit.plan.shapes import machine

RMSNORM_EPS = 1e-5
LAUNCH_ITERATIONS = 3
SHAPES = {"row": (1, 64), "rows": (5, 96), "many": (70, 4096)}  # `many`: no packets on a CPU


def body(world: int, shape: tuple[int, int], dtype: str, residual: bool) -> Callable[[int], object]:
    """Returns a rank's model. Its inputs grow by one in every iteration."""

    def make(rank: int) -> None:
        x = ark.tensor(list(shape), ark.fp32, name="x")
        x = ark.cast(ark.add(x, 1.0, output=x), by_name(dtype))
        stream = ark.cast(ark.tensor(list(shape), ark.fp32, name="stream"), by_name(dtype))
        y = ark.all_reduce(x, rank, world)
        if residual:
            y = ark.add(y, stream)
        weight = ark.tensor([shape[1]], ark.fp32, name="weight")
        keep(ark.cast(ark.rmsnorm(y, weight, RMSNORM_EPS), ark.fp32), "normed")
        keep(ark.cast(y, ark.fp32), "sum")

    return make


def inputs(shape: tuple[int, int], rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    common = np.random.default_rng(99)
    return {
        "x": rng.standard_normal(shape).astype(np.float32),
        "stream": common.standard_normal(shape).astype(np.float32),
        "weight": common.standard_normal(shape[1]).astype(np.float32),
    }


def results(name: str, world: int, plans: list[Plan], opened: list, shape: tuple[int, int]) -> list:
    def run(ranks: ThreadRanks) -> dict[str, np.ndarray]:
        device = opened[ranks.rank]
        with Executor(plans[ranks.rank], registry.get(name), device, ranks=ranks) as executor:
            own = {
                b.name.rpartition(".")[0]: b for b in executor.plan.buffers if b.rank == ranks.rank
            }
            for label, values in inputs(shape, ranks.rank).items():
                if label in own:
                    device.write(executor.buffer_address(own[label].id), values.view(np.uint8))
            executor.start(LAUNCH_ITERATIONS).wait(60.0)
            return {
                label: device.read(executor.buffer_address(own[label].id), own[label].nbytes).view(
                    np.float32
                )
                for label in ("sum", "normed")
            }

    return run_ranks(world, run)


def kinds(plans: list[Plan]) -> list[str]:
    return [op.kind for op in plans[0].ops]


def check(
    name: str,
    world: int,
    shape_name: str,
    dtype: str,
    residual: bool,
    target: Machine | None = None,
) -> None:
    shape = SHAPES[shape_name]
    with devices(name, world) as (opened, actual):
        result = body(world, shape, dtype, residual)
        fused = build(world, result, target or actual)
        apart = build(world, result, target or actual, fuse=False)
        verify(fused)
        verify(apart)
        assert "combine_norm" in kinds(fused) and "row_norm" not in kinds(fused)
        assert "row_norm" in kinds(apart)
        got = results(name, world, fused, opened, shape)
        ones = results(name, world, apart, opened, shape)
    given = [inputs(shape, rank) for rank in range(world)]
    total = sum(g["x"].astype(np.float64) + LAUNCH_ITERATIONS for g in given)
    total = total + given[0]["stream"] if residual else total
    wanted = (
        total / np.sqrt((total * total).mean(-1, keepdims=True) + RMSNORM_EPS) * given[0]["weight"]
    )
    loose = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}[dtype]
    for rank in range(world):
        np.testing.assert_array_equal(got[rank]["sum"], got[0]["sum"])
        np.testing.assert_array_equal(got[rank]["normed"], got[0]["normed"])
        if not residual:  # the fused task adds it before the sum is rounded
            np.testing.assert_array_equal(got[rank]["sum"], ones[rank]["sum"])
        np.testing.assert_allclose(got[rank]["normed"], wanted.reshape(-1), rtol=loose, atol=loose)


@pytest.mark.parametrize(
    ("world", "shape_name", "dtype", "residual"),
    [
        pytest.param(2, "row", "fp32", True, marks=slow),
        pytest.param(2, "rows", "fp16", False, marks=slow),
        (3, "rows", "bf16", True),
        (2, "many", "fp32", False),
        pytest.param(8, "rows", "fp32", True, marks=slow),
    ],
)
def test_on_cpu_ranks(world: int, shape_name: str, dtype: str, residual: bool) -> None:
    check("cpu", world, shape_name, dtype, residual)


@pytest.mark.parametrize(
    ("shape_name", "dtype"), [("row", "bf16"), pytest.param("rows", "fp32", marks=slow)]
)
def test_on_emulated_amd(shape_name: str, dtype: str) -> None:
    check("rocm", 2, shape_name, dtype, True)


@pytest.mark.parametrize("shape_name", sorted(SHAPES))
def test_on_cuda(shape_name: str) -> None:
    check("cuda", 2, shape_name, "bf16", True)


def graph_kinds(make: Callable[[int], object]) -> list[str]:
    plans = build(2, make, machine(4, Capability.PEER_PACKETS, warps=4))
    verify(plans)
    return kinds(plans)


def test_one_rank_only_norms() -> None:
    plans = build(1, body(1, (4, 64), "fp32", True), machine(4, warps=4))
    assert "combine_norm" not in kinds(plans)


@pytest.mark.parametrize("case", ["odd rows", "in between", "other norm", "over the sum"])
def test_unsupported_sums_and_norms_are_not_fused(case: str) -> None:
    def make(rank: int) -> None:
        x = ark.mul(ark.tensor([4, 63 if case == "odd rows" else 64], name="x"), 2.0)
        weight = ark.tensor([x.shape()[1]], name="weight")
        y = ark.all_reduce(x, rank, 2)
        if case == "in between":
            weight = ark.mul(weight, 2.0, output=weight)
        if case == "other norm":
            keep(ark.layernorm(y), "normed")
        elif case == "over the sum":
            keep(ark.rmsnorm(y, weight, output=y), "normed")
        else:
            keep(ark.rmsnorm(y, weight), "normed")

    assert "combine_norm" not in graph_kinds(make)


def test_sum_is_written_for_other_readers() -> None:
    def make(rank: int) -> None:
        x = ark.mul(ark.tensor([4, 64], name="x"), 2.0)
        weight = ark.tensor([64], name="weight")
        y = ark.all_reduce(x, rank, 2)
        z = ark.relu(y)
        keep(ark.add(z, ark.rmsnorm(y, weight)), "normed")

    assert "combine_norm" in graph_kinds(make)
