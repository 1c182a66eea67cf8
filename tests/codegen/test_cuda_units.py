"""Products of one or two rows with whole rows of weights on matrix units, run on the host as in
test_cuda_boxes. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from ark.tasks import text
from tests.cases.cuda_boxes import HOST, to_bf16
from tests.cases.cuda_tiles import HEAD

SIZES = [(4, 256), (4, 2048), (2, 512), (2, 4096), (1, 512), (1, 7168)]
PAIRS = [256, 2048]  # lengths of four rows of weights that are multiplied by two input rows
CALLS = r"""
template <int R, int K>
static void warp(const Half* w, const Half* x, float (*out)[4]) {
  static_assert(ARK_BY_UNITS<R, K, Half> && !ARK_BY_UNITS<R, K + 64, Half>);
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      float sum[R];
      ark_stage_products<R, K>(w, x, sum);
      for (int r = 0; r < R; ++r) out[lane][r] = sum[r];
    });
  }
  for (auto& each : lanes) each.join();
}
template <int K>
static void pair(const Half* w, const Half* x, float* out) {
  using Tile = ArkTileOf<ARK_PAIR_BY_UNITS<4, 2, K, Half>, 4, 2>::Tile;
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      float sum[2];
      ark_pair_products<K, K + 32>(w, x, sum);
      for (int e = 0; e < 2; ++e) {
        if (Tile::at(e) >= 0) out[Tile::at(e)] += sum[e];
      }
    });
  }
  for (auto& each : lanes) each.join();
}
extern "C" void run_pair(int k, const Half* w, const Half* x, float* out) {
  PAIRS
}
extern "C" void run(int r, int k, const Half* w, const Half* x, float (*out)[4]) {
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("units")
    source, library = folder / "units.cpp", folder / "units.so"
    calls = "".join(f"  if (r == {r} && k == {k}) warp<{r}, {k}>(w, x, out);\n" for r, k in SIZES)
    pairs = "".join(f"  if (k == {k}) pair<{k}>(w, x, out);\n" for k in PAIRS)
    headers = text.header("sampling.h")
    headers += "".join(map(inline.header, ("linear_tiles.h", "linear_units.h", "linear_pair.h")))
    source.write_text(HOST + HEAD + headers + CALLS.replace("  PAIRS\n", pairs) + calls + "}\n")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("rows", "inner"), SIZES)
def test_stage_of_rows_agrees_with_numpy(device: ctypes.CDLL, rows: int, inner: int) -> None:
    rng = np.random.default_rng(rows * inner)
    w, x = (to_bf16(rng.standard_normal(shape)) for shape in ((rows, inner), (inner,)))
    out = np.full((32, 4), np.nan, np.float32)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (w, x, out)]
    device.run(rows, inner, *pointers)
    wide = [(a.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for a in (w, x)]
    want = wide[0] @ wide[1]
    np.testing.assert_allclose(out[:, :rows].sum(0), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("inner", PAIRS)
def test_stage_by_two_rows_agrees_with_numpy(device: ctypes.CDLL, inner: int) -> None:
    rng = np.random.default_rng(inner)
    w = to_bf16(rng.standard_normal((4, inner)))
    x = np.full((2, inner + 32), 0x7FC0, np.uint16)  # NaN beyond each row
    x[:, :inner] = to_bf16(rng.standard_normal((2, inner)))
    out = np.zeros((4, 2), np.float32)  # each sum has one owner: what two add is wrong
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (w, x, out)]
    device.run_pair(inner, *pointers)
    wide = [(a.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for a in (w, x)]
    np.testing.assert_allclose(out, wide[0] @ wide[1][:, :inner].T, rtol=1e-4, atol=1e-3)
