"""Cases and helpers of tests/multi/test_hosts.py, which other tests use too."""

from __future__ import annotations

import subprocess
from functools import cache

import ark
from ark.backend import native
from ark.runtime.proxy import has_ucx
from tests.cases import channels
from tests.multi.hosts import Hosts, why_not

WORK = """
import json, sys
import numpy as np
import ark
ark.init(backend="cpu")
ark.distributed.group(timeout_s=120.0)  # no call hangs: on a busy machine ranks wait for processors
rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
right = 0
for n in (1, 3, 4099, 200_000):
    for dtype in (np.float32, np.float16, np.int64):
        shares = [(np.arange(n) % 11 + r).astype(dtype) for r in range(world)]
        mine = shares[rank]
        right += bool((ark.distributed.all_reduce(mine) == sum(shares)).all())
        right += bool((ark.distributed.all_reduce(mine, "max") == shares[-1]).all())
        right += bool((ark.distributed.all_gather(mine) == np.concatenate(shares)).all())
        right += bool((ark.distributed.broadcast(mine, world - 1) == shares[-1]).all())
    parts = [np.arange(world * n) + 1000 * r for r in range(world)]
    swapped = np.concatenate([p[rank * n : (rank + 1) * n] for p in parts])
    right += bool((ark.distributed.all_to_all(parts[rank]) == swapped).all())
    summed = sum(parts)[rank * n : (rank + 1) * n]
    right += bool((ark.distributed.reduce_scatter(parts[rank]) == summed).all())
    if rank == 0:
        ark.distributed.send(mine, world - 1)
    elif rank == world - 1:
        right += bool((ark.distributed.recv(np.empty_like(mine), 0) == shares[0]).all())
ark.distributed.barrier()
print(right)
"""
ENDLESS = """
import numpy as np
import ark
ark.init(backend="cpu")
x = np.ones(5000, np.float32)
ark.distributed.all_reduce(x)
print("running", flush=True)
while True:
    ark.distributed.all_reduce(x)
"""


@cache
def reason() -> str:
    command = native.find_compiler()
    if command is None or not has_ucx(command):
        return "needs UCX"
    return why_not()


def start(hosts: Hosts, code: str, ranks: int = 2, **more: str) -> list[subprocess.Popen[str]]:
    """Starts the ranks; the first half runs on the first host, the second half on the second."""
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": "23456",
        "ARK_JOB_SECRET": "a secret of this test",
        "ARK_LISTEN_ADDR": hosts.addresses[0],
    }
    return [
        hosts.start(
            rank * 2 // ranks,
            ["-c", code],
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % max(1, ranks // 2)), **more},
        )
        for rank in range(ranks)
    ]


def sums(rank: int) -> None:
    """Adds up an all-reduce less the rank's own input. Both ranks have the same input, so the
    difference must equal that input.
    """
    x = channels.counting()
    channels.add_up(ark.sub(ark.all_reduce(x, rank, 2, algorithm="ring"), x))
