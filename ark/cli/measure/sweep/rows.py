"""The cases that work along a dimension, of the sweep over many shapes of common torch ops: sums,
extremes, moments, softmax, norms, losses, scans, top-k. Called by ark.cli.measure.cases.
"""

from __future__ import annotations

from typing import Any

from ark.cli.measure.case import OpCase
from ark.cli.measure.sweep.cases import Function, case, in_both_types
from ark.ir.dtype import bf16, int32, int64

MIDDLE, CUBE, IMAGES = (1024, 1000), (64, 257, 1000), (16, 64, 56, 56)
TINY, LONG, MANY, FEW = (32, 32), (16, 1 << 20), (1 << 20, 8), (8, 1 << 20)


def _reduce(name: str, dim: Any) -> Function:
    if dim is None:
        return lambda t, x: getattr(t, name)(x)
    return lambda t, x: getattr(t, name)(x, dim=dim)


def reductions() -> list[OpCase]:
    table = []
    for dim in (0, 1, 2, (0, 2), (0, 1), None):
        word = (
            "all"
            if dim is None
            else "".join(str(d) for d in (dim if isinstance(dim, tuple) else (dim,)))
        )
        table += in_both_types(f"sum-{word}", _reduce("sum", dim), CUBE)
    for shape in (TINY, MIDDLE, LONG, MANY):
        for dim in (0, 1):
            table.append(case(f"sum-{dim}", _reduce("sum", dim), shape))
    table += in_both_types("mean-23", _reduce("mean", (2, 3)), IMAGES)
    table += in_both_types("sum-023", _reduce("sum", (0, 2, 3)), IMAGES)
    for name in ("amax", "prod", "var", "std", "logsumexp"):
        for dim in (0, 1):
            table.append(case(f"{name}-{dim}", _reduce(name, dim), (2048, 4097)))
    for name in ("argmax", "argmin", "any"):
        for dim in (0, 1):
            table.append(case(f"{name}-{dim}", _reduce(name, dim), (2048, 4097), dtype=bf16))
    for dim in (0, 1, 2):
        table.append(case(f"argmax-{dim}", _reduce("argmax", dim), CUBE))
    return [
        *table,
        *in_both_types("var-1", _reduce("var", 1), (8192, 4096)),
        case("var-all", _reduce("var", None), (8192, 2048)),
        case("argmax-all", _reduce("argmax", None), (8192, 2048)),
        case("argmax-1", _reduce("argmax", 1), (8, 128256), dtype=bf16),
        case("max-1", lambda t, x: x.max(1).values, (8192, 1000)),
        case("min-1-places", lambda t, x: x.min(1).indices, (8192, 1000)),
        case("sum-1", _reduce("sum", 1), (8192, 1000), dtype=int64),
        case("sum-0", _reduce("sum", 0), (8192, 1000), dtype=int32),
        case("amax-1", _reduce("amax", 1), (8192, 1000), dtype=int64),
        case("all-1", lambda t, x: (x > -2.0).all(1), (8192, 1000)),
        case("count", lambda t, x: (x > 0).sum(), (8192, 1000)),
        case("norm-1", lambda t, x: x.norm(dim=1), (8192, 4096)),
        case("norm-all", lambda t, x: x.norm(), (8192, 2048)),
        case("sum-turned", lambda t, x: x.t().sum(1), (4096, 4096)),
        case("normalize", lambda t, x: t.nn.functional.normalize(x), (8192, 1000)),
        case("cosine", lambda t, a, b: t.cosine_similarity(a, b), (8192, 1000), (8192, 1000)),
        *in_both_types("cumsum-0", lambda t, x: x.cumsum(0), (2048, 4097)),
        case("cumsum-1", lambda t, x: x.cumsum(1), (2048, 4097)),
        case("cumsum-1", lambda t, x: x.cumsum(1), CUBE),
        case("cumsum-1", lambda t, x: x.cumsum(1), FEW),
        case("cumsum-1", lambda t, x: x.cumsum(1), (65536, 32)),
        case("cumsum-0", lambda t, x: x.cumsum(0), (1 << 22,)),
        case("cumsum-1", lambda t, x: x.cumsum(1), (2048, 1000), dtype=int64),
        case("cumprod-1", lambda t, x: x.cumprod(1), (2048, 1000)),
        *(
            case(f"topk-{k}", lambda t, x, k=k: x.topk(k).values, shape)
            for k, shape in ((1, (64, 32000)), (5, (128, 1000)), (8, (8192, 64)), (50, (8, 128256)))
        ),
        case("topk-256", lambda t, x: x.topk(256).values, (256, 4096)),
        case("topk-1000", lambda t, x: x.topk(1000).values, (64, 8192)),
    ]


