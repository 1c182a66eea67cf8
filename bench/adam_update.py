"""Times an Adam update of parameters whose gradients are summed over ranks, by ark and by torch.
The program is the first one of the CoCoNet paper (Jangda et al., ASPLOS 2022):

    python -m bench.adam_update --ranks 2 --backend cuda --sizes 20 22 24 26 28

ark computes the update in three ways. `sliced`: a reduce-scatter of the gradients, an update of one
slice of the parameters on each rank, and an all-gather of the parameters, in one launch. Each rank
has only its slice's moments. `chunks`: as `sliced`, in chunks: a few processors put gradients and
new parameters to peers while the others update another chunk. `whole`: an all-reduce of the
gradients and an update of all parameters on every rank. torch uses an all-reduce by NCCL (Gloo on
CPUs) and torch.optim.Adam(fused=True). `ratio` is torch's time divided by that of ark's fastest
way. `apart` is the largest difference of ark's parameters, by any way, from torch's after the same
number of steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import ark
from bench.over_ranks import join, slowest

RATE, SCALE, DRAWN = 1e-3, 0.01, 1 << 20
Own = list[tuple[Any, int]]
"""The parameters that a rank updates and that are not a view of the tensor of all parameters, each
with the index of its first element there.
"""


def drawn(elements: int, seed: int) -> np.ndarray:
    """Returns random numbers, which repeat after DRAWN elements."""
    some = np.random.default_rng(seed).standard_normal(min(elements, DRAWN), np.float32)
    return np.tile(some, elements // len(some))


def gradient(elements: int, rank: int) -> np.ndarray:
    return drawn(elements, rank)


def start(elements: int) -> np.ndarray:
    return drawn(elements, 99) * np.float32(SCALE)


def sliced(g: Any, w: Any, rank: int, world: int, _: argparse.Namespace) -> Own:
    part = w.shape()[0] // world
    own = ark.tensor([part], w.dtype())
    ark.optim.Adam([own], lr=RATE).step([ark.reduce_scatter(g, rank, world)])
    ark.all_gather(own, rank, world, output=w)
    return [(own, rank * part)]


def whole(g: Any, w: Any, rank: int, world: int, _: argparse.Namespace) -> Own:
    ark.optim.Adam([w], lr=RATE).step([ark.all_reduce(g, rank, world)])
    return []


def chunks(g: Any, w: Any, rank: int, world: int, args: argparse.Namespace) -> Own:
    """Adds the update `chunks` to the model. A chunk has at most `args.chunk` of a rank's
    parameters. The first `args.copiers` processors only put to peers, and the others only compute.
    With 0 copiers, all processors do both.
    """
    part = w.shape()[0] // world
    count = max(1, part // args.chunk)
    each, peers = part // count, [(rank + step) % world for step in range(1, world)]
    gradients = {peer: ark.comm.channel(peer) for peer in peers}
    parameters = {peer: ark.comm.channel(peer, tag=1) for peer in peers}
    shares, parts = (
        [[ark.comm.symmetric([each]) for _ in range(world)] for _ in range(count)] for _ in range(2)
    )

    def of(t: Any, owner: int, chunk: int) -> Any:
        begin = owner * part + chunk * each
        return t[begin : begin + each]

    def on(first: int, last: int) -> AbstractContextManager[Any]:
        apart = 0 < args.copiers < args.processors and count > 1
        return ark.PlannerContext(processor_range=[first, last]) if apart else nullcontext()

    def put(chunk: int) -> None:
        with on(0, args.copiers):
            for peer in peers:
                gradients[peer].put(of(g, peer, chunk), shares[chunk][rank], signal=True)

    def update(chunk: int) -> None:
        with on(args.copiers, args.processors):
            total = of(g, rank, chunk)
            for peer in peers:
                (share,) = gradients[peer].wait(shares[chunk][peer])
                total = ark.add(total, share)
            ark.optim.Adam([of(w, rank, chunk)], lr=RATE).step([total])
        with on(0, args.copiers):
            for peer in peers:
                parameters[peer].put(of(w, rank, chunk), parts[chunk][rank], signal=True)

    def take(chunk: int) -> None:
        with on(args.copiers, args.processors):
            for peer in peers:
                (updated,) = parameters[peer].wait(parts[chunk][peer])
                ark.copy(updated, output=of(w, peer, chunk))

    put(0)
    for chunk in range(count):
        if chunk + 1 < count:
            put(chunk + 1)
        update(chunk)
        if chunk:
            take(chunk - 1)
    take(count - 1)
    return []


# Functions that add the ops of an optimizer update to the current ark.Model, by name.
WAYS: dict[str, Callable[..., Own]] = {"sliced": sliced, "chunks": chunks, "whole": whole}


def in_ark(way: str, elements: int, args: argparse.Namespace) -> tuple[float, np.ndarray]:
    """Seconds of an update on this rank, and the parameters after all updates."""
    ark.Model.reset()
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    g, w = ark.tensor([elements], name="g"), ark.tensor([elements], name="w")
    own = WAYS[way](g, w, rank, world, args)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        g.from_numpy(gradient(elements, rank))
        w.from_numpy(start(elements))
        for tensor, first in own:
            tensor.from_numpy(start(elements)[first : first + tensor.shape()[0]])
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
    return float(np.median(times)), result


def in_torch(elements: int, args: argparse.Namespace) -> tuple[float, np.ndarray]:
    """Seconds of an update on this rank, and the parameters after as many updates as in ark."""
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
    return float(np.median(times)), w.detach().cpu().numpy()


def copy_seconds(elements: int, args: argparse.Namespace) -> float:
    """Seconds of the copy of the gradients that torch's loop makes in addition to the update."""
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


def on_a_rank(args: argparse.Namespace) -> None:
    import torch

    ark.init(backend=args.backend)
    rank = ark.Model.get_rank()
    if args.backend == "cuda":
        torch.cuda.set_device(rank)
        args.processors = torch.cuda.get_device_properties(rank).multi_processor_count
    join(args.backend)
    for size in args.sizes:
        elements, line = 1 << size, {"parameters": 1 << size}
        results = {way: in_ark(way, elements, args) for way in args.ways}
        seconds, wanted = in_torch(elements, args)
        taken = {way: slowest(seconds) * 1e6 for way, (seconds, _) in results.items()}
        line |= {f"{way}_us": us for way, us in taken.items()}
        line["torch_us"] = slowest(seconds - copy_seconds(elements, args)) * 1e6
        line["ratio"] = line["torch_us"] / min(taken.values())
        line["apart"] = slowest(max(np.abs(w - wanted).max() for _, w in results.values()))
        if rank == 0:
            print(json.dumps({k: float(f"{v:.4g}") for k, v in line.items()}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 22, 24, 26, 28])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--chunk", type=int, default=1 << 22, help="parameters of a chunk")
    parser.add_argument("--copiers", type=int, default=24, help="processors that only put")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.processors = 0
    raise SystemExit(ark.launch(args.ranks, on_a_rank, args))


if __name__ == "__main__":
    main()
