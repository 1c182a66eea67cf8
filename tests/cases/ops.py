"""Cases and helpers of tests/backend/test_ops.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import ark
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
ROWS = {"each_type": [(3, 40), (1, 300), (2, 2, 3, 17)], "narrow": [(64,), (9, 2)]}


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


def check_matmul(backend: str) -> None:
    check(list(_matmuls()))


def check_reductions(backend: str) -> None:
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


def check_rows(backend: str, shapes: list[tuple[int, ...]]) -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def layernorm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def rmsnorm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w

    def by_ops(x: ark.Tensor, w: ark.Tensor) -> ark.Tensor:
        wide = ark.cast(x, ark.fp32)
        factor = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(wide, wide), -1), 1e-5))
        return ark.mul(w, ark.cast(ark.mul(wide, factor), x.dtype()))

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
            Case(f"rmsnorm by ops {shape}", [(x, dtype), (w, dtype)], by_ops, rmsnorm),
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


def check_movement(backend: str) -> None:
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


def check_attention(backend: str) -> None:
    """Compares with torch a model that appends three rows at position 4 of two caches and then
    attends over them.
    """
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
