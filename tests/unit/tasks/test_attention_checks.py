"""Attention of single rows refuses operands and parameters that do not fit together, over a
contiguous cache and over one in pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ark.errors import PlanError
from ark.plan.kind import OperandType, Signature
from ark.plan.kind import get as task_kind

HEADS, KV_HEADS, WIDTH, CONTEXT, PAGE, POOL = 8, 2, 64, 128, 16, 12


def operand(dtype: str, *shape: int) -> OperandType:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return OperandType(dtype, shape, tuple(strides))


def attention(kind: str, rows: int = 1, **changes: Any) -> Signature:
    params = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "splits": 1, "scale": 0.125}
    query = operand("fp32", rows, HEADS * WIDTH)
    if kind == "attention":
        cache, table = operand("bf16", KV_HEADS, CONTEXT, WIDTH), ()
    else:
        cache = operand("bf16", POOL, KV_HEADS, PAGE, WIDTH)
        table = (operand("int32", 1, CONTEXT // PAGE),)
    fresh = operand("fp32", 1, 2 * KV_HEADS * WIDTH)
    operands = (query, cache, cache, *table, operand("int32", 1), query, fresh)
    return Signature(kind, {**params, "streamed": 64, **changes}, operands)


def without_fresh(sig: Signature) -> Signature:
    return replace(sig, operands=sig.operands[:-1])


@pytest.mark.parametrize("kind", ["attention", "paged_attention"])
def test_attention_checks_query_result_and_newest_key(kind: str) -> None:
    check, sig = task_kind(kind).check, attention(kind)
    check(sig)
    check(without_fresh(attention(kind, rows=3, streamed=0)))
    refused = {
        "expected 4 heads": attention(kind, heads=4),
        "fresh` needs one query row": attention(kind, rows=3),
        "needs the newest keys and values": without_fresh(sig),
    }
    for message, wrong in refused.items():
        with pytest.raises(PlanError, match=message):
            check(wrong)
    partial = operand("fp32", 1, HEADS, 2, WIDTH + 2)
    parts = attention(kind, splits=2)
    with pytest.raises(PlanError):
        check(parts)
    check(replace(parts, operands=(*parts.operands[:-2], partial, parts.operands[-1])))


def test_attention_checks_rows_that_have_a_window_or_share_a_head() -> None:
    check = task_kind("attention").check
    check(attention("attention", window=32))
    check(attention("attention", shares=2))
    with pytest.raises(PlanError, match="not divisible by 3"):
        check(attention("attention", window=32, shares=3))
