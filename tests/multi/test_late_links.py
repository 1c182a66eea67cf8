"""Ranks on two hosts whose connection has a delay, loses frames, or is interrupted for a while or
for good. The kernel's own TCP resends what tests/multi/relay.py drops.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import cache

import pytest

from tests.cases import hosts as jobs
from tests.multi.hosts import Hosts, two_hosts, why_not
from tests.multi.relay import Cable
from tests.slow import slow

FAR = Cable(delay_ms=20.0, jitter_ms=2.0, lost=0.02, mbit=100.0, seed=7)
SMALL = """
import numpy as np
import ark
ark.init(backend="cpu")
rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
for n in (3, 4099):
    shares = [np.arange(n, dtype=np.float32) % 11 + r for r in range(world)]
    assert (ark.distributed.all_reduce(shares[rank]) == sum(shares)).all()
    assert (ark.distributed.all_gather(shares[rank]) == np.concatenate(shares)).all()
    if rank == 0:
        ark.distributed.send(shares[0], 1)
    elif rank == 1:
        assert (ark.distributed.recv(np.empty(n, np.float32), 0) == shares[0]).all()
ark.distributed.barrier()
print("right")
"""
COUNTING = """
import sys, threading
import numpy as np
import ark
ark.init(backend="cpu")
told = []
if ark.Model.get_rank() == 0:
    threading.Thread(target=lambda: told.append(sys.stdin.readline()), daemon=True).start()
count = 0
done = ark.distributed.all_reduce(np.zeros(2, np.int64))
print("running", flush=True)
while not done[1]:  # until rank 0 was told to stop
    count += 1
    done = ark.distributed.all_reduce(np.array([count, len(told)], np.int64))
    assert done[0] == 2 * count, (done, count)
print("stopped")
"""


@cache
def reason() -> str:
    return jobs.reason() or why_not(relayed=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason():
        pytest.skip(reason())
    with two_hosts(relayed=True) as result:
        yield result


def running(hosts: Hosts, code: str) -> list[subprocess.Popen[str]]:
    started = jobs.start(hosts, code)
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate(timeout=60)
    return started


def test_far_host_behind_a_link_that_loses_frames(hosts: Hosts) -> None:
    hosts.change(FAR)
    started = jobs.start(hosts, SMALL)
    outputs = [p.communicate(timeout=300) for p in started]
    assert [(p.returncode, out) for p, (out, _) in zip(started, outputs, strict=True)] == [
        (0, "right\n")
    ] * 2, outputs
    assert hosts.change(FAR)[1] > 0  # some were lost


@slow
def test_every_collective_over_a_late_link(hosts: Hosts) -> None:
    hosts.change(FAR)
    started = jobs.start(hosts, jobs.WORK)
    outputs = [p.communicate(timeout=600) for p in started]
    assert [p.returncode for p in started] == [0, 0], outputs
    assert [int(out) for out, _ in outputs] == [56, 60]


@slow
def test_four_ranks_over_a_late_link(hosts: Hosts) -> None:
    hosts.change(FAR)
    started = jobs.start(hosts, SMALL, 4)
    outputs = [p.communicate(timeout=600) for p in started]
    assert [p.returncode for p in started] == [0] * 4, outputs


@slow
def test_link_that_comes_back_after_three_seconds(hosts: Hosts) -> None:
    started = running(hosts, COUNTING)
    before = hosts.change(Cable(lost=1.0))
    time.sleep(3.0)
    assert [p.poll() for p in started] == [None, None]
    after = hosts.change(Cable(delay_ms=1.0))
    assert after[0] - before[0] == after[1] - before[1] > 0  # all of them resent
    assert started[0].stdin is not None
    started[0].stdin.write("stop\n")
    started[0].stdin.flush()
    outputs = [p.communicate(timeout=120) for p in started]
    assert [(p.returncode, out) for p, (out, _) in zip(started, outputs, strict=True)] == [
        (0, "stopped\n")
    ] * 2, outputs


@slow
def test_link_that_is_dead_ends_both(hosts: Hosts) -> None:
    """If the link is cut during a collective, so that frames are lost without an error at either
    end, both ranks end with an error.
    """
    hosts.change(FAR)
    started = running(hosts, jobs.ENDLESS)
    hosts.change(Cable(lost=1.0))
    outputs = [p.communicate(timeout=120)[1] for p in started]
    assert all(p.returncode not in (0, None) for p in started)
    assert "rank 1" in outputs[0] and "rank 0" in outputs[1], outputs
