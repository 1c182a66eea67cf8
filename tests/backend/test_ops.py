"""Every op, executed, against NumPy: shapes, types, broadcasting, views, padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ark
from tests.emulated import few_emulated
from tests.opcheck import Case, check

FLOATS = (ark.fp32, ark.fp16, ark.bf16)


def values(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape)


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-50, 50, shape)


UNARY = {
    "exp": np.exp,
    "sqrt": lambda a: np.sqrt(np.abs(a)),
    "rsqrt": lambda a: 1 / np.sqrt(np.abs(a)),
    "relu": lambda a: np.maximum(a, 0),
    "gelu": lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))),
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "silu": lambda a: a / (1 + np.exp(-a)),
    "copy": lambda a: a,
}
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
    """One processor's tasks without waits between them, whose last elements part its lanes."""
    held = []  # what is held is written, so that the ops stay apart

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
    """Bit for bit, over specials, subnormals and ties."""
    bits = np.random.default_rng(3).integers(0, 2**32, 4096, dtype=np.uint32)
    specials = np.array(
        [0.0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 1e-8, 6e-8, 2**-24 * 1.5]
    )
    array = np.concatenate([bits.view(np.float32), specials.astype(np.float32)])
    array = array[~np.isnan(array)]
    source = ark.tensor([len(array)])
    made = [ark.cast(source, dtype) for dtype in (ark.fp16, ark.bf16)]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        source.from_numpy(array)
        runtime.run()
        for tensor in made:
            with np.errstate(over="ignore"):
                want = array.astype(tensor.dtype().numpy)
            np.testing.assert_array_equal(tensor.to_numpy().view(np.uint16), want.view(np.uint16))


def _matmuls() -> Iterator[Case]:
    shapes = [
        ((33, 20), (20, 17)),
        ((1, 64), (64, 1)),
        ((2, 1, 9, 16), (3, 16, 12)),
        ((70, 40), (40, 130)),
        ((3, 5, 8), (3, 8, 6)),
    ]
    for number, (left, right) in enumerate(shapes):
        for ta, tb in ((False, False), (True, False), (False, True), (True, True)):
            dtype = FLOATS[(number + ta + 2 * tb) % 3]
            a, b = values(*left, seed=4), values(*right, seed=5)
            a = np.swapaxes(a, -1, -2) if ta else a
            b = np.swapaxes(b, -1, -2) if tb else b

            def build(x: Any, y: Any, ta: bool = ta, tb: bool = tb) -> Any:
                return ark.matmul(x, y, transpose_input=ta, transpose_other=tb)

            def want(x: Any, y: Any, ta: bool = ta, tb: bool = tb) -> np.ndarray:
                return (np.swapaxes(x, -1, -2) if ta else x) @ (np.swapaxes(y, -1, -2) if tb else y)

            name = f"matmul {dtype} {a.shape} {b.shape} {ta} {tb}"
            inputs = [(np.ascontiguousarray(a), dtype), (np.ascontiguousarray(b), dtype)]
            yield Case(name, inputs, build, want, tolerance=1e-4 if dtype is ark.fp32 else None)


def test_matmul(backend: str) -> None:
    check(list(_matmuls()))


@pytest.mark.emulated("gfx942")
def test_reductions(backend: str) -> None:
    cases = []
    for number, shape in enumerate(
        [(4, 9), (2, 3, 5, 7), (1, 130), (6,), (70, 1000), (2, 259, 72)]
    ):
        array = values(*shape, seed=6)
        dtype = FLOATS[number % 3]
        for axis in range(-1, len(shape) - 1):
            for keep in (True, False):
                for name in ("sum", "mean", "max"):
                    op, reference = getattr(ark, f"reduce_{name}"), getattr(np, name)
                    cases.append(
                        Case(
                            f"{name} {shape} {axis} {keep}",
                            [(array, dtype)],
                            lambda t, op=op, axis=axis, keep=keep: op(t, axis, keepdims=keep),
                            lambda x, r=reference, axis=axis, keep=keep: np.reshape(
                                r(x, axis=axis, keepdims=keep),
                                r(x, axis=axis, keepdims=keep).shape or (1,),
                            ),
                        )
                    )
    check(cases)


ROWS = {"each_type": [(3, 40), (1, 300), (2, 2, 3, 17)], "narrow": [(64,), (9, 2)]}


@pytest.mark.parametrize("shapes", few_emulated(ROWS.values(), ROWS["each_type"]), ids=ROWS)
@pytest.mark.emulated("gfx1100")
def test_rows(backend: str, shapes: list[tuple[int, ...]]) -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def layernorm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def rmsnorm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w

    cases = []
    for number, shape in enumerate(shapes):
        dtype = FLOATS[number]
        x, w = values(*shape, seed=7), values(shape[-1], seed=8)
        cases += [
            Case(f"softmax {shape}", [(x, dtype)], ark.softmax, softmax),
            Case(f"layernorm {shape}", [(x, dtype)], ark.layernorm, layernorm, 1e-2),
            Case(
                f"rmsnorm {shape}",
                [(x, dtype), (w, dtype)],
                lambda t, u: ark.rmsnorm(t, u, eps=1e-5),
                rmsnorm,
            ),
            Case(
                f"argmax {shape}",
                [(x, ark.fp32)],
                ark.argmax,
                lambda a: a.argmax(-1, keepdims=True),
            ),
        ]
    same = np.zeros((2, 70))
    same[1, 5:9] = 3
    cases.append(
        Case("ties", [(same, ark.fp16)], ark.argmax, lambda a: a.argmax(-1, keepdims=True))
    )
    check(cases)


