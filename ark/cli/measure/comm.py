"""Measures collectives. The results have the format of nccl-tests: time, algorithm bandwidth, bus
bandwidth, and the number of wrong elements.

There are two modes. `graph` runs many dependent collectives in one launch of a plan, timed by the
device's clock. `alone` times single calls on arrays (ark.distributed). Every rank measures, and the
slowest rank's time is reported. The peer, the library that is timed for comparison, is
torch.distributed with NCCL (in a captured graph for `graph`) or Gloo. Called by ark.cli.bench_comm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.comm_peer import GRAPH, CommCase, Peer, agreed, timed_plan, verified
from ark.cli.measure.peer import import_torch, torch_device
from ark.collective.programs import Collective, CollectiveProgram
from ark.collective.programs.attributes import CollectiveAttributes
from ark.collective.simulate import simulate
from ark.distributed.calls import Key, algorithm, machine_for
from ark.distributed.group import Group
from ark.distributed.members import Members
from ark.ir.graph import Graph
from ark.machine.capability import Capability
from ark.ops.communication.collectives import choose_program
from ark.plan.types import Plan
from ark.runtime.bootstrap import Bootstrap

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SMALL_CHAIN_CALLS, LARGE_CHAIN_CALLS = (
    32,
    8,
)  # length of a chain of dependent collectives, for small and for large sizes
# Sizes in bytes from which the measured chain of collectives is shorter than usual, because
# planning a chain of the usual length would take minutes.
MIN_LARGE_BYTES, MIN_HUGE_BYTES = 4 << 20, 64 << 20


@dataclass
class CommFigures:
    """One result. seconds, peer_seconds: the slowest rank's time, the median of the repeats. wrong:
    elements, of all ranks, that differ from NumPy's result.

    predicted_seconds: the simulator's prediction for the case's topology.
    """

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
    predicted_seconds: float | None = None


def bus_factor(collective: str, ranks: int) -> float:
    """The factor from algorithm bandwidth to bus bandwidth (the bytes that each link carries), as
    nccl-tests defines it.
    """
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def case_key(case: CommCase, world: int) -> Key:
    """The key of the collective call (collective, type, size, algorithm, engine) that a case
    measures on `world` ranks.
    """
    itemsize = case.dtype.itemsize
    elements = max(1, case.nbytes // itemsize // world) * world
    if case.collective == Collective.ALL_GATHER:
        elements //= world
    reduces = Collective(case.collective).reduces
    return Key(
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


def measure(
    case: CommCase,
    job: Bootstrap | Members,
    backend: Backend,
    device: Device,
    peer: Peer | None,
    plans: list[Plan] | None = None,
) -> CommFigures:
    """Measures one case, a collective of one size, on all ranks; returns the same result on each.
    plans: the verified plans of the case's graph; None to create them here.
    """
    world, rank = job.world_size, job.rank
    key = case_key(case, world)
    elements = key.elements
    values = [((np.arange(elements) * 7 + r) % 13).astype(case.dtype.numpy) for r in range(world)]
    if case.way == GRAPH:
        plan = (plans or case_plans(case, world, device))[rank]
        run = (job, backend, device, case.repeats, 2000, case.least)
        seconds, data = timed_plan(plan, {"x": values[rank]}, *run)
        seconds /= _chain(key, _program(case, key, world))
        got = data.view(case.dtype.numpy)
    else:
        assert isinstance(job, Bootstrap), (
            "the mode `alone` measures the group of the whole job only"
        )
        seconds, got = _alone(case, key, values[rank], job, backend, device)
    wrong = wrong_elements(case.collective, values, rank, got, key.reduction)
    other = peer.seconds(case, elements) if peer is not None else None
    figures_of = [
        json.loads(s) for s in job.all_gather(json.dumps([seconds, wrong, other]).encode())
    ]
    slowest = max(s[0] for s in figures_of)
    moved = max(key.nbytes, key.out_bytes(world))
    rate = moved / slowest / 1e9
    return CommFigures(
        case.collective,
        moved,
        elements,
        case.dtype.name,
        case.way,
        str(algorithm(key, world)),
        case.engine,
        world,
        slowest,
        rate,
        rate * bus_factor(case.collective, world),
        sum(s[1] for s in figures_of),
        None if other is None else max(s[2] for s in figures_of),
        _predicted(case, key, world, moved),
    )


def _program(case: CommCase, key: Key, world: int) -> CollectiveProgram:
    how = algorithm(key, world)
    return choose_program(key.collective, world, how, case.topology, key.root, key.reduction)


def _predicted(case: CommCase, key: Key, world: int, nbytes: int) -> float | None:
    if case.topology is None:
        return None
    return simulate(_program(case, key, world), case.topology, nbytes).time_us / 1e6


def wrong_elements(
    collective: str, values: list[np.ndarray], rank: int, got: np.ndarray, reduction: str | None
) -> int:
    """The number of elements of `got`, this rank's result, that differ from NumPy's result. The
    values are small integers, so sums are exact.
    """
    world = len(values)
    whole = [v.astype(np.float64) for v in values]
    total = np.sum(whole, axis=0) / (world if reduction == "mean" else 1)
    part = len(values[0]) // world
    results: dict[str, Callable[[], np.ndarray]] = {
        "all_reduce": lambda: total,
        "all_gather": lambda: np.concatenate(whole),
        "reduce_scatter": lambda: total[rank * part : (rank + 1) * part],
        "all_to_all": lambda: np.concatenate([v[rank * part : (rank + 1) * part] for v in whole]),
        "broadcast": lambda: whole[0],
    }
    want = results[collective]()
    near = np.isclose(got.astype(np.float64), want, rtol=1e-2, atol=1e-2)
    return int((~near).sum())


def case_plans(case: CommCase, world: int, device: Device) -> list[Plan]:
    """The verified plans of all ranks for a case. If the result of the collective can be its next
    input, the plans have a chain of collectives; otherwise they have a single collective.
    """
    key = case_key(case, world)
    machine = machine_for(device.machine, world, key)
    how = _program(case, key, world)
    given = CollectiveAttributes(program=how, element=key.element, engine=key.engine)
    attrs = given.to_node()
    graphs = []
    for rank in range(world):
        graph = Graph(rank, world)
        x = graph.tensor((key.elements,), case.dtype, arena="state", name="x")
        count = key.out_bytes(world) // key.itemsize
        source = x
        for number in range(_chain(key, how)):
            arena, name = ("activation", f"y{number}") if number else ("state", "y")
            target = graph.tensor((count,), case.dtype, arena=arena, name=name)
            graph.add("collective", [source], [target], attrs, key.collective)
            source = target
        graphs.append(graph)
    return verified(graphs, machine, {"lockstep": True})


def _chain(key: Key, program: CollectiveProgram) -> int:
    """The number of collectives in an iteration: several if a result can be the input of the next
    one, otherwise 1.
    """
    if key.collective not in ("all_reduce", "all_to_all", "broadcast"):
        return 1
    if key.nbytes >= MIN_HUGE_BYTES:
        return 2
    cut = program.chunks > 8 * program.ranks  # many small puts take long to plan
    return LARGE_CHAIN_CALLS if key.nbytes >= MIN_LARGE_BYTES or cut else SMALL_CHAIN_CALLS


def _alone(
    case: CommCase,
    key: Key,
    values: np.ndarray,
    job: Bootstrap,
    backend: Backend,
    device: Device,
) -> tuple[float, np.ndarray]:
    on_host = device.machine.has(Capability.HOST_MEMORY)
    with Group(job, backend, device) as group:
        x: Any = values
        if not on_host or case.dtype.name == "bf16":
            torch = import_torch()
            x = torch.from_numpy(values.astype(np.float32)).to(case.dtype.to_torch())
            x = x if on_host else x.to(f"{torch_device(True)}:{device.dlpack[1]}")
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
                import_torch().accelerator.synchronize()
            return (time.perf_counter() - start) / iterations

        iterations = int(agreed(job, float(np.clip(0.05 / timed(3), 3, 500))))
        times = [timed(iterations) for _ in range(case.repeats)]
        got = y if isinstance(y, np.ndarray) else y.float().cpu().numpy()
        job.barrier("the end of a case")
    return float(np.median(times)), got
