"""Attention of one row whose keys and values are streamed: each warp reads its part of the
positions from stages of the ring in shared memory. The device code runs on the host: 32 threads are
a warp's lanes, one warp after the other. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from tests.attention_on_host import HOST, bf16, steps, unfenced
from tests.declarations import cut

GROUP, WIDTH, STEP, WARPS = 4, 64, 64, 4
OWN = GROUP * (WIDTH + 2)  # a warp's part: sums, maximum and denominator of each head

CALLS = r"""
using Shared = ArkStagedAttention<4, 64, ARK_WARPS>;
template <int SHARERS, bool UNITS>
static int lane_of(Shared& s, int begin, int end, int newest) {
  ArkCtx c;
  const ArkTask t{0u};
  uint4 a[2][2];
  ark_query_tiles<4, 64, Half>(s.query, a);
  typename ArkStagedFor<4, 64, UNITS>::Sums r = {};
  r.top = -1e30f;
  const int parts = ark_staged_share<SHARERS, 4, 64, 64, Half>(c, t, s, begin, end, newest, a, r);
  if (number < parts) ark_stage_part<4, 64>(r, s.own[number]);
  return parts;
}
template <bool UNITS>
static int any_lane_of(Shared& s, int sharers, int begin, int end, int newest) {
  return sharers == 1 ? lane_of<1, UNITS>(s, begin, end, newest)
                      : lane_of<4, UNITS>(s, begin, end, newest);
}
// units: true if matrix units add up the values.
extern "C" int run(bool units, int sharers, int begin, int end, int newest, const float* query,
                   const float* current, char* stages, ark_u32* left, float* own) {
  static Shared s;
  int parts = 0;
  ring = stages, arrived = left;
  for (int i = 0; i < 256; ++i) s.query[i] = query[i];
  for (int i = 0; i < 128; ++i) s.current[i] = current[i];
  for (int w = 0; w < ARK_WARPS; ++w) {
    std::vector<std::thread> lanes;
    for (int i = 0; i < 32; ++i) {
      lanes.emplace_back([&, i] {
        lane = i, number = w;
        const int made = units ? any_lane_of<true>(s, sharers, begin, end, newest)
                               : any_lane_of<false>(s, sharers, begin, end, newest);
        if (i == 0) parts = made;
      });
    }
    for (auto& each : lanes) each.join();
    for (int i = 0; i < 264; ++i) own[w * 264 + i] = s.own[w][i];
  }
  return parts;
}
"""


# What a whole task calls, for its first warp alone.
TASK = r"""
typedef uint64_t ark_u64;
constexpr int ARK_THREADS = 32 * ARK_WARPS;
static Shared scratch;
static int ark_tid() { return 32 * number + lane; }
static bool ark_enter(ArkCtx&) { return true; }
static void ark_gathered() {}
static void ark_stages_grown(ark_u32) {}
#define ARK_SCRATCH(c) (&scratch)
template <int G, int KV_HEADS, int D, class Q, class F>
static void ark_attention_gather(ArkCtx&, float* to, int, int, bool, float, const Q& query, F) {
  for (int i = lane; i < G * D; i += 32) to[i] = query[i];
  together.arrive_and_wait();
}
template <int G, int D, int SPLITS, class O>
static void ark_staged_join(ArkCtx&, const ArkTask&, Shared& s, O out, int parts, int at, int) {
  for (int i = 0; at == 0 && i < parts * OWN; ++i) out[i] = s.own[0][i];
}
"""
CALL_TASK = r"""
struct Position { ark_u32 p[1]; };
extern "C" void run_task(int split, ark_u32 length, const float* query, float* own) {
  __builtin_memset(static_cast<void*>(&scratch), 0xff, sizeof(scratch));
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([&, i] {
      lane = i, number = 0;
      ArkCtx c;
      const ArkTask t{0u, {0, 0, split}};
      const Position position{{length}};
      ark_attention_staged<Half, 4, 1, 64, 1024, 4, 64, ARK_WARPS, 0>(c, t, 1.0f, query, position,
                                                                      own, 0);
    });
  }
  for (auto& each : lanes) each.join();
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("stages")
    source, library = folder / "stages.cpp", folder / "stages.so"
    text = unfenced(inline.header("attention_stream.h"))
    shared = cut(text, "struct ArkStagedAttention", "bool ark_attention_staged(")
    host = HOST.replace("ark_u32 fetch_begin;", "ark_u32 fetch_begin; int coord[3];")
    calls = CALLS + TASK.replace("OWN", str(OWN))
    growth = resources.files("ark_cuda").joinpath("growth.h").read_text()
    task = text[text.index(shared) + len(shared) :]
    grown = growth[growth.index("struct ArkGrown") :]
    source.write_text(host + steps() + shared + calls + grown + task + CALL_TASK)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("sharers", [1, 4])
