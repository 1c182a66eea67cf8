"""The cases that move elements, of the sweep over many shapes of common torch ops: row lookups,
concatenation, slicing, windows, and small matmuls. Called by ark.cli.measure.cases.
"""

from __future__ import annotations

from typing import Any

from ark.cli.measure.case import OpCase
from ark.cli.measure.sweep.cases import Function, case, in_both_types
from ark.ir.dtype import bf16, int64, uint8

IMAGES, ODD = (16, 64, 56, 56), (16, 64, 57, 57)


def lookups() -> list[OpCase]:
    def embedding(t: Any, table: Any, at: Any) -> Any:
        return t.nn.functional.embedding(at, table)

    listed = []
    for rows, width, count in (
        (100000, 16, 65536),
        (32000, 4096, 512),
        (50257, 768, 8192),
        (1000, 33, 65536),
    ):
        for dtype in (None, bf16):
            options = {} if dtype is None else {"dtype": dtype}
            listed.append(
                case("embedding", embedding, (rows, width), (count,), indices={1: rows}, **options)
            )
    table, at = (4096, 4096), {1: 4096}
    return [
        *listed,
        case("index-select-1", lambda t, x, i: x.index_select(1, i), table, (2048,), indices=at),
        case(
            "index-select-0",
            lambda t, x, i: x.index_select(0, i),
            table,
            (2048,),
            indices=at,
            dtype=bf16,
        ),
        case("gather-1", lambda t, x, i: x.gather(1, i), table, (4096, 512), indices=at),
        case(
            "gather-1-of-one",
            lambda t, x, i: x.gather(1, i[:, None]),
            (8192, 32000),
            (8192,),
            indices={1: 32000},
            dtype=bf16,
        ),
        case("gather-0", lambda t, x, i: x.gather(0, i), table, (512, 4096), indices=at),
        case(
            "scatter-add-0",
            lambda t, x, i, u: x.scatter_add(0, i, u),
            table,
            (512, 4096),
            (512, 4096),
            indices=at,
        ),
        case(
            "scatter-1",
            lambda t, x, i, u: x.scatter(1, i, u),
            table,
            (4096, 512),
            (4096, 512),
            indices=at,
        ),
        case(
            "index-add-0",
            lambda t, x, i, u: x.index_add(0, i, u),
            (32000, 256),
            (8192,),
            (8192, 256),
            indices={1: 32000},
        ),
        case(
            "index-put",
            lambda t, x, i, u: x.index_put((i,), u),
            (32000, 256),
            (8192,),
            (8192, 256),
            indices={1: 32000},
        ),
        case(
            "index-pairs",
            lambda t, x, i, j: x[i, j],
            table,
            (65536,),
            (65536,),
            indices={1: 4096, 2: 4096},
        ),
        case(
            "one-hot",
            lambda t, x, i: (i[:, None] == t.arange(1000, device=i.device)) * x,
            (1,),
            (8192,),
            indices={1: 1000},
        ),
        case("take-along", lambda t, x, i: t.take_along_dim(x, i, 1), table, (4096, 8), indices=at),
    ]


def movements() -> list[OpCase]:
    square, cube, wide = (4096, 4096), (64, 257, 1000), (8192, 1000)

    def pad(t: Any, x: Any, sizes: tuple[int, ...], mode: str = "constant") -> Any:
        return t.nn.functional.pad(x, sizes, mode)

    return [
        *in_both_types("pad", lambda t, x: pad(t, x, (1, 1, 1, 1)), IMAGES),
        *in_both_types("pad-right", lambda t, x: pad(t, x, (0, 24)), wide),
        case("pad-reflect", lambda t, x: pad(t, x, (1, 1, 1, 1), "reflect"), IMAGES),
        *in_both_types("roll", lambda t, x: x.roll((3, 5), (0, 1)), square),
        *in_both_types("flip-1", lambda t, x: x.flip(1), square),
        *in_both_types("flip-0", lambda t, x: x.flip(0), square),
        *in_both_types("repeat", lambda t, x: x.repeat(4, 2), (1024, 1000)),
        case("repeat-interleave", lambda t, x: x.repeat_interleave(4, 1), (1024, 1000)),
        *in_both_types(
            "expand", lambda t, x: x[:, None].expand(-1, 8, -1).contiguous(), (1024, 1000)
        ),
        *in_both_types("stack-0", lambda t, a, b: t.stack((a, b)), square, square),
        *in_both_types("stack-last", lambda t, a, b: t.stack((a, b), -1), square, square),
        *in_both_types("cat-0", lambda t, a, b: t.cat((a, b)), wide, wide),
        *in_both_types("cat-1-odd", lambda t, a, b: t.cat((a, b), 1), (8192, 33), (8192, 1000)),
        case(
            "cat-8", lambda t, x: t.cat([x[:, i : i + 8] for i in range(0, 64, 8)], 1), (8192, 64)
        ),
        *in_both_types("slice-copy", lambda t, x: x[:, 3:903].contiguous(), wide),
        *in_both_types("stride-2", lambda t, x: x[:, ::2].contiguous(), square),
        *in_both_types("stride-2-rows", lambda t, x: x[::2].contiguous(), square),
        *in_both_types("turn-021", lambda t, x: x.transpose(1, 2).contiguous(), cube),
        *in_both_types("turn-102", lambda t, x: x.transpose(0, 1).contiguous(), cube),
        *in_both_types("turn-210", lambda t, x: x.permute(2, 1, 0).contiguous(), cube),
        *in_both_types(
            "nchw-nhwc-3", lambda t, x: x.permute(0, 2, 3, 1).contiguous(), (16, 3, 224, 224)
        ),
        *in_both_types(
            "nhwc-nchw-3", lambda t, x: x.permute(0, 3, 1, 2).contiguous(), (16, 224, 224, 3)
        ),
        *in_both_types("nchw-nhwc", lambda t, x: x.permute(0, 2, 3, 1).contiguous(), IMAGES),
        case(
            "nhwc-nchw-3",
            lambda t, x: x.permute(0, 3, 1, 2).contiguous(),
            (16, 224, 224, 3),
            dtype=uint8,
        ),
        case("turn", lambda t, x: x.t().contiguous(), (2048, 2048), dtype=int64),
        case("turn-odd", lambda t, x: x.t().contiguous(), (4097, 1001)),
        case("turn-tiny", lambda t, x: x.t().contiguous(), (32, 32)),
        case(
            "heads-8",
            lambda t, x: x.view(4, 512, 12, 64).transpose(1, 2).contiguous(),
            (4, 512, 768),
            dtype=bf16,
        ),
        case("copy", lambda t, x: x.clone(), (16, 1 << 20), dtype=uint8),
        case("copy", lambda t, x: x.clone(), (32, 32)),
        *in_both_types(
            "pixel-shuffle", lambda t, x: t.nn.functional.pixel_shuffle(x, 2), (8, 64, 64, 64)
        ),
        case("unfold", lambda t, x: x.unfold(1, 16, 8).contiguous(), (64, 16000)),
    ]


