"""The function that applies an expression to the sums of a product and stores the 16-bit results.
It runs on the host: 32 threads are a warp's lanes, whose sums are arranged as PTX describes for
wgmma. Results are compared with NumPy.
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

from tests.cases.cuda_boxes import WARP, to_bf16
from tests.cases.cuda_slab import CALLS

WARP_ROWS = 13  # of a warp's 16

RUN = r"""
// rest and out are one memory, as a result that takes the residual's place.
template <int COLUMNS, bool REST>
static void lane_of(const float* sums, const float* bias, TEST_TYPE* out, int rows, int columns) {
  float d[COLUMNS / 2];
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[i] = sums[row * COLUMNS + column];
  }
  constexpr int MOST = 128 / sizeof(TEST_TYPE), SOME = COLUMNS < MOST ? COLUMNS : MOST;
  ArkCtx c;
  struct Beside {
    float bias[8][2];
  };
  const auto beside = [=](int column) {
    Beside made = {};
    for (int i = 0; i < SOME / 4; ++i) {
      const int at = column + i / 2 * 8 + i % 2;
      made.bias[i / 2][i % 2] = at < columns ? bias[at] : 0.0f;
    }
    return made;
  };
  const auto ahead = [=](int row, int column, bool there) {
    ArkPack<ark_u32, sizeof(TEST_TYPE) == 2 ? 4 : 2> pack = {};
    if (there) __builtin_memcpy(&pack, out + row * columns + column, sizeof(pack));
    return pack;
  };
  const auto two = [](int, const float* v, const Beside& held, int i, const ark_u32* rest,
                      float (&made)[2]) {
    for (int k = 0; k < 2; ++k) {
      const ark_u32 word = sizeof(TEST_TYPE) == 2 ? (k ? *rest >> 16 : *rest & 0xffffu)
                           : TEST_REST            ? rest[k] >> 16
                                                  : 0u;
      made[k] = v[k] + held.bias[i][k] + value(word);
    }
  };
  const auto aside = ark_matrix_aside<TEST_TYPE, SOME, REST>(0, 0, rows, columns, beside, ahead);
  ark_matrix_pairs<COLUMNS, SOME, REST, 1>(
      c, d, out, columns, 0, rows, columns, aside, beside, ahead, two);
}
extern "C" void run(const float* sums, const float* bias, TEST_TYPE* out, int rows, int columns) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      lane_of<TEST_COLUMNS, TEST_REST>(sums, bias, out, rows, columns);
    });
  }
  for (auto& each : lanes) each.join();
}
"""


def _between(text: str, begin: str, end: str) -> str:
    return text[text.index(begin) : text.index(end)]


@pytest.mark.parametrize(
    ("wide", "columns", "rest", "ctype"),
    [(128, 120, True, "Half"), (80, 80, False, "Half"), (48, 40, True, "float")],
)
def test_each_pair_meets_its_operands(
    tmp_path: Path, wide: int, columns: int, rest: bool, ctype: str
) -> None:
    """Each pair of results is combined with the right elements of the other operands. Rounding is
    not tested: all numbers are exact.
    """
    store = resources.files("ark_cuda").joinpath("matrix_store.h").read_text()
    slab = _between(
        store, "ARK_DEVICE ark_u32 ark_matrix_slab_at", "// Writes a lane's pairs of 16-bit"
    )
    text = WARP.read_text() + CALLS + slab + inline.header("pairs.h") + RUN
    source, library = tmp_path / "pairs.cpp", tmp_path / "pairs.so"
    defined = f"#define TEST_COLUMNS {wide}\n#define TEST_REST {str(rest).lower()}\n"
    source.write_text(f"{defined}#define TEST_TYPE {ctype}\n{text}")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    rng = np.random.default_rng(wide)
    # Whole numbers, whose sums are exact in bf16.
    sums, bias = (rng.integers(-40, 40, n).astype(np.float32) for n in ((16, wide), (wide,)))
    before = rng.integers(-40, 40, (16, columns)).astype(np.float32)
    want = before.copy()
    added = bias[:columns] + (before[:WARP_ROWS] if rest else 0)
    want[:WARP_ROWS] = sums[:WARP_ROWS, :columns] + added
    stored = to_bf16 if ctype == "Half" else np.array
    out = stored(before)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (sums, bias, out))
    ctypes.CDLL(str(library)).run(*pointers, WARP_ROWS, columns)
    np.testing.assert_array_equal(out, stored(want))
