"""Threads that run a CPU's launches: each runs one launch at a time and is kept for a while. A
forked child does not inherit them. A launch may also run on the caller's thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from importlib import resources

import numpy as np
import pytest
from ark_cpu import workers
from ark_cpu.compiler import CpuCompiler
from ark_cpu.device import CpuDevice

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Grid
from ark.backend.protocol import Target


@pytest.fixture(autouse=True)
def none_idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_idle", [])
    yield


def run() -> int:
    """Runs a function on a worker. Returns the thread's id."""
    thread_ids: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended = threading.Event()
    workers.run(lambda: thread_ids.put(threading.get_native_id()), ended.set)
    assert ended.wait(10)
    return thread_ids.get(timeout=10)


def test_next_launch_has_the_same_thread() -> None:
    """A launch that follows another one at once runs on the same thread, because the thread is free
    when the end is reported.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    workers.run(lambda: None, lambda: free.put(len(workers._idle)))
    assert free.get(timeout=10) == 1
    assert len({run() for _ in range(100)}) == 1


def test_launches_at_one_time_have_threads_of_their_own() -> None:
    barrier, ended = threading.Barrier(2, timeout=10), queue.SimpleQueue[bool]()
    for _ in range(2):
        workers.run(lambda: barrier.wait(), lambda: ended.put(True))  # waits for the other one
    assert ended.get(timeout=10) and ended.get(timeout=10)
    assert not barrier.broken


def test_thread_with_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    number = run()
    end = time.monotonic() + 20
    while any(t.native_id == number for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert run() > 0  # on another thread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_threads_of_its_own() -> None:
    run()
    child = os.fork()
    if child == 0:
        os._exit(0 if run() > 0 else 1)
    end = time.monotonic() + 30
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.02)
    assert status == 0


# A kernel for two processors. The processor that runs on the caller's thread has no work; the other
# processor waits until the parameters change.
WAITING = """
#define ARK_LANES 1
#define ARK_WARPS 1
{prelude}
constexpr size_t ARK_SCRATCH_BYTES = 64;
struct ArkControl {{ ark_u32 abort; }};
struct ArkParams {{ ark_u32 leave; }};
static ArkControl control;
static ArkControl* ark_control(const ArkParams*) {{ return &control; }}
static void ark_run(const ArkParams* params, ark_u32 processor, char*) {{
  ark_u32 spins = 0u;
  while (processor != 0u && ark_load_host(&params->leave) == 0u) ark_pause(++spins);
}}
{entry}
"""


def test_caller_checks_for_signals_while_other_processors_wait() -> None:
    folder = resources.files("ark_cpu")
    parts = {name: folder.joinpath(f"{name}.h").read_text() for name in ("prelude", "entry")}
    source = Source(WAITING.format(**parts))
    device = CpuDevice(0)
    program = device.load(CpuCompiler().compile(source, Target(device.machine.arch, 1)))
    params = np.zeros(1, np.uint32)
    here = device.inline(program, params, Grid(2, 1, 0))
    looked: list[bool] = []

    def check() -> None:
        looked.append(here.done() or here.wait(None))  # does not wait for its own thread
        if len(looked) == 3:
            raise KeyError("seen enough")

    with pytest.raises(KeyError, match="seen enough"):
        here(check, lambda: params.fill(1))
    assert looked == [False] * 3 and here.done()
    here(check, lambda: None)  # the parameter is still set, so it ends by itself
    assert here.done()
    device.unload(program)
