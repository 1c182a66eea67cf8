"""Measures how much of a collective's time is hidden behind an adjacent matmul. Four times are
measured, in one launch of a plan each: of the matmul alone, of the collective alone, of both in
sequence, and of the fused op (ark.lower.ops.communication.overlapped).

The hidden fraction of the collective is 1 - (fused - matmul) / collective. It is 100% if the fused
op takes as long as the matmul alone, 0% if it takes as long as both in sequence, and negative if it
takes longer. Called by ark.cli.bench_comm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.comm_peer import timed_plan, verified
from ark.distributed.calls import Key, machine_for
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower.engines import AUTO, COPIED
from ark.ops.communication.collectives import choose_program
from ark.plan.types import Plan
from ark.runtime.bootstrap import Bootstrap

OVERLAPS = ("all_reduce", "reduce_scatter", "all_gather")
CHECKED_ROWS = 16  # the number of rows that NumPy computes for the check


@dataclass(frozen=True)
class OverlapCase:
    """rows, columns, depth: the sizes of the matmul over all ranks; each rank has a part of the
    depth. engine: "auto", or one by which the proxy copies data between the
    rounds.
    """

    collective: str
    rows: int
    columns: int
    depth: int
    dtype: DataType
    engine: str = AUTO
    repeats: int = 5


@dataclass
class OverlapFigures:
    """Times in seconds on the slowest rank, as the median of the repeats. There are four: the
    matmul alone, the collective alone, the matmul and the collective in sequence (apart_seconds),
    and the fused op (seconds). hidden: the hidden fraction of the collective's time. wrong: the
    number of elements on all ranks that differ from the result of the two separate ops or from
    NumPy's.
    """

    collective: str
    shape: str
    dtype: str
    engine: str
    ranks: int
    product_seconds: float
    collective_seconds: float
    apart_seconds: float
    seconds: float
    hidden: float
    wrong: int


def overlap_case(
    collective: str, shape: str, dtype: DataType, engine: str, repeats: int, world: int
) -> OverlapCase:
    """The case of a shape such as 4096x4096x8192. Raises InvalidUsageError for any other text."""
    sizes = shape.split("x")
    if len(sizes) != 3 or not all(s.isdigit() and 0 < int(s) <= 1 << 20 for s in sizes):
        raise InvalidUsageError(f"{shape!r} is not a shape; write ROWSxCOLUMNSxDEPTH")
    rows, columns, depth = (int(s) for s in sizes)
    if rows % world or depth % world:
        raise InvalidUsageError(
            f"rows and depth of {shape} are not divisible by {world} ranks; give multiples of "
            f"{world}"
        )
    if engine not in (AUTO, *COPIED):
        raise InvalidUsageError(
            f"engine={engine!r} does not support overlapped matmuls; use auto or "
            f"{', '.join(COPIED)}"
        )
    return OverlapCase(collective, rows, columns, depth // world, dtype, engine, repeats)


def _graph(case: OverlapCase, rank: int, world: int, product: bool, collective: bool) -> Graph:
    graph = Graph(rank, world)
    gathers = case.collective == "all_gather"
    share = case.rows // world
    w = graph.tensor((case.columns, case.depth), case.dtype, arena="state", name="w")
    result_shape = (case.rows, case.columns)
    width = case.depth if gathers else case.columns
    scattered = case.collective == "reduce_scatter"

    def multiply(x: Tensor, y: Tensor) -> None:
        attrs = {"transpose_a": False, "transpose_b": True}
        graph.add("matmul", [x, w], [y], attrs, "matmul")

    def combine(x: Tensor, y: Tensor) -> None:
        if case.collective == "all_reduce":
            graph.add("all_reduce", [x], [y], {"packet": False}, "all_reduce")
            return
        reduction = "sum" if scattered else None
        how = choose_program(case.collective, world, "one_shot", None, None, reduction)
        graph.add("collective", [x], [y], {"program": how, "engine": AUTO}, case.collective)

    def tensor(shape: tuple[int, ...], arena: str, name: str) -> Tensor:
        return graph.tensor(shape, case.dtype, arena=arena, name=name)

    ends = (case.rows, width) if gathers else (share, width) if scattered else result_shape
    if product and collective:
        x = tensor((share if gathers else case.rows, case.depth), "state", "x")
        between = tensor((case.rows, width), "activation", "between")
        y = tensor((case.rows, case.columns) if gathers else ends, "symmetric", "y")
        for step in (combine, multiply) if gathers else (multiply, combine):
            step(x, between)
            x, between = between, y
    elif product:
        multiply(
            tensor((case.rows, case.depth), "state", "x"), tensor(result_shape, "symmetric", "y")
        )
    else:
        combine(
            tensor((share if gathers else case.rows, width), "state", "x"),
            tensor(ends, "symmetric", "y"),
        )
    return graph


def _plans(
    case: OverlapCase, world: int, device: Device, product: bool, collective: bool, overlap: object
) -> list[Plan]:
    machine = device.machine
    if not product:
        size = case.rows * case.columns
        machine = machine_for(machine, world, Key("all_reduce", case.dtype.name, 2, size))
    options = {"lockstep": True, "overlap": overlap}
    graphs = [_graph(case, rank, world, product, collective) for rank in range(world)]
    return verified(graphs, machine, options)


def _inputs(case: OverlapCase, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    rows = case.rows // world if case.collective == "all_gather" else case.rows
    x, w = (
        rng.integers(-1, 2, shape).astype(case.dtype.numpy)
        for shape in ((rows, case.depth), (case.columns, case.depth))
    )
    return x, w


def _wrong(case: OverlapCase, rank: int, world: int, got: np.ndarray) -> int:
    """The number of elements, in some rows, that differ from NumPy's result."""
    given = [_inputs(case, r, world) for r in range(world)]
    rows = len(got) // case.columns
    sample = np.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).astype(int)
    first = rank * rows if case.collective == "reduce_scatter" else 0
    if case.collective == "all_gather":
        x = np.concatenate([g[0] for g in given])[sample].astype(np.float32)
        want = x @ given[rank][1].astype(np.float32).T
    else:
        want = np.zeros((len(sample), case.columns), np.float32)
        for x, w in given:
            want += x[first + sample].astype(np.float32) @ w.astype(np.float32).T
    near = np.isclose(
        got.reshape(rows, -1)[sample].astype(np.float32), want, rtol=2e-2, atol=world * 1.0
    )
    return int((~near).sum())


