"""The loading warp of the operand stream, which copies weights to a ring of slots in shared memory.
One pass of the warp over the ring starts several copies, each by another lane. The device code runs
on the host: the 32 lanes are contexts that take turns at the warp's votes, and copies arrive and
stages are used at random between tests of barriers.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from tests.declarations import cut

pytest.importorskip("ark_cuda")

HOST = r"""
#include <strings.h>
#include <ucontext.h>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>
#define ARK_DEVICE static inline
typedef uint32_t ark_u32;
typedef uint64_t ark_u64;
struct uint4 { uint32_t x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct ArkRingAt { uint32_t full, empty, slots; };
struct ArkParams { const uint4* fetches; const void* growths; };
struct ArkCtx { const ArkParams* p; };
struct ArkRange { uint32_t fetch_begin, fetch_end; };
struct ArkGrowth { ark_u64 length; };
struct ArkRecords { uint4 mine, next; uint32_t begin, end, prefetched, asked; };
struct ArkPieces { uint32_t count, pitch; };
constexpr ark_u64 ARK_STREAM_POLICY = 0;

// The lanes. Each takes its turn until it waits for the others at a vote.
static ucontext_t scheduler, contexts[32];
static int lane_now;
static uint32_t arrived, turn, votes, result;
static int ark_lane() { return lane_now; }
static uint32_t ballot(bool x) {
  const uint32_t mine = turn;
  votes |= static_cast<uint32_t>(x) << lane_now;
  if (++arrived == 32) {
    result = votes, votes = arrived = 0, ++turn;
  }
  const int lane = lane_now;
  do {
    swapcontext(&contexts[lane], &scheduler);
  } while (turn == mine);
  return result;  // no lane reaches the next vote's end before all have read this result
}
static uint32_t __ballot_sync(uint32_t, bool x) { return ballot(x); }
static bool __all_sync(uint32_t, bool x) { return ballot(x) == ~0u; }
static uint32_t words[32];
static uint32_t __shfl_sync(uint32_t, uint32_t v, uint32_t from) {
  words[lane_now] = v;
  ballot(true);
  const uint32_t got = words[from];
  ballot(true);
  return got;
}
static int __ffs(int v) { return ffs(v); }
static uint32_t ark_clock() { return 0; }

// The ring: each slot's expected bytes and phases, and its stage from the list of records.
enum State { FREE, EXPECTED, COPIED, LANDED };
struct Slot { State state; uint32_t bytes, full, empty, stage; };
static Slot slots[64];
static uint32_t begun, in_flight, most, error, seed, arrive, use, disorder;
static void fail(uint32_t why) { if (error == 0) error = why; }
static uint32_t random_below(uint32_t n) {
  seed = seed * 1664525u + 1013904223u;
  return (seed >> 8) % n;
}
static void world() {
  std::vector<uint32_t> copied, landed;
  for (uint32_t s = 0; s < ARK_RING_DEPTH; ++s) {
    if (slots[s].state == COPIED) copied.push_back(s);
    if (slots[s].state == LANDED) landed.push_back(s);
  }
  if (!copied.empty() && random_below(100) < arrive) {
    std::sort(copied.begin(), copied.end(),
              [](uint32_t a, uint32_t b) { return slots[a].stage < slots[b].stage; });
    const uint32_t n = static_cast<uint32_t>(copied.size());
    Slot& slot = slots[copied[random_below(n < disorder ? n : disorder)]];
    slot.state = LANDED, ++slot.full, --in_flight;
  }
  if (!landed.empty() && random_below(100) < use) {
    Slot& slot = slots[landed[random_below(landed.size())]];
    slot.state = FREE, ++slot.empty;
  }
}
static bool ark_barrier_tested_at(uint32_t at, uint32_t parity) {
  world();
  const Slot& slot = slots[at % 4096 / 8];
  return ((at < 8192 ? slot.full : slot.empty) & 1u) != parity;
}
static bool ark_barrier_passed_at(uint32_t at, uint32_t parity) {
  return ark_barrier_tested_at(at, parity);
}
static bool ark_slot_free(const ArkRingAt& at, uint32_t slot, uint32_t round) {
  while (!__all_sync(0, ark_barrier_passed_at(at.empty + slot * 8u, (round + 1u) & 1u))) {
  }
  return true;
}
static bool ark_slot_free_prefetching(const ArkRingAt& at, uint32_t slot, uint32_t round,
                                      ArkRecords&, uint32_t) {
  return ark_slot_free(at, slot, round);
}
static bool ark_slot_filled(ArkCtx&, uint32_t slot, uint32_t round) {
  while (!__all_sync(0, ark_barrier_passed_at(4096u + slot * 8u, round & 1u))) {
  }
  return true;
}
static bool ark_slot_engine(uint64_t address, uint32_t bytes) {
  return ((address | bytes) & 15u) == 0u;
}
static void ark_stage_expects(uint32_t full, uint32_t bytes) {
  Slot& slot = slots[full % 4096 / 8];
  if (slot.state != FREE) fail(1);
  slot.state = EXPECTED, slot.bytes = bytes;
}
static bool ark_prepare_slot(ArkCtx&, const ArkRingAt& at, uint32_t slot, uint64_t, uint32_t size) {
  if (ark_lane() == 0) ark_stage_expects(at.full + slot * 8u, size);
  return true;
}
static bool arrived_at(uint32_t stage) {
  const Slot& slot = slots[stage % ARK_RING_DEPTH];
  return slot.stage != stage || slot.state != COPIED;
}
// The address of stage number s is 16 s, or 16 s + 8 if hardware cannot copy it.
static void ark_bulk_copy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t full, uint64_t) {
  const uint32_t at = full % 4096 / 8, stage = static_cast<uint32_t>(from / 16);
  Slot& slot = slots[at];
  if (slot.state != EXPECTED || slot.bytes != bytes) fail(2);
  if (at != begun % ARK_RING_DEPTH || to != 65536u + at * ARK_STAGE_BYTES) fail(3);
  if (stage != begun++) fail(4);
  slot.state = COPIED, slot.stage = stage;
  // If n copies may be in flight beside this one, the n-th before it has arrived. While the ring is
  // almost empty, it suffices that the one before that has.
  const bool halves = bytes <= ARK_SMALL_STAGE && from % 16 == 0;
  const uint32_t n = ARK_IN_FLIGHT + (halves ? ARK_SMALL_MORE : 0);
  if (stage >= n && !arrived_at(stage - n)) {
    if (!ARK_STARVES || (stage > n && !arrived_at(stage - n - 1))) fail(5);
  }
  if (++in_flight > most) most = in_flight;
}
static void ark_fill_slot(const ArkRingAt& at, uint32_t slot, uint64_t address, uint32_t bytes) {
  if (ark_lane() == 0) {
    ark_bulk_copy(at.slots + slot * ARK_STAGE_BYTES, address, bytes, at.full + slot * 8u, 0);
  }
}
static bool ark_stream_boxed(uint32_t) { return false; }
static ArkPieces ark_stream_pieces(uint32_t) { return {1u, 0u}; }
static void ark_fill_box(const ArkRingAt&, uint32_t, uint64_t, uint32_t, uint32_t) { abort(); }
static void ark_fill_pieces(const ArkRingAt&, uint32_t, uint64_t, uint32_t, ArkPieces) { abort(); }
static ArkGrowth ark_from_lane(const ArkGrowth& g, uint32_t) { return g; }
static bool ark_stream_begun(const ArkCtx&) { abort(); }
static bool ark_stream_growth(ArkCtx&, const ArkRingAt&, const ArkGrowth&, uint32_t, uint32_t&) {
  abort();
}
static ArkRingAt ark_ring_at() { return {4096u, 8192u, 65536u}; }
"""

CALLS = r"""
static std::vector<uint4> records;
static uint32_t every;  // stages of an iteration
static bool finished[32];
static void lane_main() {
  const ArkParams params = {records.data(), nullptr};
  ArkCtx c = {&params};
  uint32_t issued = 0;
  for (uint32_t first = 0; first < records.size(); first += every) {
    const uint32_t end = first + every;
    const ArkRange range = {first, end < records.size() ? end : uint32_t(records.size())};
    if (!ark_stream_iteration(c, range, issued)) fail(6);
    if (issued >= 2u * ARK_STAGE_PERIOD) fail(7);
  }
  finished[lane_now] = true;
}

