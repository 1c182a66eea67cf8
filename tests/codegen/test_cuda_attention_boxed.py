"""Attention of one row in the variant `matrix`: the loading thread copies keys and values to the
ring's slots, and warpgroups take the stages of slots with even and odd numbers. The device code
runs on the host: 32 threads are a warp's lanes, one warp after the other. Results are compared with
NumPy.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import attention_boxed, inline

from ark.backend import registry
from ark.ir.values import row_major
from ark.plan.signature import OperandType, Signature
from tests.attention_on_host import HOST, bf16, steps, unfenced
from tests.declarations import cut

GROUP, WIDTH, PAGE = 4, 64, 24
SLOTS, SLOT_BYTES = 8, 24576
OWN = GROUP * (WIDTH + 2)
TILE_POSITIONS = 8  # positions of a tile
# The number of positions for which a slot has room.
MOST = (SLOT_BYTES - 8 * 32) // (4 * WIDTH) // TILE_POSITIONS * TILE_POSITIONS

RING = r"""
#define ARK_POINTER(T, address) reinterpret_cast<T*>(address)
#define ARK_PARAMS(c) (&parameters)
typedef uint64_t ark_u64;
constexpr ark_u32 ARK_MATRIX_STAGES = 8u, ARK_MATRIX_STAGE = 24576u, ARK_MATRIX_SLABS = 16384u;
constexpr ark_u64 ARK_BOX_LEAVES = 0u;
constexpr int ARK_STREAM_PAGES = 1;
struct ArkGrowth {
  ark_u64 address, beside, length, table;
  ark_u32 row, rows, step, part, parts, page, pitch, pages, window;
};
struct Task {
  ark_u32 growth, kind, wait_begin, wait_end;
  ark_u64 operand[6];
};
static struct { ark_u64 growths; } parameters;
static struct { ark_u64 full[8], empty[8]; } ark_matrix;
struct ArkMatrixSlot { ark_u32 slot, parity; };
struct ArkMatrixLoad { ArkMatrixSlot at; bool stopped; ark_u32 issued; };
static ArkMatrixSlot start;          // the next slot of every warp
static ArkMatrixSlot kept;           // what the warps have kept
static ark_u32 expected[8], copied[8], released[8], waited[8];
static const ark_u32* ark_words(ark_u64 address) { return reinterpret_cast<ark_u32*>(address); }
static ark_u32 ark_load_acquire(const ark_u32* p, bool) { return *p; }
// Addresses of slots count from the ring's begin, those of barriers from `full`.
static ark_u32 ark_shared_address(const void* p) {
  const char* at = static_cast<const char*>(p);
  if (at >= ring && at < ring + 8 * ARK_MATRIX_STAGE) return static_cast<ark_u32>(at - ring);
  return static_cast<ark_u32>(at - reinterpret_cast<const char*>(&ark_matrix));
}
static char* ark_matrix_stage(ArkCtx&, ark_u32 slot) { return ring + slot * ARK_MATRIX_STAGE; }
static bool ark_matrix_free(const ArkMatrixLoad&) { return true; }
static void ark_matrix_expect(ark_u64* full, ark_u32 bytes) {
  expected[full - ark_matrix.full] += bytes;
}
static void ark_bulk_copy(ark_u32 to, ark_u64 from, ark_u32 bytes, ark_u32 full, ark_u64) {
  __builtin_memcpy(ring + to, reinterpret_cast<const void*>(from), bytes);
  copied[full / 8u] += bytes;
}
static void ark_matrix_next(ArkMatrixSlot& at) {
  if (++at.slot == 8u) at.slot = 0u, at.parity ^= 1u;
}
static void ark_matrix_loaded(ArkMatrixLoad&, bool) {}
static void ark_matrix_issued(ArkMatrixLoad& load) { ark_matrix_next(load.at), ++load.issued; }
static ArkMatrixSlot ark_matrix_place_of() { return start; }
static void ark_matrix_keep_place(const ArkMatrixSlot& at) { kept = at; }
static void ark_matrix_filled(ArkCtx&, ark_u32 full, ark_u32 parity) {
  if (lane == 0) waited[full / 8u] |= 1u << parity;
}
static void ark_matrix_release_warp(ark_u32 empty) { ++released[empty / 8u - 8u]; }
"""

CALLS = r"""
// Stages that SHARED warps share, of as many positions as a slot has room for.
template <int SHARED>
struct Stages {
  static constexpr int SHARERS = SHARED, OWNERS = 8 / SHARED;
  static constexpr ark_u32 SEVERAL = SHARED == 1 ? 8u : 1u;
  static constexpr int MOST = (24576 - 8 * 32) / 256 / 8 * 8, VALUES = MOST * 128 + 4 * 32;
};
typedef ArkBoxedAttention<4, 64> Shared;
static_assert(sizeof(ArkBoxedInputs<4, 64>) % 16 == 0, "queries are loaded in packs");
template <class S>
static void warp_of(Shared& s, int begin, int end, int newest) {
  ArkCtx c;
  uint4 a[2][2];
  ark_query_tiles<4, 64, Half>(s.inputs[0].query, a);
  ArkBoxedSums<64> r = {};
  r.top = -1e30f;
  ark_boxed_share<S, 64, Half>(c, s.inputs[0].current, begin, end, newest, a, r);
  // Two warps share a partial result, as where those of all warps do not fit in shared memory.
  float* part = s.own[number % 4];
  if (number >= 4) ark_boxed_part<4, 64, Shared::PITCH, false>(r, part);
  if (number < 4) ark_boxed_part<4, 64, Shared::PITCH, true>(r, part);
}
static void clear(char* slots, ark_u32 slot) {
  ring = slots;
  start = {slot, 0u};
  for (int i = 0; i < 8; ++i) expected[i] = copied[i] = released[i] = waited[i] = 0u;
}
extern "C" int follows(const Task* t, const Task* next, ark_u64 bytes) {
  return ark_boxed_follows<0, 3, 4, 5>(*t, *next, bytes);
}
extern "C" ark_u32 step(ark_u32 rows, ark_u32 most, ark_u32 several) {
  return ark_boxed_step(rows, most, several);
}
template <class S>
static int load_as(char* slots, ark_u32 slot, const ArkGrowth* growth, ark_u32* bytes) {
  clear(slots, slot);
  parameters.growths = reinterpret_cast<ark_u64>(growth);
  ArkCtx c;
  ArkMatrixLoad loading{start, false, 0u};
  ark_matrix_load_grown<S>(c, Task{1u}, loading);
  for (int i = 0; i < 8; ++i) bytes[i] = expected[i], bytes[8 + i] = copied[i];
  return loading.issued;
}
extern "C" int load(char* slots, ark_u32 slot, const ArkGrowth* growth, int sharers,
                    ark_u32* bytes) {
  return (sharers == 1   ? load_as<Stages<1>>
          : sharers == 2 ? load_as<Stages<2>>
                         : load_as<Stages<4>>)(slots, slot, growth, bytes);
}
template <class S>
static void attend(char* slots, ark_u32 slot, int begin, int end, int newest, const float* query,
                   const float* current, ark_u32* left, float* own) {
  static Shared s;
  clear(slots, slot);
  for (int i = 0; i < 256; ++i) s.inputs[0].query[i] = query[i];
  for (int i = 0; i < 128; ++i) s.inputs[0].current[i] = current[i];
  for (int turn = 0; turn < 8; ++turn) {
    const int w = (turn + 4) % 8;  // warps of the second group store their parts first
    std::vector<std::thread> lanes;
    for (int i = 0; i < 32; ++i) {
      lanes.emplace_back([&, i] {
        lane = i, number = w;
        warp_of<S>(s, begin, end, newest);
      });
    }
    for (auto& each : lanes) each.join();
  }
  for (int i = 0; i < 8; ++i) left[i] = released[i], left[8 + i] = waited[i];
  left[16] = kept.slot, left[17] = kept.parity;
  for (int w = 0; w < 4; ++w) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 66; ++j) own[(w * 4 + i) * 66 + j] = s.own[w][i * Shared::PITCH + j];
    }
  }
}
extern "C" void attend_all(char* slots, ark_u32 slot, int begin, int end, int newest, int sharers,
                           const float* query, const float* current, ark_u32* left, float* own) {
  typedef ArkBoxedStages<Half, 64> Chosen;
  static_assert(Chosen::SHARERS == 1 && Chosen::MOST == 88, "a warp has a slot of its own");
  static_assert(Shared::PARTS == 8, "each warp has a partial result");
  (sharers == 1   ? attend<Stages<1>>
   : sharers == 2 ? attend<Stages<2>>
                  : attend<Stages<4>>)(slots, slot, begin, end, newest, query, current, left, own);
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("boxed")
    source, library = folder / "boxed.cpp", folder / "boxed.so"
    text = unfenced(inline.header("attention_boxed.h"))
    loading = cut(text, "void ark_matrix_load_grown(", "struct alignas(16) ArkBoxedInputs")
    growth = resources.files("ark_cuda").joinpath("growth.h").read_text()
    parts = [
        HOST.replace("ARK_WARPS = 4", "ARK_WARPS = 8"),
        RING,
        growth,
        steps(),
        inline.header("attention_boxed_sums.h"),
        cut(text, "ark_u32 ark_boxed_step(", "void ark_matrix_load_grown("),
        loading.replace("const ArkTask& t", "const Task& t"),
        cut(text, "struct alignas(16) ArkBoxedInputs", "struct ArkBoxedHeld"),
        cut(text, "bool ark_boxed_follows(", "void ark_boxed_share(").replace("ArkTask", "Task"),
        cut(text, "void ark_boxed_share(", "void ark_attention_boxed("),
        CALLS,
    ]
    source.write_text("\n".join(parts))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def slots() -> np.ndarray:
    """The ring's slots, with NaN, on which no result may depend."""
    memory = np.full(SLOTS * SLOT_BYTES + 128, 0xFF, np.uint8)
    return memory[-memory.ctypes.data % 128 :][: SLOTS * SLOT_BYTES]


def step_of(rows: int, most: int, several: int) -> int:
    """Returns the number of positions in a stage, a multiple of those of a tile: the smallest with
    which the positions need no more multiples of `several` stages than with full stages.
    """
    stages = several * max(1, math.ceil(rows / (several * most)))
    return math.ceil(math.ceil(rows / stages) / TILE_POSITIONS) * TILE_POSITIONS


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("sharers", [1, 2, 4])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("length", "part", "parts", "first"),
    [
        *((249, 0, 1, 0), (249, 0, 1, 6), (64, 0, 1, 7), (255, 1, 2, 3), (300, 0, 2, 1)),
        *((0, 0, 1, 2), (511, 0, 1, 0), (400, 0, 1, 5), (255, 0, 1, 4)),
    ],
)
def test_loaded_stages_give_numpys_attention(
    device: ctypes.CDLL, length: int, part: int, parts: int, first: int, paged: bool, sharers: int
) -> None:
    """Attention of one task over the stages of its part equals NumPy's. length: the number of
    positions before this iteration. part: the task's part of the positions. first: the slot of its
    first stage. sharers: the warps that share a stage.
    """
    rng = np.random.default_rng(length + part)
    room = 24 * PAGE  # positions of the cache
    cache = bf16(rng.standard_normal((2, room, WIDTH)))
    order = rng.permutation(room // PAGE).astype(np.uint32)
    stored = cache.reshape(2, room // PAGE, PAGE, WIDTH)
    if paged:
        stored = np.empty_like(stored)
        stored[:, order] = cache.reshape(stored.shape)
    halves = (stored.view(np.uint32) >> 16).astype(np.uint16)
    row = 2 * WIDTH
    lengths = np.array([length], np.uint32)
    words = [halves[0].ctypes.data, halves[1].ctypes.data, lengths.ctypes.data, order.ctypes.data]
    pages = (PAGE, PAGE * row, room // PAGE) if paged else (0, 0, 0)
    growth = np.zeros(18, np.uint32)
    growth[:8] = np.array(words, np.uint64).view(np.uint32)
    growth[8:16] = (row, room, 64, part, parts, *pages)
    ring, nbytes = slots(), np.zeros((2, SLOTS), np.uint32)
    stages = device.load(pointer(ring), first, pointer(growth), sharers, pointer(nbytes))
    seen = min(length + 1, room)
    begin, end, newest = seen * part // parts, seen * (part + 1) // parts, seen - 1
    step = step_of(end - begin, MOST, SLOTS if sharers == 1 else 1)
    assert stages == -(-(end - begin) // step)
    assert (nbytes[0] == nbytes[1]).all()  # each barrier completes
    assert nbytes[0].sum() == 2 * row * (min(end, newest) - begin)

    query = rng.standard_normal((GROUP, WIDTH)).astype(np.float32) / 4
    current = rng.standard_normal((2, WIDTH)).astype(np.float32)
    left, own = np.zeros(18, np.uint32), np.zeros((4, OWN), np.float32)
    outputs = (pointer(query), pointer(current), pointer(left), pointer(own))
    device.attend_all(pointer(ring), first, begin, end, newest, sharers, *outputs)
    used = [(first + i) % SLOTS for i in range(stages)]
    assert [left[slot] for slot in used] == [8] * stages  # one arrival for each warp
    assert left[:SLOTS].sum() == 8 * stages
    parities = [1 << (first + i) // SLOTS for i in range(stages)]
    assert [left[SLOTS + slot] for slot in used] == parities
    after = first + stages
    assert (left[16], left[17]) == (after % SLOTS, after // SLOTS)

    cache[:, newest] = bf16(current)
    keys, values = cache[:, begin:end].astype(np.float64)
    share = own.reshape(4, GROUP, WIDTH + 2).astype(np.float64)
    weight = np.exp(share[:, :, WIDTH] - share[:, :, WIDTH].max(0))
    total = (weight * share[..., -1]).sum(0)[:, None]
    got = (weight[..., None] * share[..., :WIDTH]).sum(0) / total
    scores = query.astype(np.float64) @ keys.T * np.log(2.0)
    power = np.exp(scores - scores.max(1, keepdims=True))
    want = power / power.sum(1, keepdims=True) @ values
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(("most", "several"), [(80, 8), (32, 8), (128, 1)])
def test_stages_are_equal_and_as_few_as_full_ones(
    device: ctypes.CDLL, most: int, several: int
) -> None:
    for rows in (0, 1, 7, 63, 64, 65, 511, 512, 513, 576, 640, 641, 2047, 8193, 131072):
        step = device.step(rows, most, several)
        assert step == step_of(rows, most, several)
        assert step % TILE_POSITIONS == 0 and (rows == 0 or step in range(1, most + 1))
        assert rows == 0 or -(-rows // step) <= several * -(-rows // (several * most))


class Task(ctypes.Structure):
    """The fields of a task's record that say whether its inputs may be loaded early."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("growth", "kind", "wait_begin", "wait_end")),
        ("operand", ctypes.c_uint64 * 6),
    )


QUERY, POSITION, OUTPUT, FRESH = 0, 3, 4, 5


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"kind": 2}, False),
        ({"wait_end": 8}, False),
        *(({index: 5000 + 64}, False) for index in (QUERY, POSITION, FRESH)),
        ({QUERY: 5000 - 64}, False),
        ({QUERY: 5000 - 256, FRESH: 5000 + 256}, True),
        ({OUTPUT: 5000}, True),
    ],
)
def test_inputs_are_loaded_early_for_a_task_without_waits_that_reads_other_memory(
    device: ctypes.CDLL, changed: dict[int | str, int], expected: bool
) -> None:
    """changed: fields or operands of the next task that differ from those of a task whose inputs
    may be loaded while the running task writes 256 bytes from 5000 on.
    """
    running = Task(1, 1, 4, 6, (ctypes.c_uint64 * 6)(1000, 0, 0, 2000, 5000, 3000))
    following = Task(1, 1, 7, 7, (ctypes.c_uint64 * 6)(1256, 0, 0, 2004, 5256, 3256))
    for field, value in changed.items():
        if isinstance(field, str):
            setattr(following, field, value)
        else:
            following.operand[field] = value
    device.follows.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    early = device.follows(ctypes.addressof(running), ctypes.addressof(following), 256)
    assert bool(early) is expected


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("streamed", [32, 64, 96])
def test_stage_has_positions_for_each_warp_that_shares_it(width: int, streamed: int) -> None:
    """Besides the positions, a stage has gaps between the halves of keys and values."""
    machine = registry.machine("h200").using("matrix")
    rows, cache = (1, 8 * width), (8, 1024, width)
    operands = tuple(
        OperandType("bf16" if shape is cache else "fp32", shape, row_major(shape))
        for shape in (rows, cache, cache, rows)
    )
    params = {"heads": 8, "kv_heads": 8, "head_dim": width, "splits": 1, "scale": 1.0}
    sig = Signature("attention", {**params, "streamed": streamed}, operands)
    nbytes = attention_boxed.stage(sig, machine)
    most = (nbytes - 4 * 64) // (4 * width) // TILE_POSITIONS * TILE_POSITIONS
    assert most >= TILE_POSITIONS * attention_boxed.MAX_SHARING_WARPS
    assert nbytes % 1024 == 0 and nbytes >= 4 * width * streamed
