"""Rows that bulk copies bring to shared memory: the body on the host, where a copy takes the place
of what lay there at once, and on a GPU; against NumPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend.protocol import Target
from ark.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp32
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks import text

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend
from ark_cuda.tasks import inline

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
# Four warps of eight lanes in two teams, each with two rows ahead.
WARPS, LANES, TEAM, AHEAD, PACK, PACKS = 4, 8, 2, 2, 4, 2
SIZES = [(128, 9), (120, 4), (128, 1)]  # elements, and rows: all threads have equal parts or not
HEAD = r"""
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#define ARK_DEVICE static inline
#define ARK_THREADS (ARK_WARPS * ARK_LANES)
using ark_u32 = uint32_t;
using ark_i32 = int32_t;
using ark_i64 = int64_t;
using ark_u64 = uint64_t;
struct ArkCtx {};
struct ArkTask { int coord[3]; };
static thread_local int number;
alignas(128) static char shared[1 << 16];
#define ARK_SCRATCH(c) shared
static int ark_tid() { return number; }
static int ark_lane() { return number % ARK_LANES; }
static int ark_warp() { return number / ARK_LANES; }
static float ark_inf() { return INFINITY; }
static float ark_exp(float v) { return expf(v); }
static float ark_rsqrt(float v) { return 1.0f / sqrtf(v); }
struct Meeting { std::barrier<> all; Meeting() : all(ARK_LANES) {} };
struct Team { std::barrier<> all; Team() : all(TEAM_WARPS * ARK_LANES) {} };
static Meeting warps[ARK_WARPS];
static Team teams[ARK_WARPS / TEAM_WARPS];
static ark_u32 shown[ARK_WARPS][ARK_LANES];
static ark_u32 ark_shfl_xor(ark_u32 v, int mask) {
  warps[ark_warp()].all.arrive_and_wait();
  shown[ark_warp()][ark_lane()] = v;
  warps[ark_warp()].all.arrive_and_wait();
  return shown[ark_warp()][ark_lane() ^ mask];
}
static float ark_shfl_xor(float v, int mask) {
  ark_u32 bits;
  memcpy(&bits, &v, 4);
  bits = ark_shfl_xor(bits, mask);
  memcpy(&v, &bits, 4);
  return v;
}
#define ARK_HAS_TEAMS 1
template <int TEAM>
static void ark_team_sync() { teams[ark_warp() / TEAM].all.arrive_and_wait(); }
template <typename T, int N>
struct ArkPack { T v[N]; };
template <int N, typename T>
static ArkPack<std::remove_const_t<T>, N> ark_held(T*) { return {}; }
template <typename T, int N>
static void ark_hold(ArkPack<T, N>& to, const T* p) { memcpy(&to, p, sizeof(to)); }
template <typename P>
static P ark_unpacked(const P& held) { return held; }
template <int N, typename T>
static ArkPack<std::remove_const_t<T>, N> ark_load_pack(T* p) {
  ArkPack<std::remove_const_t<T>, N> pack;
  memcpy(&pack, p, sizeof(pack));
  return pack;
}
template <int N, typename T>
static void ark_store_pack(T* p, const ArkPack<T, N>& pack) { memcpy(p, &pack, sizeof(pack)); }
static bool ark_aligned(ark_u64) { return true; }
static float ark_get(const float* p, ark_i64 i) { return p[i]; }
static void ark_put(float* p, ark_i64 i, float v) { p[i] = v; }
#define ARK_VECTOR_LOOP
// A copy is there at once; a barrier says how many have come.
template <int COUNT>
static void ark_bulk_begin(ark_u64* full) { for (int i = 0; i < COUNT; ++i) full[i] = 0u; }
template <int COUNT>
static void ark_bulk_end(ark_u64* full) { for (int i = 0; i < COUNT; ++i) full[i] = ~0ull; }
static void ark_bulk_in(char* to, ark_u64 from, ark_u32 bytes, ark_u64* full) {
  memcpy(to, (const char*)from, bytes);
  std::atomic_ref<ark_u64>(*full).fetch_add(1u);
}
static void ark_bulk_await(ark_u64* full, ark_u32 parity) {
  while (std::atomic_ref<ark_u64>(*full).load() % 2u == parity) std::this_thread::yield();
}
"""
CALL = r"""
template <class OP, int K, int COUNT, bool WEIGHTED>
static void run(const float* x, float* y, const float* weight) {
  std::vector<std::thread> threads;
  for (int i = 0; i < ARK_WARPS * ARK_LANES; ++i) {
    threads.emplace_back([=] {
      number = i;
      ArkCtx c;
      const ArkTask t{{0, 0, 0}};
      const auto in = [&](int r) { return x + r * K; };
      const auto out = [&](int r) { return y + r * K; };
      if constexpr (WEIGHTED) {
        ark_row_stream<OP, COUNT, COUNT, K, 512, 64, PACK, PACKS, TEAM_WARPS, AHEAD>(
            c, t, in, out, weight, 1e-3f);
      } else {
        ark_row_stream<OP, COUNT, COUNT, K, 512, 64, PACK, PACKS, TEAM_WARPS, AHEAD>(
            c, t, in, out, ArkOnes{}, 1e-3f);
      }
    });
  }
  for (auto& each : threads) each.join();
}
extern "C" void rows(int op, int k, int count, const float* x, float* y, const float* weight) {
"""
OPS = {"softmax": "ArkSoftmax", "layernorm": "ArkLayerNorm", "rmsnorm": "ArkRmsNorm"}


def expected(name: str, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    if name == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return np.asarray(e / e.sum(-1, keepdims=True))
    centred = x - x.mean(-1, keepdims=True) if name == "layernorm" else x
    factor = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return np.asarray(centred * factor * (weight if name == "rmsnorm" else 1.0))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("rows")
    source, library = folder / "rows.cpp", folder / "rows.so"
    sizes = f"#define ARK_LANES {LANES}\n#define ARK_WARPS {WARPS}\n#define TEAM_WARPS {TEAM}\n"
    sizes += f"#define AHEAD {AHEAD}\n#define PACK {PACK}\n#define PACKS {PACKS}\n"
    calls = "".join(
        f"  if (op == {i} && k == {k} && count == {n}) "
        f"run<{name}, {k}, {n}, {str(i == 2).lower()}>(x, y, weight);\n"
        for i, name in enumerate(OPS.values())
        for k, n in SIZES
    )
    device = text.header("folds.h") + text.header("rows.h") + inline.header("row_stream.h")
    source.write_text(sizes + HEAD + device + CALL + calls + "}\n")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("columns", "count"), SIZES)
def test_no_row_is_replaced_before_all_have_read_it(
    host: ctypes.CDLL, name: str, columns: int, count: int
) -> None:
    rng = np.random.default_rng(columns + count)
    x = rng.standard_normal((count, columns)).astype(np.float32)
    weight = rng.standard_normal(columns).astype(np.float32)
    y = np.full_like(x, np.nan)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (x, y, weight))
    host.rows(list(OPS).index(name), columns, count, *pointers)
    np.testing.assert_allclose(y, expected(name, x, weight, 1e-3), rtol=1e-5, atol=1e-6)


def planned(machine: ark.Machine, name: str, shape: list[int], dtype: DataType) -> Plan:
    model = Model()
    with use_model(model):
        x = ark.tensor(shape, dtype, name="x")
        made = {
            "softmax": lambda: ark.softmax(x),
            "layernorm": lambda: ark.layernorm(x, 1e-3),
            "rmsnorm": lambda: ark.rmsnorm(x, ark.parameter(shape[-1:], dtype, name="w"), 1e-3),
        }[name]()
        ark.copy(made, name="out")
    result = plan(model.graph, machine.with_processors(2), {"fuse": False})
    verify([result])
    return result


def source(made: Plan) -> str:
    machine = machine_of(made, 0)
    return write(made, machine, backend.dialect(machine.arch)).source.text


# Rows; elements; streamed or not: too few rows for a team, rows that are no whole 16 bytes, short.
FORMS = [((40, 4096), True), ((40, 4000), True), ((4, 4096), False), ((40, 4090), False)]


@pytest.mark.parametrize(("shape", "streamed"), [*FORMS, ((400, 64), False)])
def test_long_rows_are_streamed_where_they_are_many(shape: tuple[int, int], streamed: bool) -> None:
    made = planned(backend.machine("h100"), "softmax", list(shape), fp32)
    assert ("ark_row_stream<" in source(made)) == streamed


def test_no_machine_streams_them_without_the_copy_unit() -> None:
    made = planned(backend.machine("a100"), "softmax", [40, 4096], fp32)
    assert "ark_row_stream<" not in source(made)


def test_the_body_compiles() -> None:
    made = planned(backend.machine("h100"), "rmsnorm", [40, 4000], bf16)
    machine = machine_of(made, 0)
    emitted = write(made, machine, backend.dialect("sm_90a"))
    assert "ark_row_stream<" in emitted.source.text
    binary = backend.compiler().compile(emitted.source, Target("sm_90a", machine.threads))
    assert " 0 bytes spill stores" in binary.log


@needs_gpu
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [s for s, streamed in FORMS if streamed])
def test_streamed_rows_agree_with_numpy(shape: tuple[int, int], name: str, dtype: DataType) -> None:
    rng = np.random.default_rng(7)
    x, w = (rng.standard_normal(s).astype(dtype.numpy) for s in (shape, shape[1]))
    with contextlib.closing(backend.open(0)) as device:
        made = planned(device.machine, name, list(shape), dtype)
        assert "ark_row_stream<" in source(made)
        with Executor(made, backend, device) as executor:
            executor.write("x", x)
            if name == "rmsnorm":
                executor.write("w", w)
            executor.start(3).wait()
            found = executor.read("out").astype(np.float64)
    want = expected(name, x.astype(np.float64), w.astype(np.float64), 1e-3)
    tolerance = 1e-5 if dtype == fp32 else 2**-7
    np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