// Streams `count` stages in iterations of `stages`. small: percent of stages of half a slot. odd:
// percent that hardware cannot copy. arriving, using: percent of tests at which a copy arrives and
// a stage is used. among: each copy that arrives is one of so many that began first. Returns 0, or
// the number of the check that failed.
extern "C" uint32_t run(uint32_t start, uint32_t count, uint32_t stages, uint32_t small,
                        uint32_t odd, uint32_t arriving, uint32_t using_, uint32_t among,
                        uint32_t* seen) {
  seed = start, arrive = arriving, use = using_, disorder = among, every = stages;
  begun = in_flight = most = error = arrived = turn = votes = 0;
  for (bool& f : finished) f = false;
  for (Slot& slot : slots) slot = {};
  records.clear();
  for (uint32_t s = 0; s < count; ++s) {
    const uint32_t bytes = random_below(100) < small ? ARK_STAGE_BYTES / 2 : ARK_STAGE_BYTES;
    records.push_back({16u * s + (random_below(100) < odd ? 8u : 0u), 0u, bytes, 0u});
  }
  static std::vector<char> stacks(32 << 16);
  for (int lane = 0; lane < 32; ++lane) {
    getcontext(&contexts[lane]);
    contexts[lane].uc_stack = {&stacks[lane << 16], 0, 1 << 16};
    contexts[lane].uc_link = &scheduler;
    makecontext(&contexts[lane], lane_main, 0);
  }
  for (uint32_t left = 32; left > 0 && error == 0;) {
    for (lane_now = 0; lane_now < 32 && error == 0; ++lane_now) {
      if (finished[lane_now]) continue;
      swapcontext(&scheduler, &contexts[lane_now]);
      if (finished[lane_now]) --left;
    }
  }
  *seen = most;
  return error != 0 ? error : begun == count ? 0 : 8;
}
"""


@dataclass(frozen=True)
class Ring:
    """A ring's shape. lead: number of warps that neither compute nor load."""

    slots: int
    in_flight: int
    lead: int = 1

    def build(self, folder: Path) -> ctypes.CDLL:
        files = resources.files("ark_cuda")
        stream, ring = (files.joinpath(name).read_text() for name in ("stream.h", "ring.h"))
        text = cut(stream, "constexpr ark_u32 ARK_STARVING", "#ifndef ARK_HAS_GROWTH")
        text += cut(ring, "bool ark_stream_landed(", "ARK_DEVICE bool ark_slot_engine(")
        text += cut(
            stream, "constexpr ark_u32 ARK_PASS_STAGES", "ARK_DEVICE bool ark_stream_needed("
        )
        source, library = folder / "pass.cpp", folder / "pass.so"
        constants = (
            f"constexpr int ARK_IN_FLIGHT = {self.in_flight}, ARK_RING_DEPTH = {self.slots};\n"
            f"constexpr int ARK_WARPS = 10, ARK_BLOCK_WARPS = {11 + self.lead};\n"
            "constexpr int ARK_STAGE_BYTES = 1024, ARK_STREAM_GROWS = 0, ARK_STREAM_CUTS = 0;\n"
            "constexpr bool ARK_SLOW_MEMORY = false, ARK_PREFETCH_ON = false;\n"
            # Small, so that stage numbers start again several times.
            "constexpr uint32_t ARK_STAGE_PERIOD = 4 * ARK_RING_DEPTH;\n"
        )
        host = HOST.replace("// The ring:", f"{constants}// The ring:", 1)
        first, functions = host.split("static bool ark_slot_free(", 1)
        constexprs, rest = text.split("// Called by the whole warp.", 1)
        names = f"{first}{constexprs}static bool ark_slot_free({functions}"
        source.write_text(f"{names}// Called by the whole warp.{rest}{CALLS}")
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


RINGS = (Ring(20, 5), Ring(12, 3), Ring(13, 2), Ring(10, 3), Ring(12, 8), Ring(4, 2, lead=0))


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_stages_are_copied_in_order_to_free_slots(tmp_path: Path, ring: Ring) -> None:
    device = ring.build(tmp_path)
    most = ctypes.c_uint32()
    for seed in range(12):
        small, odd = (0, 50, 100)[seed % 3], (0, 10)[seed % 2]
        arriving, using = ((50, 50), (5, 90), (90, 5), (20, 20))[seed // 3 % 4]
        got = device.run(seed, 1000, 61, small, odd, arriving, using, 3, ctypes.byref(most))
        assert got == 0, (seed, got)


def test_slow_memory_has_as_many_copies_in_flight_as_may_be(tmp_path: Path) -> None:
    device = Ring(20, 5).build(tmp_path)
    most = ctypes.c_uint32()
    # The ring is almost empty, so one more copy is in flight. Of half slots, ten are.
    assert device.run(1, 300, 50, 0, 0, 2, 90, 1, ctypes.byref(most)) == 0 and most.value == 6
    assert device.run(1, 300, 50, 100, 0, 2, 90, 1, ctypes.byref(most)) == 0 and most.value == 10
