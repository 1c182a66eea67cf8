"""Operations that clang expands into many instructions, on random bit patterns, compared with
NumPy.

Division and square roots are correctly rounded only if every step of their expansions is right:
scaling, estimates, Newton steps in the right rounding and denormal mode, and fix-up.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from numpy.typing import NDArray

from tests.kept import compile_hip

VALUE_COUNT = 1024
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100")
BINARY = {
    "div": "x[i] / y[i]",
    "mul": "x[i] * y[i]",
    "add": "x[i] + y[i]",
    "sqrt": "(T)SQRT(x[i])",
    "floor": "(T)FLOOR(x[i])",
    "rint": "(T)RINT(x[i])",
}
FLOATS = {
    "f16": ("_Float16", np.float16, "f16"),
    "f32": ("float", np.float32, "f"),
    "f64": ("double", np.float64, ""),
}
INTEGERS = {
    "i32": ("int", np.int32),
    "u32": ("unsigned", np.uint32),
    "i64": ("long", np.int64),
    "u64": ("unsigned long", np.uint64),
}
CONVERSIONS = [
    (a, b)
    for a in (*FLOATS, *INTEGERS)
    for b in (*FLOATS, *INTEGERS)
    if a != b and "f16" not in (a, b)
] + [("f16", "f32"), ("f32", "f16"), ("f64", "f16"), ("i32", "f16"), ("f16", "i32")]


def _source() -> str:
    text = '#define KERNEL extern "C" __global__ __launch_bounds__(256) void\n'
    index = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
    for name, (type_, _, suffix) in FLOATS.items():
        for op, expression in BINARY.items():
            for word in ("SQRT", "FLOOR", "RINT"):
                expression = expression.replace(word, f"__builtin_{word.lower()}{suffix}")
            expression = expression.replace("(T)", f"({type_})")
            text += f"KERNEL {name}_{op}({type_}* o, const {type_}* x, const {type_}* y) "
            text += f"{{ {index} o[i] = {expression}; }}\n"
    for name, (type_, _) in INTEGERS.items():
        for op, sign in (("div", "/"), ("mod", "%"), ("mul", "*")):
            text += f"KERNEL {name}_{op}({type_}* o, const {type_}* x, const {type_}* y) "
            text += f"{{ {index} o[i] = x[i] {sign} y[i]; }}\n"
    types = {**{k: v[0] for k, v in FLOATS.items()}, **{k: v[0] for k, v in INTEGERS.items()}}
    for a, b in CONVERSIONS:
        text += f"KERNEL {a}_to_{b}({types[b]}* o, const {types[a]}* x, const {types[a]}* y) "
        text += f"{{ {index} o[i] = ({types[b]})x[i]; }}\n"
    return text


@cache
def _loaded(arch: str) -> tuple[Any, Any]:
    machine = core().Machine([arch])
    code = core().CodeObject(compile_hip(_source(), arch, ("-O3", "-ffp-contract=off")))
    return machine, machine.load(code, 0)


def run(arch: str, kernel: str, x: NDArray[Any], y: NDArray[Any], out: type) -> NDArray[Any]:
    machine, code = _loaded(arch)
    size = VALUE_COUNT * 8
    addresses = [machine.allocate(0, "device", size) for _ in range(3)]
    machine.write(addresses[1], x.tobytes())
    machine.write(addresses[2], y.tobytes())
    packed = struct.pack("<QQQ", *addresses)
    result = machine.run(
        core().LaunchDesc(code, kernel, (VALUE_COUNT // 256, 1, 1), (256, 1, 1), packed)
    )
    assert result.ok, result.message
    raw = machine.read(addresses[0], VALUE_COUNT * np.dtype(out).itemsize)
    for address in addresses:
        machine.release(address)
    return np.frombuffer(raw, out)


def patterns(type_: type, seed: int) -> NDArray[Any]:
    """Random bit patterns: every exponent, denormals, infinities and NaN among them."""
    bits = np.dtype(type_).itemsize * 8
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**bits, VALUE_COUNT, dtype=np.dtype(f"u{bits // 8}")).view(type_)
    values[:512] = rng.uniform(-100, 100, 512).astype(type_)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, np.finfo(type_).max,
               np.finfo(type_).tiny, np.finfo(type_).smallest_subnormal]  # fmt: skip
    values[-100:] = np.roll(np.repeat(np.array(special, type_), 10), seed)
    return values


def same(got: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.bool_]:
    equal: NDArray[np.bool_] = (got == expected) & (np.signbit(got) == np.signbit(expected))
    return equal | (np.isnan(got) & np.isnan(expected))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", list(BINARY))
@pytest.mark.parametrize("name", list(FLOATS))
def test_floating_point_is_correctly_rounded(name: str, op: str, arch: str) -> None:
    type_ = FLOATS[name][1]
    x, y = patterns(type_, 1), patterns(type_, 2)
    got = run(arch, f"{name}_{op}", x, y, type_)
    with np.errstate(all="ignore"):
        expected = {
            "div": lambda: x / y,
            "mul": lambda: x * y,
            "add": lambda: x + y,
            "sqrt": lambda: np.sqrt(x),
            "floor": lambda: np.floor(x),
            "rint": lambda: np.rint(x),
        }[op]()
    wrong = np.flatnonzero(~same(got, expected))
    assert wrong.size == 0, [(x[i], y[i], got[i], expected[i]) for i in wrong[:5]]


@pytest.mark.parametrize("arch", ARCHS)
def test_quotients_below_the_smallest_normal_double(arch: str) -> None:
    """Quotients that are subnormal doubles are correctly rounded. Such quotients have fewer bits
    than normal ones; they must not be rounded twice.
    """
    rng = np.random.default_rng(6)
    y = np.ldexp(rng.uniform(1, 2, VALUE_COUNT), rng.integers(-20, 40, VALUE_COUNT))
    x = rng.uniform(1, 2, VALUE_COUNT) * np.ldexp(y, -1022 - rng.integers(0, 3, VALUE_COUNT))
    x[0], y[0] = -2.31111119899204e-301, 12523120.481818557
    got = run(arch, "f64_div", x, y, np.float64)
    expected = x / y
    assert np.count_nonzero(np.abs(expected) < 2.0**-1022) > VALUE_COUNT // 2
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [(x[i], y[i], got[i], expected[i]) for i in wrong[:5]]


@pytest.mark.parametrize("arch", ARCHS)
def test_quotients_above_the_largest_double(arch: str) -> None:
    """Quotients that exceed the largest double are infinite, although the Newton steps compute
    infinity minus infinity.
    """
    x = np.full(VALUE_COUNT, -7.1e255)
    y = np.ldexp(
        np.random.default_rng(7).uniform(1, 2, VALUE_COUNT), np.arange(VALUE_COUNT) % 200 - 330
    )
    y[::2] *= -1
    with np.errstate(over="ignore"):
        expected = x / y
    assert np.count_nonzero(np.isinf(expected)) > VALUE_COUNT // 2
    np.testing.assert_array_equal(run(arch, "f64_div", x, y, np.float64), expected)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "nan"), [("f16", 0xFE00), ("f32", 0xFFC00000), ("f64", 0xFFF8000000000000)]
)
def test_quotients_that_do_not_exist_are_negative_nans(name: str, nan: int, arch: str) -> None:
    """0 / 0 and inf / inf give the negative NaN of the pseudocode of V_DIV_FIXUP in AMD's
    instruction set documents.
    """
    type_ = FLOATS[name][1]
    x = np.resize(np.array([0.0, -0.0, np.inf, -np.inf], type_), VALUE_COUNT)
    y = np.resize(np.array([0.0, 0.0, np.inf, np.inf], type_), VALUE_COUNT)
    got = run(arch, f"{name}_div", x, y, type_).view(f"u{np.dtype(type_).itemsize}")
    assert set(got.tolist()) == {nan}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(INTEGERS))
def test_integer_division_and_products(name: str, arch: str) -> None:
    type_ = INTEGERS[name][1]
    bits = np.dtype(type_).itemsize * 8
    rng = np.random.default_rng(3)
    x, y = (rng.integers(0, 2**bits, VALUE_COUNT, np.dtype(f"u{bits // 8}")) for _ in range(2))
    y >>= rng.integers(0, bits, VALUE_COUNT).astype(y.dtype)
    y[y == 0] = 3
    x, y = x.view(type_), y.view(type_)
    y[y == 0] = 7
    for op in ("div", "mod", "mul"):
        got = run(arch, f"{name}_{op}", x, y, type_)
        for a, b, value in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            exact = {"div": quotient, "mod": a - quotient * b, "mul": a * b}[op]
            assert (exact - value) % 2**bits == 0, (op, a, b, value)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("a", "b"), CONVERSIONS)
def test_conversions(a: str, b: str, arch: str) -> None:
    types = {**{k: v[1] for k, v in FLOATS.items()}, **{k: v[1] for k, v in INTEGERS.items()}}
    source, target = types[a], types[b]
    if a in FLOATS:
        x = patterns(source, 4)
        if b in INTEGERS:  # out of range is undefined in C: keep what fits
            limits = np.iinfo(target)
            with np.errstate(all="ignore"):
                fits = (x > max(limits.min, -1e18)) & (x < min(limits.max, 1e18) * 0.99)
            x = np.where(fits, x, source(3.75)).astype(source)
    else:
        bits = np.dtype(source).itemsize * 8
        rng = np.random.default_rng(5)
        x = rng.integers(0, 2**bits, VALUE_COUNT, np.dtype(f"u{bits // 8}"))
        x = (x >> rng.integers(0, bits, VALUE_COUNT).astype(x.dtype)).view(source)
    got = run(arch, f"{a}_to_{b}", x, x, target)
    with np.errstate(all="ignore"):
        expected = x.astype(target)
    if b in FLOATS:
        wrong = np.flatnonzero(~same(got, expected))
    else:
        wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [(x[i], got[i], expected[i]) for i in wrong[:5]]
