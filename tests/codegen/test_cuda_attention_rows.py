"""CUDA's attention of one row over a cache, in blocks on the host (tests/block_on_host.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.frontend.tensor import Tensor
from ark.ir.dtype import bf16, int32
from ark.lower.pipeline import plan as make_plan
from ark.machine.variant import block
from tests.block_on_host import Block

pytest.importorskip("ark_cuda")

from ark_cuda import machines

HEADS, KV_HEADS, WIDTH, CONTEXT, PAGE = 4, 2, 64, 1024, 16
LAST_ROW = 700


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the attention (heads, width) of one row over keys and values (kv_heads, rows,
    width).
    """
    groups = query.reshape(KV_HEADS, HEADS // KV_HEADS, WIDTH).astype(np.float64)
    scores = groups @ keys.astype(np.float64).transpose(0, 2, 1) / np.sqrt(WIDTH)
    power = np.exp(scores - scores.max(-1, keepdims=True))
    shares: np.ndarray = power / power.sum(-1, keepdims=True)
    output: np.ndarray = shares @ values.astype(np.float64)
    return output.reshape(1, -1)


@pytest.mark.parametrize("warps", [8, 12])  # from nine on, a warp has no registers for two batches
@pytest.mark.parametrize("paged", [False, True])
def test_row_is_attended_over_several_batches_of_rows(
    warps: int, paged: bool, tmp_path: Path
) -> None:
    h100 = machines.MODELS["h100"].with_processors(2)
    machine = dataclasses.replace(h100, variants=(block(warps),))
    pages = CONTEXT // PAGE
    model = ark.Model(0, 1)
    with ark.use_model(model):
        query = ark.tensor((1, HEADS * WIDTH), bf16, name="query")
        shape = (pages, KV_HEADS, PAGE, WIDTH) if paged else (KV_HEADS, CONTEXT, WIDTH)
        keys, values = (ark.tensor(shape, bf16, name=name) for name in ("keys", "values"))
        position = ark.tensor((1,), int32, name="position")
        kept = model.graph.tensor((1, HEADS * WIDTH), bf16, arena="state", name="out")
        out = Tensor(kept, model)
        if paged:
            table = ark.tensor((1, pages), int32, name="table")
            ark.paged_attention(query, keys, values, table, position, output=out)
        else:
            ark.attention(query, keys, values, position, output=out)
    plan = make_plan(model.graph, machine)
    blocks = Block(plan, tmp_path)
    rng = np.random.default_rng(5)
    for name in ("query", "keys", "values"):
        array = blocks.named(name)
        array[...] = rng.standard_normal(array.shape).astype(array.dtype)
    blocks.named("position")[...] = LAST_ROW
    caches = [blocks.named(name).astype(np.float64) for name in ("keys", "values")]
    if paged:
        order = rng.permutation(pages)
        blocks.named("table")[...] = order
        caches = [c[order].transpose(1, 0, 2, 3).reshape(KV_HEADS, CONTEXT, WIDTH) for c in caches]
    for op in plan.ops:
        blocks.run(op)
    expected = attended(blocks.named("query"), *(c[:, : LAST_ROW + 1] for c in caches))
    got = blocks.named("out").astype(np.float64)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=4e-3)
