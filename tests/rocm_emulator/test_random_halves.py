"""Random straight-line kernels over 16-bit types, compared with NumPy operation by operation.

The architectures' machine code differs most for these types: halves of registers on RDNA3, SDWA and
packed instructions on CDNA. Hypothesis draws the program. Contraction is disabled, so that every
operation rounds as NumPy's does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kept import compile_hip

VALUE_COUNT = 128
TYPES = {
    "half": ("_Float16", np.float16),
    "short": ("short", np.int16),
    "ushort": ("unsigned short", np.uint16),
    "char": ("signed char", np.int8),
}
Function = Callable[..., NDArray[Any]]


@dataclass(frozen=True)
class Op:
    """An operation of random kernels. ``text`` is its C expression, with {0}, {1}, ... for operands
    of the types in ``sources``; the function computes the same in NumPy.
    """

    result: str
    sources: tuple[str, ...]
    text: str
    numpy: Function


def _fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    return (a.astype(np.float64) * b + c).astype(np.float16)


def _bounded(a: NDArray) -> NDArray:
    return np.where((a > -30000) & (a < 30000), a, np.float16(5)).astype(np.int16)


H, S, U, C = "half", "short", "ushort", "char"
OPS = [
    Op(H, (H, H), "{0} + {1}", np.add),
    Op(H, (H, H), "{0} - {1}", np.subtract),
    Op(H, (H, H), "{0} * {1}", np.multiply),
    Op(H, (H, H, H), "__builtin_fmaf16({0}, {1}, {2})", _fma),
    Op(H, (H, H), "({0} < {1} ? {0} : {1})", lambda a, b: np.where(a < b, a, b)),
    Op(H, (H, H), "({0} > {1} ? -{0} : {1})", lambda a, b: np.where(a > b, -a, b)),
    Op(H, (H,), "-{0}", np.negative),
    Op(H, (H,), "__builtin_fabsf16({0})", np.abs),
    Op(H, (H,), "__builtin_floorf16({0})", np.floor),
    Op(H, (S,), "(_Float16){0}", lambda a: a.astype(np.float16)),
    Op(H, (U,), "(_Float16)({0} & 1023)", lambda a: (a & 1023).astype(np.float16)),
    Op(H, (H,), "(_Float16)(float){0}", lambda a: a.copy()),
    Op(
        S,
        (H,),
        "({0} > (_Float16)-30000 && {0} < (_Float16)30000 ? (short){0} : (short)5)",
        _bounded,
    ),
    Op(S, (S, S), "(short)({0} + {1})", np.add),
    Op(S, (S, S), "(short)({0} - {1})", np.subtract),
    Op(S, (S, S), "(short)({0} * {1})", np.multiply),
    Op(S, (S, U), "(short)({0} >> ({1} & 15))", lambda a, b: a >> (b & 15).astype(np.int16)),
    Op(S, (S, S), "({0} < {1} ? {0} : {1})", np.minimum),
    Op(S, (S, S), "({0} > {1} ? {0} : {1})", np.maximum),
    Op(S, (C, S), "(short)({0} ^ {1})", lambda a, b: a.astype(np.int16) ^ b),
    Op(U, (U, U), "(unsigned short)({0} + {1})", np.add),
    Op(U, (U, U), "(unsigned short)({0} * {1})", np.multiply),
    Op(U, (U, U), "(unsigned short)({0} << ({1} & 15))", lambda a, b: a << (b & 15)),
    Op(U, (U, U), "(unsigned short)({0} >> ({1} & 15))", lambda a, b: a >> (b & 15)),
    Op(U, (S, U), "(unsigned short)({0} & {1})", lambda a, b: a.view(np.uint16) & b),
    Op(U, (U, U), "({0} < {1} ? {0} : {1})", np.minimum),
    Op(C, (S,), "(signed char){0}", lambda a: a.astype(np.int8)),
    Op(C, (C, C), "(signed char)({0} + {1})", np.add),
]
PRELUDE = """
typedef _Float16 pair __attribute__((ext_vector_type(2)));
template <class Word, class T> __device__ inline unsigned raw(T value) {
  Word word;
  __builtin_memcpy(&word, &value, sizeof word);
  return word;
}
__device__ inline unsigned bits(_Float16 v) { return raw<unsigned short>(v); }
__device__ inline unsigned bits(short v) { return raw<unsigned short>(v); }
__device__ inline unsigned bits(unsigned short v) { return raw<unsigned short>(v); }
__device__ inline unsigned bits(signed char v) { return raw<unsigned char>(v); }
"""
# Operations on pairs of 16-bit values, for which clang emits packed instructions.
PAIR = "pair p{0} = (pair){{{1}, {2}}} {3} (pair){{{2}, {1}}};"
PAIRED: dict[str, Function] = {"+": np.add, "-": np.subtract, "*": np.multiply}


@st.composite
def program(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...]]]:
    """Draws steps: an operation and the earlier values (of the right type) that are its
    operands.
    """
    return draw(
        st.lists(
            st.tuples(st.integers(0, len(OPS) - 1), st.tuples(*[st.integers(0, 10**6)] * 3)),
            min_size=6,
            max_size=24,
        )
    )


def _inputs() -> dict[str, NDArray]:
    rng = np.random.default_rng(17)
    halves = rng.uniform(-300, 300, VALUE_COUNT).astype(np.float16)
    halves[:8] = [0.0, -0.0, 65504, -65504, 6e-8, -6e-8, np.inf, 1]
    return {
        H: halves,
        S: rng.integers(-(2**15), 2**15, VALUE_COUNT).astype(np.int16),
        U: rng.integers(0, 2**16, VALUE_COUNT).astype(np.uint16),
        C: rng.integers(-128, 128, VALUE_COUNT).astype(np.int8),
    }


def build(steps: list[tuple[int, tuple[int, ...]]]) -> tuple[str, list[tuple[str, NDArray]]]:
    """Returns the kernel, and every value that it stores: (type, expected)."""
    values: dict[str, list[tuple[str, NDArray]]] = {}
    lines = []
    for kind, data in _inputs().items():
        lines.append(f"{TYPES[kind][0]} {kind}0 = in_{kind}[t];")
        values[kind] = [(f"{kind}0", data)]
    stored: list[tuple[str, NDArray]] = []
    with np.errstate(all="ignore"):
        for number, (index, picks) in enumerate(steps):
            op = OPS[index]
            pairs = zip(op.sources, picks, strict=False)
            taken = [values[kind][pick % len(values[kind])] for kind, pick in pairs]
            kind = op.result
            name = f"{kind}{number + 1}"
            text = op.text.format(*(f"({text})" for text, _ in taken))
            lines.append(f"{TYPES[kind][0]} {name} = {text};")
            result = np.asarray(op.numpy(*(data for _, data in taken))).astype(TYPES[kind][1])
            values[kind].append((name, result))
            lines.append(f"out[{len(stored)} * {VALUE_COUNT} + t] = bits({name});")
            stored.append((kind, result))
        a, b = values[H][-1], values[H][len(values[H]) // 2]
        for number, (sign, numpy) in enumerate(PAIRED.items()):
            lines.append(PAIR.format(number, a[0], b[0], sign))
            for part, (x, y) in (("x", (a, b)), ("y", (b, a))):
                lines.append(f"out[{len(stored)} * {VALUE_COUNT} + t] = bits(p{number}.{part});")
                stored.append((H, numpy(x[1], y[1])))
    parameters = ", ".join(f"const {TYPES[kind][0]}* in_{kind}" for kind in TYPES)
    body = "\n  ".join(["unsigned t = blockIdx.x * blockDim.x + threadIdx.x;", *lines])
    kernel = f'extern "C" __global__ void kernel({parameters}, unsigned* out) {{\n  {body}\n}}\n'
    return PRELUDE + kernel, stored


@cache
def machine(arch: str) -> Any:
    return core().Machine([arch])


def execute(source: str, arch: str, level: str, rows: int) -> NDArray[np.uint32]:
    code_bytes = compile_hip(source, arch, (level, "-ffp-contract=off"))
    device = machine(arch)
    held = []
    try:
        for data in _inputs().values():
            held.append(device.allocate(0, "device", data.nbytes))
            device.write(held[-1], data.tobytes())
        held.append(device.allocate(0, "device", rows * VALUE_COUNT * 4))
        code = device.load(core().CodeObject(code_bytes), 0)
        arguments = np.array(held, np.uint64).tobytes()
        shape = (VALUE_COUNT // 64, 1, 1), (64, 1, 1)
        launch = core().LaunchDesc(
            code, "kernel", *shape, arguments, 0, core().LaunchOptions(checks=True)
        )
        result = device.run(launch)
        assert result.ok, result.message
        return np.frombuffer(device.read(held[-1], rows * VALUE_COUNT * 4), np.uint32).reshape(
            rows, VALUE_COUNT
        )
    finally:
        for address in held:
            device.release(address)


@pytest.mark.parametrize("arch", ("gfx1100", "gfx942"))
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # every step of shrinking would start clang four times
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps=program())
def test_random_program(arch: str, steps: list[tuple[int, tuple[int, ...]]]) -> None:
    source, stored = build(steps)
    for level in ("-O0", "-O3"):
        got = execute(source, arch, level, len(stored))
        for row, (kind, expected) in enumerate(stored):
            size = np.dtype(TYPES[kind][1]).itemsize
            words = got[row].astype({1: np.uint8, 2: np.uint16}[size]).view(TYPES[kind][1])
            if kind == H:
                numbers = ~np.isnan(expected)
                assert np.array_equal(np.isnan(words), ~numbers), (level, row, source)
                words, expected = words[numbers].view(np.uint16), expected[numbers].view(np.uint16)
            assert np.array_equal(words, expected), (level, row, source)
