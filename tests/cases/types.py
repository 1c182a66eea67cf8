"""Cases and helpers of tests/backend/test_types.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ark
from ark.ir.dtype import DataType
from tests.opcheck import Case

INTEGERS = (ark.int64, ark.int32, ark.uint32, ark.int8, ark.uint8)
PLAIN = (*INTEGERS, ark.bool, ark.fp32, ark.fp16, ark.bf16)
PACKED = (ark.int4, ark.uint4, ark.fp4)


def shapes(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Draws a shape of `least` to `most` dimensions; hypothesis shrinks towards five."""
    size = st.sampled_from([2, 1, 3, 1, 1, 4, 1, 7, 1, 33, 1, 5, 18])
    ranks = sorted(range(least, most + 1), key=lambda n: abs(n - 5))
    drawn = st.sampled_from(ranks).flatmap(lambda n: st.lists(size, min_size=n, max_size=n))
    return drawn.filter(lambda s: np.prod(s) <= 20000)


def values(rng: np.random.Generator, shape: Any, dtype: DataType) -> np.ndarray:
    """Returns random values that the type can represent."""
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name == "int64":
        return rng.integers(-(2**40), 2**40, shape) >> rng.integers(0, 40, shape)
    if dtype.name == "fp4":
        return rng.integers(0, 16, shape).astype(np.uint8).view(dtype.numpy).astype(np.float64)
    if dtype.name in ("fp32", "fp16", "bf16"):
        return rng.uniform(-3, 3, shape)
    low, high = {"int4": (-8, 8), "uint4": (0, 16)}.get(
        dtype.name, (0, 100) if dtype.name.startswith("u") else (-100, 100)
    )
    return rng.integers(low, high, shape)


def box(draw: Any, shape: list[int], even: bool = False) -> tuple[slice, ...]:
    """Draws a box within a shape. even: the last dimension begins at an even element, hence at a
    whole byte of packed elements.
    """
    results = []
    for d, n in enumerate(shape):
        begin = draw(st.integers(0, n - 1))
        begin -= begin % 2 if even and d == len(shape) - 1 else 0
        results.append(slice(begin, n - draw(st.integers(0, n - begin - 1))))
    return tuple(results)


def thinned(draw: Any, full: list[int]) -> list[int]:
    """Draws a shape that broadcasts to `full`: some sizes become 1 and leading dimensions are left
    out.
    """
    kept = [n if draw(st.booleans()) else 1 for n in full]
    return kept[draw(st.integers(0, len(full) - 1)) :]


COMPARISONS: tuple[tuple[str, Callable[..., np.ndarray]], ...] = (
    ("less", np.less),
    ("less_equal", np.less_equal),
    ("greater", np.greater),
    ("greater_equal", np.greater_equal),
    ("equal", np.equal),
    ("not_equal", np.not_equal),
)


@st.composite
def movements(draw: Any) -> list[Case]:
    """Draws views, copies, transpositions and reshapes of every type and of up to eight
    dimensions.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    results = []
    for dtype in (*PLAIN, *PACKED):
        shape = draw(shapes(1, 8))
        inputs = [(values(rng, shape, dtype), dtype)]
        if dtype in PACKED:
            cut = box(draw, shape, even=True)
        else:
            cut = box(draw, shape)
        perm = draw(st.permutations(range(len(shape))))
        name = f"{dtype} {shape} {cut} {perm}"
        results += [
            Case(f"copy {name}", inputs, lambda t, c=cut: ark.copy(t[c]), lambda a, c=cut: a[c]),
            Case(
                f"transpose {name}",
                inputs,
                lambda t, p=perm: ark.transpose(t, p),
                lambda a, p=perm: a.transpose(p),
            ),
            Case(
                f"reshape {name}",
                inputs,
                lambda t, c=cut: ark.reshape(t[c], [-1]),
                lambda a, c=cut: a[c].reshape(-1),
            ),
        ]
    return results


@st.composite
def elementwise(draw: Any) -> list[Case]:
    """Draws comparisons, selection, arithmetic and casts; every operand broadcasts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    results = []
    for number, dtype in enumerate((*INTEGERS, ark.fp32, ark.bf16)):
        full = draw(shapes(1, 8))
        left, right, third = full, thinned(draw, full), thinned(draw, full)
        a, b = values(rng, left, dtype), values(rng, right, dtype)
        a = np.where(rng.random(left) < 0.3, np.broadcast_to(b, left), a)
        pair = [(a, dtype), (b, dtype)]
        for name, reference in COMPARISONS:
            results.append(
                Case(f"{name} {dtype} {left} {right}", pair, getattr(ark, name), reference)
            )
        for name, reference in (("maximum", np.maximum), ("minimum", np.minimum), ("mul", None)):
            op = getattr(ark, name)
            results.append(
                Case(f"{name} {dtype} {left} {right}", pair, op, reference or np.multiply)
            )
        mask = (values(rng, third, ark.bool), ark.bool)
        results.append(Case(f"where {dtype} {third}", [mask, *pair], ark.where, np.where))
        target = PLAIN[(number + 3) % len(PLAIN)]
        if target.name != "bool" and dtype in INTEGERS:
            results.append(
                Case(
                    f"cast {dtype} to {target}",
                    pair[:1],
                    lambda t, target=target: ark.cast(t, target),
                    lambda x: x,
                )
            )
        results.append(
            Case(f"truth {dtype}", pair[1:], lambda t: ark.cast(t, ark.bool), lambda x: x != 0)
        )
    shape = draw(shapes(1, 8))
    p, q = (values(rng, s, ark.bool) for s in (shape, thinned(draw, shape)))
    bools = [(p, ark.bool), (q, ark.bool)]
    for name in ("logical_and", "logical_or", "logical_xor", "equal"):
        results.append(Case(f"{name} {shape}", bools, getattr(ark, name), getattr(np, name)))
    results.append(Case("not", bools[:1], ark.logical_not, np.logical_not))
    results.append(Case("number", bools[:1], lambda t: ark.where(t, 2**40, t64(t)), select))
    # One op with more operands than a task's record can hold.
    many, dtype = (
        draw(st.integers(13, 24)),
        draw(st.sampled_from([ark.int64, ark.int32, ark.uint8])),
    )
    operands = [(values(rng, shape, dtype), dtype) for _ in range(many)]
    return [*results, Case(f"sum of {many} {dtype} {shape}", operands, total, total)]


