"""The cases of `ark bench ops`: each op with its shapes, arithmetic and memory traffic, and the
same computation in torch. Called by ark.cli.bench_ops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ark
from ark.cli.measure.case import OpCase
from ark.cli.measure.memory_cases import moves, passes
from ark.cli.measure.peer import functional, import_torch
from ark.cli.measure.sweep.elementwise import elementwise
from ark.cli.measure.sweep.moves import lookups, movements, products, windows
from ark.cli.measure.sweep.rows import norms, reductions
from ark.ir.dtype import SMALL_FLOATS, DataType, bf16, fp8_e5m2, fp32, int8


def _matmul(
    m: int,
    n: int,
    k: int,
    transposes: str = "nt",
    on_cpu: bool = False,
    dtype: DataType = bf16,
) -> OpCase:
    """A matmul; fp32 is computed in full precision. transposes: one letter per input, "n" (as it
    is) or "t" (transposed). "nt" is a matmul with a weight of shape (n, k).
    """
    ta, tb = transposes[0] == "t", transposes[1] == "t"
    shapes = ((k, m) if ta else (m, k), (n, k) if tb else (k, n))

    def build(a: Any, b: Any) -> Any:
        return ark.matmul(a, b, transpose_input=ta, transpose_other=tb)

    def peer(a: Any, b: Any) -> Any:
        return _product(a.t() if ta else a, b.t() if tb else b, "highest")

    moved = float(dtype.itemsize) * (m * k + n * k + m * n)
    name = f"matmul-{m}x{n}x{k}-{transposes}-{dtype.name}"
    return OpCase(name, dtype, shapes, build, peer, 2.0 * m * n * k, moved, on_cpu)


def _product(a: Any, b: Any, precision: str) -> Any:
    """torch's product with the given fp32 precision ("high": tf32). The previous setting is
    restored afterwards.
    """
    torch = import_torch()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def _fewer_bits(m: int, n: int, k: int, dtype: DataType) -> OpCase:
    """A matmul with a weight of shape (n, k): 8-bit floats to bf16, int8 to int32, or fp32 computed
    as tf32.
    """
    tf32 = dtype == fp32

    def build(a: Any, b: Any) -> Any:
        return ark.matmul(a, b, transpose_other=True, tf32=tf32)

    def peer(a: Any, b: Any) -> Any:
        torch = import_torch()
        if dtype == int8:
            return torch._int_mm(a, b.t())
        if tf32:
            return _product(a, b.t(), "high")
        one = _one(str(a.device))
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    itemsize, out = dtype.itemsize, 2 if dtype.bits == 8 and dtype != int8 else 4
    moved = float(itemsize * (m * k + n * k) + out * m * n)
    name = f"matmul-{m}x{n}x{k}-nt-{'tf32' if tf32 else dtype.name}"
    return OpCase(name, dtype, ((m, k), (n, k)), build, peer, 2.0 * m * n * k, moved, False)


@functools.cache
def _one(device: str) -> Any:
    """A tensor with the number 1, for use as a scale. It is created once, not in each replay of a
    graph.
    """
    return import_torch().ones((), device=device)


def _linear_gelu(m: int, n: int, k: int) -> OpCase:
    """A linear layer with bias and GELU."""

    def build(x: Any, w: Any, b: Any) -> Any:
        return ark.gelu(ark.add(ark.matmul(x, w, transpose_other=True), b))

    def peer(x: Any, w: Any, b: Any) -> Any:
        return functional().gelu(functional().linear(x, w, b), approximate="tanh")

    name, moved = f"linear-gelu-{m}x{n}x{k}-bf16", 2.0 * (m * k + n * k + m * n)
    shapes = ((m, k), (n, k), (n,))
    return OpCase(name, bf16, shapes, build, peer, 2.0 * m * n * k, moved, on_cpu=False)


def attention(heads: int, width: int, rows: int) -> OpCase:
    """Forward causal attention with as many query rows as keys. Only half of the score matrix is
    counted as arithmetic.
    """
    shape = (heads, rows, width)

    def peer(q: Any, k: Any, v: Any) -> Any:
        query = q.view(rows, heads, width).transpose(0, 1)[None]
        output = functional().scaled_dot_product_attention(query, k[None], v[None], is_causal=True)
        return output[0].transpose(0, 1).reshape(rows, heads * width)

    return OpCase(
        f"attention-{heads}x{width}-{rows}-causal-bf16",
        bf16,
        ((rows, heads * width), shape, shape),
        ark.attention,
        peer,
        2.0 * heads * width * rows * rows,
        2.0 * 4 * heads * rows * width,
        on_cpu=False,
    )


def _conv(
    images: int, channels: int, size: int, filters: int, width: int, dtype: DataType = bf16
) -> OpCase:
    """Images convolved by filters of `width` x `width` pixels, padded by half of the width on each
    side. fp32 is computed as tf32, which is torch's default.
    """
    around = width // 2

    def build(x: Any, w: Any) -> Any:
        return ark.conv(x, w, None, 1, around, tf32=dtype == fp32)

    def peer(x: Any, w: Any) -> Any:
        return functional().conv2d(x, w, padding=around)

    shapes = ((images, channels, size, size), (filters, channels, width, width))
    pixels, taps = float(images * size * size), width * width * channels
    name = f"conv-{width}-of-{images}x{channels}x{size}x{size}-{dtype.name}"
    moved = float(dtype.itemsize) * (pixels * (channels + filters) + filters * taps)
    flops = 2.0 * pixels * filters * taps
    return OpCase(name, dtype, shapes, build, peer, flops, moved, False)


def lstm(layers: int, steps: int, hidden: int) -> OpCase:
    """An LSTM of batch 1, built from plain ops; the result is its last step. Inputs: one (1,
    hidden) for each step; for each layer, the weights of input and state (4 hidden, hidden) and a
    bias (1, 4 hidden). The gates are i, f, g, o. The peers are the same ops in a captured graph,
    and torch.nn.LSTM (cuDNN).
    """
    wide = 4 * hidden
    layer = ((wide, hidden), (wide, hidden), (1, wide))
    shapes = (*((1, hidden) for _ in range(steps)), *(s for _ in range(layers) for s in layer))

    def cells(given: Sequence[Any], product: Any, sigmoid: Any, tanh: Any) -> Any:
        inputs, flat = given[:steps], given[steps:]
        state: list[Any] = [None] * layers
        for step in range(steps):
            h = inputs[step]
            for i in range(layers):
                inner, own, bias = flat[3 * i : 3 * i + 3]
                gates = product(h, inner) + bias
                if state[i] is not None:
                    gates = gates + product(state[i][0], own)
                enter, forget, new, leave = (
                    gates[:, g * hidden : (g + 1) * hidden] for g in range(4)
                )
                c = sigmoid(enter) * tanh(new)
                if state[i] is not None:
                    c = sigmoid(forget) * state[i][1] + c
                h = sigmoid(leave) * tanh(c)
                state[i] = h, c
        return h

    def build(*given: Any) -> Any:
        def product(a: Any, w: Any) -> Any:
            return ark.matmul(a, w, transpose_other=True)

        return cells(given, product, ark.sigmoid, ark.tanh)

    def peer(*given: Any) -> Any:
        torch = import_torch()
        return cells(given, lambda a, w: a @ w.t(), torch.sigmoid, torch.tanh)

    modules: dict[int, Any] = {}

    def library(*given: Any) -> Any:
        torch = import_torch()
        x, flat = torch.stack(given[:steps]), given[steps:]
        place = flat[0].data_ptr()
        module = modules.get(place)
        if module is None:
            module = torch.nn.LSTM(hidden, hidden, layers, device=x.device, dtype=x.dtype)
            for i in range(layers):
                inner, own, bias = flat[3 * i : 3 * i + 3]
                for name, value in (
                    (f"weight_ih_l{i}", inner),
                    (f"weight_hh_l{i}", own),
                    (f"bias_ih_l{i}", bias[0]),
                    (f"bias_hh_l{i}", torch.zeros_like(bias[0])),
                ):
                    getattr(module, name).data.copy_(value)
            module.flatten_parameters()
            modules[place] = module
        return module(x)[0][-1]

    flops = 2.0 * 2 * layers * steps * wide * hidden
    nbytes = 2.0 * layers * steps * 2 * wide * hidden
    name = f"lstm-{layers}x{steps}-h{hidden}-bf16"
    return OpCase(
        *(name, bf16, shapes, build, peer, flops, nbytes, False),
        scale=hidden**-0.5,
        calls=1,
        others=(("nn.LSTM", library),),
    )


def cases() -> tuple[OpCase, ...]:
    """All cases of `ark bench ops`, in the order in which they are printed."""
    table = [*passes(), *moves()]
    for size in (8192, 4096, 2048):
        table += [_matmul(size, size, size, t) for t in ("nt", "nn", "tn", "tt")]
    table += [
        _fewer_bits(size, size, size, dtype)
        for size in (8192, 4096)
        for dtype in (*SMALL_FLOATS, int8, fp32)
        if size == 8192 or dtype != fp8_e5m2
    ]
    table += [
        _linear_gelu(4096, 4096, 4096),
        _matmul(128, 4096, 4096),
        _matmul(512, 4096, 4096),
        _matmul(512, 8192, 2048),
        _matmul(16, 4096, 4096),
        _matmul(512, 512, 512, on_cpu=True),
        _matmul(512, 512, 512, "nn", on_cpu=True),
        attention(16, 128, 8192),
        _conv(16, 64, 56, 64, 3),
        _conv(16, 512, 14, 512, 3),
        _conv(16, 64, 56, 64, 3, fp32),
        _conv(16, 512, 14, 512, 3, fp32),
        *(_matmul(4096, 4096, 4096, t, dtype=fp32) for t in ("nt", "nn", "tn", "tt")),
        *(_matmul(rows, 4096, 4096, dtype=fp32) for rows in (16, 128, 512)),
        _matmul(1024, 1024, 1024, dtype=fp32),
        lstm(10, 100, 256),
        lstm(2, 4, 64),
    ]
    for family in (reductions, norms, lookups, movements, windows, products, elementwise):
        table += family()
    return tuple(table)