def measure_overlap(
    case: OverlapCase, job: Bootstrap, backend: Backend, device: Device
) -> OverlapFigures:
    """Measures one case on all ranks; returns the same figures on each."""
    world = job.world_size
    chosen: object = True if case.engine == AUTO else case.engine
    given = dict(zip("xw", _inputs(case, job.rank, world), strict=True))
    how = (job, backend, device, case.repeats, 200)
    runs = [
        timed_plan(_plans(case, world, device, *parts)[job.rank], given, *how)
        for parts in (
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (True, True, chosen),
        )
    ]
    apart_result, result = (data.view(case.dtype.numpy) for _, data in runs[2:])
    wrong = int((result != apart_result).sum()) + _wrong(case, job.rank, world, result)
    mine = [*(seconds for seconds, _ in runs), wrong]
    figures_of = [json.loads(s) for s in job.all_gather(json.dumps(mine).encode())]
    product, collective, apart, fused = (max(s[i] for s in figures_of) for i in range(4))
    hidden = 1 - (fused - product) / collective
    return OverlapFigures(
        case.collective,
        f"{case.rows}x{case.columns}x{case.depth * world}",
        case.dtype.name,
        case.engine,
        world,
        product,
        collective,
        apart,
        fused,
        hidden,
        sum(s[4] for s in figures_of),
    )
