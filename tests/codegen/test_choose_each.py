"""The choice of the tokens of many sequences, each by one thread (ark/tasks/sequences.h). The
device code runs on the host and is compared with a description of the op in Python.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ark.tasks import text
from ark.tasks.tokens import SETTINGS
from tests.declarations import cut

BATCH, TILES, CONTEXT, STOPS = 40, 3, 12, 4

HOST = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#define ARK_DEVICE static
typedef uint32_t ark_u32;
typedef int32_t ark_i32;
struct ArkCtx { int failed; };
template <typename T> struct Operand { T* p; };
static float ark_inf() { return INFINITY; }
static ark_u32 ark_float_bits(float v) {
  ark_u32 bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
static void ark_fail(ArkCtx& c, ark_u32, ark_u32, ark_u32, ark_u32) { ++c.failed; }
static void ark_post_later(ArkCtx&, int, ark_u32* p, ark_u32 v) { *p = v; }
"""

CALLS = r"""
extern "C" int choose(int b, const int* settings, int* position, const float* candidates,
                      int* tokens, int* host, const int* stops) {
  ArkCtx c{0};
  const bool over = ark_choose_by_lane<3, 12, 4>(
      c, b, Operand<const int>{settings}, Operand<int>{position}, Operand<const float>{candidates},
      Operand<int>{tokens}, Operand<int>{host}, Operand<const int>{stops});
  return over + 2 * c.failed;
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("choose")
    source, library = folder / "choose.cpp", folder / "choose.so"
    sequences, sampling = text.header("sequences.h"), text.header("sampling.h")
    parts = [
        HOST,
        cut(sampling, "bool ark_better(", "bool ark_above("),
        cut(sequences, "bool ark_ended(", "struct ArkCandidates"),
        cut(sequences, "bool ark_append_token(", "bool ark_choose_by_warp("),
        cut(sequences, "bool ark_choose_by_lane(", "void ark_choose_each("),
        CALLS,
    ]
    source.write_text("\n".join(parts))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_each_thread_chooses_the_token_of_its_sequence(device: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    settings = np.zeros((BATCH, len(SETTINGS)), np.int32)
    settings[:, SETTINGS.index("last")] = rng.integers(0, 8, BATCH)
    settings[:, SETTINGS.index("limit")] = rng.integers(2, CONTEXT + 1, BATCH)
    settings[:, SETTINGS.index("stops")] = rng.integers(0, 4, BATCH)
    positions = rng.integers(0, CONTEXT - 1, BATCH).astype(np.int32)
    ids = rng.integers(0, 6, (BATCH, TILES)).astype(np.int32)
    scores = rng.integers(0, 3, (BATCH, TILES)).astype(np.float32)  # many are equal
    candidates = np.stack([scores, ids.view(np.float32)], axis=2)
    tokens = rng.integers(0, 6, (BATCH, CONTEXT)).astype(np.int32)
    stops = np.array([1, 4, 5, 0], np.int32)
    before, host = tokens.copy(), np.full((BATCH, CONTEXT), -1, np.int32)
    position, seen = positions.copy(), set()
    for b in range(BATCH):
        arrays = (settings[b], position[b:], candidates[b], tokens[b], host[b], stops)
        got = device.choose(b, *(ctypes.c_void_p(a.ctypes.data) for a in arrays))
        at, (last, limit, count) = int(positions[b]), settings[b, 3:6]
        known = set(stops[:count].tolist())
        if at > last and (at + 1 >= limit or int(before[b, at]) in known):
            expected, moves, token = 1, 0, None
        elif at < last:
            expected, moves, token = 0, 1, None
        else:
            best = max(range(TILES), key=lambda k: (scores[b, k], -ids[b, k]))
            token = int(ids[b, best])
            expected, moves = int(token in known or at + 2 >= limit), 1
        seen.add((expected, moves, token is None))
        assert (got, position[b] - at) == (expected, moves), b
        if token is not None:
            assert tokens[b, at + 1] == host[b, at + 1] == token
            before[b, at + 1] = token
    np.testing.assert_array_equal(tokens, before)
    assert len(seen) == 4  # ended, within its text, and two kinds of choices
