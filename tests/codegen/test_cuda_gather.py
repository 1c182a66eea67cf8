"""The copy of a linear layer's input rows to shared memory, in the type of the weights. The device
code runs on the host: each thread does its part of the copy in turn, with and without a norm's
weights. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from tests.declarations import cut

ROWS, K, PITCH = 5, 192, 224  # 16 threads have two groups of eight each, the last ones one

HOST = r"""
#include <cstdint>
#include <cstring>
#define ARK_DEVICE static inline
using ark_u32 = uint32_t;
constexpr int ARK_THREADS = 16;
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static float fmaf(float a, float b, float c) { return a * b + c; }
struct Half { uint16_t bits; };
static int tid;
static int ark_tid() { return tid; }
static uint4 ark_load_far(const Half* p) { return *reinterpret_cast<const uint4*>(p); }
static float2 ark_pair(const Half*, uint32_t word) {
  const uint32_t both[2] = {word << 16, word & 0xffff0000u};
  float2 made;
  std::memcpy(&made, both, 8);
  return made;
}
static uint32_t ark_multiply_pair(const Half* p, uint32_t a, uint32_t b) {
  const float2 u = ark_pair(p, a), v = ark_pair(p, b);
  const float made[2] = {u.x * v.x, u.y * v.y};
  uint32_t bits[2];
  std::memcpy(bits, made, 8);
  for (uint32_t& each : bits) each = (each + 0x7fffu + (each >> 16 & 1u)) >> 16;
  return bits[0] | bits[1] << 16;
}
"""
CALLS = r"""
extern "C" int place(int at) { return ark_box_place(at); }
template <bool NORM, bool BOXED>
static void all(const Half* x, const Half* norm, Half* xs, float* squares) {
  for (tid = 0; tid < ARK_THREADS; ++tid) {
    uint4 factors[ARK_ROW_EIGHTS<192>];
    ark_eight_factors<192>(norm, factors);
    float square[5] = {};
    ark_batch_eights<5, 192, 224, NORM, BOXED>(x, factors, xs, square);
    for (int m = 0; m < 5; ++m) squares[m] += square[m];
  }
}
extern "C" void run(int norm, int boxed, const Half* x, const Half* by, Half* xs, float* squares) {
  if (norm && boxed) all<true, true>(x, by, xs, squares);
  if (norm && !boxed) all<true, false>(x, by, xs, squares);
  if (!norm && boxed) all<false, true>(x, by, xs, squares);
  if (!norm && !boxed) all<false, false>(x, by, xs, squares);
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("gather")
    source, library = folder / "gather.cpp", folder / "gather.so"
    boxes, gather = inline.header("linear_boxes.h"), inline.header("linear_gather.h")
    placed = boxes[boxes.index("ARK_DEVICE int ark_box_place") :].split("\n}\n", maxsplit=1)[0]
    eights = cut(gather, "int ARK_ROW_EIGHTS", "void ark_batch_rows(")
    block = "constexpr int ARK_BOX_BLOCK = 64;\n"
    source.write_text(f"{HOST}{block}{placed}\n}}\n{eights}{CALLS}")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("boxed", [False, True])
def test_rows_are_scaled_and_lie_where_products_look_for_them(
    device: ctypes.CDLL, norm: bool, boxed: bool
) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((ROWS, K)).astype(ml_dtypes.bfloat16)
    by = (1 + 0.1 * rng.standard_normal(K)).astype(ml_dtypes.bfloat16)
    xs = np.full(ROWS * PITCH + 8, 0xDEAD, np.uint16)
    xs = xs[-xs.ctypes.data % 16 // 2 :][: ROWS * PITCH].reshape(ROWS, PITCH)
    squares = np.zeros(ROWS, np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, by, xs, squares)]
    device.run(int(norm), int(boxed), *pointers)
    wide = x.astype(np.float32)
    right = (wide * by.astype(np.float32) if norm else wide).astype(ml_dtypes.bfloat16)
    places = [device.place(p) if boxed else p for p in range(0, K, 2)]
    assert sorted(places) == list(range(0, K, 2))
    for i, at in enumerate(places):
        pair = xs[:, at : at + 2]
        assert np.array_equal(pair, right[:, 2 * i : 2 * i + 2].view(np.uint16)), (i, at)
    assert (xs[:, K:] == 0xDEAD).all()
    if norm:
        np.testing.assert_allclose(squares, (wide * wide).sum(1), rtol=1e-5)
