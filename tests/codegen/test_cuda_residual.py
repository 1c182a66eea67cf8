"""The function that adds a residual to the sums of a product and stores the results. It runs on the
host: 32 threads are a warp's lanes, whose sums are arranged as PTX describes for wgmma. Results are
compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from tests.cases.cuda_boxes import WARP
from tests.cases.cuda_slab import SLAB, TYPES
from tests.declarations import cut

ROWS, COLUMNS = 13, 117  # of a warp's 16 and a tile's 128

RUN = r"""
// rest and out are one memory, as a result that takes the residual's place.
static void lane_of(const float* sums, float* rest, int rows, int columns) {
  float d[64];
  for (int i = 0; i < 64; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[i] = sums[row * 128 + column];
  }
  ArkCtx c;
  const auto ahead = [&](int row, int column, bool there) {
    ArkPack<float, 8> pack = {};
    for (int j = 0; there && j < 8; ++j) pack.v[j] = rest[row * columns + column + j];
    return pack;
  };
  const auto eight = [&](int row, int column, const float* v, int left, const auto& pack) {
    for (int j = 0; j < left; ++j) {
      float* to = rest + row * columns + column + j;
      *to = v[j] + (left == 8 ? pack.v[j] : *to);
    }
  };
  ark_matrix_each_residual<128>(c, d, 0, rows, columns, ahead, eight);
}
extern "C" void run(const float* sums, float* rest, int rows, int columns) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      lane_of(sums, rest, rows, columns);
    });
  }
  for (auto& each : lanes) each.join();
}
"""


def test_each_sum_meets_its_element_of_the_residual(tmp_path: Path) -> None:
    source, library = tmp_path / "residual.cpp", tmp_path / "residual.so"
    store = resources.files("ark_cuda").joinpath("matrix_store.h").read_text()
    slab = cut(store, "char* ark_slab_piece(", "void ark_matrix_each(")
    source.write_text(WARP.read_text() + TYPES + SLAB + slab + inline.header("residual.h") + RUN)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    rng = np.random.default_rng(0)
    sums = rng.standard_normal((16, 128)).astype(np.float32)
    rest = rng.standard_normal((16, COLUMNS)).astype(np.float32)
    want = rest.copy()
    want[:ROWS] += sums[:ROWS, :COLUMNS]
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (sums, rest))
    ctypes.CDLL(str(library)).run(*pointers, ROWS, COLUMNS)
    np.testing.assert_array_equal(rest, want)
