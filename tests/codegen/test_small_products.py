"""Batches of products of small matrices. The device code runs on the host, with a thread for each
lane of two warps, and is compared with NumPy. Shared memory begins as NaN, so that a lane that uses
an element which no lane wrote is found.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ark.tasks import text

COUNT, TASKS, WARPS = 7, 2, 2
HOST = r"""
#include <barrier>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>
#define ARK_DEVICE static inline
#define ARK_WARPS 2
typedef int64_t ark_i64;
struct ArkCtx { char* scratch; };
struct ArkTask { int coord[6]; };
#define ARK_SCRATCH(c) (c).scratch
static std::barrier<>* together[ARK_WARPS];
static thread_local int tid;
static int ark_lane() { return tid % ARK_LANES; }
static int ark_warp() { return tid / ARK_LANES; }
static void ark_warp_sync() { together[ark_warp()]->arrive_and_wait(); }
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) ArkPack { T v[N]; };
template <int N, typename T>
static ArkPack<T, N> ark_load_pack(const T* p) {
  return *reinterpret_cast<const ArkPack<T, N>*>(p);
}
template <int N, typename T>
static void ark_store_pack(T* p, const ArkPack<T, N>& pack) {
  *reinterpret_cast<ArkPack<T, N>*>(p) = pack;
}
static float ark_get(const float* p, int i) { return p[i]; }
"""
RUN = r"""
extern "C" int floats() { return ARK_WARPS * ArkSmall<M, N, K, B_DEEP>::FLOATS; }
extern "C" void run(const float* a, const float* b, float* out, float* scratch) {
  for (int task = 0; task < TASKS; ++task) {
    for (int i = 0; i < floats(); ++i) scratch[i] = std::numeric_limits<float>::quiet_NaN();
    std::vector<std::unique_ptr<std::barrier<>>> barriers;
    for (auto& each : together) {
      barriers.push_back(std::make_unique<std::barrier<>>(ARK_LANES));
      each = barriers.back().get();
    }
    std::vector<std::thread> lanes;
    for (int i = 0; i < ARK_WARPS * ARK_LANES; ++i) {
      lanes.emplace_back([=] {
        tid = i;
        ArkCtx c{reinterpret_cast<char*>(scratch)};
        ark_matmul_small<COUNT, TASKS, M, N, K, A_DEEP, A_PACK, B_DEEP, B_PACK>(
            c, ArkTask{{task}},
            [&](int i, int m, int k) { return a + i * M * K + (A_DEEP ? m * K + k : k * M + m); },
            [&](int i, int n, int k) { return b + i * N * K + (B_DEEP ? n * K + k : k * N + n); },
            [&](int i, int m, int n, float sum) { out[(i * M + m) * N + n] += sum; });
      });
    }
    for (auto& each : lanes) each.join();
  }
}
"""


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize(
    ("m", "n", "k", "a_deep", "b_deep", "vector"),
    [
        (32, 32, 32, True, False, 4),
        (32, 32, 64, False, True, 4),
        (16, 24, 8, True, True, 4),
        (7, 19, 5, True, False, 1),
        (20, 32, 6, False, False, 2),
        (3, 1, 9, True, True, 1),
        (30, 12, 12, False, False, 2),
    ],
)
def test_each_lane_stores_its_results(
    tmp_path: Path, lanes: int, m: int, n: int, k: int, a_deep: bool, b_deep: bool, vector: int
) -> None:
    numbers = {"COUNT": COUNT, "TASKS": TASKS, "M": m, "N": n, "K": k}
    numbers |= {"A_PACK": vector, "B_PACK": vector, "A_DEEP": int(a_deep), "B_DEEP": int(b_deep)}
    constants = "".join(f"constexpr int {n} = {number};\n" for n, number in numbers.items())
    head = f"#define ARK_LANES {lanes}\n{HOST}{text.header('matmul_small.h')}{constants}"
    source, library = tmp_path / "small.cpp", tmp_path / "small.so"
    source.write_text(head + RUN)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    rng = np.random.default_rng(m)
    a = rng.integers(-9, 9, (COUNT, m, k)).astype(np.float32)
    b = rng.integers(-9, 9, (COUNT, k, n)).astype(np.float32)
    stored_a = np.ascontiguousarray(a if a_deep else a.swapaxes(1, 2))
    stored_b = np.ascontiguousarray(b.swapaxes(1, 2) if b_deep else b)
    out = np.zeros((COUNT, m, n), np.float32)
    code = ctypes.CDLL(str(library))
    room = np.zeros(code.floats() + 4, np.float32)
    scratch = room[-room.ctypes.data // 4 % 4 :]  # begins at a multiple of 16 bytes
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (stored_a, stored_b, out, scratch))
    code.run(*pointers)
    np.testing.assert_array_equal(out, a @ b)
