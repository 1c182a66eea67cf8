"""Reads of packets (small stores of data together with a flag) in the kernel variant `roles`, run
on the host. A lane that has received all of its packets waits until its whole warp has, and does
not read packets again.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from tests.declarations import cut

pytest.importorskip("ark_cuda")

HOST = r"""
#include <cstdint>
#define ARK_DEVICE static inline
using ark_u32 = uint32_t;
using ark_u64 = uint64_t;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct ArkParams { ark_u64 budget_ns; };
struct ArkCtx { const ArkParams* p; ark_u32 iteration; bool failed; };
struct ArkSpin { ark_u32 spins, start; };
enum ArkVerdict { ARK_KEEP, ARK_TIMEOUT, ARK_ABORTED };
template <typename T> struct ArkShort { ark_u32 word; };
// The other lanes of the warp miss packets for so many rounds; in round `expires`, counted from 1,
// one of them has waited too long.
static int missing, expires, rounds, loads;
static bool spun;
static int __all_sync(unsigned, bool mine) {
  if (!spun) return mine && rounds >= missing;
  spun = false;
  return mine && rounds != expires;
}
static bool ark_failed(const ArkCtx& c) { return c.failed; }
static void ark_fail(ArkCtx&, ark_u32, ark_u32, ark_u32, ark_u32) { __builtin_trap(); }
static void ark_give_up(ArkCtx& c) { c.failed = true, missing = 0; }
static ArkVerdict ark_spin(const ArkParams*, ArkSpin&, ark_u64) {
  spun = true;
  if (++rounds > 100) __builtin_trap();
  return ARK_KEEP;
}
static void ark_packets_load(const ark_u64* p, ark_u64& first, ark_u64& second, bool) {
  ++loads, first = p[0], second = p[1];
}
static uint4 ark_shorts_load(const void* p) {
  ++loads;
  return *static_cast<const uint4*>(p);
}
template <typename T> static float ark_get(const T* p, int i) { return p[i]; }
static float ark_bits_float(ark_u32 v) { return static_cast<float>(v); }
static ark_u32 ark_short_epoch(const ArkCtx& c) { return (c.iteration + 1u) << 16; }
"""
CALLS = r"""
// Rounds that a lane waits, of which all packets are there; minus one if it gave up.
extern "C" int run(int is_short, int others, int after, int* reads) {
  alignas(16) ark_u64 pairs[4];
  alignas(16) ArkShort<float> fours[8];
  for (int i = 0; i < 4; ++i) pairs[i] = ark_u64{8} << 32 | static_cast<ark_u32>(i);
  for (int i = 0; i < 8; ++i) fours[i].word = 8u << 16 | static_cast<ark_u32>(i);
  const ArkParams p{1};
  ArkCtx c{&p, 7, false};
  missing = others, expires = after, rounds = loads = 0, spun = false;
  const auto there = [](int) { return true; };
  if (is_short) {
    uint4 seen[2];
    ark_load_fours<2>(c, fours, there, [&](int i) { return fours + 4 * i; }, seen);
    if (seen[1].w != fours[7].word) return -2;
  } else {
    float v[4];
    ark_load_pairs<2>(c, pairs, there, [&](int i) { return pairs + 2 * i; }, v, false);
    if (v[3] != 3.0f) return -2;
  }
  *reads = loads;
  return c.failed ? -1 : rounds;
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("lanes")
    files = resources.files("ark_cuda")
    roles, rows = (files.joinpath(name).read_text() for name in ("roles.h", "tasks/short_rows.h"))
    source, library = folder / "lanes.cpp", folder / "lanes.so"
    # NVRTC chooses an overload by an array's size, g++ does not; so the parameter becomes a
    # pointer.
    gathers = cut(roles, "void ark_load_pairs(", "void ark_poll_packet(").replace(
        "float (&v)[2 * N]", "float* v"
    )
    gathers += cut(rows, "void ark_load_fours(", "float ark_row(")
    source.write_text(f"{HOST}{gathers}{CALLS}")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_lane_waits_for_the_packets_of_its_warp(
    device: ctypes.CDLL, short: bool, others: int
) -> None:
    reads = ctypes.c_int()
    assert device.run(int(short), others, 0, ctypes.byref(reads)) == others
    assert reads.value == 2  # once each


@pytest.mark.parametrize("short", [False, True])
def test_lane_gives_up_with_its_warp(device: ctypes.CDLL, short: bool) -> None:
    assert device.run(int(short), 50, 3, ctypes.byref(ctypes.c_int())) == -1