@pytest.mark.emulated("gfx1100")
def test_movement(backend: str) -> None:
    ids = np.array([[1, 0, 4], [5, 5, 2]])
    table = values(6, 10, seed=9)
    cases = [
        Case(
            f"transpose {perm}",
            [(values(*shape, seed=10), dtype)],
            lambda t, perm=perm: ark.transpose(t, perm),
            lambda x, perm=perm: x.transpose(perm),
        )
        for shape, perm, dtype in [
            ((5, 9), [1, 0], ark.fp32),
            ((2, 3, 4, 5), [0, 2, 1, 3], ark.fp16),
            ((2, 3, 4, 5), [3, 1, 0, 2], ark.bf16),
            ((1, 7, 3), [2, 0, 1], ark.fp32),
            ((70, 90), [1, 0], ark.int32),
            ((90, 170), [1, 0], ark.bf16),
            ((85, 150), [1, 0], ark.int8),
            ((2, 3, 8, 12), [0, 2, 3, 1], ark.fp32),  # few channels go last
            ((2, 8, 12, 3), [0, 3, 1, 2], ark.bf16),  # and first
            ((2, 5, 2, 4, 6, 8), [0, 1, 4, 2, 5, 3], ark.fp16),  # as a pixel shuffle
            ((1, 33, 1, 40, 1), [4, 3, 0, 2, 1], ark.fp32),
        ]
    ]
    many = np.arange(1300).reshape(1, 1300) * 7 % 6
    given = [(many, ark.int64), (table, ark.fp16)]
    cases.append(Case("embedding of many", given, ark.embedding, lambda i, t: t[i.astype(int)]))
    for dtype in FLOATS:
        cases.append(
            Case(
                f"embedding {dtype}",
                [(ids, ark.int32), (table, dtype)],
                ark.embedding,
                lambda i, w: w[i],
            )
        )

    def rope(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = a[..., 0::2] + 1j * a[..., 1::2], b[..., 0::2] + 1j * b[..., 1::2]
        z = x * y
        return np.stack([z.real, z.imag], axis=-1).reshape((*z.shape[:-1], -1))

    for number, (left, right) in enumerate(
        [((1, 2, 8, 6), (1, 2, 8, 6)), ((3, 4, 10), (4, 10)), ((128, 2), (128, 2))]
    ):
        dtype = FLOATS[number]
        a, b = values(*left, seed=11), values(*right, seed=12)
        cases.append(Case(f"rope {left} {right}", [(a, dtype), (b, dtype)], ark.rope, rope))
    check(cases)


def test_attention(backend: str) -> None:
    """Appends three rows at position 4 of two caches, then attends; in program order."""
    kv_heads, heads, width, context, rows = 2, 6, 8, 12, 3

    def build(q: Any, k: Any, v: Any, keys: Any, vals: Any, position: Any) -> Any:
        new_keys = ark.kv_append(keys, k, position)
        new_values = ark.kv_append(vals, v, position)
        return ark.attention(q, new_keys, new_values, position)

    def want(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: Any, vals: Any, position: Any
    ) -> np.ndarray:
        at = int(position[0])
        keys, vals = keys.copy(), vals.copy()
        keys[:, at : at + rows] = k.reshape(rows, kv_heads, width).swapaxes(0, 1)
        vals[:, at : at + rows] = v.reshape(rows, kv_heads, width).swapaxes(0, 1)
        out = np.zeros((rows, heads, width))
        for r in range(rows):
            for h in range(heads):
                group = h // (heads // kv_heads)
                s = keys[group, : at + r + 1] @ q[r].reshape(heads, width)[h] / np.sqrt(width)
                p = np.exp(s - s.max())
                out[r, h] = p / p.sum() @ vals[group, : at + r + 1]
        return out.reshape(rows, -1)

    cases = []
    for dtype in FLOATS:
        inputs = [
            (values(rows, heads * width, seed=13), dtype),
            (values(rows, kv_heads * width, seed=14), dtype),
            (values(rows, kv_heads * width, seed=15), dtype),
            (values(kv_heads, context, width, seed=16), dtype),
            (values(kv_heads, context, width, seed=17), dtype),
            (np.array([4]), ark.int32),
        ]
        cases.append(Case(f"attention {dtype}", inputs, build, want))
    check(cases)


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
    """A tensor inside a larger buffer; its neighbours are not touched."""
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
