"""Collectives as nccl-tests shows them: time, algorithm and bus bandwidth, and what is wrong.

Two ways: `graph`, many dependent collectives in one launch of a plan, timed by the device; and
`alone`, calls on arrays one by one (ark.comm). Each rank measures, the slowest one counts. The peer
is torch.distributed with NCCL (in a CUDA graph for `graph`) or Gloo. Called by ark.cli.bench_comm.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from ark.backend.protocol import Backend, Device
from ark.bench.peer import import_torch, repeated
from ark.collective import Collective
from ark.distributed.calls import Key, algorithm, machine_for
from ark.distributed.group import Group
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.lower.engines import AUTO
from ark.lower.pipeline import plan as make_plan
from ark.ops.collectives import choose_program
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
CHAIN = 8  # dependent collectives of an iteration
GRAPH, ALONE = "graph", "alone"


@dataclass(frozen=True)
class CommCase:
    """nbytes: as nccl-tests counts: of a rank's larger side, input or result."""

    collective: str
    nbytes: int
    dtype: DataType
    way: str = GRAPH
    algorithm: str = "auto"
    engine: str = AUTO
    repeats: int = 5


@dataclass
class CommFigures:
    """Seconds are the slowest rank's, the median of the repeats; wrong: elements, of all ranks."""

    collective: str
    nbytes: int
    elements: int
    dtype: str
    way: str
    algorithm: str
    engine: str
    ranks: int
    seconds: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int
    peer_seconds: float | None = None


def bus_factor(collective: str, ranks: int) -> float:
    """What nccl-tests multiplies the algorithm bandwidth by: bytes that each link carries."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def measure(
    case: CommCase, job: Bootstrap, backend: Backend, device: Device, peer: Peer | None
) -> CommFigures:
    """Measures one size on all ranks; the same figures on each."""
    world, rank = job.world_size, job.rank
    itemsize = case.dtype.itemsize
    elements = max(1, case.nbytes // itemsize // world) * world
    if case.collective == Collective.ALL_GATHER:
        elements //= world
    reduces = Collective(case.collective).reduces
    key = Key(
        case.collective,
        case.dtype.name if reduces else "uint32" if itemsize == 4 else "uint8",
        itemsize,
        elements,
        "mean"
        if case.way == GRAPH and case.collective == "all_reduce"
        else "sum"
        if reduces
        else None,
        0 if case.collective == Collective.BROADCAST else None,
        case.algorithm,
        case.engine,
    )
    values = [((np.arange(elements) * 7 + r) % 13).astype(case.dtype.numpy) for r in range(world)]
    run = _in_graph if case.way == GRAPH else _alone
    seconds, got = run(case, key, values[rank], job, backend, device)
    wrong = _wrong(case.collective, values, rank, got, key.reduction)
    other = peer.seconds(case, elements) if peer is not None else None
    said = [json.loads(s) for s in job.all_gather(json.dumps([seconds, wrong, other]).encode())]
    slowest = max(s[0] for s in said)
    moved = max(key.nbytes, key.out_bytes(world))
    rate = moved / slowest / 1e9
    return CommFigures(
        case.collective,
        moved,
        elements,
        case.dtype.name,
        case.way,
        algorithm(key, world),
        case.engine,
        world,
        slowest,
        rate,
        rate * bus_factor(case.collective, world),
        sum(s[1] for s in said),
        None if other is None else max(s[2] for s in said),
    )


def _wrong(
    collective: str, values: list[np.ndarray], rank: int, got: np.ndarray, reduction: str | None
) -> int:
    """Elements that are not what NumPy says; the values are small whole numbers."""
    world = len(values)
    whole = [v.astype(np.float64) for v in values]
    total = np.sum(whole, axis=0) / (world if reduction == "mean" else 1)
    part = len(values[0]) // world
    want = {
        "all_reduce": lambda: total,
        "all_gather": lambda: np.concatenate(whole),
        "reduce_scatter": lambda: total[rank * part : (rank + 1) * part],
        "all_to_all": lambda: np.concatenate([v[rank * part : (rank + 1) * part] for v in whole]),
        "broadcast": lambda: whole[0],
    }[collective]()
    near = np.isclose(got.astype(np.float64), want, rtol=1e-2, atol=1e-2)
    return int((~near).sum())


def _plans(case: CommCase, key: Key, world: int, device: Device) -> list[Plan]:
    """Collectives behind each other where the result can be the next one's input; else one."""
    machine = machine_for(device.machine, world, key)
    how = choose_program(
        key.collective, world, algorithm(key, world), None, key.root, key.reduction
    )
    attrs = {"program": how, "element": key.element, "engine": key.engine}
    made = []
    for rank in range(world):
        graph = Graph(rank, world)
        x = graph.tensor((key.elements,), case.dtype, arena="state", name="x")
        count = key.out_bytes(world) // key.itemsize
        source = x
        for number in range(_chain(key.collective)):
            arena, name = ("activation", f"y{number}") if number else ("state", "y")
            target = graph.tensor((count,), case.dtype, arena=arena, name=name)
            graph.add("collective", [source], [target], attrs, key.collective)
            source = target
        made.append(make_plan(graph, machine))
    verify(made)
    return made


