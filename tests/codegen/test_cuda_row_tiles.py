"""The conversion of quantised codes to pairs of 16-bit floats, for all codes, and products of one
input row with the rows of weights in a stage on matrix units. The device code runs on the host;
results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from ark.backend.codegen.writer import device_text
from ark.ir.dtype import CODES, RowType, bf16, fp16, fp32, row_type
from ark.ir.rows import row_bytes, row_values
from ark.tasks.row_values import HEADER
from tests.cases.cuda_boxes import HOST
from tests.cases.cuda_codes import CONVERTED, PAIRS
from tests.cases.cuda_tiles import HEAD

NAMES = {t.name: t for t in CODES}
# Codes, columns, group, type of scales, and rows of a stage.
CASES: list[tuple[str, int, int, Any, int]] = [
    ("int4", 1024, 128, bf16, 4),
    ("int4", 256, 128, bf16, 16),
    ("int4", 512, 128, bf16, 8),
    ("int4", 2048, 128, bf16, 1),
    ("int4", 1024, 32, fp16, 4),
    ("uint4", 2048, 64, fp32, 2),
    ("fp4", 512, 32, bf16, 8),
    ("int8", 1024, 1024, fp32, 4),
    ("int8", 1024, 32, fp16, 2),
    ("int8", 256, 32, fp16, 2),
    ("uint8", 512, 128, fp32, 16),
    ("fp8_e4m3", 2048, 2048, fp32, 2),
    ("fp8_e4m3", 2048, 128, fp32, 4),
    ("fp8_e5m2", 768, 768, fp32, 1),
]
# A type of rows that matrix units do not support: 96 columns are divided among eight warps, and 12
# columns are less than a group of 32.
NARROW = row_type(NAMES["int8"], 96, 32, fp16, False, fp16)
CALLS = r"""
static void ark_narrow(ark_f16* to, float a, float b) {
  to[0] = ark_f16{rounded(a)}, to[1] = ark_f16{rounded(b)};
}
// Stores the input as a warp of a task does.
template <class Tile, int K>
static void store(const float* given, ark_f16* x, float* blocks) {
  for (int first = 4 * lane; first < K + 4 * lane; first += ARK_INPUT_BLOCK) {
    float v[4] = {};
    for (int e = 0; e < 4; ++e) v[e] = first + e < K ? given[first + e] : 0.0f;
    ark_store_block<Tile, K>(x, blocks, first, first + 2, v);
  }
  together.arrive_and_wait();
}
template <class F>
static void warp(F work) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) lanes.emplace_back([&, i] { lane = i, work(); });
  for (auto& each : lanes) each.join();
}
template <class ROW, int R>
static void products(const void* w, const float* given, float* out) {
  typedef ArkRowTile<ROW, R, Half> Tile;
  static_assert(!Tile::NONE);
  std::vector<ark_f16> x(Tile::SIZE);
  std::vector<float> blocks((ROW::COLUMNS + ARK_INPUT_BLOCK - 1) / ARK_INPUT_BLOCK);
  warp([&] {
    store<Tile, ROW::COLUMNS>(given, x.data(), blocks.data());
    const ROW* rows = static_cast<const ROW*>(w);
    const float sum = ark_tile_products<R, Tile>(rows, x.data(), blocks.data());
    if (lane % (32 / R) == 0) out[lane / (32 / R)] = sum;
    if constexpr (R == 1) {  // a pair of rows that are stages of their own
      const int apart = 2 * sizeof(ROW);
      const float pair = ark_tile_products<2, Tile>(rows, x.data(), blocks.data(), apart);
      if (lane % 16 == 0) out[1 + lane / 16] = pair;
    }
  });
}
template <class ROW, int R>
static void unscaled(const float* given, uint16_t* out) {
  typedef ArkRowTile<ROW, R, ark_f16> Tile;
  static_assert(Tile::NONE);
  float blocks[1];
  warp([&] { store<Tile, ROW::COLUMNS>(given, reinterpret_cast<ark_f16*>(out), blocks); });
}
template <class C>
static void pairs(ark_u32 code, uint16_t* out) {
  const ark_u32 word = ARK_CODE_BITS<C> == 4 ? code * 0x11111111u : code * 0x01010101u;
  for (int j = 0; j < 16 / ARK_CODE_BITS<C>; ++j) {
    const ark_u32 pair = ark_code_pair(static_cast<const C*>(nullptr), word, j);
    out[2 * j] = pair, out[2 * j + 1] = pair >> 16;
  }
}
"""


def kinds() -> list[tuple[RowType, int]]:
    """The types of the cases, and rows of a stage."""
    return [
        (row_type(NAMES[name], columns, group, scales, False, bf16), rows)
        for name, columns, group, scales, rows in CASES
    ]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("rows")
    source, library = folder / "rows.cpp", folder / "rows.so"
    runs = "".join(
        f"  if (n == {n}) products<{dtype.storage}, {rows}>(w, x, out);\n"
        for n, (dtype, rows) in enumerate(kinds())
    )
    codes = "".join(
        f"  if (n == {n}) pairs<{t.storage}>(code, out);\n" for n, t in enumerate(CODES)
    )
    calls = (
        f'extern "C" void run(int n, const void* w, const float* x, float* out) {{\n{runs}}}\n'
        f'extern "C" void store(const float* x, uint16_t* out) {{\n'
        f"  unscaled<{NARROW.storage}, 2>(x, out);\n}}\n"
        f'extern "C" void codes(int n, ark_u32 code, uint16_t* out) {{\n{codes}}}\n'
    )
    elements = "".join(map(device_text, ("small_floats.h", "pack.h")))
    own = "".join(map(inline.header, ("linear_codes.h", "row_tiles.h")))
    source.write_text(HOST + HEAD + PAIRS + elements + HEADER + CONVERTED + own + CALLS + calls)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-fpermissive", "-w"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("number", range(len(CODES)), ids=lambda n: CODES[n].name)
def test_all_codes_become_their_values(device: ctypes.CDLL, number: int) -> None:
    dtype = CODES[number]
    count = 4 if dtype.bits == 8 else 8
    for code in range(1 << dtype.bits):
        out = np.zeros(count, np.uint16)
        pointer = out.ctypes.data_as(ctypes.c_void_p)
        device.codes(number, code, pointer)
        stored = np.array([code], np.uint8)
        if dtype.name == "int4":
            stored = np.array([code - 16 if code > 7 else code], np.int8).astype(ml_dtypes.int4)
        want = float(stored.view(dtype.numpy).astype(np.float32)[0])
        if not np.isfinite(want):
            continue  # no checkpoint has it
        np.testing.assert_array_equal(out.view(np.float16).astype(float), want, str(code))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n])))
def test_stage_of_rows_agrees_with_numpy(device: ctypes.CDLL, number: int) -> None:
    dtype, rows = kinds()[number]
    single = rows == 1
    rows = 3 if single else rows  # of a single row, the pair of the first row and the third, too
    rng = np.random.default_rng(number)
    low, high = {"int4": (-8, 8), "int8": (-128, 128)}.get(dtype.codes.name, (0, 16))
    codes = rng.integers(low, high, (rows, dtype.columns))
    if dtype.codes.name == "fp4" or dtype.codes in (NAMES["fp8_e4m3"], NAMES["fp8_e5m2"]):
        codes = rng.standard_normal((rows, dtype.columns)) * 2
    scales = rng.uniform(0.5, 1.5, (rows, dtype.groups))
    stored = row_bytes(dtype, codes, scales)
    # The input's blocks have very different magnitudes, and one block is all zeros.
    x = rng.standard_normal(dtype.columns).astype(np.float32)
    x[:128] *= np.float32(2.0**6)
    if dtype.columns > 512:
        x[256:384] = 0
        x[384:512] *= np.float32(2.0**-60)
    out = np.full(rows, np.nan, np.float32)
    base = np.zeros(stored.size + 16, np.uint8)  # rows begin at multiples of 16 bytes
    begin = -base.ctypes.data % 16
    base[begin : begin + stored.size] = stored.ravel()
    aligned = base[begin : begin + stored.size]
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (aligned, x, out)]
    device.run(number, *pointers)
    values, wide = row_values(dtype, stored).astype(np.float64), x.astype(np.float64)
    values = values[[0, 0, 2]] if single else values
    most = np.abs(values) @ np.abs(wide)
    np.testing.assert_array_less(np.abs(out - values @ wide), 3e-4 * most)


def test_rows_without_matrix_units_store_their_input_unscaled(device: ctypes.CDLL) -> None:
    x = np.random.default_rng(0).standard_normal(NARROW.columns).astype(np.float32)
    out = np.zeros(NARROW.columns, np.uint16)
    device.store(*(a.ctypes.data_as(ctypes.c_void_p) for a in (x, out)))
    np.testing.assert_array_equal(out.view(np.float16), x.astype(np.float16))
