"""The ops of random programs: for each op, a function that draws arguments, one that calls ark, and
the reference result by NumPy or torch in float64 and int64.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import ark
from ark.ir.dtype import by_name

FLOATS = ("fp32", "fp16", "bf16")
INTEGERS = ("int64", "int32", "uint32", "int8", "uint8")
Value = tuple[tuple[int, ...], str]  # shape and type
Drawn = tuple[list[int], dict[str, Any], list[Value]]


class UndefinedResultError(Exception):
    """Raised if a result is not defined, for example a cast to a type that cannot represent the
    number.
    """


@dataclass(frozen=True)
class Op:
    """An op of random programs. draw: returns (indices of the values taken, parameters, shapes and
    types of the results), or None if no values fit. build: maps ark tensors and parameters to
    results. reference: the same for arrays, given the operands' types. smooth: small changes of
    operands change the results little. terms: for a sum whose terms may cancel, maps an operand to
    the sizes of the terms, each of which is rounded.
    """

    draw: Callable[[random.Random, Sequence[Value]], Drawn | None]
    build: Callable[[list[Any], dict[str, Any]], list[Any]]
    reference: Callable[[list[np.ndarray], dict[str, Any], list[str]], list[Any]]
    smooth: bool = True
    terms: Callable[[np.ndarray], np.ndarray] | None = None


def pick(
    rng: random.Random, values: Sequence[Value], types: Sequence[str], rank: int = 0
) -> int | None:
    """Picks, as an operand of the next op, a value (tensor of the program) of one of the types with
    at least `rank` dimensions; recent values are preferred. Returns its index, or None if none
    fits.
    """
    fitting = [i for i, (s, d) in enumerate(values) if d in types and len(s) >= rank]
    newest = fitting[-3:] if rng.random() < 0.6 else fitting
    return rng.choice(newest) if newest else None


def beside(rng: random.Random, values: Sequence[Value], first: int) -> int:
    """Picks, as a second operand, a value that has the type of value number `first` and broadcasts
    with it. Returns its index.
    """
    shape, dtype = values[first]

    def fits(other: Sequence[int]) -> bool:
        pairs = zip(shape[::-1], other[::-1], strict=False)
        return all(a == b or 1 in (a, b) for a, b in pairs)

    return rng.choice([i for i, (s, d) in enumerate(values) if d == dtype and fits(s)])


def from_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*arrays: np.ndarray) -> np.ndarray:
        given = (torch.from_numpy(np.ascontiguousarray(a)).reshape(a.shape) for a in arrays)
        return function(*given).numpy()

    return apply


def unary(name: str, apply: Any, types: Sequence[str], out: str = "", smooth: bool = True) -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, types)
        return None if i is None else ([i], {}, [(values[i][0], out or values[i][1])])

    return Op(draw, lambda t, p: [getattr(ark, name)(*t)], lambda a, p, d: [apply(*a)], smooth)


def binary(name: str, apply: Any, types: Sequence[str], out: str = "", smooth: bool = True) -> Op:
    """Returns an op of two tensors, or of a tensor and a number as either operand."""

    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, types)
        if i is None:
            return None
        shape, dtype = values[i]
        if rng.random() < 0.4 and dtype != "bool":
            number = rng.choice((0, 1, 2, 3, 7) if dtype[0] == "u" else (0, 1, 2, 3, -1, -2, 7))
            if dtype in FLOATS:
                number = rng.choice((number * 1.0, 0.5, -1.5, 1e4, 1e-3))
            where = "right" if rng.random() < 0.7 else "left"
            return [i], {where: number}, [(shape, out or dtype)]
        j = beside(rng, values, i)
        full = np.broadcast_shapes(shape, values[j][0])
        return [i, j], {}, [(full, out or dtype)]

    def sides(given: list[Any], p: dict[str, Any]) -> list[Any]:
        left, right = ([p[side]] if side in p else [] for side in ("left", "right"))
        return [*left, *given, *right]

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        kind = a[0].dtype
        narrow = np.float32 if kind.kind == "f" else kind  # the type in which ark keeps a number
        return [apply(*(np.asarray(v, narrow if np.isscalar(v) else kind) for v in sides(a, p)))]

    return Op(draw, lambda t, p: [getattr(ark, name)(*sides(t, p))], reference, smooth)


def along(name: str, apply: Any, types: Sequence[str], out: str = "", smooth: bool = True) -> Op:
    """Returns an op that reduces one axis and keeps it with size 1."""

    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, types, 1)
        if i is None:
            return None
        axis = rng.randrange(len(values[i][0]))
        shape = list(values[i][0])
        shape[axis] = 1
        return [i], {"axis": axis}, [(tuple(shape), out or values[i][1])]

    def build(t: list[Any], p: dict[str, Any]) -> list[Any]:
        return [getattr(ark, name)(t[0], axis=p["axis"])]

    return Op(draw, build, lambda a, p, d: [apply(a[0], p["axis"])], smooth)


def same(
    build: Any,
    reference: Any,
    types: Sequence[str],
    parameters: Callable[[random.Random, tuple[int, ...]], dict[str, Any] | None],
    shape: Callable[[tuple[int, ...], dict[str, Any]], Sequence[int]] | None = None,
    rank: int = 1,
    smooth: bool = False,
) -> Op:
    """Returns an op of one tensor, with parameters, whose result has the same type."""

    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, types, rank)
        if i is None or (p := parameters(rng, values[i][0])) is None:
            return None
        full = values[i][0] if shape is None else tuple(shape(values[i][0], p))
        return [i], p, [(full, values[i][1])]

    return Op(draw, lambda t, p: [build(t[0], p)], lambda a, p, d: [reference(a[0], p)], smooth)


def _cast() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn:
        i = rng.randrange(len(values))
        to = rng.choice((*FLOATS, *INTEGERS, "bool"))
        return [i], {"to": to}, [(values[i][0], to)]

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        if p["to"] == "bool":
            return [a[0] != 0]
        if p["to"] not in INTEGERS or types[0] not in FLOATS:
            return [a[0]]
        info = np.iinfo(by_name(p["to"]).numpy)
        whole = np.trunc(a[0])
        fits = (whole >= info.min) & (whole <= min(info.max, 2**62))
        return [np.ma.array(np.where(fits, whole, 0).astype(np.int64), mask=~fits)]

    return Op(draw, lambda t, p: [ark.cast(t[0], by_name(p["to"]))], reference, False)


def _where() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        c, i = pick(rng, values, ("bool",)), pick(rng, values, (*FLOATS, *INTEGERS))
        if c is None or i is None:
            return None
        j = beside(rng, values, i)
        try:
            shape = np.broadcast_shapes(*(values[k][0] for k in (c, i, j)))
        except ValueError:
            return None
        return [c, i, j], {}, [(shape, values[i][1])]

    return Op(draw, lambda t, p: [ark.where(*t)], lambda a, p, d: [np.where(*a)], False)


def _matmul() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, FLOATS, 2)
        if i is None:
            return None
        *lead, m, _ = values[i][0]
        return [i], {}, [((*lead, m, m), values[i][1])]

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        sizes = _finite_sizes(a[0])
        products = _counted(a[0] @ a[0].swapaxes(-1, -2), sizes @ sizes.swapaxes(-1, -2))
        if types[0] == "bf16":  # CPUs take subnormals as zeros, for torch too
            lost = np.where(sizes < 2.0**-126, sizes, 0.0) @ sizes.swapaxes(-1, -2)
            products.mask |= lost + lost.swapaxes(-1, -2) > np.abs(products.data) * 1e-3
        return [products]

    return Op(draw, lambda t, p: [ark.matmul(t[0], t[0], transpose_other=True)], reference)


def _gather() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        i = pick(rng, values, (*FLOATS, *INTEGERS, "bool"), 1)
        if i is None:
            return None
        shape = values[i][0]
        axis = rng.randrange(len(shape))
        depth = min(shape[axis], 4)
        out = (*shape[:axis], depth, *shape[axis + 1 :])
        return [i], {"axis": axis, "depth": depth}, [(out, values[i][1])]

    def build(t: list[Any], p: dict[str, Any]) -> list[Any]:
        ids = ark.sub(ark.iota([p["depth"]], 0, ark.int64), 1)  # indices -1, 0, 1, ...
        return [ark.gather(t[0], ids, p["axis"])]

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        return [np.take(a[0], np.arange(p["depth"]) - 1, p["axis"])]

    return Op(draw, build, reference, False)


def _topk() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn | None:
        fitting = [i for i, (s, d) in enumerate(values) if d in FLOATS and len(s) == 2]
        if not fitting:
            return None
        i = rng.choice(fitting)
        rows, n = values[i][0]
        if n == 0:
            return None
        k = rng.randint(1, min(n, 70))
        p = {"k": k, "largest": rng.random() < 0.6}
        return [i], p, [((rows, k), values[i][1]), ((rows, k), "int32")]

    def build(t: list[Any], p: dict[str, Any]) -> list[Any]:
        return list(ark.topk(t[0], p["k"], largest=p["largest"]))

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        given = torch.from_numpy(np.ascontiguousarray(a[0]))
        ordered = torch.sort(given, dim=-1, descending=p["largest"], stable=True)
        return [t[:, : p["k"]].numpy() for t in (ordered.values, ordered.indices)]

    return Op(draw, build, reference, False)


def _iota() -> Op:
    def draw(rng: random.Random, values: Sequence[Value]) -> Drawn:
        shape, to = rng.choice(values)[0], rng.choice((*FLOATS, *INTEGERS))
        axis = rng.randrange(len(shape))
        return [], {"shape": shape, "axis": axis, "to": to}, [(shape, to)]

    def build(t: list[Any], p: dict[str, Any]) -> list[Any]:
        return [ark.iota(list(p["shape"]), p["axis"], by_name(p["to"]))]

    def reference(a: list[np.ndarray], p: dict[str, Any], types: list[str]) -> list[Any]:
        shape = tuple(p["shape"])
        along = [-1 if d == p["axis"] else 1 for d in range(len(shape))]
        return [np.broadcast_to(np.arange(shape[p["axis"]]).reshape(along), shape)]

    return Op(draw, build, reference, False)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division. For integers it rounds towards zero, and division by 0 gives 0."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    quotient = a // safe
    quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, 0, quotient)


def _of_integers(apply: Any) -> Callable[..., np.ndarray]:
    # For integers, the remainder of a division by 0 is 0.
    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype.kind == "f":
            return apply(a, b)
        return np.where(b == 0, 0, apply(a, np.where(b == 0, 1, b)))

    return run


def _counted(sums: np.ndarray, total: np.ndarray) -> Any:
    """Returns sums, masked as undefined where their finite terms may overflow in fp32, even if
    other terms are infinite. total: the sum of the terms' absolute values.
    """
    return np.ma.array(sums, mask=total > 1e38)


def _finite_sizes(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.abs(a), 0.0)


def _sum(a: np.ndarray, axis: int) -> Any:
    sums = a.sum(axis, keepdims=True)
    total = _finite_sizes(a).sum(axis, keepdims=True)
    return _counted(sums, total) if a.dtype.kind == "f" else sums


def _prod(a: np.ndarray, axis: int) -> Any:
    """Returns products. Floats are masked as undefined where a product of some of the factors may
    overflow or underflow.
    """
    products = a.prod(axis, keepdims=True)
    if a.dtype.kind != "f":
        return products
    sizes = np.where(a == 0, 1.0, np.abs(a))
    up, down = (f(sizes, 1.0).prod(axis, keepdims=True) for f in (np.maximum, np.minimum))
    return np.ma.array(products, mask=(up > 1e38) | (down < 1e-37))


def _running(a: np.ndarray, axis: int) -> Any:
    sums = a.cumsum(axis)
    return _counted(sums, _finite_sizes(a).cumsum(axis)) if a.dtype.kind == "f" else sums


def _remainder(name: str, apply: Any) -> Op:
    """Returns a remainder op. The rounding error of the divisor is multiplied by the quotient, so
    the operand's size counts in the tolerance.
    """
    return dataclasses.replace(binary(name, _of_integers(apply), ALL, smooth=False), terms=np.abs)


def _tan(a: np.ndarray) -> np.ma.MaskedArray:
    """Returns the tangent, masked as undefined where an angle's rounding may cross a pole."""
    return np.ma.array(np.tan(a), mask=np.isfinite(a) & (np.abs(a) > 100.0))


