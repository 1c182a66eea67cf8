"""Random small HIP kernels against the very same function compiled for the host.

Hypothesis draws a function in C (typed expressions, branches, loops, a local array); clang compiles
it for the emulated device, the system's compiler for the host, and both run on the same inputs. On
the device the results then pass through LDS: each thread combines its value with one from another
lane. Half of the runs have the checks on, which must find nothing.

The sign of a zero does not count: clang's AMD back end reads `0 - x` as `-x` in front of another
operation and turns a selection between `x` and 0 into a minimum, so that a zero's sign is the
compiler's choice. It does not affect other results: no value is divided by a signed zero. (The
tests of single instructions compare zeros with their signs.)
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from ark_rocm_emulator import build, emulated
from hip import hip
from hip_runner import Arguments, Buffers, check, download, launch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import ALL

from tests.kept import compile_hip

THREADS, BLOCKS = 128, 2
SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
TARGETS = (
    [(arch, level) for arch in ALL for level in ("-O0", "-O3")]
    if SWEEP
    else [("gfx942", "-O3"), ("gfx1100", "-O3"), ("gfx90a", "-O0")]
)
TYPES = ("u32", "i32", "u64", "f32", "f64")

COMMON = """
typedef unsigned u32;
typedef int i32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
#define DIV_U(a, b) ((b) ? (a) / (b) : 7)
#define MOD_U(a, b) ((b) ? (a) % (b) : 3)
#define DIV_I(a, b) ((b) != 0 && (b) != -1 ? (a) / (b) : 5)
#define DIV_F(a, b) ((a) / ((b) == 0 ? 0 : (b)))
#define TO_I(x) ((x) > -2e9 && (x) < 2e9 ? (i32)(x) : 11)
#define TO_U(x) ((x) >= 0 && (x) < 4e9 ? (u32)(x) : 13u)
#define TO_L(x) ((x) >= 0 && (x) < 1e18 ? (u64)(x) : 17ull)
"""

# Operations of each type, separated by semicolons; {0} and {1} are operands in parentheses.
BINARY = {
    "u32": """{0} + {1}; {0} - {1}; {0} * {1}; {0} & {1}; {0} | {1}; {0} ^ {1}; {0} << ({1} & 31);
        {0} >> ({1} & 31); DIV_U({0}, {1}); MOD_U({0}, {1}); ({0} < {1} ? {0} : {1});
        (u32)(((u64){0} * {1}) >> 32)""",
    "i32": """(i32)((u32){0} + (u32){1}); (i32)((u32){0} - (u32){1}); (i32)((u32){0} * (u32){1});
        {0} ^ {1}; {0} >> ({1} & 31); DIV_I({0}, {1}); ({0} > {1} ? {0} : {1});
        ({0} < {1} ? 1 : -1)""",
    "u64": """{0} + {1}; {0} - {1}; {0} * {1}; {0} ^ {1}; {0} << ({1} & 63); {0} >> ({1} & 63);
        ({0} > {1} ? {0} : {1}); DIV_U({0}, {1})""",
    "f32": """{0} + {1}; {0} - {1}; {0} * {1}; DIV_F({0}, {1}); ({0} < {1} ? {0} : {1});
        __builtin_fmaf({0}, {1}, 0.75f); __builtin_sqrtf(__builtin_fabsf({0} * {1}))""",
    "f64": """{0} + {1}; {0} - {1}; {0} * {1}; DIV_F({0}, {1}); ({0} < {1} ? {1} : {0});
        __builtin_fma({0}, {1}, -0.5)""",
}
UNARY = {
    "u32": """~{0}; (u32)__builtin_popcount({0}); ({0} ? (u32)__builtin_clz({0}) : 32u);
        (u32)(unsigned char){0}; (u32)(i32)(short){0}""",
    "i32": "(i32)-(u32){0}; ~{0}; (i32)(signed char){0}; (i32)(unsigned short){0}",
    "u64": "~{0}; (u64)__builtin_popcountll({0}); (u64)(u32){0}",
    "f32": """-{0}; __builtin_floorf({0}); __builtin_truncf({0}); __builtin_fabsf({0});
        __builtin_rintf({0})""",
    "f64": "-{0}; __builtin_floor({0}); __builtin_fabs({0}); __builtin_rint({0})",
}
CONVERT = {
    ("f32", "i32"): "TO_I({0})",
    ("f64", "i32"): "TO_I({0})",
    ("f32", "u32"): "TO_U({0})",
    ("f64", "u32"): "TO_U({0})",
    ("f32", "u64"): "TO_L({0})",
    ("f64", "u64"): "TO_L({0})",
}
LITERAL = {
    "u32": st.integers(0, 2**32 - 1).map(lambda v: f"{v}u"),
    "i32": st.integers(-(2**31) + 1, 2**31 - 1).map(lambda v: f"({v})"),
    "u64": st.integers(0, 2**64 - 1).map(lambda v: f"{v}ull"),
    "f32": st.floats(-1e4, 1e4, width=32).map(lambda v: f"({v!r}f)"),
    "f64": st.floats(-1e6, 1e6).map(lambda v: f"({v!r})"),
}


@st.composite
def expression(draw: st.DrawFn, kind: str, names: dict[str, list[str]], depth: int) -> str:
    """A parenthesised expression of type `kind` over the variables in scope."""
    leaf = depth == 0 or draw(st.integers(0, 5)) == 0
    if leaf:
        if names[kind] and draw(st.booleans()):
            return draw(st.sampled_from(names[kind]))
        return f"({kind}){draw(LITERAL[kind])}"
    form = draw(st.integers(0, 3))
    if form == 0:
        source = draw(st.sampled_from(TYPES))
        inner = draw(expression(source, names, depth - 1))
        return f"(({kind}){CONVERT.get((source, kind), '{0}').format(f'({inner})')})"
    if form == 1:
        inner = draw(expression(kind, names, depth - 1))
        form_text = draw(st.sampled_from(UNARY[kind].split(";")))
        return f"(({kind})({form_text.strip().format(f'({inner})')}))"
    left = draw(expression(kind, names, depth - 1))
    right = draw(expression(kind, names, depth - 1))
    form_text = draw(st.sampled_from(BINARY[kind].split(";")))
    return f"(({kind})({form_text.strip().format(f'({left})', f'({right})')}))"


@st.composite
def function(draw: st.DrawFn) -> str:
    """The body of `u64 f(u32 a, i32 b, f32 c, u32 id)`."""
    names: dict[str, list[str]] = {"u32": ["a", "id"], "i32": ["b"], "u64": [], "f32": ["c"]}
    names["f64"] = []
    lines = []
    for k in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(TYPES))
        value = draw(expression(kind, names, 3))
        form = draw(st.sampled_from(["let", "branch", "loop", "array"]))
        name = f"v{k}"
        if form == "branch":
            test = draw(expression("i32", names, 2))
            other = draw(expression(kind, names, 2))
            lines.append(f"{kind} {name}; if ({test} > 0) {name} = {value}; else {name} = {other};")
        elif form == "loop":
            count = draw(expression("u32", names, 1))
            names[kind].append(name)
            step = draw(expression(kind, names, 2))
            names[kind].pop()
            lines.append(f"{kind} {name} = {value};")
            lines.append(f"for (u32 k = 0; k < ({count} & 7); ++k) {name} = {step};")
        elif form == "array":
            place = draw(expression("u32", names, 1))
            lines.append(f"{kind} {name}_[4] = {{{value}, 1, 2, 3}};")
            lines.append(f"{name}_[{place} & 3] += 1; {kind} {name} = {name}_[(id + {k}) & 3];")
        else:
            lines.append(f"{kind} {name} = {value};")
        names[kind].append(name)
    parts = []
    for kind, known in names.items():
        for name in known:
            if kind in ("f32", "f64"):
                word = "u32" if kind == "f32" else "u64"
                bits = f"__builtin_bit_cast({word}, {name})"
                parts.append(f"({name} == 0 ? 0 : {name} == {name} ? (u64){bits} : 99ull)")
            else:
                parts.append(f"(u64){name}")
    result = " + ".join(f"{part} * {2 * k + 1}ull" for k, part in enumerate(parts))
    return "\n  ".join([*lines, f"return {result};"])


def _device_source(body: str) -> str:
    return f"""{COMMON}
