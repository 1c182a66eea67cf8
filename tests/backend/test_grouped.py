"""Convolutions in groups of few channels, of images with channels last, compared with torch on
every backend.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from tests.cases.channels_last import keep_channels_last, scaled
from tests.grouped import CASES
from tests.opcheck import Case, check

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.emulated("slow")


def test_grouped_convolutions_with_channels_last_equal_torch(backend: str) -> None:
    cases = []
    for number, one in enumerate(CASES):
        for dtype in (ark.bf16, ark.fp16 if number % 2 else ark.fp32):
            types = [dtype, dtype, ark.fp32, dtype]  # of weights, image, bias and second image
            given = list(zip(one.arrays(number), types, strict=False))
            cases.append(Case(f"{one} {dtype}", given, one.build, one.expected))
    check(cases)


FORMS: list[tuple[tuple[int, ...], tuple[int, int, int], dict[str, Any]]] = [
    ((2, 16, 9, 8), (2, 8, 16), {"padding": 1}),
    ((1, 32, 10, 7), (2, 16, 16), {"padding": 1, "stride": 2}),
    ((2, 16, 6, 5), (4, 4, 4), {"padding": (2, 0), "dilation": (2, 1)}),
]


def test_grouped_convolutions_with_channels_first_equal_torch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as RegNet has them: a convolution in groups between two of single pixels, a factor for
    each channel of each image, and a residual.
    """
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    keep_channels_last(monkeypatch)
    ark.init(backend=backend)
    rng, conv2d, cases = np.random.default_rng(5), torch.nn.functional.conv2d, []
    for number, (shape, (many, each, rows), form) in enumerate(FORMS):
        channels, outputs = many * each, many * rows
        shapes = [
            shape,
            (channels, channels, 1, 1),
            (outputs, each, 3, 3),
            (channels, outputs, 1, 1),
        ]
        arrays = scaled(rng, shapes)

        def build(x: Any, u: Any, w: Any, v: Any, many: int = many, form: Any = form) -> Any:
            y = ark.relu(ark.conv(ark.relu(ark.conv(x, u)), w, groups=many, **form))
            factor = ark.sigmoid(ark.reduce_mean(ark.reduce_mean(y, 3), 2))
            y = ark.conv(ark.mul(y, factor), v)
            return ark.relu(ark.add(ark.conv(y, u), y))

        def expected(
            x: Any, u: Any, w: Any, v: Any, many: int = many, form: Any = form
        ) -> np.ndarray:
            x, u, w, v = map(torch.from_numpy, (x, u, w, v))
            y = torch.relu(conv2d(torch.relu(conv2d(x, u)), w, groups=many, **form))
            y = conv2d(y * torch.sigmoid(y.mean((2, 3), keepdim=True)), v)
            return np.asarray(torch.relu(conv2d(y, u) + y).numpy())

        given = [(a, ark.fp16 if number % 2 else ark.bf16) for a in arrays]
        cases.append(Case(f"{shape} {form}", given, build, expected, tolerance=0.03))
    check(cases)
