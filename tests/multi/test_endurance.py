"""Long runs of collectives, and ranks killed at any moment: nothing leaks, and the remaining ranks
end with the reason. `nox` does a part; ARK_ENDURANCE=1 does 100,000 collectives and 50
kills.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG = os.environ.get("ARK_ENDURANCE") == "1"
COLLECTIVES = 100_000 if LONG else 1_500
KILLS = 50 if LONG else 1
COUNTING = """
import os, sys, time
import numpy as np
import ark
ark.init(backend="cpu")
rank = ark.Model.get_rank()
x, y = np.ones(256, np.float32), np.empty(256, np.float32)
def held():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), *(
        len(os.listdir("/proc/self/" + kind)) for kind in ("fd", "task")
    )
for _ in range(300):
    ark.distributed.all_reduce(x, "sum", y)
before = held()
for _ in range(COLLECTIVES):
    ark.distributed.all_reduce(x, "sum", y)
assert (y == 2).all()
end = time.monotonic() + 20
while held()[2] > before[2] and time.monotonic() < end:
    time.sleep(0.01)  # a thread that has ended may be listed a moment longer
print(*before, *held())
""".replace("COLLECTIVES", str(COLLECTIVES))
ENDLESS = """
import sys, time
import numpy as np
import ark
ark.init(backend="cpu")
rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
calls = [
    lambda n: ark.distributed.all_reduce(np.ones(n, np.float32)),
    lambda n: ark.distributed.all_reduce(np.ones(n, np.int64), "max"),
    lambda n: ark.distributed.all_gather(np.ones(n, np.float16)),
    lambda n: ark.distributed.reduce_scatter(np.ones(n * world, np.float32)),
    lambda n: ark.distributed.all_to_all(np.ones(n * world, np.int32)),
    lambda n: ark.distributed.broadcast(np.ones(n, np.float32), 1),
]
ark.distributed.barrier()  # who dies before he has joined is waited for as long as joining may take
print("running", flush=True)
for number in range(10**9):  # a new size now and then: planning and loading are ended too
    calls[number % 6](1 + number // 60)
"""


def start(code: str, ranks: int) -> list[subprocess.Popen[str]]:
    port = str(20000 + random.SystemRandom().randrange(20000))
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["ARK_JOB_SECRET"] = str(random.SystemRandom().random())
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_many_collectives_leave_nothing_behind() -> None:
    """After many collectives a rank has as much memory and as many open files and threads as
    before, within a small tolerance.
    """
    for process in (started := start(COUNTING, 2)):
        out, err = process.communicate(timeout=3000)
        assert process.returncode == 0, err
        before, files, threads, after, files_now, threads_now = map(int, out.split())
        assert files_now <= files and threads_now <= threads
        assert after - before < 4 << 20, f"{after - before} bytes after {COLLECTIVES} collectives"
    assert len(started) == 2


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("number", range(KILLS))
def test_kill_at_any_moment_ends_the_rest(number: int) -> None:
    """SIGKILL of a random rank of three at a random time: the others end and name it."""
    rng = random.Random(f"kill {number}")
    victim, after = rng.randrange(3), rng.uniform(0.0, 3.0)
    started = start(ENDLESS, 3)
    assert started[victim].stdout is not None
    assert started[victim].stdout.readline() == "running\n", started[victim].communicate()
    time.sleep(after)
    os.kill(started[victim].pid, signal.SIGKILL)
    begin = time.monotonic()
    for rank, process in enumerate(started):
        _, outputs = process.communicate(timeout=60)
        if rank != victim:
            assert process.returncode not in (0, None)
            assert re.search(rf"\brank {victim}\b", outputs), outputs
    assert time.monotonic() - begin < 30.0
