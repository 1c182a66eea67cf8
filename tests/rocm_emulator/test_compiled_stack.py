"""Compiled programs that use the stack: recursion, arrays of bytes, pointers to functions.

Architectures differ most in private memory (swizzled buffers, scratch instructions with and without
registers). The same functions in Python give the expected results.
"""

from __future__ import annotations

import numpy as np
import pytest
from ark_rocm_emulator.compile import TARGETS
from ark_rocm_emulator.engine import core

from tests.kept import compile_hip

SOURCE = """
#define D __device__ __attribute__((noinline))
#define KERNEL extern "C" __global__ __launch_bounds__(64) void
D int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
D unsigned char crc(const unsigned char* p, int n) {
  unsigned char c = 0xff;
  for (int i = 0; i < n; i++) {
    c ^= p[i];
    for (int k = 0; k < 8; k++) c = c & 0x80 ? (c << 1) ^ 0x31 : c << 1;
  }
  return c;
}
typedef int (*Function)(int);
D int next(int x) { return x + 1; }
D int triple(int x) { return x * 3; }
D int turned(int x) { return x ^ 0x55; }
D int choice(int x) {
  switch (x) {
    case 0: return 5;
    case 1: return 17;
    case 5: return fib(6);
    case 11: return 44;
    default: return x * x;
  }
}
KERNEL recursion(int* out, const int* in) {
  int t = threadIdx.x, x = in[t], sum = 0;
  for (int i = 0; i < 24; i++) sum = sum * 7 + choice((x + i) & 15) + choice(i == 3 ? 100 : 1000);
  out[t] = sum;
}
KERNEL bytes(int* out, const int* in) {
  int t = threadIdx.x, x = in[t];
  unsigned char c[37];
  for (int i = 0; i < 37; i++) c[i] = (unsigned char)(x >> (i & 15)) + i;
  out[t] = crc(c, 37);
}
KERNEL unaligned(int* out, const int* in) {
  int t = threadIdx.x;
  volatile unsigned char c[64];
  for (int i = 0; i < 64; i++) c[i] = i * 37 + in[t];
  int sum = 0;
  for (int i = 0; i < 4; i++) {
    typedef int Loose __attribute__((aligned(1)));
    typedef long LooseLong __attribute__((aligned(1)));
    volatile Loose* word = (volatile Loose*)(c + 1 + i * 7 + (in[t] & 3));
    *word = *word * 5 + i;
    sum += (int)*(volatile LooseLong*)(c + 33 + i + (in[t] & 3)) ^ *word;
  }
  out[t] = sum + c[5];
}
KERNEL calls(int* out, const int* in) {
  Function all[3] = {next, triple, turned};
  int t = threadIdx.x, x = in[t];
  for (int i = 0; i < 6; i++) x = all[(unsigned)(x + i + t) % 3](x & 0xffff);
  out[t] = x;
}
"""
INPUT = np.concatenate([np.arange(-16, 16), np.random.default_rng(1).integers(-(2**31), 2**31, 32)])
MASK_32 = 2**32 - 1


def _recursion(x: int, _: int) -> int:
    chosen, total = {0: 5, 1: 17, 5: 8, 11: 44}, 0
    for i in range(24):
        low = (x + i) & 15
        total = total * 7 + chosen.get(low, low * low) + (10_000 if i == 3 else 1_000_000)
    return total


def _bytes(x: int, _: int) -> int:
    c = 0xFF
    for i in range(37):
        c ^= ((x >> (i & 15)) + i) & 0xFF
        for _bit in range(8):
            c = (c << 1 ^ 0x31 if c & 0x80 else c << 1) & 0xFF
    return c


def _unaligned(x: int, _: int) -> int:
    c, total = bytearray((i * 37 + x) & 0xFF for i in range(64)), 0
    for i in range(4):
        at, far = 1 + i * 7 + (x & 3), 33 + i + (x & 3)
        word = (int.from_bytes(c[at : at + 4], "little") * 5 + i) & MASK_32
        c[at : at + 4] = word.to_bytes(4, "little")
        total += int.from_bytes(c[far : far + 4], "little") ^ word
    return total + c[5]


def _calls(x: int, t: int) -> int:
    for i in range(6):
        which, low = ((x + i + t) & MASK_32) % 3, x & 0xFFFF
        x = (low + 1, low * 3, low ^ 0x55)[which]
    return x


EXPECTED = {"recursion": _recursion, "bytes": _bytes, "unaligned": _unaligned, "calls": _calls}


@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("arch", TARGETS)
def test_stack(arch: str, level: str) -> None:
    machine = core().Machine([arch])
    loaded = machine.load(core().CodeObject(compile_hip(SOURCE, arch, (level, "-fwrapv"))), 0)
    source, target = (machine.allocate(0, "device", 256) for _ in range(2))
    machine.write(source, INPUT.astype(np.int32).tobytes())
    for name, function in EXPECTED.items():
        arguments = np.array([target, source], np.uint64).tobytes()
        for checks in (False, True):
            machine.write(target, bytes(256))
            options = core().LaunchOptions(checks=checks, step_budget=5_000_000)
            launch = core().LaunchDesc(loaded, name, (1, 1, 1), (64, 1, 1), arguments, 0, options)
            result = machine.run(launch)
            assert result.ok, (name, result.message)
            got = np.frombuffer(machine.read(target, 256), np.uint32)
            expected = [function(int(x), t) & MASK_32 for t, x in enumerate(INPUT)]
            assert got.tolist() == expected, name