static __device__ u64 f(u32 a, i32 b, f32 c, u32 id) {{
  {body}
}}
extern "C" __global__ __launch_bounds__({THREADS}) void run(
    const u32* a, const i32* b, const f32* c, u64* out, u32 turn) {{
  __shared__ u64 line[{THREADS}];
  u32 t = threadIdx.x, i = blockIdx.x * {THREADS} + t;
  u64 mine = f(a[i], b[i], c[i], i);
  line[t] = mine;
  __syncthreads();
  out[i] = mine ^ (line[(t * 5 + turn) & {THREADS - 1}] << 1);
}}
"""


def _on_host(body: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, turn: int) -> np.ndarray:
    source = f"""{COMMON}
static u64 f(u32 a, i32 b, f32 c, u32 id) {{
  {body}
}}
extern "C" void run(const u32* a, const i32* b, const f32* c, u64* out, u32 n) {{
  for (u32 i = 0; i < n; ++i) out[i] = f(a[i], b[i], c[i], i);
}}
"""
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder, "host.cpp"), Path(folder, "host.so")
        text.write_text(source)
        flags = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared"]
        subprocess.run(
            [*build.compiler(), *flags, str(text), "-o", str(library)],
            check=True,
            capture_output=True,
        )
        mine = np.empty(a.size, np.uint64)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c, mine)]
        ctypes.CDLL(str(library)).run(*pointers, ctypes.c_uint32(a.size))
    lanes = mine.reshape(-1, THREADS)
    other = lanes[:, (np.arange(THREADS) * 5 + turn) % THREADS]
    return (lanes ^ (other << np.uint64(1))).ravel()


def _inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n = THREADS * BLOCKS
    a = rng.integers(0, 2**32, n).astype(np.uint32)
    b = rng.integers(-(2**31), 2**31, n).astype(np.int32)
    c = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 6, n)).astype(np.float32)
    a[:4], b[:4] = [0, 1, 2**32 - 1, 2**31], [0, -1, -(2**31), 2**31 - 1]
    c[:4] = [0.0, -0.0, np.inf, 1e-41]
    return a, b, c


@pytest.mark.parametrize(("arch", "optimisation"), TARGETS)
@settings(
    max_examples=60 if SWEEP else 12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(body=function(), seed=st.integers(0, 2**16), turn=st.integers(0, THREADS - 1))
def test_device_and_host_agree(
    arch: str, optimisation: str, body: str, seed: int, turn: int
) -> None:
    a, b, c = _inputs(seed)
    options = (optimisation, "-ffp-contract=off", "-fwrapv", "-w")
    binary = compile_hip(_device_source(body), arch, options)
    with emulated(arch, seed=seed, checks=seed & 1, report=0), Buffers() as buffers:
        function = check(hip.hipModuleGetFunction(check(hip.hipModuleLoadData(binary)), b"run"))
        out = buffers.empty(8 * a.size)
        pointers = buffers.upload(a), buffers.upload(b), buffers.upload(c), out
        launch(function, BLOCKS, THREADS, Arguments(*pointers, np.int32(turn)))
        check(hip.hipDeviceSynchronize())
        got = download(out, (a.size,), np.uint64)
    np.testing.assert_array_equal(got, _on_host(body, a, b, c, turn))