def _pool(name: str, *given: Any, **named: Any) -> Function:
    return lambda t, x: getattr(t.nn.functional, name)(x, *given, **named)


def windows() -> list[OpCase]:
    return [
        *in_both_types("max-pool-2", _pool("max_pool2d", 2), IMAGES),
        *in_both_types("max-pool-3-odd", _pool("max_pool2d", 3, 2, 1), ODD),
        case("max-pool-1d", _pool("max_pool1d", 3, 2), (64, 64, 1001)),
        *in_both_types("avg-pool-2", _pool("avg_pool2d", 2), IMAGES),
        *in_both_types("avg-pool-3-odd", _pool("avg_pool2d", 3, 2, 1), ODD),
        *in_both_types("adaptive-1", _pool("adaptive_avg_pool2d", 1), (16, 512, 7, 7)),
        *in_both_types("adaptive-7", _pool("adaptive_avg_pool2d", 7), IMAGES),
        *in_both_types("nearest", _pool("interpolate", scale_factor=2), IMAGES),
        *in_both_types("bilinear", _pool("interpolate", scale_factor=2, mode="bilinear"), IMAGES),
        case("bilinear-odd", _pool("interpolate", size=(100, 75), mode="bilinear"), ODD),
    ]


def _odd_layers(t: Any, x: Any, first: Any, second: Any, third: Any) -> Any:
    return t.relu(t.relu(x @ first.t()) @ second.t()) @ third.t()


def _convolved(stride: int, around: int) -> Function:
    return lambda t, x, w: t.nn.functional.conv2d(x, w, stride=stride, padding=around)


def products() -> list[OpCase]:
    table = []
    for batch, n in ((4096, 16), (4096, 32), (256, 64)):
        table += in_both_types("bmm", lambda t, a, b: t.bmm(a, b), (batch, n, n), (batch, n, n))
    return [
        *table,
        *in_both_types("matrix-vector", lambda t, a, x: a @ x, (4096, 4096), (4096,)),
        *in_both_types("vector-matrix", lambda t, a, x: x @ a, (4096, 4096), (4096,)),
        *in_both_types("linear-1", lambda t, x, w: x @ w.t(), (1, 4096), (4096, 4096)),
        *in_both_types("linear-10", lambda t, x, w: x @ w.t(), (512, 512), (10, 512)),
        *in_both_types("dot", lambda t, a, b: t.dot(a, b), (1 << 20,), (1 << 20,)),
        *in_both_types("mm-tiny", lambda t, a, b: a @ b, (32, 128), (128, 64)),
        *in_both_types("mm-odd", lambda t, a, b: a @ b, (1000, 333), (333, 777)),
        *in_both_types("head", lambda t, x, w: x @ w.t(), (512, 768), (50257, 768)),
        *in_both_types("mlp-odd", _odd_layers, (512, 333), (4096, 333), (4096, 4096), (10, 4096)),
        *in_both_types("stem", _convolved(2, 3), (8, 3, 224, 224), (64, 3, 7, 7)),
        *in_both_types("conv-of-3", _convolved(1, 1), (8, 3, 224, 224), (32, 3, 3, 3)),
        *in_both_types("conv-1x1", _convolved(1, 0), (16, 256, 56, 56), (64, 256, 1, 1)),
        *in_both_types(
            "einsum-heads",
            lambda t, a, b: t.einsum("bqhd,bkhd->bhqk", a, b),
            (4, 512, 12, 64),
            (4, 512, 12, 64),
        ),
        *in_both_types(
            "outer-batch", lambda t, a, b: t.einsum("bi,bj->bij", a, b), (512, 128), (512, 128)
        ),
    ]
