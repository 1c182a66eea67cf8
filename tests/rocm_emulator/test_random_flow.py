"""Random control flow (random_flow.py): results on the emulator compared with those of the host's
compiler.

Many functions share one compilation, so that each takes a tenth of a second of CPU time. A longer
search, seed after seed:

    PYTHONPATH=tests/rocm_emulator:backends/rocm_emulator:. \
        python tests/rocm_emulator/test_random_flow.py --first 1000 --count 4000 --arch gfx942
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from ark_rocm_emulator import build
from ark_rocm_emulator.compile import toolchain
from ark_rocm_emulator.engine import core
from kernel_cases import ALL
from random_flow import COMMON, LANE_WORDS, function

from tests.kept import compile_hip

LANE_COUNT = 256
BATCH_SIZE = 20
SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
BATCHES = range(5) if SWEEP else range(1)
TARGETS = (
    [(arch, level) for arch in ALL for level in ("-O1", "-O3")]
    if SWEEP
    else [("gfx942", "-O3"), ("gfx1100", "-O3")]
)
OPTIONS = ("-fwrapv", "-w")
# Reduced from seed 100391. From -O2 on, clang 22.1.8 compiles it wrongly on gfx942 and on gfx1100;
# clang 21 does not, nor does clang 22 at -O0 and -O1. It resembles the fault of llvm-project's pull
# request 183792: the assignment of half of `r`, which costs nothing, is hoisted before other paths
# to the loop's head. Which compiler pass does it was not examined.
MISCOMPILED = """
u32 turns = 200;
u32 x = a ^ 1, y = b + 2, z = a * 3, w = b >> 4;
pair v = {a, b}, r = {b, 7};
u64 q = (u64)b << 20;
if ((z & 8)) {
again4:
while (turns > 0 && 1) {
--turns;
switch ((y << ((a ^ turns) & 31)) % 5) {
case 0:
case 1:
if (((turns & b) ^ (z * w)) % 5 < 1) { x = y; continue; }
if (((3u | y) ^ (z < y ? z : y)) % 5 < 2) { mem[0] = a; break; }
if ((3u + turns) < mem[0]) { r.y = (turns * LOW(q)); goto again4; }
case 2:
case 3:
v.y = (255u >> (w & 31));
break;
default:
mem[2] += ((turns & 7u) + 2u);
}
}
} else {
v = (pair){(w - x), turns};
}
past3:;
return x + v.x * 23 + v.y * 29 + r.y * 37;
"""


def bodies(seeds: range) -> dict[int, str]:
    """Random functions by seed."""
    return {seed: function(seed) for seed in seeds}


def _functions(bodies: dict[int, str], qualifiers: str) -> str:
    functions = (
        f"{qualifiers} u32 f{name}(u32 a, u32 b, u32* mem) {{\n{body}\n}}"
        for name, body in bodies.items()
    )
    return "\n".join([COMMON, *functions])


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 2**32, LANE_COUNT).astype(np.uint32) for _ in range(2))
    a[::3] %= 100
    b[::5] %= 50
    return a, b, rng.integers(0, 2**32, LANE_COUNT * LANE_WORDS).astype(np.uint32)


def on_host(bodies: dict[int, str]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Runs the functions on the host. Returns by seed the results and the final memory."""
    loops = (
        f'extern "C" void k{seed}(const u32* a, const u32* b, u32* out, u32* mem) {{\n'
        f"  for (u32 t = 0; t < {LANE_COUNT}; ++t)\n"
        f"    out[t] = f{seed}(a[t], b[t], mem + {LANE_WORDS} * t);\n}}"
        for seed in bodies
    )
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder, "host.cpp"), Path(folder, "host.so")
        text.write_text("\n".join([_functions(bodies, "static"), *loops]))
        # Compiled by clang, because gcc lacks vectors of two elements. No library is linked,
        # because zig's clang would first build its own.
        flags = ["-std=c++20", "-O1", *OPTIONS, "-fPIC", "-shared", "-nostdlib"]
        subprocess.run([*_clang(), *flags, str(text), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    results = {}
    for seed in bodies:
        a, b, memory = _inputs()
        out = np.zeros(LANE_COUNT, np.uint32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out, memory)]
        getattr(library, f"k{seed}")(*pointers)
        results[seed] = out, memory
    return results


def _clang() -> tuple[str, ...]:
    import ziglang

    named = build.compiler()
    if "clang" in named[0]:
        return named
    return (str(Path(ziglang.__file__).parent / "zig"), "c++")


def on_device(
    bodies: dict[int, str], arch: str, level: str
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Runs the functions on an emulated device. Returns their results in the form of `on_host`."""
    kernels = (
        f'extern "C" __global__ void k{seed}(const u32* a, const u32* b, u32* out, u32* mem) {{\n'
        f"  u32 t = threadIdx.x;\n  out[t] = f{seed}(a[t], b[t], mem + {LANE_WORDS} * t);\n}}"
        for seed in bodies
    )
    source = "\n".join([_functions(bodies, "static __device__"), *kernels])
    machine = core().Machine([arch])
    code = machine.load(core().CodeObject(compile_hip(source, arch, (level, *OPTIONS))), 0)
    a, b, memory = _inputs()
    arrays = (a, b, np.zeros(LANE_COUNT, np.uint32), memory)
    places = [machine.allocate(0, "device", array.nbytes, "array") for array in arrays]
    arguments = np.array(places, np.uint64).tobytes()
    results = {}
    for seed in bodies:
        for place, array in zip(places, arrays, strict=True):
            machine.write(place, array.tobytes())
        shape = (1, 1, 1), (LANE_COUNT, 1, 1)
        result = machine.run(core().LaunchDesc(code, f"k{seed}", *shape, arguments))
        assert result.ok, f"seed {seed}: {result.message}"
        out, after = (
            np.frombuffer(machine.read(place, array.nbytes), np.uint32)
            for place, array in zip(places[2:], arrays[2:], strict=True)
        )
        results[seed] = out, after
    return results


def wrong(bodies: dict[int, str], arch: str, level: str) -> list[int]:
    """The seeds for which host and device differ."""
    host, device = on_host(bodies), on_device(bodies, arch, level)
    pairs = ((seed, zip(host[seed], device[seed], strict=True)) for seed in bodies)
    return [seed for seed, pair in pairs if not all(np.array_equal(x, y) for x, y in pair)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("arch", "level"), TARGETS)
def test_host_and_device_take_the_same_branches(arch: str, level: str, batch: int) -> None:
    assert wrong(bodies(range(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE)), arch, level) == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_clang_22_loses_a_value_that_one_way_back_sets(arch: str) -> None:
    version = subprocess.run(
        [*toolchain().clang, "--version"], capture_output=True, check=True
    ).stdout
    faulty = b"clang version 22.1." in version
    assert wrong({0: MISCOMPILED}, arch, "-O1") == []
    assert wrong({0: MISCOMPILED}, arch, "-O3") == ([0] if faulty else [])


def main() -> None:
    """Prints the seeds for which a device's results differ from the host's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--level", default="-O3")
    chosen = parser.parse_args()
    for first in range(chosen.first, chosen.first + chosen.count, BATCH_SIZE):
        seeds = range(first, min(first + BATCH_SIZE, chosen.first + chosen.count))
        print(seeds, "wrong:", wrong(bodies(seeds), chosen.arch, chosen.level), flush=True)


if __name__ == "__main__":
    main()
