"""Convolutions with few channels: the image is padded and loaded by box copies, instead of a matrix
of windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests.windows import in_place

Shape = tuple[int, ...]


def planned(x: Shape, w: Shape, dtype: Any, **conv: Any) -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        ark.conv(ark.tensor(x, dtype), ark.tensor(w, dtype), tf32=dtype is ark.fp32, **conv)
    plan = make_plan(model.graph, registry.machine("h200"))
    verify([plan])
    return plan


@pytest.mark.parametrize(("dtype", "channels"), [(ark.fp32, 4), (ark.bf16, 8)], ids=str)
def test_first_convolution_of_a_network_makes_no_matrix(dtype: Any, channels: int) -> None:
    """The first convolution of a network builds no matrix of windows, in which each pixel would
    occur 49 times. Only the image is copied: with its padding, and with as many channels as fill 16
    bytes.
    """
    plan = planned((16, 3, 224, 224), (64, 3, 7, 7), dtype, stride=2, padding=3)
    assert [op.kind for op in plan.ops] == ["remap", "remap", "matmul"]
    kernel, image, product = plan.ops  # the kernel's copy is small and runs first
    assert plan.tensors[image.operands[1]].shape == (16, 224, 229, channels)
    assert plan.tensors[kernel.operands[1]].shape == (64, 7, 7, channels)
    windows = product.params["windows"]
    assert (windows["size"], windows["before"], windows["stride"]) == ([7, 7], [3, 0], [2, 2])
    assert plan.arenas["activation"] < 70e6  # the matrix of windows in fp32 took 118 MB


def test_dilated_taps_are_not_loaded_as_one_row() -> None:
    plan = planned((16, 3, 112, 112), (64, 3, 7, 7), ark.bf16, dilation=2)
    assert not any(op.params.get("windows") for op in plan.ops)


def test_images_are_not_padded_under_a_variant_that_loads_no_boxes() -> None:
    """In a variant that loads no boxes, the matrix of windows would also contain the padded image's
    zeros.
    """
    plan = planned((2, 3, 224, 224), (32, 3, 3, 3), ark.bf16, stride=2, padding=1)
    assert plan.variant == "block"
    assert [op.kind for op in plan.ops] == ["remap", "matmul"]


CONVOLUTIONS: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 3, 20, 22), (16, 3, 7, 7), {"stride": 2, "padding": 3}),
    ((3, 3, 9, 11), (8, 3, 3, 3), {"padding": 1}),
    ((2, 5, 15, 17), (8, 5, 4, 6), {"stride": (3, 2), "padding": (2, 4)}),
    ((2, 3, 14, 13), (8, 3, 3, 2), {"dilation": (2, 1), "padding": (2, 0)}),
    ((2, 6, 50), (8, 6, 9), {"stride": 3, "padding": 5}),
]


def test_windows_of_the_padded_image_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite element makes only those results infinite whose window contains it."""
    torch = pytest.importorskip("torch")
    in_place(monkeypatch)
    ark.init(backend="cpu")
    rng = np.random.default_rng(0)
    for x, w, how in CONVOLUTIONS:
        source, weight = (rng.integers(-4, 5, shape).astype(np.float32) for shape in (x, w))
        weight[weight == 0] = 1
        source[0, 1][tuple(n // 2 for n in x[2:])] = np.inf
        given = [torch.from_numpy(v).bfloat16() for v in (source, weight)]
        got = ark.conv(*given, **how).eval().float().numpy()
        peer = getattr(torch.nn.functional, f"conv{len(x) - 2}d")
        want = peer(*(g.float() for g in given), **how).bfloat16().float().numpy()
        np.testing.assert_array_equal(got, want, err_msg=str((x, w, how)))
