"""Convolutions that are rewritten to channels last, compared with torch. On processors with one
thread they are not rewritten.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.rewrite import convolutions
from tests.opcheck import Case, check

pytestmark = pytest.mark.emulated("slow")

SHAPES: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 16, 9, 9), (16, 16, 3, 3), {"padding": 1}),
    ((1, 8, 12, 8), (24, 8, 3, 2), {"stride": 2, "padding": (1, 0)}),
    ((2, 8, 7, 7), (8, 8, 3, 3), {"dilation": 2}),
    ((1, 16, 40), (8, 16, 5), {"padding": 2}),
    ((3, 8, 8, 8), (32, 8, 1, 1), {"stride": 2}),
]


def test_convolutions_of_turned_channels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    monkeypatch.setattr(convolutions, "least_work", lambda _: 1.0)
    ark.init(backend=backend)
    rng = np.random.default_rng(3)
    cases = []
    for number, (shape, kernel, options) in enumerate(SHAPES):
        dtype = ark.fp16 if number % 2 else ark.bf16
        arrays = [rng.uniform(-1, 1, s) for s in (shape, kernel, kernel[:1])]
        peer = getattr(torch.nn.functional, f"conv{len(shape) - 2}d")

        def expected(*given: np.ndarray, peer: Any = peer, options: Any = options) -> np.ndarray:
            return np.asarray(peer(*map(torch.from_numpy, given), **options).numpy())

        cases.append(
            Case(
                f"{shape} {kernel} {options}",
                [(a, dtype) for a in arrays],
                lambda x, w, b, o=options: ark.conv(x, w, b, **o),
                expected,
            )
        )
    check(cases)


def test_pools_of_neighbouring_channels(backend: str) -> None:
    """Windows of one element in the last dimension, which may or may not be a whole number of
    packs.
    """
    torch = pytest.importorskip("torch")
    ark.init(backend=backend)
    rng = np.random.default_rng(4)
    size, steps, margin = (3, 3, 1), (2, 1, 1), (1, 1, 0)
    cases = []
    for channels, dtype in ((16, ark.fp32), (16, ark.bf16), (6, ark.fp32)):
        array = rng.uniform(-1, 1, (1, 2, 7, 9, channels))
        array[0, 1, 3, 4] = np.nan
        array[0, 0, 0, :, 0] = -np.inf
        for name, run, peer in (
            (
                "max",
                lambda x: ark.max_pool(x, size, steps, margin),
                lambda x: torch.nn.functional.max_pool3d(x, size, steps, margin),
            ),
            (
                "mean",
                lambda x: ark.avg_pool(x, size, steps, margin),
                lambda x: torch.nn.functional.avg_pool3d(x, size, steps, margin),
            ),
            (
                "mean inside",
                lambda x: ark.avg_pool(x, size, steps, margin, count_include_pad=False),
                lambda x: torch.nn.functional.avg_pool3d(
                    x, size, steps, margin, count_include_pad=False
                ),
            ),
        ):
            values = array if name == "max" else np.nan_to_num(array, neginf=0.0)
            cases.append(
                Case(
                    f"{name} {channels} {dtype}",
                    [(values, dtype)],
                    run,
                    lambda x, peer=peer: peer(torch.from_numpy(x)).numpy(),
                )
            )
    check(cases)
