"""Times an update by Adam of parameters whose gradients are summed over ranks, CoCoNet's first
program (Jangda et al., ASPLOS 2022), beside torch's:

    python -m bench.adam_update --ranks 2 --backend cuda --sizes 20 22 24 26 28

`sliced` is one launch of a reduce-scatter of the gradients, the update of each rank's slice, whose
moments only that rank has, and an all-gather of the parameters. `whole` sums all gradients on all
ranks. torch's are an all-reduce by NCCL (Gloo on CPUs) and torch.optim.Adam(fused=True). `apart` is
the largest difference of the sliced update from torch's after the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import ark

RATE, SCALE = 1e-3, 0.01


def gradient(elements: int, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(elements, np.float32)


def start(elements: int) -> np.ndarray:
    return SCALE * np.random.default_rng(99).standard_normal(elements, np.float32)


def sliced(g: Any, w: Any, rank: int, world: int) -> Any:
    own = ark.tensor([w.shape()[0] // world], w.dtype())
    part = ark.reduce_scatter(g, rank, world)
    ark.optim.Adam([own], lr=RATE).step([part])
    ark.all_gather(own, rank, world, output=w)
    return own


def whole(g: Any, w: Any, rank: int, world: int) -> Any:
    ark.optim.Adam([w], lr=RATE).step([ark.all_reduce(g, rank, world)])
    return w


# Functions that add an update to the model and return the parameters that this rank updates.
WAYS: dict[str, Callable[..., Any]] = {"sliced": sliced, "whole": whole}


def in_ark(way: str, elements: int, args: argparse.Namespace) -> tuple[float, np.ndarray, int]:
    """Seconds of an update on this rank, the parameters at the end, and the number of updates."""
    ark.Model.reset()
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    g, w = ark.tensor([elements], name="g"), ark.tensor([elements], name="w")
    own = WAYS[way](g, w, rank, world)
    part = elements // world
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        g.from_numpy(gradient(elements, rank))
        w.from_numpy(start(elements))
        if own is not w:
            own.from_numpy(start(elements)[rank * part : (rank + 1) * part])
        runtime.barrier()
        runtime.run(3)
        times = []
        for _ in range(args.repeats):
            runtime.barrier()
            begun = time.perf_counter()
            runtime.run(args.steps)
            times.append((time.perf_counter() - begun) / args.steps)
        result = w.to_numpy()
        runtime.barrier()
    return float(np.median(times)), result, 3 + args.repeats * args.steps


def in_torch(elements: int, args: argparse.Namespace, steps: int) -> tuple[float, np.ndarray]:
    """Seconds of an update on this rank, and the parameters after `steps` of them."""
    import torch

    where = f"cuda:{ark.Model.get_rank()}" if args.backend == "cuda" else "cpu"
    g = torch.tensor(gradient(elements, ark.Model.get_rank()), device=where)
    total = torch.empty_like(g)
    w = torch.nn.Parameter(torch.tensor(start(elements), device=where))
    optimizer = torch.optim.Adam([w], lr=RATE, fused=True)

    def run(count: int) -> float:
        torch.distributed.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            total.copy_(g)  # NCCL sums in place
            torch.distributed.all_reduce(total)
            w.grad = total
            optimizer.step()
        if args.backend == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    run(3)
    times = [run(args.steps) for _ in range(args.repeats)]
    assert steps == 3 + args.repeats * args.steps
    return float(np.median(times)), w.detach().cpu().numpy()


def copy_seconds(elements: int, args: argparse.Namespace) -> float:
    """Seconds of the copy that torch's loop makes and ark's does not."""
    import torch

    where = f"cuda:{ark.Model.get_rank()}" if args.backend == "cuda" else "cpu"
    x, y = (torch.empty(elements, device=where) for _ in range(2))
    y.copy_(x)
    if args.backend == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(args.steps):
        y.copy_(x)
    if args.backend == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / args.steps


def on_a_rank(args: argparse.Namespace, port: int) -> None:
    import torch

    ark.init(backend=args.backend)
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    if args.backend == "cuda":
        torch.cuda.set_device(rank)
    store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=120))
    name = "nccl" if args.backend == "cuda" else "gloo"
    torch.distributed.init_process_group(name, store=store, rank=rank, world_size=world)

    def slowest(seconds: float) -> float:
        return float(ark.distributed.all_reduce(np.array([seconds], np.float32), "max")[0])

    for size in args.sizes:
        elements, line = 1 << size, {"parameters": 1 << size}
        results = {way: in_ark(way, elements, args) for way in WAYS}
        seconds, wanted = in_torch(elements, args, results["sliced"][2])
        line |= {f"{way}_us": slowest(seconds) * 1e6 for way, (seconds, *_) in results.items()}
        line["torch_us"] = slowest(seconds - copy_seconds(elements, args)) * 1e6
        line["ratio"] = line["torch_us"] / line["sliced_us"]
        line["apart"] = slowest(float(np.abs(results["sliced"][1] - wanted).max()))
        if rank == 0:
            print(json.dumps({k: float(f"{v:.4g}") for k, v in line.items()}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 22, 24, 26, 28])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    raise SystemExit(ark.launch(args.ranks, on_a_rank, args, port))


if __name__ == "__main__":
    main()
