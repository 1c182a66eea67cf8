"""Sampling at the ends of the options' ranges and beyond: the tokens are those of the NumPy
reference, which computes in fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ark.models.sampling import (
    MAX_ABS_BIAS,
    MAX_ABS_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_SHARE,
    MIN_TEMPERATURE,
)
from tests.cases.sampling import SPREAD, draw, referenced
from tests.emulated import few_emulated

STEPS, SUPPRESSED = 8, -np.inf
BEST = int(SPREAD.argmax())
HUGE = {5: MAX_ABS_BIAS, 7: -MAX_ABS_BIAS, BEST: -MAX_ABS_BIAS}
GREEDY: dict[str, dict[str, Any]] = {
    "top_p at its end": {"top_p": MIN_SHARE},
    "top_p that fp32 rounds to 0": {"top_p": 1e-46},
    "top_p below 0": {"top_p": -1.0},
    "top_p at its end, hot": {"top_p": MIN_SHARE, "temperature": MAX_TEMPERATURE},
    "top_p that fp32 rounds to 0, hot": {"top_p": 1e-46, "temperature": 1e38},
    "min_p 1": {"min_p": 1.0},
    "min_p above 1": {"min_p": 2.0},
    "temperature at its end": {"temperature": MIN_TEMPERATURE},
    "temperature 1e-40": {"temperature": 1e-40},
    "temperature 1e-40 and top_k": {"temperature": 1e-40, "top_k": 3},
    "temperature 1e-40 and top_p": {"temperature": 1e-40, "top_p": 0.5},
    "temperature 1e-40 and typical_p": {"temperature": 1e-40, "typical_p": 0.5},
    "temperature below 0": {"temperature": -1e38, "top_p": 0.5},
    "every filter at its end": {"top_k": 1, "top_p": MIN_SHARE, "min_p": 1.0},
}
RANDOM: dict[str, dict[str, Any]] = {
    "typical_p at its end": {"typical_p": MIN_SHARE},
    "typical_p that fp32 rounds to 0": {"typical_p": 1e-46},
    "temperature at its upper end": {"temperature": MAX_TEMPERATURE, "top_p": 0.9},
    "temperature 1e38": {"temperature": 1e38},
    "temperature 1e38, filters": {"temperature": 1e38, "top_p": 0.5, "top_k": 50, "min_p": 0.5},
    "temperature 1e38, suppressed": {
        "temperature": 1e38,
        "top_p": 0.9,
        "bias": dict.fromkeys(range(0, 60, 2), SUPPRESSED),
    },
    "biases at their ends": {"bias": HUGE, "top_p": 0.99},
    "biases at their ends, hot": {"bias": HUGE, "temperature": MAX_TEMPERATURE, "min_p": 1e-3},
    "penalties at their lower ends": {
        "repetition_penalty": MIN_REPETITION_PENALTY,
        "presence_penalty": -MAX_ABS_PENALTY,
        "frequency_penalty": -MAX_ABS_PENALTY,
        "prompt": (3, 9),
    },
    "penalties at their upper ends": {
        "repetition_penalty": MAX_REPETITION_PENALTY,
        "presence_penalty": MAX_ABS_PENALTY,
        "frequency_penalty": MAX_ABS_PENALTY,
        "prompt": (3, 9),
    },
    "seed of 63 bits": {"seed": 1 << 63, "top_p": 0.9},
    "seed of 64 bits": {"seed": (1 << 64) - 1, "top_p": 0.9},
    "seed below 0": {"seed": -(1 << 63), "top_p": 0.9},
}


@pytest.mark.parametrize("name", few_emulated({**GREEDY, **RANDOM}, "top_p at its end"))
def test_extreme_options(backend: str, name: str) -> None:
    """Beyond its range an option has the effect of the range's end, so that one token at least can
    be sampled.
    """
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 3, **{**GREEDY, **RANDOM}[name]}
    drawn = draw(np.stack([SPREAD, SPREAD[::-1]]), STEPS, top=2, logprobs=2, **asked)
    tokens = drawn.tokens[:, :STEPS]
    assert ((tokens >= 0) & (tokens < len(SPREAD))).all()
    np.testing.assert_array_equal(tokens, referenced(drawn, STEPS)[:, :STEPS])
    reported = drawn.logprobs[:, 2 : 2 + STEPS, 0].view(np.float32)
    assert np.isfinite(reported).all() and (reported <= 0).all()
    if name in GREEDY:
        assert (tokens == [[BEST], [len(SPREAD) - 1 - BEST]]).all()
