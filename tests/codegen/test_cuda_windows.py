"""Products of windows on NVIDIA GPUs: the input's tensor maps compared with hand-computed ones, the
compiler's output for windows as the left and as the right operand, and on a GPU the sums of
convolutions compared with torch's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend.codegen.body import BoxMap
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.lower.pipeline import plan as make_plan
from ark.ops.windows import padding_pairs
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests import kept
from tests.slow import in_turns, slow

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
Shape = tuple[int, ...]
BOXED = {"variant": "matrix"}
# Input, weights, options.
FEW_CHANNELS: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((4, 3, 64, 66), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    ((6, 3, 48, 50), (72, 3, 3, 3), {"padding": 1}),
    ((4, 5, 61, 70), (64, 5, 4, 11), {"stride": (3, 2), "padding": ((2, 0), (1, 4))}),
    ((4, 6, 4000), (64, 6, 9), {"stride": 2, "padding": 4}),
]
SHAPES: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((4, 64, 30, 31), (64, 64, 3, 3), {"padding": 1}),
    ((4, 64, 32, 32), (128, 64, 3, 2), {"stride": (2, 1), "padding": ((1, 1), (0, 0))}),
    ((2, 128, 40, 40), (64, 128, 3, 3), {"padding": 2, "dilation": 2}),
    ((3, 64, 33, 41), (72, 64, 5, 5), {"stride": (2, 3), "padding": 2}),
    ((4, 64, 2000), (128, 64, 5), {"padding": 2}),
    ((6, 128, 1501), (64, 128, 4), {"stride": 3, "padding": ((1, 4),), "dilation": 2}),
    ((8, 64, 57, 57), (256, 64, 1, 1), {"stride": 2}),
    ((2, 64, 64, 64), (64, 64, 7, 7), {"stride": 2, "padding": 3}),
    ((2, 192, 48, 48), (200, 192, 3, 3), {"padding": ((0, 2), (1, 0))}),
    ((16, 256, 7, 7), (256, 256, 3, 3), {"padding": 1}),
    ((3, 320, 9, 8), (256, 320, 3, 3), {"padding": 1}),
    ((2, 192, 40, 40), (4, 192, 3, 3), {"padding": 1}),
    *FEW_CHANNELS,
]


def planned(
    model: str,
    x: Shape,
    w: Shape,
    dtype: Any = ark.bf16,
    plan_options: Mapping[str, Any] | None = None,
    **conv: Any,
) -> Plan:
    graph_model = ark.Model(0, 1)
    with ark.use_model(graph_model):
        given, weight = ark.tensor(x, dtype, name="x"), ark.tensor(w, dtype, name="w")
        ark.conv(given, weight, **conv, name="out")
    window_plan = make_plan(graph_model.graph, machines.MODELS[model], plan_options)
    verify([window_plan])
    return window_plan


def maps_of(window_plan: Plan) -> tuple[BoxMap, BoxMap]:
    machine = machine_of(window_plan)
    emitted = write(window_plan, machine, backend.dialect(machine.arch))
    (op,) = (op for op in window_plan.ops if op.kind == "matmul")
    left, right = emitted.maps[emitted.opcode[op.id]]
    return left, right


def test_map_of_windows_as_the_right_side() -> None:
    """The tensor map of a convolution's windows as the right operand, checked by hand: kernel 3 x
    2, stride 2 x 1, images of 32 x 40, padded by one row before and one column on each side. That
    gives 16 x 41 windows, the last of which begins at row 29 and column 39.
    """
    window_plan = planned(
        "h100", (8, 64, 32, 40), (256, 64, 3, 2), stride=(2, 1), padding=((1, 0), (1, 1))
    )
    left, right = maps_of(window_plan)
    columns = window_plan.ops[-2 if window_plan.ops[-1].kind == "transpose" else -1].params["tile"][
        1
    ]
    assert (left.dims, left.steps) == ((384, 256), ())
    assert right == BoxMap(
        1,
        "bf16",
        (64, 40, 32, 8),
        (128, 40 * 128, 32 * 40 * 128),
        (64, columns),
        lower=(-1, -1),
        upper=(0, -2),
        steps=(1, 1, 2, 1),
    )


def test_map_of_windows_of_one_dimension_as_the_left_side() -> None:
    """The tensor map of one-dimensional windows as the left operand, checked by hand: kernel 4,
    dilation 2, rows of 501 elements, padded by 1 before and 4 after. That gives 500 windows, the
    last of which begins at 498.
    """
    window_plan = planned("h100", (8, 128, 501), (256, 128, 4), padding=((1, 4),), dilation=2)
    left, right = maps_of(window_plan)
    assert right.steps == ()
    rows = window_plan.ops[2].params["tile"][0]
    assert left == BoxMap(
        0,
        "bf16",
        (128, 501, 1, 8),
        (256, 501 * 256, 501 * 256),
        (64, rows),
        lower=(-1, 0),
        upper=(-2, 0),
        steps=(1, 1, 1, 1),
    )


def loaded(box: BoxMap, memory: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """The lines of elements that copies through a tiled map load for the rows at `place`, with
    zeros outside of the map. place: coordinates of dimensions 1 and up, the first of which are row
    numbers.
    """
    steps = [s // memory.itemsize for s in box.strides]
    at = np.arange(-(-box.dims[0] // box.box[0]) * box.box[0])
    lines = np.zeros((*np.broadcast(*place).shape, len(at)), memory.dtype)
    inside = np.all([(p >= 0) & (p < n) for p, n in zip(place, box.dims[1:], strict=True)], axis=0)
    first = sum(np.asarray(p) * s for p, s in zip(place, steps, strict=True))
    lines[inside, : box.dims[0]] = memory[first[inside][:, None] + at[: box.dims[0]]]
    return lines


@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
@pytest.mark.parametrize(("x", "w", "options"), FEW_CHANNELS)
def test_boxes_of_few_channels_hold_the_windows(
    x: Shape, w: Shape, options: dict[str, Any], dtype: Any
) -> None:
    """Simulated copies through both tensor maps load operands whose product is torch's convolution.
    From each row of an image they load only the elements of the window.
    """
    torch = pytest.importorskip("torch")
    plan = planned("h100", x, w, dtype, BOXED, tf32=dtype == ark.fp32, **options)
    assert [op.kind for op in plan.ops[:3]] == ["remap", "remap", "matmul"]
    p = plan.ops[2].params["windows"]
    maps = maps_of(plan)
    image_map, weight_map = maps[p["side"]], maps[1 - p["side"]]
    padded = plan.tensors[plan.ops[2].operands[p["side"]]].shape
    spatial, more = len(x) - 2, padded[-1] - x[1]
    assert image_map.dims[0] == weight_map.dims[0] == p["size"][-1] * padded[-1]
    rng = np.random.default_rng(0)
    source, weight = (rng.integers(-4, 5, shape).astype(np.float32) for shape in (x, w))
    margins = padding_pairs("conv", options["padding"], spatial)
    image = np.pad(np.moveaxis(source, 1, -1), [*[(0, 0)] * spatial, margins[-1], (0, more)])
    image = image[(slice(None),) * spatial + (slice(padded[-2]),)].astype(dtype.numpy)
    assert image.shape == padded
    kernel = np.pad(np.moveaxis(weight, 1, -1), [*[(0, 0)] * (1 + spatial), (0, more)])
    sizes, down = (1, *p["sizes"])[-2:], (1, *p["size"])[-2]
    n, oy, ox = (g.ravel() for g in np.indices((x[0], *sizes)))
    rows, sums = np.arange(w[0]), np.zeros((len(n), w[0]), np.float32)
    for tap in range(down):
        y = oy * image_map.steps[2] + image_map.lower[1] + tap
        left = loaded(image_map, image.ravel(), (ox + image_map.lower[0], y, n))
        right = loaded(weight_map, kernel.ravel().astype(dtype.numpy), (rows, rows * 0 + tap))
        sums += left.astype(np.float32) @ right.astype(np.float32).T
    pairs = [m for pair in reversed(margins) for m in pair]
    given = torch.nn.functional.pad(torch.from_numpy(source), pairs)
    peer = getattr(torch.nn.functional, f"conv{spatial}d")
    how = {"stride": options.get("stride", 1)}
    want = peer(given, torch.from_numpy(weight), **how).numpy()
    np.testing.assert_array_equal(np.moveaxis(sums.reshape(x[0], *p["sizes"], w[0]), -1, 1), want)


@pytest.mark.parametrize("model", ["h100", pytest.param("b200", marks=slow)])
@pytest.mark.parametrize(
    ("dtype", "x", "w", "options"),
    in_turns(
        [ark.bf16, ark.fp32],
        [
            ((16, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
            ((16, 128, 14, 14), (512, 128, 3, 3), {"stride": 2, "padding": 1}),
            ((16, 3, 112, 112), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
        ],
    ),
)
def test_both_halves_compile(
    model: str, x: Shape, w: Shape, options: dict[str, Any], dtype: Any
) -> None:
    window_plan = planned(model, x, w, dtype, tf32=dtype == ark.fp32, **options)
    assert window_plan.variant == "matrix"
    assert any(op.params.get("windows") for op in window_plan.ops)
    machine = machine_of(window_plan)
    source = write(window_plan, machine, backend.dialect(machine.arch)).source
    binary = kept.binary(backend, source, Target(machine.arch, machine.threads))
    assert "ark_window_load" in source.text
    assert "serialized" not in binary.log
    assert " 0 bytes spill stores" in binary.log


@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
def test_convolutions_of_few_pixels_are_divided_along_k(dtype: Any) -> None:
    """A convolution whose result has few tiles gives each processor a part of the windows."""
    x, w = (2, 640, 8, 8), (1280, 640, 3, 3)
    window_plan = planned("h200", x, w, dtype, BOXED, tf32=dtype == ark.fp32, padding=1)
    kinds = [op.kind for op in window_plan.ops if op.kind != "transpose"]
    assert kinds == ["matmul", "elementwise"]
    (product,) = (op for op in window_plan.ops if op.kind == "matmul")
    assert product.params["splits"] > 1 and product.params["windows"]["side"] == 0
    machine = machine_of(window_plan)
    source = write(window_plan, machine, backend.dialect(machine.arch)).source
    binary = kept.binary(backend, source, Target(machine.arch, machine.threads))
    assert " 0 bytes spill stores" in binary.log


def test_convolutions_of_few_outputs_use_matrix_units() -> None:
    """A convolution whose outputs are no whole vector, such as the last one of an image model,
    stores them with channels first, unless rows of so many places (3,969) are unaligned.
    """
    window_plan = planned("h200", (2, 320, 64, 64), (4, 320, 3, 3), ark.bf16, BOXED, padding=1)
    (product,) = (op for op in window_plan.ops if op.kind == "matmul")
    assert product.params["windows"]["side"] == 1 and product.params["tile"][0] == 4
    odd = planned("h200", (2, 320, 63, 63), (3, 320, 3, 3), ark.bf16, BOXED, padding=1)
    assert "convolution" in [op.kind for op in odd.ops]


def test_fp32_is_convolved_in_its_own_digits_unless_tf32_is_allowed() -> None:
    """Convolutions in fp32 stay in full precision unless tf32 is permitted: large ones use a matrix
    of windows in memory and fp32 tiles, small ones read the image in place.
    """
    shape = (16, 64, 56, 56), (64, 64, 3, 3)
    window_plan = planned("h100", *shape, ark.fp32, padding=1)
    assert [op.kind for op in window_plan.ops] == ["remap", "matmul"]
    machine = machine_of(window_plan)
    text = write(window_plan, machine, backend.dialect("sm_90a")).source.text
    assert "  ark_unit_tile<64, 256, 32, 32, 3, " in text  # three products of tf32 for one of fp32
    small = planned("h100", (1, 8, 16, 16), (8, 8, 3, 3), ark.fp32, padding=1)
    assert [op.kind for op in small.ops] == ["convolution"]
    odd = planned("h100", (16, 3, 224, 224), (64, 3, 7, 7), ark.fp32, stride=2, tf32=True)
    assert [op.kind for op in odd.ops[:3]] == ["remap", "remap", "matmul"]


def test_images_of_a_depthwise_convolution_are_divided_evenly() -> None:
    """A depthwise convolution of 1,024 one-channel images is assigned to 128 processors with eight
    images each, not to 132 processors with up to eight.
    """
    window_plan = planned("h100", (16, 64, 56, 56), (64, 1, 3, 3), ark.fp32, padding=1, groups=64)
    assert [(op.kind, op.params["tile"]) for op in window_plan.ops] == [
        ("convolution", [1, 8, 1, 3136])
    ]


@needs_gpu
@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
@pytest.mark.parametrize(("x", "w", "options"), SHAPES)
def test_gpu_convolves_as_torch_does(
    x: Shape, w: Shape, options: dict[str, Any], dtype: Any
) -> None:
    """On a GPU, convolutions equal torch's. Inputs are whole numbers, whose sums are exact in fp32
    and in tf32's factors, so only the result is rounded.
    """
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = [rng.integers(-4, 5, shape).astype(dtype.numpy) for shape in (x, w)]
    source, weight = (torch.from_numpy(v.astype(np.float32)) for v in values)
    how = dict(options)
    if isinstance(how.get("padding"), tuple):
        margins = [n for pair in reversed(how.pop("padding")) for n in pair]
        source = torch.nn.functional.pad(source, margins)
    want = getattr(torch.nn.functional, f"conv{len(x) - 2}d")(source, weight, **how)
    window_plan = planned("h100", x, w, dtype, BOXED, tf32=dtype == ark.fp32, **options)
    assert any(op.params.get("windows") for op in window_plan.ops)
    with (
        contextlib.closing(backend.open(0)) as device,
        Executor(window_plan, backend, device) as run,
    ):
        for name, value in zip("xw", values, strict=True):
            run.write(name, value)
        run.start(2).wait()
        got = run.read("out").astype(np.float32)
    exact = (want.bfloat16().float() if dtype is ark.bf16 else want).numpy()
    np.testing.assert_array_equal(got.reshape(exact.shape), exact)
