"""Products of a few rows with quantised weights in the variant `matrix`: all codes are converted to
their values, and the products of a stage equal NumPy's, for every placement of scales. The device
code runs on the host. On a GPU products equal NumPy's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines
from ark_cuda.tasks import inline

from ark.backend.codegen.writer import device_text, write
from ark.backend.protocol import Target
from ark.ir.dtype import CODES, DataType, RowType, bf16, by_name, fp16, fp32, row_type
from ark.ir.graph import Graph
from ark.ir.rows import row_bytes, row_values
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks.matmul_codes import STAGE_DEPTH, codes_bytes, scales_bytes
from ark.tasks.row_values import HEADER
from tests import kept
from tests.cases.cuda_boxes import HOST, to_bf16
from tests.cases.cuda_codes import CONVERTED, PAIRS
from tests.cases.cuda_tiles import HEAD
from tests.declarations import cut
from tests.slow import slow

GPU = bool(backend.probe().devices)
needs_gpu = pytest.mark.skipif(
    not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]
HIGH, COLUMNS = 24, 32  # rows of the input in a stage, and rows of weights

# The weights: (codes, columns, group, type of scales, zero points, type of values).
TYPES: list[tuple[str, int, int, DataType, bool, DataType]] = [
    ("fp8_e4m3", 512, 512, fp32, False, bf16),  # sums are scaled
    ("int8", 512, 512, fp32, False, fp16),
    ("fp8_e4m3", 512, 128, fp32, False, bf16),  # sums of a line are scaled
    ("int4", 640, 128, bf16, False, bf16),  # a row ends within a stage
    ("int4", 512, 64, fp16, False, fp16),
    ("fp4", 512, 32, bf16, False, bf16),  # values are scaled
    ("fp4", 512, 16, fp32, False, bf16),
    ("int8", 512, 32, fp16, False, fp16),
    ("uint4", 512, 32, fp32, True, fp16),
    ("uint4", 576, 64, bf16, True, bf16),
    ("uint8", 512, 512, fp32, True, bf16),
    ("fp8_e5m2", 512, 128, fp32, False, bf16),
]
FLOATS = r"""
#undef ARK_WARPS
#define ARK_WARPS 8
#define ARK_MATRIX_SLABS 16384
static thread_local int own_warp;
static std::barrier<> block(32 * ARK_WARPS);
static char slabs[ARK_MATRIX_SLABS];
static char* ark_matrix_slab(ArkCtx&, int) { return slabs; }
#define ark_warp() own_warp
#define ark_sync() block.arrive_and_wait()
struct float2 { float x, y; };
static ark_u32 nearest(float v) {
  const ark_u32 bits = ark_float_bits(v);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static ark_u32 ark_both_fma(const ark_f16*, ark_u32 a, ark_u32 b, ark_u32 c) {
  return ark_pair_fma(a, b, c);
}
static ark_u32 ark_both_fma(const ark_bf16*, ark_u32 a, ark_u32 b, ark_u32 c) {
  const auto one = [=](int n) {
    return nearest(value(a >> n & 0xffffu) * value(b >> n & 0xffffu) + value(c >> n & 0xffffu));
  };
  return one(0) | one(16) << 16;
}
static float2 ark_pair(const ark_bf16*, ark_u32 w) { return {value(w & 0xffffu), value(w >> 16)}; }
static float2 ark_pair(const ark_f16*, ark_u32 w) { return {half(w, 0), half(w, 16)}; }
static ark_u32 ark_pack_pair(const ark_bf16*, float low, float high) {
  return nearest(low) | nearest(high) << 16;
}
static ark_u32 ark_pack_pair(const ark_f16*, float low, float high) {
  return rounded(low) | static_cast<ark_u32>(rounded(high)) << 16;
}
"""
CALLS = r"""
template <class F>
static void threads(int first, int end, F f) {
  std::vector<std::thread> all;
  for (int i = first; i < end; ++i) {
    all.emplace_back([&, i] {
      own_warp = i / 32, lane = i % 32;
      f(i);
    });
  }
  for (auto& each : all) each.join();
}
// The product of STAGES stages, each PITCH bytes behind the last one, of which the last one has
// `lines` lines. out: 64 by COLUMNS.
template <class P, int COLUMNS>
static void product(const char* from, int pitch, int k, int stages, int lines, float* out) {
  struct Sums { float of[P::WIDE / 16][P::BLOCKS][4]; };
  std::vector<Sums> sums(32 * ARK_WARPS, Sums{});
  for (int s = 0; s < stages; ++s) {
    for (int w = 0; w < ARK_WARPS; ++w) {
      if (s + 1 == stages && w % 4 >= lines) continue;
      threads(32 * w, 32 * w + 32, [&](int i) {
        ark_code_line<P>(from + s * pitch, w % 4, w / 4, k + 256 * s, sums[i].of);
      });
    }
  }
  threads(0, 32 * ARK_WARPS, [&](int i) {
    ArkCtx c;
    float made[P::WIDE / 2] = {};
    ark_code_join<P>(c, sums[i].of, made);
    for (int e = 0; e < P::WIDE / 2; ++e) {
      const int row = own_warp % 4 * 16 + lane / 4 + e % 4 / 2 * 8;
      out[row * COLUMNS + own_warp / 4 * P::WIDE + e / 4 * 8 + lane % 4 * 2 + e % 2] = made[e];
    }
  });
}
template <typename T, class C>
static void pairs(ark_u32 code, uint16_t* out) {
  const ark_u32 word = ARK_CODE_BITS<C> == 4 ? code * 0x11111111u : code * 0x01010101u;
  for (int j = 0; j < 16 / ARK_CODE_BITS<C>; ++j) {
    const ark_u32 pair =
        ark_code_pair_as(static_cast<const T*>(nullptr), static_cast<const C*>(nullptr), word, j);
    out[2 * j] = pair, out[2 * j + 1] = pair >> 16;
  }
}
"""


def types() -> list[RowType]:
    return [row_type(by_name(codes), *rest) for codes, *rest in TYPES]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("products")
    source, library = folder / "products.cpp", folder / "products.so"
    runs = "".join(
        f"  if (n == {n}) product<ArkCodeProduct<int, {t.values.storage}, {t.storage}, {COLUMNS}, "
        f"{HIGH}, {scales_bytes(t)}>, {COLUMNS}>(from, pitch, k, stages, lines, out);\n"
        for n, t in enumerate(types())
    )
    codes = "".join(
        f"  if (n == {2 * n + i}) pairs<{t.storage}, {c.storage}>(code, out);\n"
        for n, c in enumerate(CODES)
        for i, t in enumerate((bf16, fp16))
    )
    calls = (
        'extern "C" void run(int n, const char* from, int pitch, int k, int stages, int lines, '
        "float* out) {\n"
        f'{runs}}}\nextern "C" void codes(int n, ark_u32 code, uint16_t* out) {{\n{codes}}}\n'
    )
    elements = "".join(map(device_text, ("small_floats.h", "pack.h")))
    own = "".join(map(inline.header, ("linear_codes.h", "code_pairs.h", "code_products.h")))
    own = cut(own, "", "void ark_code_product(")
    text = HOST + HEAD + PAIRS + FLOATS + elements + HEADER + CONVERTED + own + CALLS + calls
    source.write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-fpermissive", "-w"]
    subprocess.run([*command, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("dtype", CODES, ids=lambda t: t.name)
@pytest.mark.parametrize("values", [bf16, fp16], ids=lambda t: t.name)
def test_all_codes_become_their_values(
    device: ctypes.CDLL, dtype: DataType, values: DataType
) -> None:
    number = 2 * CODES.index(dtype) + (values is fp16)
    for code in range(1 << dtype.bits):
        out = np.zeros(4 if dtype.bits == 8 else 8, np.uint16)
        device.codes(number, code, out.ctypes.data_as(ctypes.c_void_p))
        stored = np.array([code], np.uint8)
        if dtype.name == "int4":
            stored = np.array([code - 16 if code > 7 else code], np.int8).astype(ml_dtypes.int4)
        want = float(stored.view(dtype.numpy).astype(np.float32)[0])
        if np.isfinite(want):  # no checkpoint has other values
            np.testing.assert_array_equal(out.view(values.numpy).astype(float), want, str(code))


def matrix(dtype: RowType, rows: int, rng: np.random.Generator) -> np.ndarray:
    """The bytes of random rows of a quantised matrix."""
    low, high = {"int4": (-8, 8), "int8": (-128, 128), "uint8": (0, 256)}.get(
        dtype.codes.name, (0, 16)
    )
    codes = rng.integers(low, high, (rows, dtype.columns))
    if dtype.codes.name.startswith("fp"):
        codes = rng.standard_normal((rows, dtype.columns)) * 2
    scales = rng.uniform(0.5, 1.5, (rows, dtype.groups))
    zeros = rng.integers(0, 16, scales.shape) + 0.25 if dtype.zeros else None
    return row_bytes(dtype, codes, scales, zeros)


def stage(dtype: RowType, x: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Returns a stage's contents in shared memory, as box copies write them: lines of 128 bytes of
    the input, swizzled; codes; scales; zero points.
    """
    lines = np.zeros((STAGE_DEPTH // 64, HIGH, 8, 8), np.uint16)
    for line in range(min(len(lines), (dtype.columns - k) // 64)):
        pieces = x[:, k + 64 * line : k + 64 * (line + 1)].reshape(len(x), 8, 8)
        for row in range(len(x)):
            lines[line, row, np.arange(8) ^ row % 8] = pieces[row]

    def box(begin: int, nbytes: int) -> np.ndarray:
        padded = np.concatenate([rows, np.zeros((len(rows), nbytes), np.uint8)], 1)
        return padded[:, begin : begin + nbytes]

    size = k // dtype.group * dtype.scales.itemsize
    parts = [box(dtype.codes.nbytes(k), codes_bytes(dtype))]
    if scales_bytes(dtype):
        parts.append(box((dtype.scales_at + size) // 16 * 16, scales_bytes(dtype)))
    if dtype.zeros:
        parts.append(box((dtype.zeros_at + size) // 16 * 16, scales_bytes(dtype)))
    return np.concatenate([lines.view(np.uint8).ravel(), *(p.ravel() for p in parts)])


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: "-".join(map(str, TYPES[n])))
@pytest.mark.parametrize("start", [0, 256])
def test_stages_agree_with_numpy(device: ctypes.CDLL, number: int, start: int) -> None:
    """The products of a sequence of stages equal NumPy's. start: the first element along k; above 0
    for a later part of a product whose k is split.
    """
    dtype = types()[number]
    rng = np.random.default_rng(number)
    rows = np.ascontiguousarray(matrix(dtype, COLUMNS, rng)).view(np.uint8).reshape(COLUMNS, -1)
    given = rng.standard_normal((21, dtype.columns)).astype(np.float32)
    x = to_bf16(given) if dtype.values is bf16 else given.astype(np.float16).view(np.uint16)
    out = np.full((64, COLUMNS), np.nan, np.float32)
    stages = np.stack([stage(dtype, x, rows, k) for k in range(start, dtype.columns, STAGE_DEPTH)])
    memory = np.zeros(stages.size + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    memory[begin : begin + stages.size] = stages.ravel()
    lines = (dtype.columns - start) % STAGE_DEPTH // 64 or STAGE_DEPTH // 64
    places = [a.ctypes.data_as(ctypes.c_void_p) for a in (memory[begin:], out)]
    device.run(number, places[0], stages.shape[1], start, len(stages), lines, places[1])
    seen = x.view(dtype.values.numpy).astype(np.float64)[:, start:]
    values = row_values(dtype, rows).astype(np.float64)[:, start:]
    if dtype.groups == 1 and not dtype.zeros:
        scale = rows[:, dtype.scales_at :].copy().view(dtype.scales.numpy)[:, :1].astype(float)
        out = out * scale.T
    most = np.abs(seen) @ np.abs(values).T
    rounded = dtype.zeros or (dtype.group % 64 and dtype.groups > 1)
    tolerance = 2.0**-20 if not rounded else 2.0**-9 if dtype.values is bf16 else 2.0**-12
    np.testing.assert_array_less(np.abs(out[:21] - seen @ values.T), tolerance * most)


def planned(machine: Machine, dtype: RowType, m: int, n: int, dtype_out: DataType = fp32) -> Plan:
    """Returns a plan of c = x weights^T and e = relu(c) under the variant `matrix`, where relu
    waits for c's tiles.
    """
    graph = Graph()
    x = graph.tensor((m, dtype.columns), dtype.values, arena="state", name="x")
    weights = graph.tensor((n, dtype.columns), dtype, arena="parameter", name="weights")
    c = graph.tensor((m, n), dtype_out, arena="state", name="c")
    e = graph.tensor((m, n), dtype_out, arena="state", name="e")
    given = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [x, weights], [c], given, "product")
    graph.add("relu", [c], [e], {}, "after")
    result = plan(graph, machine, {"variant": "matrix"})
    verify([result])
    assert "row_values" not in {op.kind for op in result.ops}
    return result


# The products: (type of the weights, rows, columns, type of the result). Together they cover each
# placement of scales, zero points, rows and columns that end within a tile, and different numbers
# of parts of k.
SHAPES = [
    (TYPES[0], 16, 2048, bf16),
    (TYPES[2], 33, 136, fp32),
    (TYPES[3], 64, 4096, bf16),
    (TYPES[5], 9, 1000, bf16),
    (TYPES[8], 16, 520, fp16),
    (TYPES[9], 40, 96, fp32),
]


@pytest.mark.parametrize(
    ("kind", "m", "n", "out"),
    [pytest.param(*case, marks=[slow] * (i not in (0, 3))) for i, case in enumerate(SHAPES)],
)
def test_products_compile_and_have_maps_of_codes_and_scales(kind, m, n, out) -> None:
    dtype = row_type(by_name(kind[0]), *kind[1:])
    product = planned(H100, dtype, m, n, dtype_out=out)
    machine = machine_of(product)
    emitted = write(product, machine, backend.dialect("sm_90a"))
    kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    place = next(i for i, op in enumerate(product.ops) if op.kind == "matmul")
    given, *pieces = emitted.maps[emitted.opcode[place]]
    assert given.operand == 0 and len(pieces) == 2 - (dtype.groups == 1 and not dtype.zeros)
    assert all((p.operand, p.dtype, p.dims) == (1, "byte", (dtype.itemsize, n)) for p in pieces)


@needs_gpu
@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: "-".join(map(str, TYPES[n])))
@pytest.mark.parametrize(("m", "n"), [(16, 2048), (9, 1000), (40, 136), (64, 4100)])
def test_products_equal_numpy(number: int, m: int, n: int) -> None:
    dtype, device = types()[number], backend.open(0)
    rng = np.random.default_rng(number)
    rows = np.ascontiguousarray(matrix(dtype, n, rng)).view(np.uint8).reshape(n, -1)
    x = rng.standard_normal((m, dtype.columns)).astype(dtype.values.numpy)
    with contextlib.closing(device):
        product = planned(device.machine, dtype, m, n)
        with Executor(product, backend, device) as executor:
            executor.write("weights", rows)
            executor.write("x", x)
            for iterations in (1, 3):
                executor.start(iterations).wait(60)
                c, e = (executor.read(name).copy().reshape(m, n) for name in ("c", "e"))
                np.testing.assert_array_equal(e, np.maximum(c, 0))
                seen, values = x.astype(np.float64), row_values(dtype, rows).astype(np.float64)
                most = np.abs(seen) @ np.abs(values).T
                rounded = dtype.zeros or (dtype.group % 64 and dtype.groups > 1)
                tolerance = 2.0**-18 if not rounded else 2.0**-9
                np.testing.assert_array_less(np.abs(c - seen @ values.T), tolerance * most)
