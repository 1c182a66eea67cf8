"""Cases and helpers of tests/backend/test_decoder.py, which other tests use too."""

from __future__ import annotations

import numpy as np
import torch

import ark
from ark.ops.base import result
from tests.opcheck import Case, check

FLOATS = (ark.fp32, ark.fp16, ark.bf16)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def check_swiglu_and_linear_equal_torch(backend: str) -> None:
    def gated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (torch.nn.functional.silu(torch.tensor(a)) * torch.tensor(b)).numpy()

    def pairs(x: np.ndarray) -> np.ndarray:
        return gated(x[:, 0::2], x[:, 1::2])

    def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return torch.nn.functional.linear(torch.tensor(x), torch.tensor(w)).numpy()

    cases = []
    for dtype in FLOATS:
        two = [(values(3, 40, seed=1), dtype), (values(3, 40, seed=2), dtype)]
        cases.append(Case(f"swiglu {dtype}", two, ark.swiglu, gated))
        mixed = [(values(5, 64, seed=3), ark.fp32), (values(24, 64, seed=4) / 8, dtype)]
        cases.append(Case(f"linear {dtype}", mixed, ark.linear, product))
    cases.append(
        Case(
            "swiglu_pairs",
            [(values(3, 80), ark.fp32)],
            lambda x: result("swiglu_pairs", [x], (3, 40), ark.fp32),
            pairs,
        )
    )
    check(cases)
