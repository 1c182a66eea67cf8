"""Prefetches of weights to L2 by the operand stream, which also copies them from there to a ring of
stages in shared memory. The code runs on the host with a simulated clock. One thread represents a
warp's lanes, and record k of a list of stages is the number k.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from tests.declarations import cut

pytest.importorskip("ark_cuda")

LISTED_STAGES = 64  # stages of a list

HOST = r"""
#include <cstdint>
#define ARK_DEVICE static inline
typedef uint32_t ark_u32;
struct uint4 { uint32_t x, y, z, w; };
struct ArkRingAt { uint32_t full, empty, slots; };
static uint32_t now, frees, asked[64], at[64], count;
static uint32_t ark_clock() { return now += 10; }
static bool __all_sync(uint32_t, bool x) { return x; }
static uint32_t __shfl_sync(uint32_t, uint32_t v, uint32_t lane) { return v + lane; }
static uint32_t ark_lane() { return 0; }
static bool ark_barrier_tested_at(uint32_t, uint32_t) { return now >= frees; }
static void ark_prefetch_stage(const uint4& record) { asked[count] = record.x, at[count++] = now; }
static bool ark_slot_free(const ArkRingAt&, uint32_t, uint32_t) {
  if (now < frees) now = frees;
  return true;
}
"""

CALLS = r"""
// Stages `first` to `last` of `end` go into the ring; the first has to wait until the clock is
// `full`, then one goes every `every` clocks. Which stages were asked for, and when.
extern "C" uint32_t run(uint32_t first, uint32_t last, uint32_t end, uint32_t full, uint32_t every,
                        uint32_t* stages, uint32_t* clocks) {
  now = count = 0;
  ArkRecords r = {{0, 0, 0, 0}, {32, 0, 0, 32}, 0, end, 0, 0u - 100000u};
  for (uint32_t place = first; place <= last; ++place) {
    frees = place == first ? full : 0;
    if (!ark_slot_free_prefetching(ArkRingAt{}, 0, 0, r, place)) return ~0u;
    now += every;
  }
  for (uint32_t i = 0; i < count; ++i) stages[i] = asked[i], clocks[i] = at[i];
  return count;
}
"""


def build(
    folder: Path, runs: int, stage_ns: int = 624, slots: int = 12, mib: int = 2357
) -> ctypes.CDLL:
    """Compiles the prefetch code for the host. A list has 64 stages. runs: how many stages at its
    start are consecutive bytes; the later ones are boxes. slots: slots of the ring.

    mib: the MiB of weights that an iteration reads.
    """
    files = resources.files("ark_cuda")
    stream, barriers = (files.joinpath(name).read_text() for name in ("stream.h", "barriers.h"))
    text = cut(barriers, "ark_u32 ark_clocks(", "ark_u32 ark_clock()")
    text += cut(stream, "constexpr bool ARK_SLOW_MEMORY", "constexpr ark_u32 ARK_STARVING")
    source, library = folder / "prefetch.cpp", folder / "prefetch.so"
    # The simulated shuffle adds the lane to all words of a record; a real one adds it to the first
    # word only.
    constants = (
        f"constexpr int ARK_STAGE_NS = {stage_ns}, ARK_STREAM_RUNS = {int(runs > 0)};\n"
        f"constexpr int ARK_STREAM_CUTS = {int(runs < LISTED_STAGES)};\n"
        f"constexpr int ARK_RING_DEPTH = {slots}, ARK_STREAM_MIB = {mib};\n"
    )
    source.write_text(f"{HOST}{constants}{text}{CALLS}")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("runs"), LISTED_STAGES)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("boxes"), 0)


def asked(
    device: ctypes.CDLL, first: int, last: int, end: int, full: int, every: int
) -> tuple[list[int], list[int]]:
    stages, clocks = (ctypes.c_uint32 * 64)(), (ctypes.c_uint32 * 64)()
    count = device.run(first, last, end, full, every, stages, clocks)
    return list(stages[:count]), list(clocks[:count])


def paced(clocks: list[int], most: int = 1400) -> bool:
    """True if consecutive prefetches are apart by about the time of one stage at memory
    bandwidth.
    """
    return all(1200 <= b - a <= most for a, b in itertools.pairwise(clocks))


def test_full_ring_prefetches_the_next_stages_in_order(runs: ctypes.CDLL) -> None:
    stages, clocks = asked(runs, 30, 30, 60, 100_000, 0)
    assert stages == list(range(30, 46)) and paced(clocks)
    assert 700 <= clocks[0] <= 800  # a short wait asks for nothing
    assert asked(runs, 30, 30, 60, 600, 0) == ([], [])


def test_nothing_is_prefetched_past_the_last_stage(runs: ctypes.CDLL) -> None:
    assert asked(runs, 30, 30, 35, 100_000, 0)[0] == list(range(30, 35))


def test_stages_copied_from_l2_allow_further_prefetches(runs: ctypes.CDLL) -> None:
    # While the ring is full, for 9,500 clocks, seven stages are prefetched to L2. Then the ring
    # frees a slot every 800 clocks. A stage takes longer than that to arrive from memory.
    stages, clocks = asked(runs, 4, 31, 60, 9_500, 800)
    ahead = len([c for c in clocks if c <= 9_500])
    assert ahead == 7 and paced(clocks[:ahead])
    # Intervals between prefetches vary: the clock is read only once per stage, and after a late
    # prefetch the next one follows sooner.
    assert 1300 <= (clocks[-1] - clocks[ahead - 1]) / (len(clocks) - ahead) <= 1450
    # After about 14 stages in all, the ring has used up the lead of seven stages. From then on it
    # loads stages directly from memory, and no further stage is prefetched.
    assert stages == list(range(4, 4 + len(stages))) and 14 <= len(stages) <= 17


def test_large_models_runs_are_prefetched_more_slowly(runs: ctypes.CDLL, tmp_path: Path) -> None:
    large = build(tmp_path, LISTED_STAGES, mib=14_314)
    clocks = [asked(device, 30, 30, 60, 100_000, 0)[1] for device in (runs, large)]
    small, slow = (statistics.mean(b - a for a, b in itertools.pairwise(c)) for c in clocks)
    assert 1.09 < slow / small < 1.13


def test_ring_that_is_not_full_prefetches_nothing(runs: ctypes.CDLL, boxes: ctypes.CDLL) -> None:
    for device in (runs, boxes):
        assert asked(device, 0, 31, 60, 0, 2_000) == ([], [])


def test_boxes_are_prefetched_only_while_the_ring_is_full(boxes: ctypes.CDLL) -> None:
    stages, clocks = asked(boxes, 4, 31, 60, 9_500, 2_000)
    assert stages == list(range(4, 4 + len(stages))) and len(stages) >= 5
    assert all(c <= 9_500 for c in clocks)


def test_with_faster_memory_runs_are_prefetched_only_while_the_ring_is_full(tmp_path: Path) -> None:
    fast = build(tmp_path, LISTED_STAGES, 503)
    stages, clocks = asked(fast, 30, 30, 60, 100_000, 0)
    assert stages == list(range(30, 46)) and paced(clocks)
    assert 700 <= clocks[0] <= 800
    stages, clocks = asked(fast, 4, 31, 60, 9_500, 600)
    assert len(stages) >= 5 and all(c <= 9_500 for c in clocks)


def test_boxes_beside_runs_are_prefetched_like_runs(tmp_path: Path) -> None:
    mixed = build(tmp_path, 40)
    stages, clocks = asked(mixed, 30, 30, 60, 100_000, 0)
    assert stages == list(range(30, 42)) and paced(clocks) and clocks[0] >= 1200
    stages, clocks = asked(mixed, 4, 31, 60, 9_500, 600)  # on while stages come from L2
    assert clocks[-1] > 9_500


def test_boxes_of_a_shallow_ring_allow_further_prefetches(tmp_path: Path) -> None:
    shallow = build(tmp_path, 0, slots=10)
    stages, clocks = asked(shallow, 30, 30, 60, 100_000, 0)
    assert stages == list(range(30, 46)) and paced(clocks)
    stages, clocks = asked(shallow, 4, 31, 60, 9_500, 600)
    assert clocks[-1] > 9_500 and stages == list(range(4, 4 + len(stages)))


def test_with_faster_memory_boxes_and_runs_are_prefetched_like_boxes(tmp_path: Path) -> None:
    stages, _ = asked(build(tmp_path, 40, 503), 30, 30, 64, 100_000, 0)
    assert stages == list(range(30, 54))
