"""Ops that move elements by index, and windows, compared with NumPy and torch.

Hypothesis draws shapes, axes, padding and strides. One model contains all cases of an example.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.emulated import few_emulated
from tests.opcheck import Case, check

# An example takes seconds to compile, so a failing one is shown without shrinking.
PROPERTY = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TYPES = st.sampled_from([ark.fp32, ark.bf16, ark.int64, ark.int8, ark.uint8])


def values(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    if dtype in (ark.fp32, ark.fp16, ark.bf16):
        return rng.uniform(-2, 2, shape)
    return rng.integers(0, 100, shape)


@st.composite
def moved(draw: Any) -> list[Case]:
    """Draws gathers, scatters and other index ops over one to six dimensions."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cases = []
    for _ in range(3):
        shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
        rank, dtype = len(shape), draw(TYPES)
        axis = draw(st.integers(0, rank - 1))
        array = values(rng, shape, dtype)
        inputs = [(array, dtype)]
        pads = [(draw(st.integers(0, 7)), draw(st.integers(0, 7))) for _ in shape]
        name = f"{dtype} {shape} {axis} {pads}"
        for mode in ("constant", "edge", "reflect", "wrap"):
            cases.append(
                Case(
                    f"pad {mode} {name}",
                    inputs,
                    lambda t, p=pads, m=mode: ark.pad(t, p, m),
                    lambda a, p=pads, m=mode: np.pad(a, p, m),
                )
            )
        repeats = [draw(st.integers(1, 2)) for _ in shape]
        cases += [
            Case(
                f"flip {name}",
                inputs,
                lambda t, x=axis: ark.flip(t, x),
                lambda a, x=axis: np.flip(a, x),
            ),
            Case(
                f"tile {name}",
                inputs,
                lambda t, r=repeats: ark.tile(t, r),
                lambda a, r=repeats: np.tile(a, r),
            ),
            Case(
                f"concat {name}",
                inputs,
                lambda t, x=axis: ark.concat([t, t, t], x),
                lambda a, x=axis: np.concatenate([a, a, a], x),
            ),
        ]
        index = draw(st.sampled_from([ark.int32, ark.int64]))
        n = shape[axis]
        many = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        cases.append(
            Case(
                f"gather {name}",
                [*inputs, (rng.integers(-n, n, many), index)],
                lambda t, i, x=axis: ark.gather(t, i, x),
                lambda a, i, x=axis: np.take(a, i, x),
            )
        )
        smaller = [draw(st.integers(1, m + (3 if d == axis else 0))) for d, m in enumerate(shape)]
        smaller = [
            s if d == axis else min(s, m)
            for d, (s, m) in enumerate(zip(smaller, shape, strict=True))
        ]
        ids = rng.integers(-n, n, smaller)
        cases.append(
            Case(
                f"gather_elements {name}",
                [*inputs, (ids, index)],
                lambda t, i, x=axis: ark.gather_elements(t, i, x),
                lambda a, i, x=axis: np.take_along_axis(
                    a[tuple(slice(m) if d != x else slice(None) for d, m in enumerate(i.shape))],
                    i,
                    x,
                ),
            )
        )
        for reduction in ("set", "add", "maximum"):
            cases.append(
                Case(
                    f"scatter {reduction} {name} {smaller}",
                    [*inputs, (ids, index), (values(rng, smaller, dtype), dtype)],
                    lambda t, i, u, x=axis, r=reduction: ark.scatter_elements(t, i, u, x, r),
                    lambda a, i, u, x=axis, r=reduction: scattered(a, i, u, x, r),
                    tolerance=0.1 if dtype is ark.bf16 else None,
                )
            )
        for exclusive, reverse in ((False, False), (True, True)):
            cases.append(
                Case(
                    f"cumsum {name} {exclusive} {reverse}",
                    inputs,
                    lambda t, x=axis, e=exclusive, r=reverse: ark.cumsum(t, x, e, r),
                    lambda a, x=axis, e=exclusive, r=reverse: summed(a, x, e, r),
                    tolerance=0.05,
                )
            )
    return cases


