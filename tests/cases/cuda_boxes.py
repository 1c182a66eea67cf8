"""Cases and helpers of tests/codegen/test_cuda_boxes.py, which other tests use too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WARP = Path(__file__).parents[1] / "warp_on_host.h"
HOST = (
    WARP.read_text()
    + r"""
#define ARK_DEVICE_MEMBER inline
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static void ark_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1, const Half*) {
  multiply_tile(d, {a0, a1, a2, a3, b0, b1});
}
"""
)


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
