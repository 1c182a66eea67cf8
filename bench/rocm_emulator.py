"""Measures the ROCm emulator's speed in wave-instructions per second, by kind of code.

``PYTHONPATH=.:backends/rocm_emulator python bench/rocm_emulator.py``; one thread is timed by its
CPU time (the best of three runs), all cores by wall-clock time, for which the machine must be
otherwise idle. The figures are those of an interpreter on this CPU and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from ark_rocm_emulator.compile import TARGETS, compile_hip
from ark_rocm_emulator.engine import core

BLOCKS, THREADS = 64, 256
# Products of tiles whose elements are VALUE.
MATRIX = """
        typedef float f4 __attribute__((ext_vector_type(4)));
        typedef float f8 __attribute__((ext_vector_type(8)));
        typedef _Float16 h4 __attribute__((ext_vector_type(4)));
        typedef _Float16 h16 __attribute__((ext_vector_type(16)));
        #if defined(__GFX9__)
        typedef h4 Operand; typedef f4 Sum;
        #define MULTIPLY(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0)
        #else
        typedef h16 Operand; typedef f8 Sum;
        #define MULTIPLY(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c)
        #endif
        __shared__ _Float16 held[512 * sizeof(Operand) / 2];
        for (unsigned k = t; k < sizeof(held) / 2; k += 256) held[k] = (_Float16)VALUE;
        __syncthreads();
        const Operand* at = (const Operand*)held;
        Sum c[2][4] = {};
        for (int i = 0; i < n / 8; ++i) {
          Operand a[2], b[4];
          for (int k = 0; k < 2; ++k) a[k] = at[(t % 16 + 16 * k + i) & 511];
          for (int k = 0; k < 4; ++k) b[k] = at[(t % 16 + 16 * k + 7 * i + 256) & 511];
          for (int k = 0; k < 8; ++k) {
            c[k / 4][k % 4] = MULTIPLY(a[k / 4], b[k % 4], c[k / 4][k % 4]);
          }
        }
        float sum = 0;
        for (int k = 0; k < 8; ++k) sum += c[k / 4][k % 4][k % 4];
        out[i0] = sum;"""
PROGRAMS = {
    "valu": """
        float a = t, b = 1.5f, c = 0.25f, d = 2.0f;
        unsigned x = t, y = blockIdx.x;
        for (int i = 0; i < n; ++i) {
          a = a * b + c; b = b * 0.999f + d; c = a - b; d = d * 0.5f + a;
          x = x * 1664525u + y; y ^= x >> 7; x += y << 3;
        }
        out[i0] = a + b + c + d + x + y;""",
    "lds": """
        __shared__ float tile[256];
        float sum = t;
        for (int i = 0; i < n; ++i) {
          tile[t] = sum;
          __syncthreads();
          sum += tile[(t * 7 + i) & 255];
          __syncthreads();
        }
        out[i0] = sum;""",
    "global": """
        float sum = 0;
        for (int i = 0; i < n; ++i) sum += out[(i0 + i * 64) & 16383] * 0.5f;
        out[16384 + i0] = sum;""",
    "matrix": """
        typedef float f4 __attribute__((ext_vector_type(4)));
        typedef float f8 __attribute__((ext_vector_type(8)));
        typedef _Float16 h4 __attribute__((ext_vector_type(4)));
        typedef _Float16 h16 __attribute__((ext_vector_type(16)));
        #if defined(__GFX9__)
        h4 a = {1, 2, 3, 4};
        f4 c = {0, 0, 0, 0};
        for (int i = 0; i < n; ++i) c = __builtin_amdgcn_mfma_f32_16x16x16f16(a, a, c, 0, 0, 0);
        #else
        h16 a = {1, 2, 3, 4};
        f8 c = {0, 0, 0, 0};
        for (int i = 0; i < n; ++i) c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, a, c);
        #endif
        out[i0] = c[0] + c[3];""",
    "tiles": MATRIX.replace("VALUE", "(k & 15)"),
    "floats": MATRIX.replace("VALUE", "(((k * 2654435761u) >> 9) * 0x1p-22f - 1.0f)"),
}


def measure(arch: str, name: str, rounds: int, parallel: bool) -> tuple[int, float]:
    """(wave-instructions, seconds) of one launch. With one thread, seconds are CPU time."""
    source = (
        'extern "C" __global__ __launch_bounds__(256) void kernel(float* out, int n) {\n'
        "unsigned t = threadIdx.x, i0 = blockIdx.x * blockDim.x + t;\n" + PROGRAMS[name] + "\n}"
    )
    machine = core().Machine([arch])
    code = machine.load(core().CodeObject(compile_hip(source, arch)), 0)
    out = machine.allocate(0, "device", 4 * 2 * BLOCKS * THREADS)
    machine.write(out, bytes(4 * 2 * BLOCKS * THREADS))
    arguments = np.array([out], np.uint64).tobytes() + np.array([rounds], np.int32).tobytes()
    options = core().LaunchOptions(parallel=parallel)
    shape = (BLOCKS, 1, 1), (THREADS, 1, 1)
    start = time.process_time()
    result = machine.run(core().LaunchDesc(code, "kernel", *shape, arguments, 0, options))
    processor = time.process_time() - start
    if not result.ok:
        raise SystemExit(result.message)
    return result.instructions, result.seconds if parallel else processor


def main() -> None:
    """Prints a table: million wave-instructions per second on one thread and on all cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=TARGETS, action="append")
    parser.add_argument("--rounds", type=int, default=2000, help="loop iterations of each kernel")
    chosen = parser.parse_args()
    print(f"{'arch':8} {'code':8} {'one thread':>14} {f'{os.cpu_count()} cores':>14}   (M/s)")
    for arch in chosen.arch or ("gfx942", "gfx1100"):
        for name in PROGRAMS:
            rates = []
            for parallel in (False, True):
                runs = [measure(arch, name, chosen.rounds, parallel) for _ in range(3)]
                rates.append(max(count / seconds for count, seconds in runs) / 1e6)
            print(f"{arch:8} {name:8} {rates[0]:14.1f} {rates[1]:14.1f}")


if __name__ == "__main__":
    main()
