"""Measures a sum over ranks that is followed by a residual addition and an rmsnorm, in three forms:
the sum only, the three ops one by one, and all as one op (ark.lower.rewrite.fuse_all_reduce_norm).
Each form is repeated as a chain in one launch of a plan.

Called by ark.cli.bench_comm.
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
from ark.ir.dtype import DataType, fp32
from ark.ir.graph import Graph
from ark.plan.types import Plan
from ark.runtime.bootstrap import Bootstrap

CHAIN_LENGTH = 16
NORM_EPS = 1e-5
FORMS = ("sum", "apart", "one")


@dataclass
class NormFigures:
    """Times of one repetition of the measured ops, in seconds, on the slowest rank, as the median
    of the repeats. sum_seconds: only the sum over ranks. apart_seconds: the three ops one by one.
    seconds: the three ops as one op. wrong: the number of elements, on all ranks together, that
    differ from NumPy's result after the first repetition.
    """

    rows: int
    columns: int
    dtype: str
    ranks: int
    sum_seconds: float
    apart_seconds: float
    seconds: float
    wrong: int


def norm_shapes(text: str) -> list[tuple[int, int]]:
    """Parses shapes such as 1x4096,64x4096. Raises InvalidUsageError for any other text."""
    shapes = []
    for shape in text.split(","):
        sizes = shape.split("x")
        if len(sizes) != 2 or not all(s.isdigit() and 0 < int(s) <= 1 << 20 for s in sizes):
            raise InvalidUsageError(f"{shape!r} is not a shape of rows; write ROWSxCOLUMNS")
        shapes.append((int(sizes[0]), int(sizes[1])))
    return shapes


def _graph(form: str, shape: tuple[int, int], dtype: DataType, rank: int, world: int) -> Graph:
    """A chain of y = norm(sum(x) + stream), in which each y is the next x. The first y is stored
    for the check.
    """
    graph = Graph(rank, world)
    x = graph.tensor(shape, dtype, arena="state", name="x")
    stream = graph.tensor(shape, dtype, arena="state", name="stream")
    weight = graph.tensor(shape[1:], fp32, arena="state", name="weight")
    for number in range(CHAIN_LENGTH):
        arena = "activation" if number else "state"
        result = graph.tensor(shape, dtype, arena=arena, name="y" if not number else f"y{number}")
        if form == "sum":
            graph.add("all_reduce", [x], [result], {"packet": False}, "all_reduce")
        else:
            total = graph.tensor(shape, dtype, name=f"sum{number}")
            added = graph.tensor(shape, dtype, name=f"stream{number}")
            graph.add("all_reduce", [x], [total], {"packet": False}, "all_reduce")
            graph.add("add", [total, stream], [added], {}, "add")
            graph.add("rmsnorm", [added, weight], [result], {"eps": NORM_EPS}, "rmsnorm")
            stream = added
        x = result
    return graph


def _plans(
    form: str, shape: tuple[int, int], dtype: DataType, world: int, device: Device
) -> list[Plan]:
    elements = shape[0] * shape[1]
    machine = machine_for(
        device.machine, world, Key("all_reduce", dtype.name, dtype.itemsize, elements)
    )
    options = {"lockstep": True, "fuse": form == "one"}
    graphs = [_graph(form, shape, dtype, rank, world) for rank in range(world)]
    return verified(graphs, machine, options)


def _inputs(shape: tuple[int, int], dtype: DataType, rank: int) -> dict[str, np.ndarray]:
    rng, common = np.random.default_rng(rank), np.random.default_rng(99)
    return {
        "x": rng.standard_normal(shape).astype(dtype.numpy),
        "stream": common.standard_normal(shape).astype(dtype.numpy),
        "weight": common.standard_normal(shape[1]).astype(np.float32),
    }


def _wrong(shape: tuple[int, int], dtype: DataType, world: int, got: np.ndarray) -> int:
    given = [_inputs(shape, dtype, rank) for rank in range(world)]
    total = sum(g["x"].astype(np.float64) for g in given) + given[0]["stream"].astype(np.float64)
    want = total / np.sqrt((total * total).mean(-1, keepdims=True) + NORM_EPS) * given[0]["weight"]
    loose = 1e-4 if dtype == fp32 else 5e-2
    near = np.isclose(got.view(dtype.numpy).astype(np.float64), want.reshape(-1), loose, loose)
    return int((~near).sum())


def measure_norm(
    shape: tuple[int, int], dtype: DataType, repeats: int, job: Bootstrap, backend: Backend,
    device: Device,
) -> NormFigures:  # fmt: skip
    """Measures the three forms for one shape on all ranks; returns the same figures on each
    rank.
    """
    world = job.world_size
    given = _inputs(shape, dtype, job.rank)
    plans = (_plans(form, shape, dtype, world, device)[job.rank] for form in FORMS)
    runs = [timed_plan(plan, given, job, backend, device, repeats, 1000) for plan in plans]
    mine = [
        *(seconds / CHAIN_LENGTH for seconds, _ in runs),
        _wrong(shape, dtype, world, runs[2][1]),
    ]
    figures_of = [json.loads(s) for s in job.all_gather(json.dumps(mine).encode())]
    alone, apart, one = (max(s[i] for s in figures_of) for i in range(3))
    every = sum(s[3] for s in figures_of)
    return NormFigures(*shape, dtype.name, world, alone, apart, one, every)
