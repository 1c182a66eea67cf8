"""Every op, executed and compared with NumPy: shapes, types, broadcasting, views, padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from tests.cases.ops import (
    FLOATS,
    ROWS,
    UNARY,
    check_attention,
    check_matmul,
    check_movement,
    check_reductions,
    check_rows,
    integers,
    values,
)
from tests.emulated import few_emulated
from tests.opcheck import Case, check

BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.emulated("gfx942")
def test_unary(backend: str) -> None:
    cases = []
    for dtype in FLOATS:
        for name, reference in UNARY.items():
            positive = name in ("sqrt", "rsqrt")
            shape = (3, 37) if positive else (2, 3, 1, 41)
            array = values(*shape, low=0.1 if positive else -3.0, high=3.0)
            op = getattr(ark, name)
            cases.append(Case(f"{name} {dtype}", [(array, dtype)], op, reference))
    check(cases)


@pytest.mark.parametrize("count", few_emulated((262_139, 1_000_003), 1_000_003))
@pytest.mark.emulated("gfx1100")
def test_chains_of_tiles_that_end_within_a_warp(backend: str, count: int) -> None:
    """Chains of elementwise ops whose tasks run on one processor without waits between them. The
    last tile is so small that only a part of a warp's lanes have elements.
    """
    held = []  # held results are written, which keeps the ops separate

    def chain(a: ark.Tensor) -> ark.Tensor:
        held.append(ark.mul(a, 2.0))
        held.append(ark.mul(held[-1], 0.5))
        return ark.mul(held[-1], 4.0)

    array = values(count)
    check([Case(f"chain {t}", [(array, t)], chain, lambda a: a * 4) for t in (ark.fp32, ark.bf16)])


SHAPES = [
    ((5, 7), (5, 7)),
    ((5, 7), (1, 7)),
    ((5, 7), (7,)),
    ((5, 1), (1, 7)),
    ((2, 1, 3, 4), (5, 1, 4)),
    ((1,), (3, 3)),
    ((1, 1), (1, 1)),
]


@pytest.mark.emulated("gfx1100")
def test_binary(backend: str) -> None:
    cases = []
    for number, (left, right) in enumerate(SHAPES):
        dtype = (*FLOATS, ark.fp32)[number % 4]
        a, b = values(*left, seed=1), values(*right, seed=2, low=0.5)
        for name, reference in BINARY.items():
            op = getattr(ark, name)
            inputs = [(a, dtype), (b, dtype)]
            cases.append(Case(f"{name} {dtype} {left} {right}", inputs, op, reference))
    check(cases)


@pytest.mark.emulated("gfx942")
def test_integers(backend: str) -> None:
    a, b = integers(4, 9, seed=1), integers(1, 9, seed=2)
    b[0, :2] = (0, -1)
    wide = np.array([[2**31 - 1, -(2**31), 5, 7]])

    def divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(y == 0, 0, np.trunc(x / np.where(y == 0, 1, y))).astype(np.int64)

    pair = [(a, ark.int32), (b, ark.int32)]
    check(
        [
            Case("add", pair, ark.add, np.add),
            Case("sub", pair, ark.sub, np.subtract),
            Case("mul", pair, ark.mul, np.multiply),
            Case("div", pair, ark.div, divide),
            Case("wrap", [(wide, ark.int32)], lambda t: ark.add(t, 1), lambda x: x + 1),
            Case("scalar", pair[:1], lambda t: ark.sub(100, t), lambda x: 100 - x),
            Case(
                "sum", pair[:1], lambda t: ark.reduce_sum(t, 0), lambda x: x.sum(0, keepdims=True)
            ),
            Case(
                "max", pair[:1], lambda t: ark.reduce_max(t, 1), lambda x: x.max(1, keepdims=True)
            ),
            Case("copy", pair[:1], ark.copy, lambda x: x),
            Case("transpose", pair[:1], lambda t: ark.transpose(t, [1, 0]), lambda x: x.T),
        ]
    )


@pytest.mark.emulated("gfx942")
def test_scalars_and_constants(backend: str) -> None:
    a = values(3, 5, low=0.5)
    one = [(a, ark.fp32)]
    half = [(a, ark.fp16)]
    check(
        [
            Case("add", one, lambda t: ark.add(t, 1.5), lambda x: x + 1.5),
            Case("radd", one, lambda t: ark.add(1.5, t), lambda x: x + 1.5),
            Case("rsub", half, lambda t: ark.sub(2.0, t), lambda x: 2.0 - x),
            Case("rdiv", one, lambda t: ark.div(2, t), lambda x: 2 / x),
            Case("operators", one, lambda t: (2 - t) * t / 3 + t, lambda x: (2 - x) * x / 3 + x),
            Case("constant", [], lambda: ark.constant(7, [4, 4]), lambda: np.full((4, 4), 7.0)),
            Case("ones", [], lambda: ark.ones([3], ark.bf16), lambda: np.ones(3)),
            Case("zeros", [], lambda: ark.zeros([2, 2], ark.int32), lambda: np.zeros((2, 2))),
            Case("number", [], lambda: ark.copy(42.0), lambda: np.full((1,), 42.0)),
            Case("infinite", one, lambda t: ark.mul(t, float("inf")), lambda x: x * np.inf),
        ]
    )


CASTS = [(a, b) for a in (*FLOATS, ark.int32) for b in (*FLOATS, ark.int32) if a.name != b.name]


@pytest.mark.emulated("gfx1100")
def test_casts(backend: str) -> None:
    array = np.array([[0.0, 1.0, -1.0, 2.5, -2.5, 3.0, 1000.0, -7.75, 0.333]])
    cases = []
    for source, target in CASTS:
        data = np.trunc(array) if source is ark.int32 else array
        cases.append(
            Case(
                f"{source} to {target}",
                [(data, source)],
                lambda t, target=target: ark.cast(t, target),
                lambda x, target=target: np.trunc(x) if target is ark.int32 else x,
            )
        )
    check(cases)


@pytest.mark.emulated("gfx1100")
def test_casts_round_like_numpy(backend: str) -> None:
    """Casts of fp32 to other types give NumPy's bits, also for special values, subnormals
    and ties.
    """
    bits = np.random.default_rng(3).integers(0, 2**32, 4096, dtype=np.uint32)
    specials = np.array(
        [0.0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 1e-8, 6e-8, 2**-24 * 1.5]
    )
    array = np.concatenate([bits.view(np.float32), specials.astype(np.float32)])
    array = array[~np.isnan(array)]
    source = ark.tensor([len(array)])
    casts = [ark.cast(source, dtype) for dtype in (ark.fp16, ark.bf16)]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        source.from_numpy(array)
        runtime.run()
        for tensor in casts:
            with np.errstate(over="ignore"):
                want = array.astype(tensor.dtype().numpy)
            np.testing.assert_array_equal(tensor.to_numpy().view(np.uint16), want.view(np.uint16))


def test_matmul(backend: str) -> None:
    check_matmul(backend)


@pytest.mark.emulated("gfx942")
def test_reductions(backend: str) -> None:
    check_reductions(backend)


@pytest.mark.parametrize("shapes", few_emulated(ROWS.values(), ROWS["each_type"]), ids=ROWS)
@pytest.mark.emulated("gfx1100")
def test_rows(backend: str, shapes: list[tuple[int, ...]]) -> None:
    check_rows(backend, shapes)


@pytest.mark.emulated("gfx1100")
def test_movement(backend: str) -> None:
    check_movement(backend)


def test_attention(backend: str) -> None:
    check_attention(backend)


@pytest.mark.emulated("gfx942")
def test_views(backend: str) -> None:
    array = values(6, 10, seed=18)
    one = [(array, ark.fp32)]

    def into_slice(t: Any) -> Any:
        whole = ark.zeros([6, 10])
        part = ark.add(t[1:3, 2:5], 1.0, output=whole[2:4, 7:10])
        return ark.add(ark.identity(whole, deps=[part]), 0.0)

    def into_slice_want(x: np.ndarray) -> np.ndarray:
        out = np.zeros((6, 10))
        out[2:4, 7:10] = x[1:3, 2:5] + 1
        return out

    def product(x: np.ndarray) -> np.ndarray:
        return x[:4, :5] @ x[1:3, 5:].T

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x[:, 1:4])
        return e / e.sum(1, keepdims=True)

    views: dict[str, tuple[Any, Any]] = {
        "slice": (lambda t: ark.mul(t[2:5, 3:], 2.0), lambda x: x[2:5, 3:] * 2),
        "row": (lambda t: ark.exp(t[-1]), lambda x: np.exp(x[5:6])),
        "nested": (lambda t: ark.copy(t[1:5][1:3, :4]), lambda x: x[2:4, :4]),
        "same": (lambda t: ark.add(t[:3], t[3:]), lambda x: x[:3] + x[3:]),
        "into": (into_slice, into_slice_want),
        "reshape": (lambda t: ark.copy(ark.reshape(t, [3, -1])), lambda x: x.reshape(3, -1)),
        "reshape of rows": (
            lambda t: ark.exp(ark.reshape(t[1:3], [5, 2, 2])),
            lambda x: np.exp(x[1:3].reshape(5, 2, 2)),
        ),
        "reshape of columns": (
            lambda t: ark.reshape(t[:, 2:6], [4, 6]),
            lambda x: x[:, 2:6].reshape(4, 6),
        ),
        "zero keeps": (
            lambda t: ark.copy(ark.reshape(t, [0, 5, 2])),
            lambda x: x.reshape(6, 5, 2),
        ),
        "softmax": (lambda t: ark.softmax(t[:, 1:4]), softmax),
        "matmul": (lambda t: ark.matmul(t[:4, :5], t[1:3, 5:], transpose_other=True), product),
        "reduce": (
            lambda t: ark.reduce_sum(t[1:4, 2:9], 0),
            lambda x: x[1:4, 2:9].sum(0, keepdims=True),
        ),
        "transpose": (lambda t: ark.transpose(t[1:4, 2:9], [1, 0]), lambda x: x[1:4, 2:9].T),
        "sharding": (
            lambda t: ark.sub(*ark.sharding(t, 1, 5)),
            lambda x: x[:, :5] - x[:, 5:],
        ),
    }
    check([Case(name, one, build, want) for name, (build, want) in views.items()])


@pytest.mark.emulated("gfx942")
def test_padding(backend: str) -> None:
    """An op on a box of a larger buffer does not write the elements around the box."""
    padded = ark.tensor([3, 5], ark.fp32, strides=[4, 8], offsets=[1, 2], padded_shape=[3, 6])
    array = values(3, 5, seed=19)
    doubled = ark.mul(padded, 2.0)
    written = ark.add(padded, 1.0, output=padded)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        padded.from_numpy(array)
        runtime.run()
        np.testing.assert_allclose(doubled.to_numpy(), array.astype(np.float32) * 2)
        np.testing.assert_allclose(written.to_numpy(), array.astype(np.float32) + 1)
        whole = padded.storage.device.read(padded.storage.address, 4 * 8 * 4).view(np.float32)
    outside = np.ones((4, 8), bool)
    outside[1:4, 2:7] = False
    assert not whole.reshape(4, 8)[outside].any()
