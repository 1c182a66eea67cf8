"""Products of windows on NVIDIA GPUs: the tensor maps of the input, by hand, and what the compiler
makes of both halves; on a GPU the sums of convolutions against torch's.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend.protocol import Target
from ark.codegen.dialect import BoxMap
from ark.codegen.writer import write
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests.slow import slow

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
Shape = tuple[int, ...]
# Input, weights, options.
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
]


def planned(model: str, x: Shape, w: Shape, dtype: Any = ark.bf16, **conv: Any) -> Plan:
    made = ark.Model(0, 1)
    with ark.use_model(made):
        given, weight = ark.tensor(x, dtype, name="x"), ark.tensor(w, dtype, name="w")
        ark.conv(given, weight, **conv, name="out")
    found = make_plan(made.graph, machines.MODELS[model])
    verify([found])
    return found


def maps_of(made: Plan) -> tuple[BoxMap, BoxMap]:
    machine = machine_of(made)
    emitted = write(made, machine, backend.dialect(machine.arch))
    (op,) = (op for op in made.ops if op.kind == "matmul")
    left, right = emitted.maps[emitted.opcode[op.id]]
    return left, right


def test_a_map_of_windows_as_the_right_side() -> None:
    """3 x 2 taps every 2 rows of 32 x 40 places, one row in front and none behind, one column on
    either side: 16 x 41 places, the last of which begins at row 29 and column 39.
    """
    made = planned(
        "h100", (8, 64, 32, 40), (256, 64, 3, 2), stride=(2, 1), padding=((1, 0), (1, 1))
    )
    left, right = maps_of(made)
    columns = made.ops[-2 if made.ops[-1].kind == "transpose" else -1].params["tile"][1]
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


def test_a_map_of_windows_of_one_dimension_as_the_left_side() -> None:
    """A row of 501 places, 4 taps 2 apart, 1 in front and 4 behind: 500 places, the last one of
    which begins at 498.
    """
    made = planned("h100", (8, 128, 501), (256, 128, 4), padding=((1, 4),), dilation=2)
    left, right = maps_of(made)
    assert right.steps == ()
    rows = made.ops[2].params["tile"][0]
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


@pytest.mark.parametrize("model", ["h100", pytest.param("b200", marks=slow)])
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((16, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
        ((16, 128, 14, 14), (512, 128, 3, 3), {"stride": 2, "padding": 1}),
    ],
)
@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
def test_both_halves_compile(
    model: str, x: Shape, w: Shape, options: dict[str, Any], dtype: Any
) -> None:
    made = planned(model, x, w, dtype, tf32=dtype == ark.fp32, **options)
    assert made.variant == "matrix"
    assert any(op.params.get("windows") for op in made.ops)
    machine = machine_of(made)
    source = write(made, machine, backend.dialect(machine.arch)).source
    binary = backend.compiler().compile(source, Target(machine.arch, machine.threads))
    assert "ark_window_load" in source.text
    assert "serialized" not in binary.log
    assert " 0 bytes spill stores" in binary.log


def test_fp32_is_convolved_in_its_own_digits_unless_tf32_is_allowed() -> None:
    """By a matrix of windows in memory and tiles of fp32, where it is large; in place if small."""
    shape = (16, 64, 56, 56), (64, 64, 3, 3)
    made = planned("h100", *shape, ark.fp32, padding=1)
    assert [op.kind for op in made.ops] == ["remap", "matmul"]
    machine = machine_of(made)
    text = write(made, machine, backend.dialect("sm_90a")).source.text
    assert "  ark_unit_tile<64, 256, 32, 32, 3, " in text  # three products of tf32 for one of fp32
    small = planned("h100", (1, 8, 16, 16), (8, 8, 3, 3), ark.fp32, padding=1)
    assert [op.kind for op in small.ops] == ["convolution"]
    odd = planned("h100", (16, 3, 224, 224), (64, 3, 7, 7), ark.fp32, stride=2, tf32=True)
    assert [op.kind for op in odd.ops] == ["remap", "matmul"]


def test_images_of_their_own_channels_are_dealt_so_that_all_end_together() -> None:
    """1,024 images of a channel: eight for each of 128 processors, not seven for most of 132."""
    made = planned("h100", (16, 64, 56, 56), (64, 1, 3, 3), ark.fp32, padding=1, groups=64)
    assert [(op.kind, op.params["tile"]) for op in made.ops] == [("convolution", [1, 8, 1, 3136])]


@needs_gpu
@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
@pytest.mark.parametrize(("x", "w", "options"), SHAPES)
def test_a_gpu_convolves_as_torch_does(
    x: Shape, w: Shape, options: dict[str, Any], dtype: Any
) -> None:
    """Whole numbers, whose sums fp32 holds exactly, and tf32 their factors; only the result is
    rounded.
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
    made = planned("h100", x, w, dtype, tf32=dtype == ark.fp32, **options)
    assert any(op.params.get("windows") for op in made.ops)
    with contextlib.closing(backend.open(0)) as device, Executor(made, backend, device) as run:
        for name, value in zip("xw", values, strict=True):
            run.write(name, value)
        run.start(2).wait()
        got = run.read("out").astype(np.float32)
    exact = (want.bfloat16().float() if dtype is ark.bf16 else want).numpy()
    np.testing.assert_array_equal(got.reshape(exact.shape), exact)
