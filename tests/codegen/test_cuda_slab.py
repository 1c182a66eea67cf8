"""The function that copies a warp's results from its slab (its part of shared memory) to rows in
memory. Some rows have a length that is a multiple of 16 bytes, others do not. It runs on the host,
lane by lane. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from tests.cases.cuda_boxes import WARP
from tests.cases.cuda_slab import TYPES
from tests.declarations import cut

WARP_ROWS = 13  # of 16

CALLS = r"""
static bool ark_aligned(ark_u64 bits) { return bits % 16 == 0; }
template <int N, typename T>
static void ark_store_pack(T* to, const ArkPack<T, N>& pack) {
  if (reinterpret_cast<ark_u64>(to) % sizeof(pack) != 0) std::abort();
  __builtin_memcpy(to, &pack, sizeof(pack));
}
"""
RUN = r"""
// CARRIED: the pieces at which two slabs of a row meet are stored as one.
template <bool CARRIED, typename T>
static void store(const T* values, T* out, int pitch, int rows, int columns) {
  constexpr int WIDE = 128 / sizeof(T), PIECE = 16 / sizeof(T);
  static ArkMatrixRest rests[32];
  for (int q = 0; q < 2 * WIDE; q += WIDE) {
    alignas(128) char slab[2048];
    for (int i = 0; i < 16 * WIDE; ++i) {
      const int row = i / WIDE, at = i % WIDE;
      char* to = slab + row * 128 + ((at / PIECE ^ (row & 7)) << 4) + at % PIECE * sizeof(T);
      *reinterpret_cast<T*>(to) = values[row * 2 * WIDE + q + at];
    }
    for (lane = 0; lane < 32; ++lane) {
      if (!CARRIED) {
        ark_matrix_slab_store<2 * WIDE>(slab, out, pitch, 0, q, rows, columns);
      } else if (q == 0) {
        ark_matrix_slab_scatter<true, false>(slab, out, pitch, rows, columns, rests[lane]);
      } else {
        ark_matrix_slab_scatter<false, true>(
            slab, out + q, pitch, rows, columns - q, rests[lane]);
      }
    }
  }
}
extern "C" void store2(const uint16_t* v, uint16_t* out, int pitch, int rows, int columns) {
  store<false>(v, out, pitch, rows, columns);
}
extern "C" void store4(const float* v, float* out, int pitch, int rows, int columns) {
  store<false>(v, out, pitch, rows, columns);
}
extern "C" void carry2(const uint16_t* v, uint16_t* out, int pitch, int rows, int columns) {
  store<true>(v, out, pitch, rows, columns);
}
extern "C" void carry4(const float* v, float* out, int pitch, int rows, int columns) {
  store<true>(v, out, pitch, rows, columns);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = resources.files("ark_cuda").joinpath("matrix_store.h").read_text()
    slab = cut(text, "ark_matrix_shifted(", "void ark_matrix_store_from(")
    source = tmp_path_factory.mktemp("slab") / "slab.cpp"
    source.write_text("#include <cstdlib>\n" + WARP.read_text() + TYPES + CALLS + slab + RUN)
    built = source.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", built], check=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("function", ["store", "carry"])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_each_element_is_stored_once_where_it_belongs(
    library: ctypes.CDLL, dtype: type, function: str
) -> None:
    size = np.dtype(dtype).itemsize
    store, wide = getattr(library, f"{function}{size}"), 256 // size
    rng = np.random.default_rng(size)
    values = rng.integers(1, 60000, (16, wide)).astype(dtype)
    for pitch in range(wide, wide + 9):
        for begin in range(8):
            for columns in (wide, wide - 1, wide // 2 + 3, wide // 2, 5):
                memory = np.zeros(16 * pitch + 64, dtype)
                first = -(memory.ctypes.data // size) % (16 // size) + begin
                out = memory[first : first + 16 * pitch].reshape(16, pitch)
                want = np.zeros_like(out)
                want[:WARP_ROWS, :columns] = values[:WARP_ROWS, :columns]
                places = (a.ctypes.data_as(ctypes.c_void_p) for a in (values, out))
                store(*places, pitch, WARP_ROWS, columns)
                np.testing.assert_array_equal(out, want)
                assert not memory[:first].any() and not memory[first + 16 * pitch :].any()
