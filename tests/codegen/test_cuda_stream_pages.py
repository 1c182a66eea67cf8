"""Copies of keys and values from the pages of a paged cache to a stage in shared memory, by the
lanes of the loading warp. The device code runs on the host, lane by lane. Results are compared with
the rows in NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark.backend.codegen import layout
from tests.declarations import cut

HEADS, WIDTH, POOL, STEP = 3, 8, 40, 64  # of fp16
ROW, STAGE = 2 * WIDTH, 2 * STEP * 2 * WIDTH

HOST = f"""
#include <cstdint>
#include <cstring>
#define ARK_DEVICE static inline
typedef uint32_t ark_u32;
typedef uint64_t ark_u64;
typedef int32_t ark_i32;
{layout.structures()}
constexpr ark_u32 ARK_STAGE_BYTES = {STAGE}u;
constexpr int ARK_STREAM_POLICY = 0;
struct ArkRingAt {{ uint32_t full, empty, slots; }};
static int lane;
static char* ring;
static ark_u32 copied;
static int ark_lane() {{ return lane; }}
static void ark_bulk_copy(ark_u32 to, ark_u64 from, ark_u32 bytes, ark_u32, int) {{
  memcpy(ring + to, reinterpret_cast<const char*>(from), bytes);
  copied += bytes;
}}
"""

CALLS = """
// One stage into slot 1 of the ring; returns how many bytes were copied.
extern "C" ark_u32 run(const ArkGrowth* g, ark_u32 first, ark_u32 end, char* to) {
  ring = to, copied = 0;
  for (lane = 0; lane < 32; ++lane) {
    const ark_u32 number = ark_stream_page(*g, first, end);
    ark_fill_pages(ArkRingAt{0, 0, 0}, *g, 1u, first, end, number);
  }
  return copied;
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pages")
    source, library = folder / "pages.cpp", folder / "pages.so"
    text = resources.files("ark_cuda").joinpath("stream_growth.h").read_text()
    body = cut(text, "ark_u32 ark_stream_page(", "bool ark_stream_growth(")
    source.write_text(HOST + body + CALLS)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("page", [4, 16, 48, 256])
def test_stage_has_the_rows_of_its_pages(device: ctypes.CDLL, page: int) -> None:
    """The lanes of the loading warp copy the keys and values of one part of the positions, which
    may begin and end in the middle of a page. An invalid page number is read as page 0.
    """
    rng = np.random.default_rng(page)
    keys, values = rng.standard_normal((2, POOL, HEADS, page, WIDTH)).astype(np.float16)
    table = rng.permutation(POOL).astype(np.int32)[: max(3, -(-200 // page))]
    table[1] = POOL
    numbers = np.where(table < POOL, table, 0)
    head = 2
    growth = np.zeros(1, layout.dtype("ArkGrowth"))
    offset = head * page * ROW
    growth["address"], growth["beside"] = keys.ctypes.data + offset, values.ctypes.data + offset
    growth["table"], growth["row"], growth["step"] = table.ctypes.data, ROW, STEP
    growth["page"], growth["pitch"], growth["pages"] = page, HEADS * page * ROW, POOL
    rows = [cache[numbers, head].reshape(-1, WIDTH) for cache in (keys, values)]
    for first, count in ((0, 64), (0, 1), (13, 64), (16, 32), (47, 3), (90, 63), (5, 0)):
        ring = np.zeros(2 * STAGE, np.uint8)
        given = (ctypes.c_void_p(a.ctypes.data) for a in (growth, ring))
        copied = device.run(next(given), first, first + count, next(given))
        assert copied == 2 * count * ROW
        stage = ring[STAGE:].view(np.float16).reshape(2, STEP, WIDTH)
        for got, want in zip(stage, rows, strict=True):
            np.testing.assert_array_equal(got[:count], want[first : first + count])
        assert not ring[:STAGE].any() and not stage[:, count:].any()
