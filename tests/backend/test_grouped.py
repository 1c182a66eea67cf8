"""Convolutions in groups of few channels, of images with channels last, compared with torch on
every backend.
"""

from __future__ import annotations

import pytest

import ark
from tests.grouped import CASES
from tests.opcheck import Case, check

pytest.importorskip("torch")


def test_groups_of_images_with_channels_last(backend: str) -> None:
    cases = []
    for number, one in enumerate(CASES):
        for dtype in (ark.bf16, ark.fp16 if number % 2 else ark.fp32):
            types = [dtype, dtype, ark.fp32, dtype]  # of weights, image, bias and second image
            given = list(zip(one.arrays(number), types, strict=False))
            cases.append(Case(f"{one} {dtype}", given, one.build, one.expected))
    check(cases)
