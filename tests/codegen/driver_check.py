"""Makes every call of ark_cuda's device object to a stand-in for the driver. It is run as a
program, once for each version of cuda-bindings: `python driver_check.py` prints that version.

`python driver_check.py map HANDLE` is the second process, which maps memory; `run` closes an
executor while a kernel runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from typing import Any

import cuda.bindings
import numpy as np
from ark_cuda import backend, driver

from ark.backend.devices import Binary, Grid
from ark.backend.protocol import Source, Target
from ark.errors import SystemError

NUMBERS = np.arange(64, dtype=np.uint8)


def map_it(handle: str) -> None:
    device = backend.open(0)
    memory = device.map_peer(bytes.fromhex(handle))
    assert (device.read(memory.address, 64) == NUMBERS).all()
    device.write(memory.address, NUMBERS[::-1].copy())
    device.free(memory)
    device.close()


def everything() -> None:
    device = backend.open(0)
    assert device.machine.processors == 4 and device.arch == "sm_90a", device.machine
    assert device.free_bytes() == 1 << 29
    shared, plain, host = (device.alloc(64, kind) for kind in ("symmetric", "device", "host"))
    device.write(shared.address, NUMBERS)
    handle = device.export(shared)
    assert device.map_peer(handle).address == shared.address
    done = subprocess.run([sys.executable, __file__, "map", handle.hex()], timeout=60)
    assert done.returncode == 0
    assert (device.read(shared.address, 64) == NUMBERS[::-1]).all()
    device.zero(shared.address, 64)
    assert not device.read(shared.address, 64).any()
    assert host.host is not None
    for _ in range(3):
        program = device.load(Binary(b"none", ".cubin"))
        launch = device.launch(program, bytes(96), Grid(4, 32, 1024))
        assert launch.wait(10) and launch.done() and launch.elapsed_ms() == 1.0
        device.unload(program)
    kept = device.load(Binary(b"none", ".cubin"))
    launches_that_follow_each_other(device, kept)
    launches_behind_copies(device, kept, plain.address)
    for memory in (shared, plain, host):
        device.free(memory)
    assert kept is not None
    device.close()


def launched() -> list[int]:
    """The arguments that the stand-in received: function, grid, blocks, shared bytes, stream,
    parameters, event, and the event's stream.
    """
    words = (ctypes.c_uint64 * 64)()
    return list(words[: ctypes.CDLL("libcuda.so.1").stand_in_launched(words)])


def launches_behind_copies(device: Any, program: Any, address: int) -> None:
    """Copies and clears are passed to the driver with the next launch and not before, in their
    order. With ark's launch function compiled, and without a compiler, the driver gets the same
    calls.
    """
    device.write(address, NUMBERS)
    for compiled in (True, False):
        if not compiled:
            assert device._ordered._quick is not None
            device._ordered._quick = None
        data = NUMBERS[:8] + 1
        device.enqueue_zero(address + 4, 16)
        device.enqueue_write(address + 8, data)
        device.enqueue_write(address, data[:0])
        data[:] = 0
        assert (device.read(address, 64) == NUMBERS).all()
        launch = device.launch(program, bytes(96), Grid(4, 32, 1024))
        wanted = NUMBERS.copy()
        wanted[4:20], wanted[8:16] = 0, NUMBERS[:8] + 1
        assert (device.read(address, 64) == wanted).all()
        function, *grid, stream, _, end, its = launched()
        assert (function, grid) == (int(program.function), [4, 1, 1, 32, 1, 1, 1024])
        assert stream == its == int(device._stream) and end == int(launch._end)
        device.write(address, NUMBERS)
    try:
        device._ordered._stream = driver.cu.CUstream(0x66)
        device._ordered._quick = device._ordered._queue()
        device.launch(program, bytes(96), Grid(4, 32, 1024))
    except SystemError as error:
        assert "launching the loop kernel" in str(error), error
    else:
        raise AssertionError("the launch failed, but no SystemError was raised")


def launches_that_follow_each_other(device: Any, program: Any) -> None:
    """The Python bindings launch if the stream is new or another context is current; otherwise the
    compiled function does. The driver gets the same calls both ways. This is tested with and
    without a compiler.
    """
    params = np.zeros(12, np.uint64)
    for compiled in (True, False):
        relaunch = device.repeated_launch(program, params, Grid(4, 32, 1024))
        assert relaunch._quick is not None
        if not compiled:
            relaunch._quick = None
        slowly: list[int] = []
        bindings = relaunch._launch
        relaunch._launch = lambda s, f=bindings, seen=slowly: seen.append(s) or f(s)
        given = [int(program.function), 4, 1, 1, 32, 1, 1, 1024]
        behind = [params.ctypes.data, int(relaunch._end)]
        for current, stream, quickly in (
            (False, 0, False),
            (False, 0, False),
            (True, 0, True),
            (True, 1 << 40, False),
            (True, 1 << 40, True),
        ):
            slowly.clear()
            with driver.current(device.context) if current else contextlib.nullcontext():
                relaunch(stream)
            assert launched() == [*given, stream, *behind, stream]
            assert slowly == ([] if quickly and compiled else [stream])
        assert relaunch.done() and relaunch.wait(1)
        with driver.current(device.context):
            relaunch._stream = 0x66  # as if that call had worked before
            relaunch._queue = driver.cu.CUstream(0x66)
            try:
                relaunch(0x66)
            except SystemError as error:
                assert "launching the loop kernel" in str(error), error
            else:
                raise AssertionError("the launch failed, but no SystemError was raised")


class NoCompiler:
    """A compiler that returns a placeholder as the kernel's code, because the stand-in runs nothing
    and NVRTC's wrapper needs more of the driver than the stand-in has.
    """

    def key(self, target: Target) -> str:
        return "stand-in"

    def compile(self, source: Source, target: Target) -> Binary:
        return Binary(b"none", ".cubin")


def leave_one_running() -> None:
    """Makes the calls that ark.runtime makes while a kernel runs, during which nothing may be
    freed.
    """
    from ark.backend import registry
    from ark.ir.dtype import by_name
    from ark.models.build import Shape
    from ark.models.plans import plans
    from ark.runtime import run
    from ark.runtime.executor import Executor
    from tests.unit.plan.shapes import CONFIG

    run.STOP_S = 0.2
    chosen = registry.get("cuda")
    type(chosen).compiler = lambda self: NoCompiler()  # type: ignore[assignment, method-assign]
    type(chosen).toolchain = lambda self, arch: None  # type: ignore[attr-defined]
    device = backend.open(0)
    plan = plans(Shape(CONFIG, by_name("fp32"), 64, 0), device.machine)[0]
    try:
        with Executor(plan, chosen, device) as executor:
            executor.start(1000)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("closed", executor.close())
    device.close()


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "everything"
    if mode == "map":
        map_it(sys.argv[2])
    elif mode == "run":
        leave_one_running()
    else:
        everything()
        print(cuda.bindings.__version__)
