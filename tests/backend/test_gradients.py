"""Gradients compared with torch.autograd in float64: ops, views, writes in place, whole blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.tasks.functions import FUNCTIONS
from tests.gradcheck import Case, check, values

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.emulated("slow")
F = torch.nn.functional


UNARY: dict[str, tuple[Any, float, float]] = {
    "exp": (torch.exp, -2, 2),
    "ln": (torch.log, 0.3, 3),
    "sqrt": (torch.sqrt, 0.3, 3),
    "rsqrt": (torch.rsqrt, 0.3, 3),
    "reciprocal": (torch.reciprocal, 0.4, 3),
    "relu": (torch.relu, -2, 2),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), -3, 3),
    "gelu_erf": (F.gelu, -3, 3),
    "sigmoid": (torch.sigmoid, -3, 3),
    "silu": (F.silu, -3, 3),
    "neg": (torch.neg, -2, 2),
    "abs": (torch.abs, -2, 2),
    "expm1": (torch.expm1, -2, 2),
    "log1p": (torch.log1p, -0.5, 2),
    "tanh": (torch.tanh, -2, 2),
    "erf": (torch.erf, -2, 2),
    "sin": (torch.sin, -3, 3),
    "cos": (torch.cos, -3, 3),
    "floor": (torch.floor, -2, 2),
    "ceil": (torch.ceil, -2, 2),
    "round": (torch.round, -2, 2),
    "sign": (torch.sign, -2, 2),
    "elu": (F.elu, -2, 2),
    "selu": (F.selu, -2, 2),
    "leaky_relu": (F.leaky_relu, -2, 2),
    "hard_sigmoid": (lambda x: torch.clamp(0.2 * x + 0.5, 0, 1), -4, 4),
    "hard_swish": (F.hardswish, -4, 4),
    "log_sigmoid": (F.logsigmoid, -3, 3),
    "mish": (F.mish, -3, 3),
    "softsign": (F.softsign, -3, 3),
    **{
        f.name: (getattr(torch, f.public.torch), *f.public.between)
        for f in FUNCTIONS.values()
        if f.public
    },
}


def test_functions_of_one_tensor(backend: str) -> None:
    check(
        [
            Case(name, [values(3, 5, low=low, high=high)], getattr(ark, name), reference)
            for name, (reference, low, high) in UNARY.items()
        ]
    )


def _gate(function: Any) -> Any:
    return getattr(F, function.gated.torch)


def test_functions_of_several_tensors(backend: str) -> None:
    a, b = values(2, 3, 4), values(3, 1, low=0.5, high=2.0)
    pairs: list[tuple[str, Any, Any]] = [
        ("add", ark.add, torch.add),
        ("sub", ark.sub, torch.sub),
        ("mul", ark.mul, torch.mul),
        ("div", ark.div, torch.div),
        ("maximum", ark.maximum, torch.maximum),
        ("minimum", ark.minimum, torch.minimum),
        ("mod", ark.mod, torch.remainder),
        ("fmod", ark.fmod, torch.fmod),
        ("atan2", ark.atan2, torch.atan2),
        ("hypot", ark.hypot, torch.hypot),
    ]
    for f in (f for f in FUNCTIONS.values() if f.gated):
        pairs.append((f.name, getattr(ark, f.name), lambda x, y, f=f: _gate(f)(x) * y))
    cases = [Case(name, [a, b], op, reference) for name, op, reference in pairs]
    positive = np.abs(a) + 0.2
    cases += [
        Case("pow", [positive, b], ark.pow, torch.pow),
        Case("square", [a], lambda x: ark.pow(x, 2), lambda x: x**2),
        Case("root", [positive], lambda x: ark.pow(x, 0.5), lambda x: x**0.5),
        Case("power", [positive], lambda x: ark.pow(x, 2.5), lambda x: x**2.5),
        Case("number", [b], lambda x: 2.0 / x - (1.0 - x), lambda x: 2.0 / x - (1.0 - x)),
        Case("clip", [a], lambda x: ark.clip(x, -1, 1), lambda x: torch.clamp(x, -1, 1)),
        Case(
            "where",
            [a, b],
            lambda x, y: ark.where(ark.greater(x, 0.1), x * y, y),
            lambda x, y: torch.where(x > 0.1, x * y, y),
        ),
        Case("twice", [a], lambda x: x * x * x + x, lambda x: x * x * x + x),
        Case("equal ones", [a[0]], lambda x: ark.maximum(x, ark.copy(x)), lambda x: x),
        Case("tril", [a], ark.tril, torch.tril),
        Case("triu", [a], lambda x: ark.triu(x, 1), lambda x: torch.triu(x, 1)),
        Case("detach", [a], lambda x: x * ark.detach(x), lambda x: x * x.detach(), smooth=False),
        Case(
            "reshaped",
            [a],
            lambda x: ark.reshape(ark.detach(x), [6, 4]) * ark.reshape(x, [6, 4]),
            lambda x: (x.detach() * x).reshape(6, 4),
            smooth=False,
        ),
    ]
    check(cases)


def test_views_and_movement(backend: str) -> None:
    a = values(4, 6, seed=1)
    zero = a.copy()
    zero[1, 2] = zero[2, 0] = zero[2, 3] = zero[3, 5] = 0.0
    ids = np.array([[3, 0], [3, 1]], np.int32)
    few = np.array([[1, 5, 1], [0, 0, 2]], np.int32)

    def parts(x: Any) -> Any:
        left, right = ark.split(x, [2, 4], 1)
        return ark.mul(ark.reduce_sum(left, 1), ark.reduce_mean(right, 1)) + left[:, 0:1]

    def in_place(x: Any) -> Any:
        whole = ark.tensor([4, 6])
        ark.exp(x[0:2], output=whole[0:2])
        ark.mul(x[2:4], 3.0, output=whole[2:4])
        return ark.tanh(whole)

    check(
        [
            Case(
                "reshape",
                [a],
                lambda x: ark.exp(ark.reshape(x, [3, 8])),
                lambda x: x.reshape(3, 8).exp(),
            ),
            Case(
                "slice", [a], lambda x: x[1:3, 2:5] * x[0:2, 0:3], lambda x: x[1:3, 2:5] * x[:2, :3]
            ),
            Case(
                "strided view in another shape",
                [a],
                lambda x: (
                    ark.reshape(x, [2, 2, 6])[:, 0:1, 1:4] * 2.0
                    + ark.reshape(x[0:1, 0:3], [1, 1, 3])
                ),
                lambda x: x.reshape(2, 2, 6)[:, :1, 1:4] * 2.0 + x[:1, :3].reshape(1, 1, 3),
            ),
            Case(
                "split",
                [a],
                parts,
                lambda x: x[:, :2].sum(1, keepdim=True) * x[:, 2:].mean(1, keepdim=True) + x[:, :1],
            ),
            Case(
                "written in place",
                [a],
                in_place,
                lambda x: torch.cat([x[:2].exp(), x[2:] * 3]).tanh(),
            ),
            Case(
                "transpose", [a], lambda x: ark.exp(ark.transpose(x, [1, 0])), lambda x: x.T.exp()
            ),
            Case(
                "concat",
                [a, a[:, :2]],
                lambda x, y: ark.concat([x * 2.0, y, x], 1),
                lambda x, y: torch.cat([x * 2, y, x], 1),
            ),
            Case(
                "expand", [a[:1]], lambda x: ark.expand(x, [3, 4, 6]), lambda x: x.expand(3, 4, 6)
            ),
            Case(
                "pad",
                [a],
                lambda x: ark.pad(x, [(1, 2), (0, -2)]),
                lambda x: F.pad(x, (0, -2, 1, 2)),
            ),
            Case(
                "pad edge",
                [a],
                lambda x: ark.pad(x, [(0, 0), (2, 1)], "edge"),
                lambda x: F.pad(x[None], (2, 1), mode="replicate")[0],
            ),
            Case(
                "pad reflect",
                [a],
                lambda x: ark.pad(x, [(0, 0), (2, 3)], "reflect"),
                lambda x: F.pad(x[None], (2, 3), mode="reflect")[0],
            ),
            Case(
                "pad wrap",
                [a],
                lambda x: ark.pad(x, [(0, 0), (2, 3)], "wrap"),
                lambda x: F.pad(x[None], (2, 3), mode="circular")[0],
            ),
            Case("flip", [a], lambda x: ark.flip(x, [0, 1]), lambda x: x.flip(0, 1)),
            Case(
                "steps",
                [a],
                lambda x: ark.strided_slice(x, [0, 1], [4, 3], [1, 2]),
                lambda x: x[:, 1::2],
            ),
            Case("tile", [a], lambda x: ark.tile(x, [2, 3]), lambda x: x.tile(2, 3)),
            Case("embedding", [ids, a], ark.embedding, lambda i, x: F.embedding(i, x)),
            Case("gather", [a, ids], lambda x, i: ark.gather(x, i, 1), lambda x, i: x[:, i]),
            Case(
                "gather_elements",
                [a, few],
                lambda x, i: ark.gather_elements(x, i, 1),
                lambda x, i: x.gather(1, i),
            ),
            Case(
                "scatter",
                [a, few[:, :2], a[:2, :2]],
                lambda x, i, y: ark.scatter_elements(x, i, y, 1),
                lambda x, i, y: x.scatter(1, i, y),
                smooth=False,
            ),
            Case(
                "scatter add",
                [a, few, a[:2, :3]],
                lambda x, i, y: ark.scatter_elements(x, i, y, 1, "add"),
                lambda x, i, y: x.scatter_add(1, i, y),
            ),
            Case("cumsum", [a], lambda x: ark.cumsum(x, 1), lambda x: x.cumsum(1)),
            Case(
                "cumsum exclusive",
                [a],
                lambda x: ark.cumsum(x, 1, exclusive=True, reverse=True),
                lambda x: x.flip(1).cumsum(1).flip(1) - x,
            ),
            Case(
                "cumprod",
                [np.abs(a) + 0.3],
                lambda x: ark.cumprod(x, 0),
                lambda x: x.cumprod(0),
                1e-4,
            ),
            Case(
                "cumprod with none, one and two zeros in a line",
                [zero],
                lambda x: ark.cumprod(x, 1),
                lambda x: x.cumprod(1),
                1e-4,
            ),
            Case(
                "cumprod of those behind",
                [zero],
                lambda x: ark.cumprod(x, 1, exclusive=True, reverse=True),
                lambda x: torch.cat([x[:, 1:], torch.ones(4, 1)], 1).flip(1).cumprod(1).flip(1),
                1e-4,
            ),
            Case("topk", [a], lambda x: ark.topk(x, 2)[0], lambda x: x.topk(2)[0]),
        ]
    )


def test_reductions_and_norms(backend: str) -> None:
    a = values(3, 4, 5, seed=2)
    ties = np.round(a)
    zero = a.copy()
    zero[0, 1, 2] = zero[1, 1, 1] = 0.0

    def rmsnorm(x: Any, w: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    check(
        [
            Case("sum", [a], lambda x: ark.reduce_sum(x, 1), lambda x: x.sum(1)),
            Case(
                "sum of two",
                [a],
                lambda x: ark.reduce_sum(x, [0, 2], False),
                lambda x: x.sum((0, 2)),
            ),
            Case("mean", [a], lambda x: ark.reduce_mean(x, -1, False), lambda x: x.mean(-1)),
            Case("max", [a], lambda x: ark.reduce_max(x, 1), lambda x: x.amax(1)),
            Case("min", [a], lambda x: ark.reduce_min(x, 0), lambda x: x.amin(0)),
            Case(
                "max tied",
                [ties],
                lambda x: ark.reduce_max(x, 1),
                lambda x: x.amax(1),
                smooth=False,
            ),
            Case(
                "min tied",
                [ties],
                lambda x: ark.reduce_min(x, 0),
                lambda x: x.amin(0),
                smooth=False,
            ),
            Case("prod", [zero], lambda x: ark.reduce_prod(x, 1), lambda x: x.prod(1)),
            Case("softmax", [a], ark.softmax, lambda x: x.softmax(-1)),
            Case("log softmax", [a], ark.log_softmax, lambda x: x.log_softmax(-1)),
            Case("layernorm", [a], ark.layernorm, lambda x: F.layer_norm(x, (5,), eps=1e-6), 1e-4),
            Case("rmsnorm", [a, a[0, 0]], ark.rmsnorm, rmsnorm),
            Case(
                "group_norm",
                [a, a[0, :, 0], a[1, :, 0]],
                lambda x, w, b: ark.group_norm(x, 2, w, b),
                lambda x, w, b: F.group_norm(x, 2, w, b),
                1e-4,
            ),
            Case(
                "batch_norm",
                [a, a[0, :, 0], a[1, :, 0], a[2, :, 0], np.abs(a[0, :, 1]) + 0.5],
                ark.batch_norm,
                lambda x, w, b, m, v: (
                    (x - m[:, None]) / torch.sqrt(v[:, None] + 1e-5) * w[:, None] + b[:, None]
                ),
            ),
        ]
    )


def test_products(backend: str) -> None:
    a, b = values(2, 3, 4, seed=3), values(2, 4, 5, seed=4)
    cases = []
    for ta in (False, True):
        for tb in (False, True):
            left, right = (a.swapaxes(1, 2) if ta else a), (b.swapaxes(1, 2) if tb else b)

            def build(x: Any, y: Any, ta: bool = ta, tb: bool = tb) -> Any:
                return ark.matmul(x, y, transpose_input=ta, transpose_other=tb)

            def reference(x: Any, y: Any, ta: bool = ta, tb: bool = tb) -> Any:
                return (x.mT if ta else x) @ (y.mT if tb else y)

            cases.append(Case(f"matmul {ta} {tb}", [left.copy(), right.copy()], build, reference))
            cases.append(
                Case(f"matmul shared {ta} {tb}", [left.copy(), right[0].copy()], build, reference)
            )
    cases.append(Case("linear", [a[0], b[0].T.copy()], ark.linear, F.linear))
    check(cases)


def test_convolutions_and_pools(backend: str) -> None:
    image, weight, bias = values(2, 4, 7, 6, seed=5), values(6, 2, 3, 2, seed=6), values(6, seed=7)
    kernel = values(4, 3, 3, 2, seed=8)
    line = values(1, 2, 9, seed=9)
    check(
        [
            Case(
                "conv",
                [image, weight, bias],
                lambda x, w, b: ark.conv(x, w, b, stride=2, padding=1, groups=2),
                lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2),
            ),
            Case(
                "conv of patches",
                [values(2, 3, 4, 6, seed=5), values(5, 3, 2, 3, seed=6), values(5, seed=7)],
                lambda x, w, b: ark.conv(x, w, b, stride=[2, 3]),
                lambda x, w, b: F.conv2d(x, w, b, stride=(2, 3)),
            ),
            Case(
                "conv dilated",
                [image, values(3, 4, 2, 2)],
                lambda x, w: ark.conv(x, w, dilation=2),
                lambda x, w: F.conv2d(x, w, dilation=2),
            ),
            Case(
                "conv1d",
                [line, values(2, 2, 3)],
                lambda x, w: ark.conv(x, w, padding=[(2, 0)]),
                lambda x, w: F.conv1d(F.pad(x, (2, 0)), w),
            ),
            Case(
                "conv3d",
                [values(1, 2, 3, 4, 3), values(2, 2, 2, 2, 2)],
                lambda x, w: ark.conv(x, w, stride=[1, 2, 1]),
                lambda x, w: F.conv3d(x, w, stride=(1, 2, 1)),
            ),
            Case(
                "conv_transpose",
                [image, kernel],
                lambda x, w: ark.conv_transpose(x, w, stride=2, padding=1, output_padding=1),
                lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
            ),
            *(
                Case(
                    f"max_pool {name}",
                    [pixels],
                    lambda x: ark.max_pool(x, 3, 2, 1),
                    lambda x: F.max_pool2d(x, 3, 2, 1),
                    smooth=name == "alone",
                )
                for name, pixels in (("alone", image), ("tied", np.round(image)))
            ),
            Case(
                "avg_pool",
                [image],
                lambda x: ark.avg_pool(x, 3, 2, 1),
                lambda x: F.avg_pool2d(x, 3, 2, 1),
            ),
            Case(
                "avg_pool without padding",
                [image],
                lambda x: ark.avg_pool(x, 3, 2, 1, count_include_pad=False),
                lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            ),
            Case(
                "global pools",
                [image],
                lambda x: ark.global_avg_pool(x) * ark.global_max_pool(x),
                lambda x: x.mean((2, 3), True) * x.amax((2, 3), True),
            ),
            Case(
                "resize",
                [image],
                lambda x: ark.resize(x, [10, 4], "linear"),
                lambda x: F.interpolate(x, (10, 4), mode="bilinear"),
            ),
            Case(
                "resize nearest",
                [image],
                lambda x: ark.resize(x, [14, 3], "nearest", "asymmetric"),
                lambda x: x.repeat_interleave(2, 2)[..., ::2],
            ),
        ]
    )


def test_attention_and_rotation(backend: str) -> None:
    """Gradients of grouped-query attention over a cache with rows appended from position 2 on."""
    rows, heads, kv_heads, width, context, start = 3, 4, 2, 6, 8, 2
    q = values(rows, heads * width, seed=11)
    k, v = (values(rows, kv_heads * width, seed=s) for s in (12, 13))
    old = values(kv_heads, context, width, seed=14)
    at = np.array([start], np.int32)
    freqs = np.array([1.0, 0.3, 0.1])

    def build(q: Any, k: Any, v: Any, keys: Any, values: Any, at: Any, turn: Any) -> Any:
        query, key = (ark.rotary_embedding(t, at, turn) for t in (q, k))
        cache = ark.copy(keys), ark.copy(values)
        new = ark.kv_append(cache[0], key, at), ark.kv_append(cache[1], v, at)
        return ark.attention(query, *new, at)

    def rotated(x: Any) -> Any:
        half = width // 2
        angle = (start + torch.arange(rows))[:, None] * torch.from_numpy(freqs.astype(np.float32))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        parts = x.reshape(rows, -1, 2, half)
        first, second = parts[:, :, 0], parts[:, :, 1]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def reference(q: Any, k: Any, v: Any, keys: Any, values: Any, at: Any, _: Any) -> Any:
        query = rotated(q).transpose(0, 1)

        def appended(cache: Any, new: Any) -> Any:
            return torch.cat([cache[:, :start], new, cache[:, start + rows :]], 1)

        key = appended(keys, rotated(k).transpose(0, 1))
        value = appended(values, v.reshape(rows, kv_heads, width).transpose(0, 1))
        key, value = (t.repeat_interleave(heads // kv_heads, 0) for t in (key, value))
        mask = torch.arange(context)[None] <= start + torch.arange(rows)[:, None]
        out = F.scaled_dot_product_attention(query, key, value, mask)
        return out.transpose(0, 1).reshape(rows, heads * width)

    pairs = values(2, 5, 8, seed=15), values(5, 8, seed=16)

    def complex_product(x: Any, y: Any) -> Any:
        product = torch.view_as_complex(x.reshape(2, 5, 4, 2)) * torch.view_as_complex(
            y.reshape(5, 4, 2)
        )
        return torch.view_as_real(product).reshape(2, 5, 8)

    text = np.array([3, 1, 3, 2], np.int32)
    cases = [
        Case(
            "attention",
            [q, k, v, old, old[::-1].copy(), at, freqs],
            build,
            reference,
            5e-5,
            fixed=[6],
        ),
        Case("rope", pairs, ark.rope, complex_product),
        Case(
            "embed",
            [text, values(5, 3), np.array([1], np.int32)],
            lambda t, w, p: ark.embed(t, w, p, 4),
            lambda t, w, p: F.embedding(torch.tensor([1, 3, 2, 0]), w),
        ),
        Case(
            "slot",
            [old, old[0, 0:1].repeat(context, 0), at],
            lambda c, t, p: ark.kv_cache_slot(ark.copy(c), t, p) * 2.0,
            lambda c, t, p: t * 2.0,
        ),
    ]
    check(cases)