def _softmax(dim: int) -> Function:
    return lambda t, x: t.softmax(x, dim)


def _cross(t: Any, x: Any, at: Any) -> Any:
    return t.nn.functional.cross_entropy(x, at)


def norms() -> list[OpCase]:
    table = []
    for shape in ((65536, 8), (65536, 33), (1 << 20, 16), (64, 128256), (4096, 4097), (1, 1000)):
        table += in_both_types("softmax", _softmax(-1), shape)
    for sizes, dim in (((1024, 4096), 0), ((4, 21, 256, 256), 1), ((16, 1000, 128), 1)):
        table += in_both_types(f"softmax-{dim}", _softmax(dim), sizes)
    table += in_both_types("log-softmax", lambda t, x: t.log_softmax(x, -1), (2048, 32000))

    def layer(t: Any, x: Any, w: Any, b: Any) -> Any:
        return t.nn.functional.layer_norm(x, w.shape, w, b)

    def rms(t: Any, x: Any, w: Any) -> Any:
        return t.nn.functional.rms_norm(x, w.shape, w, 1e-6)

    for shape in ((65536, 8), (65536, 96), (8192, 1000), (8192, 4096), (16, 1 << 20), (4, 768)):
        table += in_both_types("layer-norm", layer, shape, shape[1:], shape[1:])
    for shape in ((65536, 64), (8192, 1000), (8192, 4096), (1, 4096)):
        table += in_both_types("rms-norm", rms, shape, shape[1:])

    def group(t: Any, x: Any, w: Any, b: Any) -> Any:
        return t.nn.functional.group_norm(x, 32, w, b)

    def batch(training: bool) -> Function:
        def run(t: Any, x: Any, w: Any, b: Any) -> Any:
            f = t.nn.functional
            return (
                f.batch_norm(x, b, w.abs() + 1, w, b, training=False)
                if not training
                else f.batch_norm(x, None, None, w, b, True)
            )

        return run

    for image in ((8, 320, 64, 64), (16, 64, 57, 57), (2, 1280, 8, 8)):
        table += in_both_types("group-norm", group, image, image[1:2], image[1:2])
    table += in_both_types(
        "instance-norm", lambda t, x: t.nn.functional.instance_norm(x), (16, 64, 57, 57)
    )
    table += in_both_types("batch-norm", batch(False), IMAGES, (64,), (64,))
    table += in_both_types("batch-norm-training", batch(True), IMAGES, (64,), (64,))
    for shape in ((8192, 1000), (2048, 32000), (128, 10)):
        table += [
            case("cross-entropy", _cross, shape, shape[:1], dtype=d, indices={1: shape[1]})
            for d in (bf16,)
        ]

    def loss(name: str) -> Function:
        return lambda t, a, b: getattr(t.nn.functional, name)(a, b)

    table += [
        case(n.replace("_", "-"), loss(n), (4096, 1000), (4096, 1000))
        for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div")
    ]
    table.append(
        case(
            "bce",
            lambda t, a, b: t.nn.functional.binary_cross_entropy_with_logits(a, b.abs()),
            (4096, 1000),
            (4096, 1000),
        )
    )
    return table
