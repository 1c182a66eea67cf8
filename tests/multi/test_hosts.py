"""Ranks on two hosts: collectives and channels over UCX on TCP, between network namespaces, also
with killed peers, a broken link and foreign processes. tests/multi/test_late_links.py covers late
links.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import ark
from ark.backend import native
from ark.backend.codegen import layout
from ark.backend.codegen.layout import ERROR_KINDS
from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import int32
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.faults import explain
from ark.runtime.hosts import NAME, here, numbered
from ark.runtime.proxy import has_ucx
from tests.cases import channels
from tests.cases.collectives import CPU_2, devices
from tests.cases.hosts import ENDLESS, WORK, reason, start, sums
from tests.multi.hosts import Hosts, two_hosts
from tests.ranks import run_ranks
from tests.slow import slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason():
        pytest.skip(reason())
    with two_hosts() as result:
        yield result


@slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_between_hosts(hosts: Hosts, ranks: int) -> None:
    """Four ranks, two on each host. The ranks of a host share memory and reach the other host by
    TCP.
    """
    started = start(hosts, WORK, ranks)
    outputs = [p.communicate(timeout=300) for p in started]
    assert [p.returncode for p in started] == [0] * ranks, outputs
    assert [int(out) for out, _ in outputs] == [56] * (ranks - 1) + [60]


def rank_process(started: subprocess.Popen[str]) -> int:
    """Returns the id of the process that `ip netns exec` becomes."""
    return started.pid


@slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_others_who_name_it(hosts: Hosts, victim: int) -> None:
    started = start(hosts, ENDLESS)
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate(timeout=60)
    os.kill(rank_process(started[victim]), signal.SIGKILL)
    begin = time.monotonic()
    _, outputs = started[1 - victim].communicate(timeout=60)
    started[victim].communicate(timeout=60)
    assert time.monotonic() - begin < 30.0
    assert started[1 - victim].returncode not in (0, None)
    assert f"rank {victim}" in outputs, outputs


@slow
def test_single_put_takes_one_message_each_way(hosts: Hosts) -> None:
    """A put that is sent alone takes one message to the peer and one back, counted in TCP segments
    with acknowledgements: there is no separate flush.
    """
    from bench.ucx import ONES, WARM, both_ends

    with both_ends(hosts, 1024) as (ask, segments):
        ask("one")
        before = segments()
        ask("one")
        assert (segments() - before) / (ONES + WARM) < 3.0


@slow
def test_cable_that_is_pulled_ends_both(hosts: Hosts) -> None:
    started = start(hosts, ENDLESS)
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate(timeout=60)
    hosts.cut()
    begin = time.monotonic()
    outputs = [p.communicate(timeout=90)[1] for p in started]
    assert time.monotonic() - begin < 60.0
    assert all(p.returncode not in (0, None) for p in started)
    assert "rank 1" in outputs[0] and "rank 0" in outputs[1], outputs


@slow
def test_stranger_is_turned_away(hosts: Hosts) -> None:
    """A process on the other host without the job's secret is rejected."""
    place = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "23456", "ARK_JOIN_TIMEOUT": "8"}
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "ARK_JOB_SECRET": "another"}
    stranger = hosts.start(1, ["-c", WORK], {**place, **job})
    own = start(hosts, WORK)
    outputs = [p.communicate(timeout=300) for p in own]
    assert [p.returncode for p in own] == [0, 0], outputs
    out, _ = stranger.communicate(timeout=60)
    assert stranger.returncode != 0 and not out


# Tests below run plans for several hosts in threads of this process, which communicate through UCX
# as if they were on two hosts.


def plans_of(body: channels.Body, hosts: list[int], machines: Sequence[Machine] = ()) -> list[Plan]:
    results = []
    for rank in range(len(hosts)):
        model = Model(rank, len(hosts))
        with use_model(model):
            body(rank)
        results.append(
            make_plan(model.graph, machines[rank] if machines else CPU_2, {"hosts": hosts})
        )
    verify(results)
    return results


@pytest.mark.parametrize(
    "body",
    [
        channels.put_then_signal,
        channels.signal_with_put,
        channels.get,
        channels.twice,
        channels.messages,
    ],
    ids=lambda b: b.__name__,
)
def test_channels_between_hosts(monkeypatch: pytest.MonkeyPatch, body: channels.Body) -> None:
    command = native.find_compiler()
    if command is None or not has_ucx(command):
        pytest.skip("needs UCX")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    plans = plans_of(body, [0, 1])
    assert "transfer" in {op.kind for p in plans for op in p.ops}
    with devices("cpu", 2) as (opened, _):
        got = channels.run(plans, "cpu", opened)
    np.testing.assert_array_equal(got, channels.wanted(len(got)))


@pytest.mark.parametrize("kinds", [("cpu", "rocm"), ("rocm", "cpu")], ids="-".join)
def test_cpu_and_an_emulated_device(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, str]
) -> None:
    """One host's ranks are CPUs, the other's are emulated AMD devices. Each plans for its own
    device, and the plans are verified together. The emulated device has all checks.
    """
    command = native.find_compiler()
    if command is None or not has_ucx(command):
        pytest.skip("needs UCX")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with devices("rocm", 1) as (amd, machine), devices("cpu", 1) as (cpu, _):
        machines, opened = {"cpu": CPU_2, "rocm": machine}, {"cpu": cpu[0], "rocm": amd[0]}
        for body in (channels.put_then_signal, channels.get, channels.messages, sums):
            plans = plans_of(body, [0, 1], [machines[kind] for kind in kinds])
            assert plans[0].machine != plans[1].machine
            got = channels.run(plans, kinds, [opened[kind] for kind in kinds], 3)
            np.testing.assert_array_equal(got, channels.wanted(len(got), 3), body.__name__)


