"""The peer of `ark bench comm`: torch.distributed with NCCL or Gloo, in the same processes as ark.
Called by ark.cli.measure.comm.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.peer import import_torch, repeated
from ark.collective.programs import CollectiveProgram
from ark.collective.topology import Topology
from ark.distributed.members import Members
from ark.errors import SystemError
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.lower.engines import AUTO
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor

GRAPH, ALONE = "graph", "alone"


@dataclass(frozen=True)
class CommCase:
    """A collective to measure. nbytes: the bytes of a rank's input or result, whichever is larger,
    as in nccl-tests.

    algorithm: an algorithm's name, or a collective program for the job's ranks. topology: the
    network of the ranks. The programs of named algorithms and the predicted times are for this
    network. None means a full mesh, without predicted times. least: True to report the fastest
    repeat, which shows what a link can attain, instead of the median.
    """

    collective: str
    nbytes: int
    dtype: DataType
    way: str = GRAPH
    algorithm: str | CollectiveProgram = "auto"
    engine: str = AUTO
    repeats: int = 5
    topology: Topology | None = None
    least: bool = False


def agreed(job: Bootstrap | Members, number: float) -> float:
    """The largest of the ranks' values of `number`; all ranks must call this function."""
    return max(float(json.loads(s)) for s in job.all_gather(json.dumps(number).encode()))


def seconds_each(
    executor: Executor, job: Bootstrap | Members, repeats: int, most: int, least: bool = False
) -> float:
    """The seconds of one iteration on this rank, as the median over `repeats` launches, or as the
    minimum if `least` is True. The number of iterations of a launch, from 3 to `most`, is the same
    on every rank. It is chosen so that a launch takes about 20 ms.
    """
    run = executor.start(3)
    run.wait(60.0)
    once = run.elapsed_ms() / 1e3 / 3
    iterations = int(agreed(job, float(np.clip(0.02 / once, 3, most))))
    times = []
    for _ in range(repeats):
        run = executor.start(iterations)
        run.wait(120.0)
        times.append(run.elapsed_ms() / 1e3 / iterations)
    job.barrier("the end of a case")
    return float(min(times) if least else np.median(times))


def timed_plan(
    plan: Plan,
    given: Mapping[str, np.ndarray],
    job: Bootstrap | Members,
    backend: Backend,
    device: Device,
    repeats: int,
    most: int,
    least: bool = False,
) -> tuple[float, np.ndarray]:
    """The seconds of one iteration of this rank's plan (see `seconds_each`), and the bytes of the
    buffer `y` after the first iteration. given: values of the buffers of these names, of those that
    the plan has.
    """
    with Executor(plan, backend, device, ranks=job) as executor:
        own = [b for b in plan.buffers if b.rank == plan.rank]
        places = {b.name.rpartition(".")[0]: b for b in own} | {b.name: b for b in own}
        for name, values in given.items():
            place = places.get(name)
            if place is not None and place.nbytes == values.nbytes:
                data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
                device.write(executor.buffer_address(place.id), data)
        executor.start(1).wait(60.0)
        y = places["y"]
        got = device.read(executor.buffer_address(y.id), y.nbytes).copy()
        return seconds_each(executor, job, repeats, most, least), got


def verified(graphs: Iterable[Graph], machine: Machine, options: Mapping[str, Any]) -> list[Plan]:
    """The verified plans of all ranks."""
    plans = [make_plan(graph, machine, options) for graph in graphs]
    verify(plans)
    return plans


def join_torch(name: str, job: Bootstrap | Members, timeout_s: float = 60) -> None:
    """Makes the job's ranks a process group of torch.distributed. NCCL does not use the multicast
    of NVLink. name: "nccl" or "gloo". timeout_s: seconds within which all ranks must join.
    """
    torch = import_torch()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    port = json.loads(job.all_gather(json.dumps(_free_port()).encode())[0])
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, job.world_size, job.rank == 0, timedelta(seconds=timeout_s)
    )
    torch.distributed.init_process_group(
        name, store=store, rank=job.rank, world_size=job.world_size
    )


class Peer:
    """The library that ark's collectives are compared with: torch.distributed, in the same
    processes as ark.
    """

    def __init__(self, name: str, job: Bootstrap, device: Device) -> None:
        torch = import_torch()
        self._name, self._job = name, job
        self._where = "cpu"
        if name == "nccl":
            if not torch.cuda.is_available():
                raise SystemError(
                    "NCCL needs a GPU and a torch that is built for it, which is not available "
                    "here; compare with --vs gloo"
                )
            self._where = f"cuda:{device.dlpack[1]}"
            torch.cuda.set_device(device.dlpack[1])
        join_torch(name, job)

    def seconds(self, case: CommCase, elements: int) -> float | None:
        """The median seconds of one call; None for collectives that the peer does not support."""
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
        except RuntimeError:  # some versions of Gloo have no reduce_scatter_tensor
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

            iterations = int(agreed(self._job, float(np.clip(0.05 / timed(3), 3, 1000))))
            return float(np.median([timed(iterations) for _ in range(case.repeats)]))

    def close(self) -> None:
        import_torch().distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
