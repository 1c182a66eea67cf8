"""Cases and helpers of tests/backend/test_attention.py, which other tests use too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ark
from ark.ir.dtype import DataType
from tests.opcheck import Case


@dataclass(frozen=True)
class Shape:
    """The arguments of a call of attention. position: None if there is no position operand. batch:
    0 if there is no batch dimension. mask: its shape. If it has several rows, the first one hides
    all keys; if it has fewer batches than the queries, it is repeated. added: True if the mask
    contains numbers that are added to scores; otherwise it contains bools.
    """

    rows: int
    context: int
    heads: int
    kv_heads: int
    width: int
    position: int | None = None
    batch: int = 0
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    mask: tuple[int, ...] = ()
    added: bool = False


SHAPES = (
    Shape(9, 40, 4, 2, 16, position=13),
    Shape(40, 40, 4, 1, 24),
    Shape(33, 70, 2, 2, 64, position=3, window=9),
    Shape(20, 20, 6, 3, 8, batch=2, sinks=True),
    Shape(17, 50, 2, 1, 32, causal=False, softcap=3.0),
    Shape(1, 30, 2, 1, 16, position=29, window=12, sinks=True, scale=0.3),
    Shape(12, 16, 2, 1, 16, position=9),  # the last rows are past the end of the cache
    Shape(33, 70, 4, 2, 16, batch=3, causal=False, mask=(3, 1, 1, 70)),
    Shape(20, 45, 2, 2, 24, batch=2, causal=False, mask=(1, 2, 20, 45), added=True),
    Shape(18, 40, 2, 1, 32, position=15, softcap=4.0, mask=(18, 40)),
    Shape(49, 49, 3, 3, 32, batch=4, causal=False, mask=(2, 3, 49, 49), added=True),
)
TILES = (
    Shape(200, 333, 4, 2, 64, position=100),
    Shape(130, 130, 2, 1, 128, batch=2, window=50),
    Shape(150, 260, 2, 1, 96, causal=False, softcap=5.0),
    Shape(129, 300, 2, 2, 256, position=0, sinks=True),
    Shape(140, 140, 1, 1, 192),
    Shape(130, 200, 4, 2, 64, batch=2, causal=False, mask=(2, 1, 130, 200)),
    Shape(200, 200, 2, 2, 128, mask=(2, 200, 200), added=True, sinks=True),
)
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


def by_torch(s: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: Any) -> np.ndarray:
    """Returns the expected (batch, rows, heads * width), by torch; visibility is an added mask of 0
    and -inf.
    """
    extra = list(rest)
    mask = torch.tensor(extra.pop()) if s.mask else None
    position = int(extra.pop(0)[0]) if s.position is not None else 0
    batch = max(1, s.batch)
    queries = torch.tensor(q).reshape(batch, s.rows, s.heads, s.width).transpose(1, 2)
    shape = (batch, s.kv_heads, s.context, s.width)
    keys, values = (
        torch.tensor(a).reshape(shape).repeat_interleave(s.heads // s.kv_heads, 1) for a in (k, v)
    )
    rows = position + torch.arange(s.rows)[:, None]
    columns = torch.arange(s.context)[None]
    seen = (columns <= rows) | torch.tensor(not s.causal)
    if s.window:
        seen = seen & (columns > rows - s.window)
    seen = seen.double().log()  # log of True and False: 0 and -inf
    if mask is not None:
        if mask.ndim == 4 and 1 < len(mask) < batch:
            mask = mask.repeat(batch // len(mask), 1, 1, 1)
        seen = seen + (mask if s.added else mask.double().log())
    if s.softcap or s.sinks:
        scale = s.width**-0.5 if s.scale is None else s.scale
        scores = queries @ keys.transpose(-1, -2) * scale
        if s.softcap:
            scores = s.softcap * torch.tanh(scores / s.softcap)
        scores = scores + seen
        if s.sinks:
            sink = torch.tensor(extra[0]).reshape(1, -1, 1, 1).expand(batch, -1, s.rows, 1)
            scores = torch.cat((scores, sink), -1)
        result = torch.softmax(scores, -1).nan_to_num()[..., : s.context] @ values
    else:
        result = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=s.scale
        )
    return result.transpose(1, 2).reshape(q.shape).numpy()


def case(s: Shape, dtype: DataType, seed: int, cached: DataType | None = None) -> Case:
    """Returns the test case of a shape. cached: the type of keys and values, if it differs from the
    queries' type.
    """
    rng = np.random.default_rng(seed)
    lead = (s.batch,) if s.batch else ()
    cache = (*lead, s.kv_heads, s.context, s.width)
    inputs = [
        (rng.standard_normal((*lead, s.rows, s.heads * s.width)), dtype),
        *((rng.standard_normal(cache), cached or dtype) for _ in range(2)),
    ]
    if s.position is not None:
        inputs.append((np.array([s.position]), ark.int32))
    if s.sinks:
        inputs.append((rng.standard_normal(s.heads), ark.fp32))
    if s.mask:
        hidden = rng.random(s.mask) < 0.4
        hidden[..., 0, :] |= s.mask[-2] > 1  # all keys of the first row are hidden
        added = np.where(hidden, -np.inf, rng.standard_normal(s.mask))
        inputs.append((added, dtype) if s.added else (~hidden, ark.bool))

    def build(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return ark.attention(
            q,
            k,
            v,
            rest[0] if s.position is not None else None,
            s.scale,
            causal=s.causal,
            window=s.window,
            softcap=s.softcap,
            sinks=rest[int(s.position is not None)] if s.sinks else None,
            mask=rest[-1] if s.mask else None,
        )

    def want(*arrays: Any) -> np.ndarray:
        return by_torch(s, *arrays)

    return Case(f"{s} {dtype}", inputs, build, want, TOLERANCE[dtype.name])
