"""Times collectives of CPU ranks with torch.distributed's backends `ark` and `gloo`, which
alternate in one run:

    python -m bench.gloo [--ranks 2] [--sizes 4,1024,65536] [--collective all_reduce]

Prints microseconds per call on rank 0, as the minimum and the median of several rounds: wall-clock
time, and CPU time of all the process's threads, which depends less on a busy machine. Data is fp32;
torch uses one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ark.distributed.torch  # registers the backend

ROUNDS, WARM = 15, 20
SIZES = "4,1024,16384,65536,262144,1048576"


def call(collective: str, elements: int, group: Any) -> Callable[[], Any]:
    """A function that calls the collective once on a tensor of `elements` elements per rank."""
    x = torch.ones(elements)
    if collective == "all_reduce":  # a maximum of ones does not change the data
        return lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    if collective == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    y = torch.empty(elements * dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(y, x, group=group)


def rank_of(sizes: list[int], collective: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("ark")
    gloo = dist.new_group(backend="gloo")
    groups = {"ark": dist.group.WORLD, "gloo": gloo}
    if dist.get_rank() == 0:
        print(f"{collective}, {dist.get_world_size()} ranks; us a call, least / median")
        print(f"{'bytes':>8}  {'ark':>17}  {'gloo':>17}  {'ark, cpu':>17}  {'gloo, cpu':>17}")
    for nbytes in sizes:
        calls = 100 if nbytes <= 1 << 16 else 20
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        each = {name: call(collective, nbytes // 4, group) for name, group in groups.items()}
        for one in each.values():
            for _ in range(WARM):
                one()
        for _ in range(ROUNDS):
            for name, one in each.items():
                dist.barrier(group=gloo)
                begin = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    one()
                spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
                seconds[name].append((spent[0] / calls * 1e6, spent[1] / calls * 1e6))
        if dist.get_rank() == 0:
            words = [
                f"{np.min(row):7.0f} / {np.median(row):7.0f}"
                for place in (0, 1)
                for row in ([r[place] for r in seconds[name]] for name in groups)
            ]
            print(f"{nbytes:8d}  " + "  ".join(words), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help="bytes a rank")
    ways = ("all_reduce", "all_gather", "broadcast")
    parser.add_argument("--collective", choices=ways, default=ways[0])
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    raise SystemExit(ark.launch(args.ranks, rank_of, sizes, args.collective))


if __name__ == "__main__":
    main()
