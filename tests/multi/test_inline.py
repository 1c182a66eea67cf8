"""Collectives on CPU ranks run on the caller's thread: what happens if an interrupt or an error
arrives while it waits for a rank that is late.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.devices import InlineDevice
from ark.distributed import functions
from ark.distributed.calls import Call, Key
from ark.errors import GpuError, InvalidUsageError
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.runtime.executor import Executor
from ark.runtime.inline import InlineRuns
from tests.ranks import ThreadRanks, run_ranks

KEY = Key("all_reduce", "fp32", 4, 300_000, "sum")  # enough elements for two processors


def call_of(ranks: ThreadRanks) -> Call:
    device = registry.get("cpu").open(0)
    device.machine = device.machine.with_processors(4)
    return Call(KEY, ranks, ranks.rank, 2, registry.get("cpu"), device, 300.0)


def interrupted(elements: int) -> None:
    """Rank 0 gets SIGINT while it waits for rank 1 in a collective. Rank 1 calls the collective
    later and gets the error.
    """
    import os
    import signal

    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x = np.ones(elements, np.float32)
    assert (ark.distributed.all_reduce(x) == 2).all()
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ark.distributed.all_reduce(x)
        (call,) = functions.group()._calls[functions.group()._all_ranks].values()
        assert int(call.executor._host_words["error"][0]) == 0  # it did not end by the time limit
    else:
        time.sleep(0.6)
        with pytest.raises(ark.SystemError, match="did not end: rank 0 reports: KeyboardInterrupt"):
            ark.distributed.all_reduce(x)
    assert (ark.distributed.all_reduce(x) == 2).all()


def test_ctrl_c_while_a_peer_is_waited_for() -> None:
    assert ark.launch(2, interrupted, 3) == 0


def one_comes(ranks: ThreadRanks, ending: Any) -> tuple[int, str]:
    """Runs two collective calls, of which rank 1 joins only the first. Returns rank 0's number of
    processors and the error that ended its second call.
    """
    call = call_of(ranks)
    call.run()
    message = ""
    if ranks.rank == 0:
        waiting = threading.Timer(0.2, ending, (ranks, call))
        waiting.start()
        with pytest.raises(GpuError) as caught:
            call.run()
        message = str(caught.value)
        waiting.join()
    call.executor.ranks = None  # the ranks no longer synchronise
    ranks.barrier()
    call.close(collective=False)
    return call.executor.plan.processors, message


def test_failed_rank_while_it_is_waited_for() -> None:
    """If a rank fails while rank 0 waits for it, both processors of rank 0 end: the caller's thread
    and the other one.
    """

    def fails(ranks: ThreadRanks, call: Call) -> None:
        ranks.abort("rank 1 is gone")

    assert run_ranks(2, lambda ranks: one_comes(ranks, fails))[0] == (2, "rank 1 is gone")


def test_closing_ends_the_call_of_another_thread() -> None:
    def stops(ranks: ThreadRanks, call: Call) -> None:
        assert call.executor.latest is not None and call.executor.latest.running()
        assert call.executor.latest.stop(60.0)

    processors, message = run_ranks(2, lambda ranks: one_comes(ranks, stops))[0]
    assert processors == 2 and "the kernel ended after 1 of 2 iterations" in message


def test_launches_of_both_kinds_by_turns() -> None:
    """A launch on a thread of its own and a launch on the caller's thread alternate. Counters
    continue from one to the next.
    """

    def body(ranks: ThreadRanks) -> None:
        call = call_of(ranks)
        source, target = (m.host.view(np.float32) for m in (call.source, call.target))  # type: ignore[union-attr]
        for turn in range(6):
            source[:] = np.arange(KEY.elements) + turn + ranks.rank
            if turn % 3 == 1:
                call.executor.resume(1).wait()
            else:
                call.run()
            np.testing.assert_array_equal(target, 2.0 * np.arange(KEY.elements) + 2 * turn + 1)
        ranks.barrier()
        call.close(collective=True)

    run_ranks(2, body)


def test_lone_process_goes_on_after_an_interrupted_call() -> None:
    """A single process can continue after an interrupted call, because it resets its counters.
    Several ranks cannot, because their counters would differ.
    """
    machine = registry.machine("cpu-1")
    graph = Graph()
    x, y = (graph.tensor((4,), fp32, arena="state", name=name) for name in "xy")
    graph.add("add", [x, y], [y], {})
    cpu = registry.get("cpu")
    with Executor(make_plan(graph, machine), cpu, cpu.open(0)) as executor:
        runs = InlineRuns(executor)
        assert not runs.short()
        executor.write("x", np.ones(4, np.float32))
        runs()
        runs()
        assert runs.short()
        launch, runs._launch = runs._launch, _interrupted  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            runs()
        runs._launch = launch
        runs()
        assert executor.read("y").tolist() == [3.0] * 4
        assert executor.resumed == 1


def _interrupted(check: Any, leave: Any) -> None:
    leave()
    raise KeyboardInterrupt


def test_caller_may_have_begun_a_launch_that_still_runs() -> None:
    def body(ranks: ThreadRanks) -> None:
        call = call_of(ranks)
        call.run()
        ranks.barrier()
        if ranks.rank == 0:
            first = call.executor.resume(1)
            assert first.running()
            threading.Timer(0.2, ranks.barrier).start()  # rank 1 comes only then
        else:
            ranks.barrier()
        call.run()
        if ranks.rank == 1:
            call.run()
        assert call.executor.resumed == 3
        ranks.barrier()
        call.close(collective=True)

    run_ranks(2, body)


def test_devices_that_have_no_thread_of_a_callers() -> None:
    class Other:
        device = object()

    assert isinstance(registry.get("cpu").open(0), InlineDevice)
    with pytest.raises(InvalidUsageError, match="cannot run a launch on the caller's thread"):
        InlineRuns(Other())  # type: ignore[arg-type]
