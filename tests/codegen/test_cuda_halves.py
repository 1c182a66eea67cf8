"""Rotates heads by halves in the registers of a product's sums. The device code runs on the host:
32 threads are a warp's lanes, whose sums are arranged as PTX describes for wgmma, and results are
compared with NumPy. NVRTC compiles it without spills.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda import backend, machines
from ark_cuda.tasks import inline

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from tests import kept
from tests.cases.cuda_boxes import WARP, to_bf16
from tests.cases.cuda_slab import CALLS
from tests.cases.rotary_products import Projection
from tests.slow import slow

ROWS, POSITIONS = 13, 5  # rows of a warp's 16; rows of the cosines and sines

HELD = r"""
template <typename T, int N>
struct ArkWords {
  ArkPack<ark_u32, N / 2> words;
};
template <int N>
static ArkWords<Half, N> ark_held(const Half*) {
  return {};
}
static void ark_hold(ArkWords<Half, 2>& to, const Half* p) {
  if (reinterpret_cast<ark_u64>(p) % 4 != 0) __builtin_trap();
  __builtin_memcpy(&to, p, 4);
}
static ArkPack<float, 2> ark_unpacked(const ArkWords<Half, 2>& held) {
  const ark_u32 words[2] = {held.words.v[0] << 16, held.words.v[0] & 0xffff0000u};
  ArkPack<float, 2> made;
  __builtin_memcpy(&made, words, 8);
  return made;
}
static float ark_get(const float* p, int i) { return p[i]; }
static void ark_put(Half* p, int i, float v) {
  const ark_u32 both = ark_pack_pair(p, v, 0.0f);
  __builtin_memcpy(p + i, &both, 2);
}
"""
RUN = r"""
static void lane_of(const float* sums, const Half* cosines, const Half* sines, Half* out, int rows,
                    int columns, bool aligned) {
  float d[TEST_COLUMNS / 2];
  for (int i = 0; i < TEST_COLUMNS / 2; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[i] = sums[row * TEST_COLUMNS + column];
  }
  ArkCtx c;
  const auto row = [=](int high) { return (lane / 4 + 8 * high) % TEST_POSITIONS; };
  const auto turned = [=](int from) {
    return ark_matrix_turn<TEST_PITCH, TEST_PITCH>(cosines, sines, aligned, row, from);
  };
  const auto own = [](int at_row, int at_column, float* v) {
    for (int k = 0; k < 2; ++k) v[k] += 100 * at_row + at_column + k;
  };
  ark_matrix_store_halves<TEST_COLUMNS, TEST_WIDTH>(
      c, d, out, columns, 0, rows, columns, aligned, turned(0), turned, own);
}
extern "C" void run(const float* sums, const Half* cosines, const Half* sines, Half* out, int rows,
                    int columns, bool aligned) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      lane_of(sums, cosines, sines, out, rows, columns, aligned);
    });
  }
  for (auto& each : lanes) each.join();
}
"""


def library(folder: Path, columns: int, width: int, pitch: int) -> ctypes.CDLL:
    """The functions of the header, compiled for the host."""
    store = resources.files("ark_cuda").joinpath("matrix_store.h").read_text()
    slab = store[: store.index("// Returns 16 bytes of the 32 bytes")]
    fill = slab[slab.index("// Rounds a warp's 16 rows") :]
    places = slab[slab.index("ARK_DEVICE ark_u32 ark_matrix_slab_at") :]
    places = places[: places.index("// Writes a lane's pairs")]
    text = inline.header("halves.h").replace(
        'asm volatile("shr.u32 %0, %1, 20;" : "=r"(zero) : "r"(q));', "zero = q >> 20;"
    )
    sizes = {"COLUMNS": columns, "WIDTH": width, "PITCH": pitch, "POSITIONS": POSITIONS}
    defined = "".join(f"#define TEST_{name} {n}\n" for name, n in sizes.items())
    source, compiled = folder / "halves.cpp", folder / "halves.so"
    source.write_text(defined + WARP.read_text() + CALLS + HELD + places + fill + text + RUN)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", compiled], check=True)
    return ctypes.CDLL(str(compiled))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("wide", "columns", "width"), [(256, 192, 64), (256, 256, 128), (64, 64, 64)]
)
@pytest.mark.parametrize("aligned", [True, False])
def test_each_pair_is_rotated_by_its_angle(
    tmp_path: Path, wide: int, columns: int, width: int, aligned: bool
) -> None:
    """Each pair of a head is rotated by the angle of its row and column. The tables have fewer rows
    than the warp, so they are repeated. aligned: False if the tables begin at an odd element.
    """
    half, pitch = width // 2, width + (not aligned)
    rng = np.random.default_rng(wide + width)
    sums = rng.standard_normal((16, wide)).astype(np.float32)
    tables = to_bf16(rng.uniform(-1, 1, (2, POSITIONS * pitch + 2)).astype(np.float32))
    out = np.zeros((16, columns), np.uint16)
    begin = int(not aligned)
    given = [sums, tables[0][begin:], tables[1][begin:], out]
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in given)
    library(tmp_path, wide, width, pitch).run(*pointers, ROWS, columns, aligned)

    place = np.minimum(np.arange(16), ROWS - 1)[:, None] * 100 + np.arange(columns)
    heads = (sums[:, :columns] + place).reshape(16, -1, 2, half)
    cosines, sines = (
        from_bf16(t[begin : begin + POSITIONS * pitch]).reshape(POSITIONS, pitch)[:, :half]
        for t in tables
    )
    cosine, sine = (t[np.arange(16) % POSITIONS][:, None] for t in (cosines, sines))
    low, high = heads[:, :, 0], heads[:, :, 1]
    want = np.stack([low * cosine - high * sine, high * cosine + low * sine], 2)
    want = want.reshape(16, columns)[:ROWS]
    np.testing.assert_allclose(from_bf16(out[:ROWS]), want, rtol=2**-7, atol=2**-7)
    assert not out[ROWS:].any()


@pytest.mark.parametrize(
    ("machine", "projection"),
    [
        ("h200", Projection(8, 512, 1024, 64, 64)),
        pytest.param("h200", Projection(8, 512, 1024, 32, 128), marks=slow),
        pytest.param("h200", Projection(2, 512, 1024, 16, 64, True, 2), marks=slow),
        pytest.param("b200", Projection(8, 512, 1024, 64, 64), marks=slow),
    ],
)
def test_rotated_sums_stay_in_registers(machine: str, projection: Projection) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    planned = plan(projection.graph(), machines.MODELS[machine], {"variant": "matrix"})
    assert [op.params["rotary"] for op in planned.ops if op.kind == "matmul"] == [projection.width]
    target = machine_of(planned)
    emitted = write(planned, target, backend.dialect(target.arch))
    assert "  ark_matrix_store_halves<" in emitted.source.text
    binary = kept.binary(backend, emitted.source, Target(target.arch, target.threads))
    lines = binary.log.splitlines()
    spilled = [b for a, b in itertools.pairwise(lines) if " ark_loop" in a and " spill " in b]
    assert spilled and all(" 0 bytes spill stores, 0 bytes spill loads" in b for b in spilled)
    assert "serialized" not in binary.log