def total(*parts: Any) -> Any:
    """Returns ((a + b) - c) + d ...; saturation or overflow shows a wrong order of operations."""
    result = parts[0]
    for number, part in enumerate(parts[1:]):
        result = result - part if number % 2 else result + part
    return result


def t64(t: Any) -> Any:
    return ark.mul(ark.cast(t, ark.int64), -(2**50))


def select(p: np.ndarray) -> np.ndarray:
    return np.where(p, 2**40, p.astype(np.int64) * -(2**50))


@st.composite
def reductions(draw: Any) -> list[Case]:
    """Draws reductions over any axis of up to eight dimensions, and batched products of
    matrices.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    results = []
    for dtype in (ark.fp32, ark.fp16, *INTEGERS):
        shape = draw(shapes(1, 8))
        cut = box(draw, shape)
        axis = draw(st.integers(-len(shape), len(shape) - 1))
        keep = draw(st.booleans())
        inputs = [(values(rng, shape, dtype), dtype)]
        for name in ("sum", "max", "min"):
            op, reference = getattr(ark, f"reduce_{name}"), getattr(np, name)
            results.append(
                Case(
                    f"{name} {dtype} {shape} {cut} {axis}",
                    inputs,
                    lambda t, op=op, c=cut, a=axis, k=keep: op(t[c], a, keepdims=k),
                    lambda x, r=reference, c=cut, a=axis, k=keep: np.atleast_1d(
                        r(x[c], axis=a, keepdims=k)
                    ),
                    tolerance=2e-2 if dtype.name == "fp16" else 1e-4,
                )
            )
        for name, index in (("argmax", ark.int32), ("argmin", ark.int64)):
            results.append(
                Case(
                    f"{name} {dtype} {shape} {axis}",
                    inputs,
                    lambda t, n=name, a=axis, i=index: getattr(ark, n)(t, axis=a, dtype=i),
                    lambda x, n=name, a=axis: np.expand_dims(getattr(x, n)(a), a),
                )
            )
    shape = draw(shapes(3, 6))
    axes = tuple(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    results.append(
        Case(
            f"mean {shape} {axes}",
            [(values(rng, shape, ark.fp32), ark.fp32)],
            lambda t: ark.reduce_mean(t, axes, keepdims=False),
            lambda x: np.atleast_1d(x.mean(axes)),
        )
    )
    batch = [min(n, 3) for n in draw(shapes(1, 6))]
    m, n, k = (draw(st.integers(1, 20)) for _ in range(3))
    left, right = [*batch, m, k], [*thinned(draw, batch), n, k]
    results.append(
        Case(
            f"matmul {left} {right}",
            [(values(rng, s, ark.fp32), ark.fp32) for s in (left, right)],
            lambda a, b: ark.matmul(a, b, transpose_other=True),
            lambda a, b: a @ np.swapaxes(b, -1, -2),
            tolerance=1e-4,
        )
    )
    results.append(
        Case(
            f"softmax {left}",
            [(values(rng, left, ark.fp32), ark.fp32)],
            ark.softmax,
            lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
        )
    )
    return results


def many(t: Any) -> Any:
    """Returns a chain of fourteen inputs, which is fused to one op."""
    total = ark.mul(ark.copy(t), 1.0)
    for factor in range(2, 15):
        other = ark.mul(t, float(factor))
        held.append(other)
        total = ark.add(total, other)
    return total


held: list[Any] = []