@pytest.mark.parametrize(("positions", "newest"), [(250, 249), (192, 500), (65, 64)])
def test_stages_taken_alone_and_shared_give_numpys_attention(
    device: ctypes.CDLL, units: bool, sharers: int, positions: int, newest: int
) -> None:
    """Attention of one task over its stages equals NumPy's. units: True if matrix units add up the
    values, as for heads of 64. sharers: the warps that share a stage. positions: the number of
    positions in the task's part. newest: the position of this iteration, whose key and value are in
    no stage.
    """
    rng = np.random.default_rng(positions)
    query = rng.standard_normal((GROUP, WIDTH)).astype(np.float32) / 4
    cache = bf16(rng.standard_normal((2, positions, WIDTH)))
    current = rng.standard_normal((2, WIDTH)).astype(np.float32)
    count = -(-positions // STEP)
    stages = np.zeros((count, 2, STEP, WIDTH), np.float32)
    for at in range(positions):
        stages[at // STEP, :, at % STEP] = cache[:, at]
    if newest < positions:
        cache[:, newest] = bf16(current)
        stages[newest // STEP, :, newest % STEP] = 100.0  # the slot's earlier contents
    memory = np.zeros(count * 16384 + 128, np.uint8)
    ring = memory[-memory.ctypes.data % 128 :][: count * 16384]
    ring[:] = (stages.view(np.uint32) >> 16).astype(np.uint16).ravel().view(np.uint8)
    left, own = np.zeros(count, np.uint32), np.zeros((WARPS, OWN), np.float32)
    arrays = (query, current, ring, left, own)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    parts = device.run(units, sharers, 0, positions, newest, *pointers)
    assert parts == min(WARPS, -(-positions * sharers // STEP))
    assert (left == WARPS).all()  # each slot is given back exactly once for every warp
    part = own[:parts].reshape(parts, GROUP, WIDTH + 2).astype(np.float64)
    top = part[:, :, WIDTH].max(0)
    share = np.exp(part[:, :, WIDTH] - top)
    got = (share[..., None] * part[..., :WIDTH]).sum(0) / (share * part[..., -1]).sum(0)[:, None]
    scores = query.astype(np.float64) @ cache[0].T.astype(np.float64) * np.log(2.0)
    power = np.exp(scores - scores.max(1, keepdims=True))
    want = power / power.sum(1, keepdims=True) @ cache[1]
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(("length", "split"), [(0, 0), (1, 0), (1, 2), (2, 0)])
def test_split_without_positions_adds_nothing(device: ctypes.CDLL, length: int, split: int) -> None:
    """With fewer positions than splits, a task's result has a denominator of 0."""
    query = np.random.default_rng(0).standard_normal((GROUP, WIDTH)).astype(np.float32)
    own = np.full(OWN, np.nan, np.float32)
    device.run_task(split, length, *(ctypes.c_void_p(a.ctypes.data) for a in (query, own)))
    part = own.reshape(GROUP, WIDTH + 2)
    assert (part[:, :WIDTH] == 0.0).all() and (part[:, -1] == 0.0).all()
    assert (part[:, WIDTH] < -1e29).all()