def _gelu_erf(a: np.ndarray) -> np.ma.MaskedArray:
    """Returns GELU, masked at infinities: ark returns the limits there, torch's formula NaN."""
    return np.ma.array(from_torch(F.gelu)(a), mask=np.isinf(a))


def _deviation(a: np.ndarray) -> np.ndarray:
    return np.sqrt(a.var(-1, keepdims=True) + 1e-6)


def _normalised(a: np.ndarray) -> np.ndarray:
    if (np.abs(a[np.isfinite(a)]) > 1e15).any():
        raise UndefinedResultError  # squares overflow in fp32
    return (a - a.mean(-1, keepdims=True)) / _deviation(a)


def _range(rng: random.Random, size: int) -> list[int]:
    """Returns the begin and end of a range of indices. It is empty only if the dimension has size
    0.
    """
    begin = rng.randrange(max(size, 1))
    return [begin, rng.randint(min(begin + 1, size), size)]


ALL = (*FLOATS, *INTEGERS)
EVERY = (*ALL, "bool")
SIGNED = ("int64", "int32", "int8")
TORCHS = {
    **{n: getattr(torch, n) for n in ("exp", "expm1", "log1p", "sqrt", "rsqrt", "erf", "tanh")},
    **{n: getattr(torch, n) for n in ("reciprocal", "sigmoid", "sin", "cos", "asin")},
    **{n: getattr(torch, n) for n in ("acos", "atan", "sinh", "cosh", "asinh", "acosh")},
    **{n: getattr(torch, n) for n in ("atanh", "relu", "selu")},
    **{n: getattr(F, n) for n in ("silu", "elu", "mish", "softsign", "leaky_relu")},
    "ln": torch.log,
    "log_sigmoid": F.logsigmoid,
    "gelu": lambda t: F.gelu(t, approximate="tanh"),
}
OPS_OF_TORCH = {n: unary(n, from_torch(f), FLOATS) for n, f in TORCHS.items()}
OPS: dict[str, Op] = {
    **OPS_OF_TORCH,
    "tan": unary("tan", _tan, FLOATS),
    "gelu_erf": dataclasses.replace(unary("gelu_erf", _gelu_erf, FLOATS), terms=np.abs),
    "gelu": dataclasses.replace(OPS_OF_TORCH["gelu"], terms=np.abs),
    **{n: unary(n, getattr(np, n), FLOATS, smooth=False) for n in ("floor", "ceil", "round")},
    **{n: unary(n, getattr(np, n), FLOATS, "bool", False) for n in ("isnan", "isinf")},
    **{n: unary(n, f, (*FLOATS, *SIGNED)) for n, f in (("neg", np.negative), ("abs", np.abs))},
    "sign": unary("sign", np.sign, (*FLOATS, *SIGNED), smooth=False),
    "logical_not": unary("logical_not", np.logical_not, ("bool",), smooth=False),
    "bitwise_not": unary("bitwise_not", np.invert, SIGNED, smooth=False),
    **{n: binary(n, f, ALL) for n, f in (("add", np.add), ("mul", np.multiply))},
    "sub": binary("sub", np.subtract, ALL),
    "div": binary("div", _quotient, ALL),
    "mod": _remainder("mod", from_torch(torch.remainder)),
    "fmod": _remainder("fmod", np.fmod),
    "pow": binary("pow", np.power, FLOATS),
    **{n: binary(n, getattr(np, n), ALL, smooth=False) for n in ("maximum", "minimum")},
    "atan2": binary("atan2", np.arctan2, FLOATS),
    "hypot": binary("hypot", np.hypot, FLOATS),
    **{
        n: binary(n, getattr(np, n), ALL, "bool", False)
        for n in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
    },
    **{
        n: binary(n, getattr(np, n), ("bool",), smooth=False)
        for n in ("logical_and", "logical_or", "logical_xor")
    },
    **{
        n: binary(n, getattr(np, n), SIGNED, smooth=False)
        for n in ("bitwise_and", "bitwise_or", "bitwise_xor")
    },
    "cast": _cast(),
    "where": _where(),
    "iota": _iota(),
    "matmul": _matmul(),
    "gather": _gather(),
    "topk": _topk(),
    "reduce_sum": along("reduce_sum", _sum, ALL),
    "reduce_mean": along("reduce_mean", lambda a, d: _sum(a, d) / a.shape[d], FLOATS),
    "reduce_prod": along("reduce_prod", _prod, ALL),
    "reduce_max": along("reduce_max", lambda a, d: a.max(d, keepdims=True), ALL, smooth=False),
    "reduce_min": along("reduce_min", lambda a, d: a.min(d, keepdims=True), ALL, smooth=False),
    "logsumexp": dataclasses.replace(  # its rounding error is at least that of a number of size 1
        along(
            "logsumexp", lambda a, d: from_torch(lambda t: torch.logsumexp(t, d, True))(a), FLOATS
        ),
        terms=lambda a: np.ones(1),
    ),
    "argmax": along("argmax", lambda a, d: np.argmax(a, d, keepdims=True), ALL, "int32", False),
    "argmin": along("argmin", lambda a, d: np.argmin(a, d, keepdims=True), ALL, "int32", False),
    "softmax": unary("softmax", from_torch(lambda t: torch.softmax(t, -1)), FLOATS),
    "log_softmax": dataclasses.replace(
        unary("log_softmax", from_torch(lambda t: torch.log_softmax(t, -1)), FLOATS),
        terms=lambda a: 1.0 + a.max(-1, keepdims=True) - a,
    ),
    "safe_softmax": unary(
        "safe_softmax", from_torch(lambda t: torch.ops.aten._safe_softmax(t, -1)), FLOATS
    ),
    "layernorm": dataclasses.replace(
        unary("layernorm", _normalised, FLOATS),
        terms=lambda a: np.abs(a).max(-1, keepdims=True) / _deviation(a),
    ),
    "cumsum": same(
        lambda t, p: ark.cumsum(t, p["axis"]),
        lambda a, p: _running(a, p["axis"]),
        ALL,
        lambda rng, s: {"axis": rng.randrange(len(s))},
        smooth=True,
    ),
    "transpose": same(
        lambda t, p: ark.transpose(t, p["perm"]),
        lambda a, p: a.transpose(p["perm"]),
        EVERY,
        lambda rng, s: {"perm": rng.sample(range(len(s)), len(s))},
        lambda s, p: [s[d] for d in p["perm"]],
    ),
    "reshape": same(
        lambda t, p: ark.reshape(t, p["shape"]),
        lambda a, p: a.reshape(p["shape"]),
        EVERY,
        lambda rng, s: (
            {"shape": [math.prod(s[: len(s) // 2]), math.prod(s[len(s) // 2 :])]}
            if math.prod(s) < 1 << 30
            else None
        ),
        lambda s, p: p["shape"],
    ),
    "flip": same(
        lambda t, p: ark.flip(t, [p["axis"]]),
        lambda a, p: np.flip(a, p["axis"]),
        EVERY,
        lambda rng, s: {"axis": rng.randrange(len(s))},
    ),
    "concat": same(
        lambda t, p: ark.concat([t, t], p["axis"]),
        lambda a, p: np.concatenate([a, a], p["axis"]),
        EVERY,
        lambda rng, s: {"axis": rng.randrange(len(s))} if max(s) < 1 << 30 else None,
        lambda s, p: [2 * n if d == p["axis"] else n for d, n in enumerate(s)],
    ),
    "part": same(
        lambda t, p: t[tuple(slice(b, e) for b, e in p["box"])],
        lambda a, p: a[tuple(slice(b, e) for b, e in p["box"])],
        EVERY,
        lambda rng, s: {
            "box": [[b := rng.randint(0, max(n - 1, 0)), rng.randint(min(b + 1, n), n)] for n in s]
        },
        lambda s, p: [e - b for b, e in p["box"]],
    ),
    "tril": same(
        lambda t, p: ark.tril(t, p["diagonal"]),
        lambda a, p: np.tril(a, p["diagonal"]),
        EVERY,
        lambda rng, s: {"diagonal": rng.randint(-3, 3)},
        rank=2,
    ),
    "clip": same(
        lambda t, p: ark.clip(t, 1, 3),
        lambda a, p: np.clip(a, 1, 3),
        ALL,
        lambda rng, s: {},
    ),
}
