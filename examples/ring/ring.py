"""Computes the mean of all ranks' vectors by an all-reduce around a ring, with custom ops.

The device code of the ops is in ring.h. Their tasks put a tile to the next rank, signal that rank,
and wait for the previous rank.

    python -m examples.ring.ring --ranks 3
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

import ark

TEXT = Path(__file__).with_name("ring.h")
TILE = {"m": 1024}

scale_and_put = ark.custom_op(
    "scale_and_put", TEXT, "x[m] -> there[m]", TILE, constants={"by": float}
)
add_and_forward = ark.custom_op(
    "add_and_forward", TEXT, "got[m], total[m] -> total[m], there[m]", TILE
)
add = ark.custom_op("add", TEXT, "got[m], total[m] -> total[m]", TILE)


def mean(x: ark.Tensor, rank: int, world: int) -> ark.Tensor:
    """The mean of x, one dimension of floats, over all ranks. There are two ranks or more.

    Each tile goes around the ring independently of other tiles: a step of a tile waits only for the
    same tile of the previous rank.
    """
    to, before = ark.comm.channel((rank + 1) % world), ark.comm.channel((rank - 1) % world)
    inboxes = [ark.comm.symmetric(x.shape(), x.dtype()) for _ in range(world - 1)]
    scale_and_put(x, by=1 / world, there=to.there(inboxes[0]), signals=to)
    total = ark.mul(x, 1 / world)
    for inbox, following in itertools.pairwise(inboxes):
        there = to.there(following)
        total, _ = add_and_forward(inbox, total, there=there, waits=before, signals=to)
    return add(inboxes[-1], total, waits=before)


def work(backend: str, elements: int, iterations: int) -> None:
    """The process of a rank: compares the result with NumPy."""
    ark.init(backend=backend)
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    x = ark.tensor([elements])
    averaged = mean(x, rank, world)
    given = [np.random.default_rng(r).standard_normal(elements) for r in range(world)]
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(given[rank].astype(np.float32))
        runtime.barrier()
        runtime.run(iterations)
        np.testing.assert_allclose(averaged.to_numpy(), np.mean(given, 0), rtol=1e-5, atol=1e-6)
        runtime.barrier()
    if rank == 0:
        print(f"the mean of {world} ranks' {elements} numbers is NumPy's")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--ranks", type=int, default=3, help="two or more")
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=3)
    args = parser.parse_args()
    raise SystemExit(ark.launch(args.ranks, work, args.backend, args.elements, args.iterations))


if __name__ == "__main__":
    main()
