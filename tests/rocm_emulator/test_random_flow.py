"""Random control flow (random_flow.py) on the emulator against the host's compiler.

Many functions share one compilation, so that one costs a tenth of a second of the processor. A
longer search, seed after seed:

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
from ark_rocm_emulator.compile import compile_hip
from ark_rocm_emulator.engine import core
from kernel_cases import ALL
from random_flow import COMMON, WORDS, function

LANES = 256
BATCH = 20
SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
BATCHES = range(10) if SWEEP else range(1)
TARGETS = (
    [(arch, level) for arch in ALL for level in ("-O1", "-O3")]
    if SWEEP
    else [("gfx942", "-O3"), ("gfx1100", "-O3")]
)
OPTIONS = ("-fwrapv", "-w")


def _functions(seeds: range, qualifiers: str) -> str:
    made = (
        f"{qualifiers} u32 f{seed}(u32 a, u32 b, u32* mem) {{\n{function(seed)}\n}}"
        for seed in seeds
    )
    return "\n".join([COMMON, *made])


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 2**32, LANES).astype(np.uint32) for _ in range(2))
    a[::3] %= 100
    b[::5] %= 50
    return a, b, rng.integers(0, 2**32, LANES * WORDS).astype(np.uint32)


def on_host(seeds: range) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By seed, the results and the memory behind them."""
    loops = (
        f'extern "C" void k{seed}(const u32* a, const u32* b, u32* out, u32* mem) {{\n'
        f"  for (u32 t = 0; t < {LANES}; ++t) out[t] = f{seed}(a[t], b[t], mem + {WORDS} * t);\n}}"
        for seed in seeds
    )
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder, "host.cpp"), Path(folder, "host.so")
        text.write_text("\n".join([_functions(seeds, "static"), *loops]))
        flags = ["-std=c++20", "-O1", *OPTIONS, "-fPIC", "-shared"]
        # clang's vectors of two, which gcc does not have.
        subprocess.run([*_clang(), *flags, str(text), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    found = {}
    for seed in seeds:
        a, b, memory = _inputs()
        out = np.zeros(LANES, np.uint32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out, memory)]
        getattr(library, f"k{seed}")(*pointers)
        found[seed] = out, memory
    return found


def _clang() -> tuple[str, ...]:
    import ziglang

    named = build.compiler()
    if "clang" in named[0]:
        return named
    return (str(Path(ziglang.__file__).parent / "zig"), "c++")


def on_device(seeds: range, arch: str, level: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The same from the waves of an emulated device."""
    kernels = (
        f'extern "C" __global__ void k{seed}(const u32* a, const u32* b, u32* out, u32* mem) {{\n'
        f"  u32 t = threadIdx.x;\n  out[t] = f{seed}(a[t], b[t], mem + {WORDS} * t);\n}}"
        for seed in seeds
    )
    source = "\n".join([_functions(seeds, "static __device__"), *kernels])
    machine = core().Machine([arch])
    code = machine.load(core().CodeObject(compile_hip(source, arch, (level, *OPTIONS))), 0)
    a, b, memory = _inputs()
    arrays = (a, b, np.zeros(LANES, np.uint32), memory)
    places = [machine.allocate(0, "device", array.nbytes, "array") for array in arrays]
    arguments = np.array(places, np.uint64).tobytes()
    found = {}
    for seed in seeds:
        for place, array in zip(places, arrays, strict=True):
            machine.write(place, array.tobytes())
        shape = (1, 1, 1), (LANES, 1, 1)
        result = machine.run(core().LaunchDesc(code, f"k{seed}", *shape, arguments))
        assert result.ok, f"seed {seed}: {result.message}"
        out, after = (
            np.frombuffer(machine.read(place, array.nbytes), np.uint32)
            for place, array in zip(places[2:], arrays[2:], strict=True)
        )
        found[seed] = out, after
    return found


def wrong(seeds: range, arch: str, level: str) -> list[int]:
    """The seeds of which host and device differ."""
    host, device = on_host(seeds), on_device(seeds, arch, level)
    pairs = ((seed, zip(host[seed], device[seed], strict=True)) for seed in seeds)
    return [seed for seed, both in pairs if not all(np.array_equal(x, y) for x, y in both)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("arch", "level"), TARGETS)
def test_host_and_device_take_the_same_ways(arch: str, level: str, batch: int) -> None:
    assert wrong(range(batch * BATCH, (batch + 1) * BATCH), arch, level) == []


def main() -> None:
    """Print the seeds of which a device's results differ from the host's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--level", default="-O3")
    chosen = parser.parse_args()
    for first in range(chosen.first, chosen.first + chosen.count, BATCH):
        seeds = range(first, min(first + BATCH, chosen.first + chosen.count))
        print(seeds, "wrong:", wrong(seeds, chosen.arch, chosen.level), flush=True)


if __name__ == "__main__":
    main()
