"""Emulated devices are created and removed within one process, also after a failed run. Their clock
counts the emulator's own steps.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest

pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

from ark_rocm_emulator.engine import core

from tests.kept import compile_hip

# A script that uses emulated devices once for each argument; an argument with ! makes that use
# fail. Objects of a failed run are kept until its devices have been removed.
SCRIPT = """
import gc
import sys

import numpy as np
from ark_rocm_emulator import emulated, set_option

import ark

held = []
for word in sys.argv[1:]:
    with emulated(word.strip("!")):
        ark.init(backend="rocm")
        a, b = ark.tensor((64, 64), ark.fp32), ark.tensor((64, 64), ark.fp32)
        c = ark.matmul(a, b)
        runtime = ark.Runtime()
        held.append(runtime)
        runtime.launch(loop_mode=False)
        for tensor in (a, b):
            tensor.from_numpy(np.ones((64, 64), np.float32))
        if "!" in word:
            set_option("step_budget", 500)
            try:
                runtime.run(1)
            except ark.GpuError as error:
                held.append(error)
                print("failed")
        else:
            runtime.run(1)
            print(c.to_numpy().max())
held.clear()
gc.collect()
ark.init()
print("end")
"""


@pytest.mark.parametrize(
    "words, expected",
    [
        (("gfx942", "gfx942"), ["64.0", "64.0", "end"]),
        (("gfx942!", "gfx1100"), ["failed", "64.0", "end"]),
    ],
)
def test_devices_may_come_twice(words: tuple[str, ...], expected: list[str]) -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("ARK_ROCM")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, env=plain
    )
    assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]


EVENTS = """
from ark_rocm_emulator import emulated
from hip import hip

earlier = []
for arch in ("gfx942", "gfx1100"):
    with emulated(arch):
        events = [hip.hipEventCreate()[1] for _ in range(64)]
        assert not {int(e) for e in events} & {int(e) for e in earlier}
        for event in earlier:
            assert hip.hipEventDestroy(event)[0] == hip.hipError_t.hipErrorInvalidHandle
        for event in events:
            assert int(hip.hipEventRecord(event, None)[0]) == 0
            assert int(hip.hipEventSynchronize(event)[0]) == 0
        assert int(hip.hipEventElapsedTime(events[0], events[-1])[0]) == 0
        earlier = events
"""


def test_events_of_removed_devices_stay_unknown() -> None:
    """A launch of removed devices that Python collects late destroys no event of later devices."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("ARK_ROCM")}
    done = subprocess.run([sys.executable, "-c", EVENTS], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr[-2000:]


CLOCK = """
extern "C" __global__ void ticks(unsigned long long* out, unsigned n) {
  unsigned long long begin = __builtin_amdgcn_s_memrealtime();
  unsigned x = threadIdx.x;
  for (unsigned i = 0; i < n; ++i) x = x * 1664525u + 1013904223u;
  out[0] = __builtin_amdgcn_s_memrealtime() - begin + (x == 12345u);
}
"""
STEP_TICKS = 5  # kStepTicks in core/grid.h


@pytest.mark.parametrize("checks", [False, True])
def test_kernels_clock_counts_steps(checks: bool) -> None:
    """A kernel's clock counts the emulator's steps, not time. So a time limit allows the same
    number of steps with all checks.
    """
    machine = core().Machine(["gfx942"])
    code = core().CodeObject(compile_hip(CLOCK, "gfx942", ("-O1",)))
    loaded, out = machine.load(code, 0), machine.allocate(0, "device", 8, "out")
    arguments = struct.pack("<QI", out, 20_000)
    options = core().LaunchOptions(checks=checks)
    desc = core().LaunchDesc(loaded, "ticks", (1, 1, 1), (64, 1, 1), arguments, 0, options)
    result = machine.run(desc)
    assert result.ok, result.message
    (ticks,) = struct.unpack("<Q", machine.read(out, 8))
    assert 0 < ticks <= STEP_TICKS * result.instructions
