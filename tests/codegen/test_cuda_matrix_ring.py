"""When the prefetching thread of the variant `matrix` prefetches a stage to L2: only if the loading
thread has not loaded it yet, at the pace of memory, and while the loading thread loads nothing. The
code runs on the host with a simulated clock.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from tests.declarations import cut

pytest.importorskip("ark_cuda")

from ark_cuda.tasks.matrix_ring import PREFETCH_PERIOD_STAGES as PERIOD

HOST = r"""
#include <cstdint>
#define ARK_DEVICE static inline
typedef uint32_t ark_u32;
typedef uint64_t ark_u64;
constexpr ark_u32 ARK_MATRIX_AHEAD = 16u, ARK_MATRIX_PACE = PERIOD;
struct ArkMatrixLoad { ark_u32 loaded, walked, clock; };
static struct { ark_u32 loaded; } ark_matrix;
static ark_u64 now, ends;
static const ark_u32* words;  // by microsecond: what the loading thread has stored
static ark_u32 ark_clock() { return static_cast<ark_u32>(now * 7u / 4u); }  // 1.75 GHz
static ark_u32 ark_shared_word(const ark_u32*) { return words[now / 1000u]; }
static bool ark_matrix_left() { return now >= ends; }
static void __nanosleep(unsigned ns) { now += ns; }
"""

CALLS = r"""
// Waits for a stage from time 0 on. Returns the time in ns: as it is if the stage is to be
// prefetched, plus 1 million if it is loaded, plus 2 million if the computing warps have left.
extern "C" uint32_t due(uint32_t walked, uint32_t ns, const uint32_t* stored,
                        uint32_t microseconds) {
  now = 0u, words = stored, ends = 1000u * microseconds;
  ArkMatrixLoad load{stored[0], walked, 0u};
  bool wanted;
  if (!ark_matrix_due(load, ns, wanted)) return 2000000u + now;
  return (wanted ? 0u : 1000000u) + now;
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("ahead")
    files = resources.files("ark_cuda")
    matrix, barriers = (files.joinpath(name).read_text() for name in ("matrix.h", "barriers.h"))
    text = cut(barriers, "ark_u32 ark_clocks(", "ark_u32 ark_clock()")
    text += cut(matrix, "bool ark_matrix_due(", "void ark_box_prefetch(")
    source, library = folder / "ahead.cpp", folder / "ahead.so"
    host = HOST.replace("PERIOD", f"{PERIOD}u")
    source.write_text(f"{host}{text}{CALLS}")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def due(device: ctypes.CDLL, walked: int, loaded: list[int], ns: int = 450) -> int:
    """Waits for the stage after `walked` stages. loaded: by microsecond, the number of stages that
    the loading thread has loaded.
    """
    words = (ctypes.c_uint32 * (len(loaded) + 1))(*(n << 8 for n in [*loaded, loaded[-1]]))
    return device.due(walked, ns, words, len(loaded))


def test_stage_is_prefetched_in_the_time_of_several(device: ctypes.CDLL) -> None:
    idle = [5] * 40
    for ns in (450, 600):
        assert 0 <= due(device, 5, idle, ns) - PERIOD * ns <= 50
    assert due(device, 4, idle) == 1_000_000  # is loaded


def test_nothing_is_prefetched_while_stages_are_loaded(device: ctypes.CDLL) -> None:
    busy = [*range(5, 25), *[24] * 20]
    assert 0 <= due(device, 29, busy) - 19_000 - PERIOD * 450 <= 100
    assert 0 <= due(device, 9, busy) - 1_000_000 - 5_000 <= 50  # loaded before its turn


def test_at_most_16_stages_are_prefetched(device: ctypes.CDLL) -> None:
    assert due(device, 21, [5] * 20) >= 2_000_000  # 17 stages ahead
    assert due(device, 20, [5] * 20) < 1_000_000
