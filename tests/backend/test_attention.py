"""Attention of many rows compared with torch's scaled_dot_product_attention in float64, and with
the definitions of soft caps and sinks.
"""

from __future__ import annotations

import pytest

import ark
from ark.errors import ModelError
from ark.ir.dtype import DataType
from tests.cases.attention import SHAPES, TILES, case
from tests.opcheck import check


def test_attention_equals_torch(backend: str) -> None:
    types = (ark.fp32, ark.fp16, ark.bf16)
    check([case(s, d, i) for i, s in enumerate(SHAPES) for d in types])


@pytest.mark.parametrize("dtype", [ark.fp16, ark.bf16], ids=str)
def test_attention_of_whole_tiles_equals_torch(backend: str, dtype: DataType) -> None:
    check([case(s, dtype, i) for i, s in enumerate(TILES)])


def test_mismatched_shapes_are_refused() -> None:
    q, k = ark.tensor((4, 32)), ark.tensor((1, 8, 16))
    with pytest.raises(ModelError, match=r"needs causal=True"):
        ark.attention(q, k, k, causal=False, window=3)
    with pytest.raises(ModelError, match=r"expected fp32 \(2,\)"):
        ark.attention(q, k, k, sinks=ark.tensor((3,)))
    with pytest.raises(ModelError, match="must have one dtype and shape"):
        ark.attention(q, k, ark.tensor((1, 8, 16), ark.fp16))
    with pytest.raises(ModelError, match="heads a multiple of 1"):
        ark.attention(ark.tensor((4, 24)), k, k)
    with pytest.raises(ModelError, match=r"expected \(\[batch,\] rows"):
        ark.attention(ark.tensor((2, 4, 32)), k, k)
    with pytest.raises(ModelError, match="position has shape"):
        ark.attention(q, k, k, ark.tensor((2,), ark.int32))
