"""The host's proxy, a thread that copies data between ranks on request of a kernel (engine `dma`).
Its copies arrive in order. It sleeps when idle, stops, and refuses memory outside of the plan. If
it cannot be built, only the engine `dma` fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from importlib import resources

import numpy as np
import pytest

import ark
from ark.backend import native, registry
from ark.backend.codegen import layout
from ark.errors import GpuError, SystemError
from ark.ir.dtype import int32
from ark.plan.verify import verify
from ark.runtime import proxy as proxies
from ark.runtime.executor import Executor
from ark.runtime.proxy import Proxy
from tests.cases import channels
from tests.cases.collectives import build, devices
from tests.cases.proxy import fetch, put_and_send
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import few

MANY = 3 * layout.FIFO_SLOTS // 2  # triggers: slots are used a second time


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_copies_of_the_proxy_arrive(name: str) -> None:
    with devices(name, 2) as (opened, machine):
        for body in (put_and_send, fetch):
            plans = build(2, body, machine)
            verify(plans)
            assert "transfer" in {op.kind for p in plans for op in p.ops}
            iterations = 3 if name == "rocm" else 20
            got = channels.run(plans, name, opened, iterations)
            np.testing.assert_array_equal(got, channels.wanted(channels.INBOX_ELEMENTS, iterations))


def test_plan_without_a_wait_for_the_proxys_copy_is_refused() -> None:
    """A plan with a copy by the proxy is refused if the reader does not wait for the copy."""

    def body(rank: int) -> None:
        x, inbox = channels.counting(), ark.comm.symmetric([channels.INBOX_ELEMENTS], int32)
        channel = ark.comm.channel(1 - rank, engine="dma")
        if rank == 0:
            channel.put(x, inbox)
            channel.signal(relaxed=True)
            channels.counting(8)
        else:
            channels.add_up(*channel.wait(inbox))

    with pytest.raises(ark.errors.PlanError, match="nothing makes the second wait"):
        verify(build(2, body))


@pytest.mark.parametrize("algorithm", few(1, ["ring", "one_shot", "double_binary_tree"]))
def test_collectives_by_the_proxy(algorithm: str) -> None:
    world, count = 4, 4099

    def body(rank: int) -> None:
        x = channels.counting(count)
        total = ark.all_reduce(x, rank, world, algorithm=algorithm, engine="dma")
        ark.copy(total, output=ark.tensor([count], int32, name="total"))

    with devices("cpu", world) as (opened, machine):
        plans = build(world, body, machine)
        verify(plans)
        backend = registry.get("cpu")
        xs = np.random.default_rng(1).integers(-99, 99, (world, count)).astype(np.int32)

        def work(ranks: ThreadRanks) -> np.ndarray:
            plan = plans[ranks.rank]
            with Executor(plan, backend, opened[ranks.rank], ranks=ranks, budget_s=30.0) as ready:
                ready.write("x", xs[ranks.rank])
                ready.start(2).wait(60.0)
                actual = ready.read("total")
                ranks.barrier()
                return actual

        for actual in run_ranks(world, work):
            np.testing.assert_array_equal(actual, (xs + 2).sum(0))


def test_each_vendor_copies_by_its_own_driver() -> None:
    """The proxies of both vendors are loaded in one process. If their modules had the same name,
    one would be used for both vendors.
    """
    rocm = pytest.importorskip("ark_rocm")
    header = resources.files(rocm).joinpath("copies.h").read_text()
    own = registry.get("cpu").open(0)
    assert proxies._module(header).Proxy is not proxies._module(own.copies().header).Proxy
    own.close()


@pytest.fixture
def alone() -> Iterator[tuple[Proxy, np.ndarray, np.ndarray]]:
    """Returns a proxy without a kernel (the test writes the triggers), the memory that it may copy,
    and the word by which the proxy would tell a kernel to end.
    """
    device = registry.get("cpu").open(0)
    abort = device.alloc(4, "host")
    memory = device.alloc(1 << 16, "device")
    result = Proxy(device, abort.address)
    result.allow(memory.address, memory.nbytes)
    result.restart()
    assert memory.host is not None and abort.host is not None
    yield result, memory.host, abort.host.view(np.uint32)
    result.close()
    device.close()


def push(proxy: Proxy, at: int, source: int, target: int, size: int) -> None:
    assert proxy.fifo.host is not None
    words = proxy.fifo.host.view(layout.dtype("ArkFifo"))["words"][0].reshape(-1, 4)
    slot = words[at % layout.FIFO_SLOTS]
    high = source >> 32 | (target >> 32) << 16
    slot[:3] = source & 0xFFFFFFFF, target & 0xFFFFFFFF, high
    slot[3] = size | (at // layout.FIFO_SLOTS & 1 ^ 1) << 31


def served(proxy: Proxy, count: int) -> bool:
    assert proxy.fifo.host is not None
    done = proxy.fifo.host.view(np.uint32)
    end = time.monotonic() + 20.0
    while int(done[0]) < count and time.monotonic() < end and not proxy.error():
        time.sleep(0)
    return int(done[0]) == count == proxy.served()


def test_slots_are_used_again_without_being_cleared(alone: tuple) -> None:
    proxy, memory, _ = alone
    memory[:4] = 7
    base = memory.ctypes.data
    for at in range(MANY):
        push(proxy, at, base + at, base + at + 4, 4)  # each copies the result of the previous one
        assert served(proxy, at + 1)
    assert (memory[: MANY + 4] == 7).all() and not memory[MANY + 7 : MANY + 100].any()


def test_idle_proxy_sleeps_and_wakes_at_once(alone: tuple) -> None:
    proxy, memory, _ = alone
    end = time.monotonic() + 60.0
    while proxy.rests() < 100 and time.monotonic() < end:
        time.sleep(0.01)  # it polls, and sleeps longer the longer it is idle
    assert proxy.rests() >= 100
    memory[:8] = 9
    push(proxy, 0, memory.ctypes.data, memory.ctypes.data + 8, 8)
    assert served(proxy, 1)
    assert (memory[8:16] == 9).all()


@contextlib.contextmanager
def joined(nbytes: int) -> Iterator[tuple[list[Proxy], np.ndarray, np.ndarray, int]]:
    """Returns two proxies joined by UCX, the first one running: the proxies, the memory of the
    first, the memory of the second, and the address by which triggers name the latter.
    """
    command = native.find_compiler()
    if command is None or not proxies.has_ucx(command):
        pytest.skip("needs UCX")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        device = registry.get("cpu").open(0)
        memories = [device.alloc(nbytes, "symmetric") for _ in range(2)]
        result = [Proxy(device, 0) for _ in range(2)]
        ways = [proxy.network(memory) for proxy, memory in zip(result, memories, strict=True)]
    source, target = (memory.host.view(np.uint32) for memory in memories if memory.host is not None)
    source[:] = np.arange(nbytes // 4) + 1
    there = result[0].connect(1, ways[1])
    result[1].connect(0, ways[0])
    result[0].allow(memories[0].address, memories[0].nbytes)
    result[0].restart()
    yield result, source, target, there.address
    for proxy in result:
        proxy.close()
    device.close()


@pytest.mark.parametrize("size", [4, 40_000])
def test_served_requests_have_arrived(size: int) -> None:
    """Puts over UCX that the proxy reports as complete have arrived, with as many puts as the FIFO
    holds. The proxy flushes once for several small puts.
    """
    words = size // 4
    count = min(layout.FIFO_SLOTS, (8 << 20) // size)
    with joined(count * size) as (result, source, target, there):
        result[1].restart()
        for at in range(count):
            push(result[0], at, source.ctypes.data + at * size, there + at * size, size)
        result[0].wake()
        assert result[0].fifo.host is not None
        done = result[0].fifo.host.view(np.uint32)
        end, seen, right = time.monotonic() + 60.0, 0, True
        while right and seen < count and time.monotonic() < end:
            seen = int(done[0])
            right = bool((target[: seen * words] == source[: seen * words]).all())
        assert right and seen == count and not result[0].error()


@pytest.mark.parametrize("answered", ["late", "never"])
def test_puts_one_by_one_to_a_peer_that_is_late(answered: str) -> None:
    """Makes 600 puts, one after another, to a peer that answers late. With a flush for each put,
    UCX would end the process at the 255th pending flush.
    """
    count = 600
    with joined(4 * count) as (result, source, target, there):
        for at in range(count):
            push(result[0], at, source.ctypes.data + 4 * at, there + 4 * at, 4)
            result[0].wake()
            time.sleep(2e-4)  # so that it is taken alone
        assert result[0].served() == 0
        if answered == "late":
            result[1].restart()
            assert served(result[0], count)
            np.testing.assert_array_equal(target, source)


def test_put_alone_after_many() -> None:
    """Makes 40 puts without a wait, then 40 more with a wait for completion after each; all
    arrive.
    """
    many, count = 40, 80
    with joined(4 * count) as (result, source, target, there):
        result[1].restart()
        for at in range(count):
            push(result[0], at, source.ctypes.data + 4 * at, there + 4 * at, 4)
            if at >= many:
                assert served(result[0], at + 1)
        np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("offset", [-1, (1 << 16) - 3, 1 << 40])
def test_unregistered_memory_is_refused_and_ends_the_kernel(alone: tuple, offset: int) -> None:
    proxy, memory, abort = alone
    push(proxy, 0, memory.ctypes.data + offset, memory.ctypes.data, 4)
    assert not served(proxy, 1)
    assert "which is no memory of the plan" in proxy.error()
    end = time.monotonic() + 20.0
    while abort[0] == 0 and time.monotonic() < end:
        time.sleep(0)  # the word follows the text, so that whoever sees it finds the text
    assert abort[0] == 1


def test_error_in_the_proxy_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the proxy refuses a copy, because the memory to copy was not registered with it, all ranks
    get an error message.
    """
    monkeypatch.setattr(Proxy, "allow", lambda *_: None)
    plans = build(2, put_and_send)
    verify(plans)
    begin = time.monotonic()
    with (
        devices("cpu", 2) as (opened, _),
        pytest.raises(GpuError, match=r"proxy stopped.*no memory"),
    ):
        channels.run(plans, "cpu", opened)
    assert time.monotonic() - begin < 25.0


@pytest.mark.parametrize("missing", ["pybind11", "compiler"])
def test_without_a_proxy_only_its_engines_are_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    proxies._built.cache_clear()
    if missing == "pybind11":
        monkeypatch.setattr(proxies.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(native, "find_compiler", lambda: None)
    plans = build(2, put_and_send)
    with devices("cpu", 2) as (opened, _):
        with pytest.raises(SystemError, match="the proxy needs"):
            channels.run(plans, "cpu", opened, 1)
        others = build(2, channels.put_then_signal)
        got = channels.run(others, "cpu", opened, 2)
    np.testing.assert_array_equal(got, channels.wanted(channels.INBOX_ELEMENTS, 2))
