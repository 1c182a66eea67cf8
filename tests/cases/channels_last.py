"""Convolutions that are rewritten to channels last, for the tests of every form of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ark.lower import variant_passes
from ark.lower.rewrite import channels_last, convolutions


def keep_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the planner rewrite also small and depthwise convolutions to channels last, on every
    GPU.
    """
    monkeypatch.setattr(convolutions, "least_work", lambda _: 1.0)
    always = channels_last.channels_last
    monkeypatch.setattr(
        variant_passes, "turn_channels", lambda graph, context, **_: always(graph, context)
    )


def scaled(rng: np.random.Generator, shapes: list[Any]) -> list[np.ndarray]:
    """Returns an image, and weights scaled so that the results are about as large as the image's
    elements.
    """
    image, *weights = shapes
    small = [rng.uniform(-1, 1, s) / np.sqrt(np.prod(s[1:])) for s in weights]
    return [rng.uniform(-1, 1, image), *small]
