"""Memory-bound cases of `ark bench ops`: elementwise ops, row ops, sums, and ops that move elements
or reduce them. Called by ark.cli.measure.cases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ark
from ark.cli.measure.case import OpCase
from ark.cli.measure.peer import functional, import_torch
from ark.ir.dtype import DataType, bf16, fp32, int32

MEBI_ELEMENTS = 1 << 20
FLAT, WIDE, SQUARE = (64 * MEBI_ELEMENTS,), (8192, 4096), (8192, 8192)


def _case(
    name: str,
    dtype: DataType,
    shapes: Sequence[tuple[int, ...]],
    out: Sequence[int],
    build: Callable[..., Any],
    peer: Callable[..., Any],
    result: DataType | None = None,
    indices: Mapping[int, int] | None = None,
    moved: float = 0.0,
) -> OpCase:
    """A case that reads every input once and writes the output once. moved: the number of elements
    read and written, if it differs. result: the output's type, if it differs from `dtype`.
    """
    numbers = indices or {}
    nbytes = (
        moved * dtype.itemsize
        or sum(
            math.prod(s) * (int32 if i in numbers else dtype).itemsize for i, s in enumerate(shapes)
        )
        + math.prod(out) * (result or dtype).itemsize
    )
    case = OpCase(f"{name}-{dtype.name}", dtype, tuple(shapes), build, peer, 0.0, float(nbytes))
    return dataclasses.replace(case, indices=numbers)


def _chain(a: Any, b: Any) -> Any:
    return ark.mul(ark.gelu(ark.add(a, b)), 0.5)


def _chain_peer(a: Any, b: Any) -> Any:
    return functional().gelu(a + b, approximate="tanh") * 0.5


def _adds(a: Any) -> Any:
    """64 dependent additions: each adds the previous result to itself."""
    for _ in range(64):
        a = ark.add(a, a)
    return a


def _adds_peer(a: Any) -> Any:
    for _ in range(64):
        a = a + a
    return a


def _norm_peer(x: Any) -> Any:
    return functional().layer_norm(x, x.shape[-1:])


def _rms_peer(x: Any, w: Any) -> Any:
    return functional().rms_norm(x, x.shape[-1:], w, 1e-6)


def passes() -> list[OpCase]:
    """Benchmark cases of elementwise ops, softmax, norms, sums and a transpose, in fp32 and
    bf16.
    """
    table = []
    for dtype in (fp32, bf16):
        table += [
            _case("add-64m", dtype, (FLAT, FLAT), FLAT, ark.add, lambda a, b: a + b),
            _case("softmax-8192x4096", dtype, (WIDE,), WIDE, ark.softmax, lambda x: x.softmax(-1)),
            _case("layernorm-8192x4096", dtype, (WIDE,), WIDE, ark.layernorm, _norm_peer),
            _case("rmsnorm-8192x4096", dtype, (WIDE, (4096,)), WIDE, ark.rmsnorm, _rms_peer),
            _case(
                "sum-rows-8192x8192",
                dtype,
                (SQUARE,),
                (8192,),
                lambda x: ark.reduce_sum(x, 1),
                lambda x: x.sum(1, keepdim=True),
            ),
            _case(
                "sum-columns-8192x8192",
                dtype,
                (SQUARE,),
                (8192,),
                lambda x: ark.reduce_sum(x, 0),
                lambda x: x.sum(0, keepdim=True),
            ),
            _case(
                "sum-all-64m",
                dtype,
                (FLAT,),
                (1,),
                lambda x: ark.reduce_sum(x, 0),
                lambda x: x.sum(0, keepdim=True),
            ),
            _case(
                "transpose-8192x8192",
                dtype,
                (SQUARE,),
                SQUARE,
                lambda x: ark.transpose(x, [1, 0]),
                lambda x: x.t().contiguous(),
            ),
            _case(
                "bias-16384x4096",
                dtype,
                ((16384, 4096), (4096,)),
                (16384, 4096),
                ark.add,
                lambda a, b: a + b,
            ),
            _case("chain-64m", dtype, (FLAT, FLAT), FLAT, _chain, _chain_peer),
            adds := _case("adds-64x4096", dtype, ((4096,),), (4096,), _adds, _adds_peer),
            dataclasses.replace(adds, name=f"adds-64x4096-apart-{dtype.name}", fuse=False),
        ]
    return table


def moves() -> list[OpCase]:
    """Benchmark cases of copies, casts, and ops that move elements or reduce along rows, columns
    and windows.
    """
    rows, images = (16384,), (16, 64, 112, 112)
    halves = (16, 64, 56, 56)
    return [
        *(
            _case(f"copy-{name}", dtype, (shape,), shape, ark.copy, lambda x: x.clone())
            for dtype in (fp32, bf16)
            for name, shape in (("64m", FLAT), ("8192x4096", WIDE))
        ),
        _case(
            *("cast-64m", fp32, (FLAT,), FLAT),
            lambda x: ark.cast(x, bf16),
            lambda x: x.bfloat16(),
            result=bf16,
        ),
        _case(
            *("where-64m", bf16, (FLAT, FLAT), FLAT),
            lambda a, b: ark.where(ark.greater(a, b), a, b),
            lambda a, b: a.where(a > b, b),
        ),
        _case(
            *("concat-8192x4096", bf16, (WIDE, WIDE), (8192, 8192)),
            lambda a, b: ark.concat([a, b], 1),
            lambda a, b: import_torch().cat([a, b], 1),
        ),
        _case(
            *("heads-8x2048x32x128", bf16, ((8, 2048, 32, 128),), (8, 32, 2048, 128)),
            lambda x: ark.transpose(x, [0, 2, 1, 3]),
            lambda x: x.transpose(1, 2).contiguous(),
        ),
        _case(
            *("gather-16384-of-32768x4096", bf16, ((32768, 4096), rows), (16384, 4096)),
            lambda x, at: ark.gather(x, at, 0),
            lambda x, at: x.index_select(0, at),
            indices={1: 32768},
            moved=2.0 * 16384 * 4096,
        ),
        _case(
            *("scatter-add-8192x4096", fp32, (WIDE, (8192, 1024), (8192, 1024)), WIDE),
            lambda x, at, new: ark.scatter_elements(x, at, new, 1, "add"),
            lambda x, at, new: x.scatter_add(1, at, new),
            indices={1: 4096},
        ),
        *(
            _case(
                *(f"cumsum-{name}-8192x4096", fp32, (WIDE,), WIDE),
                lambda x, axis=axis: ark.cumsum(x, axis),
                lambda x, axis=axis: x.cumsum(axis),
            )
            for name, axis in (("rows", 1), ("columns", 0))
        ),
        _case(
            *("max-rows-8192x8192", bf16, (SQUARE,), (8192,)),
            lambda x: ark.reduce_max(x, 1),
            lambda x: x.amax(1, keepdim=True),
        ),
        _case(
            *("argmax-8192x8192", bf16, (SQUARE,), (8192,)),
            lambda x: ark.argmax(x),
            lambda x: x.argmax(-1),
            result=int32,
        ),
        _case(
            *("topk-8-of-8192x4096", fp32, (WIDE,), (8192, 8)),
            lambda x: ark.topk(x, 8)[0],
            lambda x: x.topk(8)[0],
        ),
        _case(
            *("log-softmax-8192x4096", bf16, (WIDE,), WIDE),
            ark.log_softmax,
            lambda x: x.log_softmax(-1),
        ),
        _case(
            *("group-norm-16x64x112x112", fp32, (images,), images),
            lambda x: ark.group_norm(x, 8),
            lambda x: functional().group_norm(x, 8),
        ),
        _case(
            *("max-pool-3-of-16x64x112x112", fp32, (images,), halves),
            lambda x: ark.max_pool(x, 3, 2, 1),
            lambda x: functional().max_pool2d(x, 3, 2, 1),
        ),
    ]
