"""Times chains of all-reduces inside one loop kernel, beside torch.distributed in the same run.

`python bench/all_reduce.py --ranks 2 [--backend cuda] [--elements 4096 ...]`. A step of the chain
is an all-reduce and a multiplication by 1 / ranks, so that values stay in range; the peer does the
same two steps, on GPUs (bf16) with NCCL, replayed from a CUDA graph, on CPUs (fp32) with gloo. What
the chains leave is compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

import ark
from ark.backend import registry
from ark.bench.peer import import_torch
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp32
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor
from ark.runtime.rank_info import rank_from_environment

STEPS = 16
ITERATIONS = 50
REPEATS = 5


def start_value(elements: int, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(elements).astype(np.float32)


def measure_ark(
    ranks: Bootstrap, backend: str, device: Any, machine: Any, elements: int, algorithm: str
) -> tuple[float, np.ndarray]:
    """Seconds of one step, and what the chain leaves."""
    dtype = fp32 if backend == registry.FALLBACK else bf16
    plans = []
    for rank in range(ranks.world_size):
        model = Model(rank, ranks.world_size)
        with use_model(model):
            x = ark.tensor([elements], dtype, name="x")
            value = ark.mul(x, 1.0)
            for _ in range(STEPS):
                total = ark.all_reduce(value, rank, ranks.world_size, algorithm=algorithm)
                value = ark.mul(total, 1.0 / ranks.world_size)
            ark.copy(value, ark.tensor([elements], dtype, name="y"))
        plans.append(plan(model.graph, machine))
    verify(plans)
    chosen = registry.get(backend)
    with Executor(plans[ranks.rank], chosen, device, ranks=ranks) as executor:
        executor.write("x", start_value(elements, ranks.rank))
        executor.start(2).wait(60)
        result = executor.read("y").astype(np.float32)
        times = []
        for _ in range(REPEATS):
            run = executor.start(ITERATIONS)
            run.wait(60)
            times.append(run.elapsed_ms() / 1e3 / ITERATIONS / STEPS)
        ranks.barrier()
    return statistics.median(times), result


def measure_peer(rank: int, world: int, gpu: bool, elements: int) -> tuple[float, np.ndarray]:
    """The same chain in torch.distributed; the process group is up."""
    torch = import_torch()
    place = f"cuda:{rank}" if gpu else "cpu"
    x = torch.from_numpy(start_value(elements, rank)).to(place)
    x = x.to(torch.bfloat16) if gpu else x
    value = x.clone()

    def chain() -> None:
        for _ in range(STEPS):
            torch.distributed.all_reduce(value)
            value.mul_(1.0 / world)

    if not gpu:
        chain()
        result = value.numpy().copy()
        begin = time.perf_counter()
        for _ in range(ITERATIONS):
            chain()
        return (time.perf_counter() - begin) / ITERATIONS / STEPS, result
    chain()
    result = value.float().cpu().numpy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.distributed.barrier()
        begin.record()
        for _ in range(ITERATIONS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / ITERATIONS / STEPS)
    return statistics.median(times[1:]), result


def one_rank(args: argparse.Namespace) -> int:
    rank_info = rank_from_environment()
    gpu = args.backend != registry.FALLBACK
    torch = import_torch()
    with Bootstrap.from_environment(rank_info=rank_info) as ranks:
        device = registry.get(args.backend).open(rank_info.local_rank if gpu else 0)
        machine = device.machine
        if not gpu:
            machine = machine.with_processors(max(1, machine.processors // rank_info.world_size))
        if gpu:
            torch.cuda.set_device(rank_info.local_rank)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 20)
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        for elements in args.elements:
            peer, wanted = measure_peer(rank_info.rank, rank_info.world_size, gpu, elements)
            row = f"{elements:>9} elements: torch {peer * 1e6:8.1f} us"
            for algorithm in args.algorithms:
                seconds, got = measure_ark(
                    ranks, args.backend, device, machine, elements, algorithm
                )
                error = np.abs(got - wanted).max() / np.abs(wanted).max()
                row += f", {algorithm} {seconds * 1e6:8.1f} us (differs by {error:.0e})"
            if rank_info.rank == 0:
                print(row, flush=True)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        device.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default=registry.FALLBACK)
    parser.add_argument("--elements", type=int, nargs="+", default=[4096, 65536, 1048576])
    parser.add_argument("--algorithms", nargs="+", default=["one_shot", "ring", "forestcoll"])
    args = parser.parse_args()
    if rank_from_environment().world_size > 1:
        return one_rank(args)
    return ark.launch(args.ranks, one_rank, args)


if __name__ == "__main__":
    sys.exit(main())
