"""Transposes from or to short rows, which one thread holds completely. The device code runs on the
host, thread by thread, and is compared with NumPy. Also tests the condition for its use.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ark.backend import registry
from ark.plan import kind as kinds
from ark.plan.signature import OperandType, Signature
from ark.tasks import text

SHORT_ROWS = 5  # in tiles of two, the last of which is cut
HOST = r"""
#include <cstdint>
#define ARK_DEVICE static inline
#define ARK_THREADS 96
typedef uint64_t ark_u64;
typedef int64_t ark_i64;
typedef uint32_t ark_u32;
typedef int32_t ark_i32;
enum ArkRareNow { ark_rare };
struct ArkRareLater { bool found; };
struct ArkCtx { char* scratch; };
struct ArkTask { int coord[6]; };
#define ARK_SCRATCH(c) (c).scratch
#define ARK_SCRATCH_BYTES 65536
#define ARK_LOOP_BYTES 0
#define ARK_VECTOR_LOOP
static int tid;
static int ark_tid() { return tid; }
static void ark_sync() {}
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) ArkPack { T v[N]; };
template <typename T, int N>
struct ArkHeld {};
template <int N, typename T>
static ArkPack<T, N> ark_load_pack(const T* p) {
  return *reinterpret_cast<const ArkPack<T, N>*>(p);
}
template <int N, typename T>
static void ark_store_pack(T* p, const ArkPack<T, N>& pack) {
  *reinterpret_cast<ArkPack<T, N>*>(p) = pack;
}
static bool ark_aligned(ark_u64 address) { return (address & 15u) == 0u; }
"""
CALL = r"""
#define ONE(ROW, V, CHANNELS) \
  extern "C" void turn_##ROW##_##V##_##CHANNELS(const T* from, T* to, int row, int channel) { \
    typedef ArkTile<1, 2, ROW, CHANNELS / 2, 1, 5, ROW, CHANNELS> Tile; \
    ArkCtx c{}; \
    const ArkTask t{{0, row, 0, channel, 0, 0}}; \
    for (tid = 0; tid < ARK_THREADS; ++tid) { \
      ark_transpose_short<Tile, false, ROW, V, T>( \
          c, t, CHANNELS, \
          [&](int, int i1, int i2, int i3) { return from + (i1 * CHANNELS + i3) * ROW + i2; }, \
          [&](int, int i1, int i2, int i3) { return to + (i1 * ROW + i2) * CHANNELS + i3; }, \
          reinterpret_cast<ark_u64>(from) | reinterpret_cast<ark_u64>(to)); \
    } \
  } \
  extern "C" void back_##ROW##_##V##_##CHANNELS(const T* from, T* to, int row, int channel) { \
    typedef ArkTile<1, 2, CHANNELS / 2, ROW, 1, 5, CHANNELS, ROW> Tile; \
    ArkCtx c{}; \
    const ArkTask t{{0, row, channel, 0, 0, 0}}; \
    for (tid = 0; tid < ARK_THREADS; ++tid) { \
      ark_transpose_short<Tile, true, ROW, V, T>( \
          c, t, CHANNELS, \
          [&](int, int i1, int i2, int i3) { return from + (i1 * ROW + i3) * CHANNELS + i2; }, \
          [&](int, int i1, int i2, int i3) { return to + (i1 * CHANNELS + i2) * ROW + i3; }, \
          reinterpret_cast<ark_u64>(from) | reinterpret_cast<ark_u64>(to)); \
    } \
  }
typedef uint16_t T;
ONE(9, 8, 64) ONE(9, 1, 64) ONE(25, 4, 24) ONE(3, 8, 48)
"""
FORMS = [(9, 8, 64), (9, 1, 64), (25, 4, 24), (3, 8, 48)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("short")
    source, library = folder / "short.cpp", folder / "short.so"
    source.write_text(HOST + text.header("box.h") + text.header("transpose.h") + CALL)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def aligned(values: np.ndarray, shift: int = 0) -> np.ndarray:
    """A copy of an array that begins the given number of elements after a multiple of 16 bytes."""
    buffer = np.zeros(values.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 16 + 2 * shift
    shifted = buffer[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    shifted[...] = values
    return shifted


@pytest.mark.parametrize("way", ["turn", "back"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("row", "width", "channels"), FORMS)
def test_short_rows_are_transposed(
    device: ctypes.CDLL, row: int, width: int, channels: int, shift: int, way: str
) -> None:
    """Transposes from and to short rows equal NumPy's. shift: with 1, no row begins at a multiple
    of 16 bytes. way: whether the short rows are read ("turn") or written ("back").
    """
    rng = np.random.default_rng(row)
    short, long = (SHORT_ROWS, channels, row), (SHORT_ROWS, row, channels)
    first_shape, last_shape = (short, long) if way == "turn" else (long, short)
    given = aligned(rng.integers(0, 1 << 16, first_shape).astype(np.uint16), shift)
    turned = aligned(np.full(last_shape, 7, np.uint16), shift)
    turn = getattr(device, f"{way}_{row}_{width}_{channels}")
    for first in range(0, SHORT_ROWS, 2):
        for channel in (0, channels // 2):
            turn(
                ctypes.c_void_p(given.ctypes.data),
                ctypes.c_void_p(turned.ctypes.data),
                first,
                channel,
            )
    np.testing.assert_array_equal(turned, given.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        ((512, 512, 9), "bf16", "9, 8"),
        ((64, 60, 9), "bf16", "9, 4"),
        ((64, 64, 25), "bf16", "25, 4"),
        ((64, 64, 9), "fp32", "9, 4"),
        ((64, 64, 49), "bf16", None),  # long rows go through shared memory
    ],
)
def test_emitted_call_has_as_many_rows_as_fit_into_registers(
    shape: tuple[int, int, int], dtype: str, wanted: str | None
) -> None:
    rows, channels, row = shape
    operands = (
        OperandType(dtype, shape, (channels * row, row, 1)),
        OperandType(dtype, (rows, row, channels), (channels * row, channels, 1)),
    )
    params = {"perm": (0, 1, 3, 2), "tile": (1, 2, row, channels)}
    sig = Signature("transpose", params, operands)
    back = Signature("transpose", {**params, "tile": (1, 2, channels, row)}, operands[::-1])
    for way, one in (("false", sig), ("true", back)):
        source = kinds.get("transpose").source("turn", one, registry.machine("h100"))
        assert ("ark_transpose_short" in source) == (wanted is not None)
        assert wanted is None or f", {way}, {wanted}, " in source
    alone = kinds.get("transpose").source("turn", sig, registry.machine("cpu-2"))
    assert "ark_transpose_short" not in alone
