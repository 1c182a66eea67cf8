"""The number of copies that the operand stream keeps in flight (the stream copies weights to a ring
of slots in shared memory, ahead of the tasks that read them). The device code runs on the host. The
test checks that stages are used in order, and that the barrier of a ring slot completes one phase
for each stage that used the slot.
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
typedef uint32_t ark_u32;
struct ArkRingAt { uint32_t full, empty, slots; };
static uint32_t phases[64];
static bool __all_sync(uint32_t, bool x) { return x; }
static bool ark_barrier_tested_at(uint32_t at, uint32_t parity) {
  return phases[(at - 4096) / 8] % 2 != parity;  // the phase under way has the other parity
}
"""

CALLS = r"""
// The most copies when the `issued`-th stage's begins and `used` of those before have been used.
extern "C" uint32_t run(uint32_t issued, uint32_t used) {
  for (uint32_t& p : phases) p = 0;
  for (uint32_t i = 0; i < used; ++i) ++phases[i % ARK_RING_DEPTH];
  return ark_stream_in_flight(ArkRingAt{0, 4096, 0}, issued);
}
"""


def build(
    folder: Path, slots: int, in_flight: int, lead: int = 1, slow: bool = True
) -> ctypes.CDLL:
    """Compiles the stream for the host. slots: slots of the ring. lead: number of warps that
    neither compute nor load. slow: True for a slow memory.
    """
    stream = resources.files("ark_cuda").joinpath("stream.h").read_text()
    text = cut(stream, "constexpr ark_u32 ARK_STARVING", "#ifndef ARK_HAS_GROWTH")
    source, library = folder / "in_flight.cpp", folder / "in_flight.so"
    constants = (
        f"constexpr int ARK_IN_FLIGHT = {in_flight}, ARK_RING_DEPTH = {slots};\n"
        "constexpr int ARK_STAGE_BYTES = 16384, ARK_STREAM_CUTS = 0;\n"
        f"constexpr bool ARK_SLOW_MEMORY = {int(slow)};\n"
        f"constexpr int ARK_WARPS = 12, ARK_BLOCK_WARPS = {13 + lead};\n"
    )
    source.write_text(f"{HOST}{constants}{text}{CALLS}")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(
    ("slots", "in_flight", "slow"), [(13, 2, True), (10, 2, False), (12, 3, True), (12, 3, False)]
)
def test_one_more_is_in_flight_while_few_stages_are_unused(
    tmp_path: Path, slots: int, in_flight: int, slow: bool
) -> None:
    device = build(tmp_path, slots, in_flight, slow=slow)
    few = 5 if slow else 6
    for issued in range(5 * slots):
        for unused in range(min(issued, slots) + 1):
            starving = issued >= few and unused < few
            expected = in_flight + 1 if starving else in_flight
            assert device.run(issued, issued - unused) == expected, (issued, unused)


def test_stages_shared_by_all_warps_have_no_more_copies_in_flight(tmp_path: Path) -> None:
    device = build(tmp_path, 12, 2, lead=0)
    assert {device.run(n, n - unused) for n in range(12, 30) for unused in range(12)} == {2}


def test_ring_of_four_slots_has_no_more_in_flight(tmp_path: Path) -> None:
    device = build(tmp_path, 4, 2)
    assert {device.run(n, n - unused) for n in range(12, 30) for unused in range(4)} == {2}
