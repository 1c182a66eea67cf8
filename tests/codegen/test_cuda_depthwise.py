"""Depthwise convolutions with channels last, whose images are copied to shared memory. Whole blocks
of the CUDA body run on the host, with copies that arrive late, and results are compared with
torch's in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.tasks.depthwise_form import units

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda.machines import MODELS

from tests.block_on_host import Block

torch = pytest.importorskip("torch")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A convolution. image: images, height, width, channels. processors: with few of them, a thread
    computes several patches of a task, while the task's second half is still copied.
    """

    image: tuple[int, int, int, int]
    size: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    before: Pair = (0, 0)
    dtype: DataType = ark.bf16
    variant: str = "matrix"
    processors: int = 132

    @property
    def sizes(self) -> Pair:
        """Rows and columns of the result. The padding is the same on both sides."""
        down, across = (
            (n + 2 * b - (k - 1) * d - 1) // s + 1
            for n, b, k, d, s in zip(
                self.image[1:3], self.before, self.size, self.dilation, self.stride, strict=True
            )
        )
        return down, across


CASES = [
    Case((2, 21, 17, 48), (7, 7), before=(3, 3)),
    Case((2, 33, 29, 48), (7, 7), before=(3, 3), processors=2),
    Case((3, 7, 7, 136), (7, 7), before=(3, 3), dtype=ark.fp16),
    Case((1, 30, 26, 40), (5, 5), (2, 2), before=(2, 2)),
    Case((2, 95, 65, 40), (3, 3), (2, 2), before=(1, 1), processors=1),
    Case((1, 25, 31, 24), (3, 3), (2, 1), (1, 2), (1, 2), ark.fp16),
    Case((2, 19, 11, 16), (3, 2), (3, 2), (2, 1), (4, 1)),
    Case((1, 18, 33, 24), (3, 3), before=(1, 1), dtype=ark.fp32, variant="block"),
]


def planned(case: Case, finish: bool) -> Plan:
    """The plan of the convolution alone. finish: True for a factor and an addend for each channel,
    an addend for each element, and relu.
    """
    model, channels = Model(), case.image[3]
    shape = [case.image[0], *case.sizes, channels]
    with use_model(model):
        image, weight = (
            ark.tensor(list(s), case.dtype, name=n)
            for n, s in (("image", case.image), ("weight", (case.size[0] * case.size[1], channels)))
        )
        more = [
            ark.tensor(s, case.dtype, name=n)
            for n, s in (("scale", [channels]), ("bias", [1, 1, 1, channels]), ("rest", shape))
        ]
        out = ark.tensor(shape, case.dtype, name="out")
    expression = [
        "relu",
        ["add", ["add", ["mul", ["input", 0], ["input", 1]], ["input", 2]], ["input", 3]],
    ]
    attributes: dict[str, Any] = {
        "size": [*case.size],
        "stride": [*case.stride],
        "dilation": [*case.dilation],
        "before": [*case.before],
        "sizes": [*case.sizes],
    }
    if finish:
        attributes["finish"] = expression
    others = more if finish else []
    inputs = [t.ir for t in (weight, image, *others)]
    model.graph.add("depthwise", inputs, [out.ir], attributes, "depthwise")
    machine = MODELS["h200"].with_processors(case.processors)
    return make_plan(model.graph, machine, {"variant": case.variant, "fuse": False})


def expected(case: Case, given: dict[str, np.ndarray], finish: bool) -> np.ndarray:
    image, weight = (torch.tensor(given[n], dtype=torch.float64) for n in ("image", "weight"))
    channels = case.image[3]
    kernel = weight.reshape(*case.size, channels).permute(2, 0, 1)[:, None]
    sums = torch.nn.functional.conv2d(
        image.permute(0, 3, 1, 2),
        kernel,
        stride=case.stride,
        padding=case.before,
        dilation=case.dilation,
        groups=channels,
    )
    result = sums.permute(0, 2, 3, 1).numpy()
    if finish:
        result = np.maximum(result * given["scale"] + given["bias"] + given["rest"], 0)
    return result


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.image} {case.size}")
def test_results_equal_torch(case: Case, finish: bool, tmp_path: Path) -> None:
    plan = planned(case, finish)
    (op,) = plan.ops
    assert op.params.get("patch"), op.params
    patches = units(op.params["tile"], op.params["patch"])
    assert (patches > machine_of(plan).warps * 32) == (case.processors < 132)
    block = Block(plan, tmp_path)
    rng = np.random.default_rng(1)
    given = {}
    for name in ("image", "weight", *(("scale", "bias", "rest") if finish else ())):
        tensor = block.named(name)
        tensor[...] = rng.uniform(-1, 1, tensor.shape).astype(tensor.dtype)
        given[name] = tensor.astype(np.float64)
    out = block.named("out")
    out[...] = np.nan
    block.run(op, late=True)
    want = expected(case, given, finish)
    bound = {ark.fp32: 1e-5, ark.fp16: 2e-3, ark.bf16: 1.5e-2}[case.dtype]
    np.testing.assert_allclose(out.astype(np.float64), want, atol=bound, rtol=bound)