OF_TWO_KINDS = """
import os
from contextlib import nullcontext
import numpy as np
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor
from tests.cases import channels
from tests.cases.collectives import CPU_2
from tests.cases.hosts import sums

rank = int(os.environ["RANK"])
with Bootstrap.from_environment() as job:
    if rank:
        from ark_rocm_emulator import emulated
    with emulated("gfx942", 1, checks=1, compute_units=3) if rank else nullcontext():
        backend = registry.get("rocm" if rank else "cpu")
        device = backend.open(0)
        for body in (channels.put_then_signal, channels.messages, sums):
            model = Model(rank, 2)
            with use_model(model):
                body(rank)
            plan = make_plan(model.graph, device.machine if rank else CPU_2, {"hosts": [0, 1]})
            with Executor(plan, backend, device, ranks=job, budget_s=60.0) as executor:
                if any(t.name == "x" for t in plan.tensors):
                    x = executor.find("x")
                    executor.write("x", np.arange(x.shape[0], dtype=np.int32))
                executor.start(3).wait(120.0)
                if rank:
                    got = executor.read("total")
                    assert (got == channels.wanted(len(got), 3)).all(), body.__name__
                job.barrier()
        device.close()
print("right")
"""


@slow
def test_cpu_and_an_emulated_device_on_two_hosts(hosts: Hosts) -> None:
    """A CPU in one namespace and an emulated device in the other, as processes, give the right
    sums.
    """
    pytest.importorskip("ark_rocm_emulator")
    started = start(hosts, OF_TWO_KINDS)
    outputs = [p.communicate(timeout=300) for p in started]
    assert [out for out, _ in outputs] == ["right\n"] * 2, outputs


NOTHING_IN_COMMON = """
import os
from ark.backend import registry
from ark.errors import SystemError
from ark.runtime.proxy import Proxy

device = registry.get("cpu").open(0)
made = []
for transport in ("self", "tcp"):
    os.environ["UCX_TLS"] = transport
    proxy = Proxy(device, 0)
    made.append((proxy, proxy.network(device.alloc(4096, "symmetric"))))
try:
    made[1][0].connect(0, made[0][1])
except SystemError as error:
    print(error, flush=True)
for proxy, _ in made:
    proxy.close()
del proxy, made
print("closed")
"""


def test_hosts_that_have_no_transport_in_common() -> None:
    """If two hosts have no transport in common, the error says so, and the proxy can be closed."""
    command = native.find_compiler()
    if command is None or not has_ucx(command):
        pytest.skip("needs UCX")
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_IN_COMMON], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "rank 0 cannot be reached: connecting to a peer failed: Destination" in lines[0]
    assert "UCX_TLS" in lines[0] and lines[1] == "closed"


def test_unsupported_transfers_between_hosts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"reduce into .* on another host is not supported"):
        plans_of(channels.reduce, [0, 1])
    with pytest.raises(UnsupportedError, match=r"strided part"):
        plans_of(channels.parts, [0, 1])
    model = Model(0, 2)
    with use_model(model):
        channels.put_then_signal(0)
    with pytest.raises(InvalidUsageError, match="hosts has 3 numbers for 2 ranks"):
        make_plan(model.graph, CPU_2, {"hosts": [0, 1, 1]})

    def packets(rank: int) -> None:
        x = ark.tensor([8], int32)
        ark.all_reduce(x, rank, 2, algorithm="one_shot", engine="packet")

    with pytest.raises(UnsupportedError, match="'packet'; it has nic"):
        plans_of(packets, [0, 1])


def test_transfer_without_an_answer_names_the_rank() -> None:
    plan = plans_of(channels.put_then_signal, [0, 1])[0]
    listing = [
        (phase, processor, task)
        for phase, each in enumerate(plan.phases)
        for processor, tasks in enumerate(each.processors)
        for task in tasks
    ]
    place, task = next(
        (i, t) for i, (_, _, t) in enumerate(listing) if plan.ops[t.op].kind == "transfer"
    )
    host = np.zeros(1, layout.dtype("ArkHost"))
    (proxy,) = (number for number, kind in ERROR_KINDS.items() if kind == "proxy")
    for name, value in {"error": proxy, "error_task": place, "error_op": task.op}.items():
        host[name] = value
    tables = SimpleNamespace(listing=listing)
    done = [2**31] * len(plan.counters)
    message = explain(plan, tables, host[0], done, [], {})  # type: ignore[arg-type]
    assert "waited for the answer of rank 1 on another host" in message
    assert "a broken link between hosts" in message
    alone = dataclasses.replace(plan, meta={**plan.meta, "hosts": [0, 0]})
    assert "waited for a proxy longer" in explain(alone, tables, host[0], done, [], {})  # type: ignore[arg-type]


def test_plan_that_stores_to_another_host_is_refused() -> None:
    """A plan for ranks on one host, which stores to peers, is refused for ranks on two hosts."""
    results = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            channels.put_then_signal(rank)
        results.append(make_plan(model.graph, CPU_2))
    apart = [dataclasses.replace(p, meta={**p.meta, "hosts": [0, 1]}) for p in results]
    with pytest.raises(PlanError, match="only transfers reach there"):
        verify(apart)


def test_ranks_know_who_shares_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbered(run_ranks(2, lambda ranks: here())) == (0, 0)
    own = here()
    monkeypatch.setenv(NAME, "named")
    assert numbered(["other", here(), "other", own]) == (0, 1, 0, 2)
