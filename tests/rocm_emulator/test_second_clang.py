"""Small code that compilers are known to get wrong, run on the emulator.

clang 21 and 22 compile a byte swap of 64 bits wrongly at -O0 for gfx1100. For each half of the
value they move 16 bits to a new register by `v_mov_b16_e32 v0.l, v1.l`. By AMD's RDNA3 instruction
set document this instruction does not change the register's other half. Then they read all four
bytes of the register by `v_perm_b32`. So the upper two bytes of each word are right, and the lower
two are old contents of the register. The test asserts this result. At -O3, which ark uses, the
result is right.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from ark_rocm_emulator.compile import compile_hip, to_assembly
from ark_rocm_emulator.engine import core

SOURCE = """
extern "C" __global__ void divide(const unsigned* in, unsigned* out) {
  short narrow = (short)in[threadIdx.x];
  out[threadIdx.x] = (unsigned)(int)narrow / 7u;
}
extern "C" __global__ void swap(const unsigned long long* in, unsigned long long* out) {
  out[threadIdx.x] = __builtin_bswap64(in[threadIdx.x]);
}
"""
LANE_COUNT = 32


def run(arch: str, level: str, kernel: str, data: np.ndarray) -> np.ndarray:
    machine = core().Machine([arch])
    code = machine.load(core().CodeObject(compile_hip(SOURCE, arch, (level,))), 0)
    size = data.nbytes
    source, target = (machine.allocate(0, "device", size, name) for name in ("in", "out"))
    machine.write(source, data.tobytes())
    arguments = np.array([source, target], np.uint64).tobytes()
    result = machine.run(core().LaunchDesc(code, kernel, (1, 1, 1), (LANE_COUNT, 1, 1), arguments))
    assert result.ok, result.message
    return np.frombuffer(machine.read(target, size), data.dtype)


def check(arch: str, level: str, kernel: str) -> None:
    rng = np.random.default_rng(1)
    if kernel == "divide":
        data = rng.integers(0, 1 << 16, LANE_COUNT).astype(np.uint32)
        expected = data.astype(np.int16).astype(np.int32).view(np.uint32) // np.uint32(7)
    else:
        data = rng.integers(0, 1 << 63, LANE_COUNT).astype(np.uint64)
        expected = data.byteswap()
    np.testing.assert_array_equal(run(arch, level, kernel, data), expected)


CASES = [
    (kernel, level, arch)
    for kernel in ("divide", "swap")
    for level in ("-O0", "-O3")
    for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100")
]
WRONG = ("swap", "-O0", "gfx1100")


@pytest.mark.parametrize(("kernel", "level", "arch"), [c for c in CASES if c != WRONG])
def test_small_kernel(kernel: str, level: str, arch: str) -> None:
    check(arch, level, kernel)


def test_half_of_each_swapped_word_is_lost_in_a_move_of_16_bits() -> None:
    kernel, level, arch = WRONG
    assembly, _ = to_assembly(SOURCE, arch, (level,))
    body = assembly[assembly.index("\nswap:") :]
    moved = r"v_mov_b16_e32 (v\d+)\.l, v\d+\.l\n(?:.*\n)?\s*v_perm_b32 v\d+, 0, \1,"
    assert re.search(moved, body)
    data = np.random.default_rng(1).integers(0, 1 << 63, LANE_COUNT).astype(np.uint64)
    expected = data.byteswap().view(np.uint32)
    got = run(arch, level, kernel, data).view(np.uint32)
    np.testing.assert_array_equal(got >> 16, expected >> 16)
    assert (got != expected).any()