def scattered(a: np.ndarray, ids: np.ndarray, u: np.ndarray, axis: int, reduction: str) -> Any:
    scattered_to = a.copy()
    for place in np.ndindex(*u.shape):
        at = (*place[:axis], ids[place], *place[axis + 1 :])
        old, new = scattered_to[at], u[place]
        scattered_to[at] = {"set": new, "add": old + new, "maximum": max(old, new)}[reduction]
    return scattered_to


def summed(a: np.ndarray, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
    flipped = np.flip(a, axis) if reverse else a
    sums = flipped.cumsum(axis) - (flipped if exclusive else 0)
    return np.flip(sums, axis) if reverse else sums


@given(drawn=moved())
@PROPERTY
def test_moved(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


@pytest.mark.parametrize("reduction", few_emulated(("set", "add", "maximum"), "add"))
def test_many_updates_of_few_lines(backend: str, reduction: str) -> None:
    """Scatters of many updates to few rows, for which the threads of a block search for updates
    together, or tasks share the updated indices.
    """
    rng = np.random.default_rng(4)
    cases = []
    for shape, wide in (([300], 1), ([70, 5], 1), ([2, 9, 40], 1), ([40, 3], 3)):
        axis = len(shape) - 2 if len(shape) > 1 else 0
        many = [1213 if d == axis else n for d, n in enumerate(shape)]
        size = [1213 if d == axis else wide if n == wide else 1 for d, n in enumerate(shape)]
        ids = rng.integers(-shape[axis], shape[axis], size)
        cases.append(
            Case(
                f"{reduction} {shape}",
                [
                    (values(rng, shape, ark.fp32), ark.fp32),
                    (ids, ark.int32),
                    (values(rng, many, ark.fp32), ark.fp32),
                ],
                lambda t, i, u, x=axis: ark.scatter_elements(t, i, u, x, reduction),
                lambda a, i, u, x=axis: scattered(a, np.broadcast_to(i, u.shape), u, x, reduction),
                tolerance=1e-3,
            )
        )
    check(cases)


# Inputs of cumulative sums: (shape, axis); a line is the elements along the axis. If there are few
# lines, a block sums each of them; if there are many, a warp does. Where adjacent lines are
# adjacent in memory, they go to adjacent lanes, and the warps divide a line's length.
FEW = (([1025], 0), ([3, 700], 1), ([600, 2], 0))
MANY = (([40, 90], 1), ([300, 40], 0), ([2, 260, 33], 1))
LONG_LINES = (*FEW, *MANY)


@pytest.mark.emulated("slow")
def test_all_threads_sum_a_long_line(backend: str) -> None:
    rng = np.random.default_rng(5)
    check(
        [
            Case(
                f"cumsum {shape} {axis} {exclusive} {reverse}",
                [(rng.integers(-9, 9, shape), dtype)],
                lambda t, x=axis, e=exclusive, r=reverse: ark.cumsum(t, x, e, r),
                lambda a, x=axis, e=exclusive, r=reverse: summed(a, x, e, r),
            )
            for shape, axis in LONG_LINES
            for dtype in (ark.int32, ark.int64)
            for exclusive, reverse in ((False, False), (True, True))
        ]
    )


@pytest.mark.parametrize(("shape", "axis"), [((20, 1100), 1), ((1100, 20), 0)])
@pytest.mark.emulated("slow")
def test_processor_with_many_long_lines_sums_them_in_pieces(
    backend: str, shape: tuple[int, int], axis: int
) -> None:
    chosen = registry.get(backend)
    x = np.random.default_rng(6).integers(-9, 9, shape).astype(np.float32)
    model = Model()
    with use_model(model):
        sums = ark.cumsum(ark.tensor(shape, ark.fp32, name="x"), axis)
        ark.copy(sums, name="out")
    with contextlib.closing(chosen.open(0)) as device:
        planned = plan(model.graph, device.machine.with_processors(1), {"fuse": False})
        verify([planned])
        with Executor(planned, chosen, device) as executor:
            executor.write("x", x)
            executor.start(2).wait()
            got = executor.read("out").reshape(shape)
    np.testing.assert_array_equal(got, x.cumsum(axis))


def test_tuples_of_indices(backend: str) -> None:
    rng = np.random.default_rng(3)
    data = rng.uniform(-1, 1, (3, 5, 4))
    pairs = np.stack([rng.integers(0, 3, (2, 6)), rng.integers(-5, 5, (2, 6))], -1)
    news = rng.uniform(-1, 1, (2, 6, 4))
    batched = rng.integers(0, 5, (3, 2, 1))

    def added(a: np.ndarray, i: np.ndarray, u: np.ndarray) -> np.ndarray:
        sums = a.copy()
        np.add.at(sums, (i[..., 0], i[..., 1]), u)
        return sums

    x, i = (data, ark.fp32), (pairs, ark.int64)
    check(
        [
            Case("gather_nd", [x, i], ark.gather_nd, lambda a, j: a[j[..., 0], j[..., 1]]),
            Case(
                "batched",
                [x, (batched, ark.int32)],
                lambda a, j: ark.gather_nd(a, j, batch_dims=1),
                lambda a, j: np.take_along_axis(a, j, 1),
            ),
            Case(
                "scatter_nd",
                [x, i, (news, ark.fp32)],
                lambda a, j, u: ark.scatter_nd(a, j, u, "add"),
                added,
            ),
            Case(
                "steps",
                [x],
                lambda t: ark.strided_slice(t, [0, 4, 0], [3, 3, 2], [1, -2, 3]),
                lambda a: a[:, 4::-2, ::3],
            ),
            Case(
                "twenty", [x], lambda t: ark.concat([t] * 20, 1), lambda a: np.tile(a, (1, 20, 1))
            ),
            Case(
                "split",
                [x],
                lambda t: ark.add(ark.split(t, [2, 3], 1)[1], 1.0),
                lambda a: a[:, 2:] + 1,
            ),
            Case(
                "packed concat",
                [(np.arange(-8, 7).reshape(3, 5), ark.int4)],
                lambda t: ark.cast(ark.concat([t, t], 0), ark.int32),
                lambda a: np.concatenate([a, a]),
            ),
        ]
    )


def test_index_out_of_range_is_named() -> None:
    ark.init(backend="cpu")
    table, ids = ark.tensor([4, 3]), ark.tensor([2], ark.int64)
    ark.gather(table, ids)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        ids.from_numpy(np.array([1, 9]))
        with pytest.raises(ark.GpuError, match="9"):
            runtime.run()
    ark.init(backend="cpu")


def _tensor(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.ascontiguousarray(array, np.float64))


@st.composite
def windows(draw: Any) -> list[Case]:
    """Draws convolutions and pools over one to three spatial dimensions."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cases = []
    for count in (1, 2, 3):
        groups = draw(st.sampled_from([1, 2, 4]))
        sizes = [draw(st.integers(5, 8)) for _ in range(count)]
        kernel = [draw(st.integers(1, 3)) for _ in range(count)]
        stride = [draw(st.integers(1, 3)) for _ in range(count)]
        dilation = [draw(st.integers(1, 2)) for _ in range(count)]
        padding = [draw(st.integers(0, 2)) for _ in range(count)]
        x = rng.uniform(-1, 1, (2, 4, *sizes))
        w = rng.uniform(-1, 1, (4, 4 // groups, *kernel))
        back = rng.uniform(-1, 1, (4, 3, *kernel))
        bias = rng.uniform(-1, 1, 4)
        name = f"{sizes} {kernel} {stride} {dilation} {padding} {groups}"
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

        def apply(op: str, *arrays: np.ndarray, **more: Any) -> np.ndarray:
            return getattr(functional, op)(*map(_tensor, arrays), **more).double().numpy()

        patches = rng.uniform(-1, 1, (2, 3, *(k * draw(st.integers(1, 3)) for k in kernel)))
        table = rng.uniform(-1, 1, (4, 3, *kernel))
        cases.append(
            Case(
                f"patches {patches.shape} {kernel}",
                [(patches, ark.fp32), (table, ark.fp32), (bias, ark.fp32)],
                lambda a, b, c, k=kernel: ark.conv(a, b, c, stride=k),
                lambda a, b, c, k=kernel, n=count: apply(f"conv{n}d", a, b, c, stride=k),
                tolerance=1e-4,
            )
        )
        triple = [(x, ark.fp32), (w, ark.fp32), (bias, ark.fp32)]
        cases.append(
            Case(
                f"conv {name}",
                triple,
                lambda a, b, c, o=options: ark.conv(a, b, c, **o),
                lambda a, b, c, o=options, n=count: apply(f"conv{n}d", a, b, c, **o),
                tolerance=1e-4,
            )
        )
        cases.append(
            Case(
                f"conv_transpose {name}",
                [(x, ark.fp32), (back, ark.fp32)],
                lambda a, b, o=options: ark.conv_transpose(a, b, **{**o, "padding": 0}),
                lambda a, b, o=options, n=count: apply(
                    f"conv_transpose{n}d", a, b, **{**o, "padding": 0}
                ),
                tolerance=1e-4,
            )
        )
        half = [min(p, k // 2) for p, k in zip(padding, kernel, strict=True)]
        for ceil in (False, True):
            cases.append(
                Case(
                    f"max {name} {ceil}",
                    [(x, ark.fp32)],
                    lambda a, k=kernel, s=stride, p=half, d=dilation, c=ceil: ark.max_pool(
                        a, k, s, p, d, c
                    ),
                    lambda a, n=count, k=kernel, s=stride, p=half, d=dilation, c=ceil: apply(
                        f"max_pool{n}d",
                        a,
                        kernel_size=k,
                        stride=s,
                        padding=p,
                        dilation=d,
                        ceil_mode=c,
                    ),
                )
            )
            for counted in (False, True):
                cases.append(
                    Case(
                        f"avg {name} {ceil} {counted}",
                        [(x, ark.fp32)],
                        lambda a, k=kernel, s=stride, p=half, c=ceil, w=counted: ark.avg_pool(
                            a, k, s, p, ceil=c, count_include_pad=w
                        ),
                        lambda a, n=count, k=kernel, s=stride, p=half, c=ceil, w=counted: apply(
                            f"avg_pool{n}d",
                            a,
                            kernel_size=k,
                            stride=s,
                            padding=p,
                            ceil_mode=c,
                            count_include_pad=w,
                        ),
                    )
                )
    return cases


@given(drawn=windows())
@PROPERTY
@pytest.mark.emulated("slow")
def test_windows(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


@pytest.mark.emulated("slow")
def test_images(backend: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    rng = np.random.default_rng(5)
    x, ones = rng.uniform(-1, 1, (2, 4, 9, 6)), rng.uniform(0.5, 2, 4)

    def sized(mode: str, sizes: Any, corners: bool | None = None) -> Any:
        return lambda a: functional.interpolate(
            _tensor(a), sizes, mode=mode, align_corners=corners
        ).numpy()

    def normed(a: np.ndarray, s: np.ndarray) -> np.ndarray:
        t = _tensor(s)
        return functional.batch_norm(_tensor(a), t, t, t, t).numpy()

    image, pair = [(x, ark.fp32)], [(x, ark.fp32), (ones, ark.fp32)]
    half, ends = {"coordinates": "half_pixel"}, {"coordinates": "align_corners"}
    check(
        [
            Case(
                "linear",
                image,
                lambda t: ark.resize(t, (18, 4), "linear", **half),
                sized("bilinear", (18, 4), False),
            ),
            Case(
                "corners",
                image,
                lambda t: ark.resize(t, (5, 11), "linear", **ends),
                sized("bilinear", (5, 11), True),
                1e-4,
            ),
            Case(
                "average",
                image,
                ark.global_avg_pool,
                lambda a: a.mean((2, 3), keepdims=True),
            ),
            Case("most", image, ark.global_max_pool, lambda a: a.max((2, 3), keepdims=True)),
            Case("batch norm", pair, lambda t, s: ark.batch_norm(t, s, s, s, s), normed, 1e-4),
            Case(
                "group norm",
                pair,
                lambda t, s: ark.group_norm(t, 2, s, s),
                lambda a, s: functional.group_norm(_tensor(a), 2, _tensor(s), _tensor(s)).numpy(),
                1e-4,
            ),
            Case(
                "instance norm",
                image,
                ark.instance_norm,
                lambda a: functional.instance_norm(_tensor(a)).numpy(),
                1e-4,
            ),
        ]
    )


def test_bad_index_is_named(backend: str) -> None:
    ids, table = ark.tensor([4], ark.int32), ark.tensor([10, 8])
    out = ark.embedding(ids, table)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        ids.from_numpy(np.array([1, 2, 99, 3]))
        with pytest.raises(ark.GpuError, match=r"99.*out of range"):
            runtime.run()
    assert out.shape() == [4, 8]