def _in_graph(
    case: CommCase,
    key: Key,
    values: np.ndarray,
    job: Bootstrap,
    backend: Backend,
    device: Device,
) -> tuple[float, np.ndarray]:
    plan = _plans(case, key, job.world_size, device)[job.rank]
    many = _chain(key.collective)
    with Executor(plan, backend, device, ranks=job) as executor:
        places = {b.name: b for b in plan.buffers if b.rank == plan.rank}
        if "x" in places:  # a broadcast reads the root's alone
            device.write(executor.buffer_address(places["x"].id), values.view(np.uint8))
        executor.start(1).wait(60.0)
        data = device.read(executor.buffer_address(places["y"].id), places["y"].nbytes)
        got = data.view(case.dtype.numpy)
        run = executor.start(3)
        run.wait(60.0)
        once = run.elapsed_ms() / 1e3 / 3
        iterations = int(_agreed(job, float(np.clip(0.02 / once, 3, 2000))))
        times = []
        for _ in range(case.repeats):
            run = executor.start(iterations)
            run.wait(120.0)
            times.append(run.elapsed_ms() / 1e3 / iterations / many)
        job.barrier("the end of a case")
    return float(np.median(times)), got


def _chain(collective: str) -> int:
    """Collectives of an iteration: many, where the result can be the next one's input."""
    return CHAIN if collective in ("all_reduce", "all_to_all", "broadcast") else 1


def _agreed(job: Bootstrap, number: float) -> float:
    """The largest of the ranks' numbers."""
    return max(json.loads(s) for s in job.all_gather(json.dumps(number).encode()))


def _alone(
    case: CommCase,
    key: Key,
    values: np.ndarray,
    job: Bootstrap,
    backend: Backend,
    device: Device,
) -> tuple[float, np.ndarray]:
    on_host = device.machine.has("single_thread")
    with Group(job, backend, device) as group:
        x: Any = values
        if not on_host or case.dtype.name == "bf16":
            torch = import_torch()
            x = torch.from_numpy(values.astype(np.float32)).to(case.dtype.to_torch())
            x = x if on_host else x.to(f"cuda:{device.dlpack[1]}")
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.all_reduce(x, key.reduction or "sum", y),
            "all_gather": lambda: group.all_gather(x, y),
            "reduce_scatter": lambda: group.reduce_scatter(x, "sum", y),
            "all_to_all": lambda: group.all_to_all(x, y),
            "broadcast": lambda: group.broadcast(x, 0, y),
        }
        y: Any = None
        y = calls[case.collective]()

        def timed(iterations: int) -> float:
            job.barrier("a repeat")
            start = time.perf_counter()
            for _ in range(iterations):
                calls[case.collective]()
            if not on_host:
                import_torch().cuda.synchronize()
            return (time.perf_counter() - start) / iterations

        iterations = int(_agreed(job, float(np.clip(0.05 / timed(3), 3, 500))))
        times = [timed(iterations) for _ in range(case.repeats)]
        got = y if isinstance(y, np.ndarray) else y.float().cpu().numpy()
        job.barrier("the end of a case")
    return float(np.median(times)), got


class Peer:
    """torch.distributed beside ark, in the same processes."""

    def __init__(self, name: str, job: Bootstrap, device: Device) -> None:
        torch = import_torch()
        self._name, self._job = name, job
        self._where = "cpu"
        if name == "nccl":
            self._where = f"cuda:{device.dlpack[1]}"
            torch.cuda.set_device(device.dlpack[1])
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        port = json.loads(job.all_gather(json.dumps(_free_port()).encode())[0])
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, job.world_size, job.rank == 0, timedelta(seconds=60)
        )
        torch.distributed.init_process_group(
            name, store=store, rank=job.rank, world_size=job.world_size
        )

    def seconds(self, case: CommCase, elements: int) -> float | None:
        """Seconds of one call, the median; None for what the peer does not have."""
        torch = import_torch()
        dist = torch.distributed
        world = self._job.world_size
        x = torch.ones(elements, dtype=case.dtype.to_torch(), device=self._where)
        shape = {"all_gather": elements * world, "reduce_scatter": elements // world}
        y = x.new_zeros(shape.get(case.collective, elements))
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_gather": lambda: dist.all_gather_into_tensor(y, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "broadcast": lambda: dist.broadcast(x, 0),
        }
        call = calls[case.collective]
        try:
            call()
        except RuntimeError:  # Gloo has no reduce_scatter_tensor on some versions
            return None
        with contextlib.ExitStack() as stack:
            graphed = self._name == "nccl" and case.way == GRAPH
            loop = repeated(call, graphed, stack)

            def timed(iterations: int) -> float:
                self._job.barrier("a repeat of the peer")
                if graphed or self._name != "nccl":
                    return loop(iterations)
                start = time.perf_counter()
                for _ in range(iterations):
                    call()
                torch.cuda.synchronize()
                return (time.perf_counter() - start) / iterations

            iterations = int(_agreed(self._job, float(np.clip(0.05 / timed(3), 3, 1000))))
            return float(np.median([timed(iterations) for _ in range(case.repeats)]))

    def close(self) -> None:
        import_torch().distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
