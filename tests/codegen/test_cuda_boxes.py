"""Products of input rows with weights that a box copy (TMA) has loaded to shared memory. The device
code runs on the host: 32 threads are a warp's lanes, and the products of matrix units follow PTX's
description of m16n8k16. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from tests.cases.cuda_boxes import HOST, to_bf16

LINE_ELEMENTS = 64  # elements of a row that lie together


CALLS = r"""
// x: M rows of BLOCKS * 64 elements. out: of each lane a tile's sums.
template <int R, int M, int BLOCKS>
static void lane_of(const Half* box, const Half* x, float (*out)[4]) {
  using Box = ArkBox<R, M>;
  constexpr int K = BLOCKS * ARK_BOX_BLOCK;
  float d[Box::SETS][Box::CHAINS][4] = {};
  const auto halves = [&](int i, int half) {
    if constexpr (R > 8) {
      const Half* at = x + Box::input() * K + i * ARK_BOX_BLOCK + Box::chunk() * 8;
      const uint4 u = *reinterpret_cast<const uint4*>(at);
      const uint4 v = *reinterpret_cast<const uint4*>(at + Box::NEXT * 8);
      return half == 0 ? make_uint4(u.x, u.z, v.x, v.z) : make_uint4(u.y, u.w, v.y, v.w);
    }
    return reinterpret_cast<const uint4*>(x + Box::input() * K)[i * 8 + half * 4 + lane % 4];
  };
  ark_box_products<R, M, BLOCKS, 4>(box, halves, d);
  float sum[R > 8 ? 4 : 2];
  ark_box_tile<R, M>(d, sum);
  for (int e = 0; e < (R > 8 ? 4 : 2); ++e) out[lane][e] = sum[e];
}
template <int R, int M, int BLOCKS>
static void warp(const Half* box, const Half* x, float (*out)[4]) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      lane_of<R, M, BLOCKS>(box, x, out);
    });
  }
  for (auto& each : lanes) each.join();
}
extern "C" int place(int at) { return ark_box_place(at); }
#define ONE(R, M) if (r == R && m == M) warp<R, M, 3>(box, x, out);
extern "C" void run(int r, int m, const Half* box, const Half* x, float (*out)[4]) {
  ONE(8, 2) ONE(8, 3) ONE(8, 4) ONE(8, 5) ONE(8, 8) ONE(16, 2) ONE(16, 4) ONE(16, 7) ONE(16, 8)
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("boxes")
    source, library = folder / "boxes.cpp", folder / "boxes.so"
    source.write_text(HOST + inline.header("linear_boxes.h") + CALLS)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def boxed(weights: np.ndarray) -> np.ndarray:
    """Arranges rows as a box copy to shared memory does: in blocks of 128 bytes per row, swizzled,
    one block of all rows after another.
    """
    rows, k = weights.shape
    box = np.zeros((k // LINE_ELEMENTS, rows, 8, 8), np.uint16)
    for row in range(rows):
        for chunk in range(8):
            box[:, row, chunk ^ row % 8] = weights[row].reshape(-1, 8, 8)[:, chunk]
    return box


@pytest.mark.parametrize(
    ("rows", "inputs"), [(8, 2), (8, 3), (8, 4), (8, 5), (8, 8), (16, 2), (16, 4), (16, 7), (16, 8)]
)
def test_warps_sums_equal_numpy(device: ctypes.CDLL, rows: int, inputs: int) -> None:
    rng = np.random.default_rng(rows * inputs)
    k = 3 * LINE_ELEMENTS
    # The whole numbers are so small that bf16 represents them exactly, and fp32 their sums.
    weights = rng.integers(-8, 9, (rows, k)).astype(np.float32)
    x = rng.integers(-8, 9, (inputs, k)).astype(np.float32)
    given = to_bf16(x)
    if rows == 8:
        places = [device.place(2 * i) + j for i in range(k // 2) for j in range(2)]
        assert sorted(places) == list(range(k))
        given = np.empty_like(given)
        given[:, places] = to_bf16(x)
    out = np.zeros((32, 4), np.float32)
    arrays = (boxed(to_bf16(weights)), np.ascontiguousarray(given), out)
    buffers = [np.zeros(a.nbytes + 1024, np.uint8) for a in arrays]
    at = [b[-b.ctypes.data % 1024 :][: a.nbytes] for a, b in zip(arrays, buffers, strict=True)]
    for place, array in zip(at, arrays, strict=True):
        place[:] = array.view(np.uint8).ravel()
    device.run(rows, inputs, *(ctypes.c_void_p(place.ctypes.data) for place in at))
    got = at[2].view(np.float32).reshape(32, 4)
    want = weights @ x.T
    for lane in range(32):
        if rows == 8:
            own, column = lane % 4 * 2, lane // 4
            lane_sums = {(own + e, column): got[lane, e] for e in range(2)}
        else:
            own, column = lane // 4 * 2, lane % 4 * 2
            lane_sums = {(own + e // 2, column + e % 2): got[lane, e] for e in range(4)}
        for (row, m), sums in lane_sums.items():
            assert m >= inputs or sums == want[row, m]
