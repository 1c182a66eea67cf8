"""Cases and helpers of tests/backend/test_paged.py, which other tests use too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ark
from ark.ir.dtype import DataType
from tests.opcheck import TOLERANCE, Case


@dataclass(frozen=True)
class Shape:
    """The arguments of a call of paged attention. positions: of each sequence's query row; if there
    is a single sequence, of the first of its `rows` query rows. pool: the number of pages in all.
    """

    positions: tuple[int, ...]
    rows: int
    heads: int
    kv_heads: int
    width: int
    page: int
    most: int  # the page table's entries for a sequence
    pool: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


def table(s: Shape, seed: int) -> np.ndarray:
    """Returns a page table in which no page occurs twice. Entries after the last position, or
    before all windows, are page numbers that do not exist.
    """
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(s.pool)
    result = np.full((len(s.positions), s.most), -7)
    for b, position in enumerate(s.positions):
        last = position + (s.rows - 1 if len(s.positions) == 1 else 0)
        used = last // s.page + 1
        result[b, :used], numbers = numbers[:used], numbers[used:]
        result[b, used:] = rng.choice([-1, s.pool, 2**31 - 1], s.most - used)
        if s.window:
            result[b, : max(0, position - s.window + 1) // s.page] = -1
    return result


def side_by_side(cache: np.ndarray, row: np.ndarray) -> torch.Tensor:
    """Returns the keys or values of a sequence in contiguous memory, (heads, positions, width),
    gathered from the pages of its row of the page table. Pages that do not exist are zeros.
    """
    pages = [cache[n] if 0 <= n < len(cache) else np.zeros_like(cache[0]) for n in row]
    return torch.tensor(np.concatenate(pages, axis=1))


def by_torch(
    s: Shape,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pages: np.ndarray,
    at: np.ndarray,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    results = []
    for b, rows in enumerate(np.split(q, len(s.positions))):
        queries = torch.tensor(rows).reshape(len(rows), s.heads, s.width).transpose(0, 1)
        keys, values = (
            side_by_side(c, pages[b]).repeat_interleave(s.heads // s.kv_heads, 0) for c in (k, v)
        )
        places = at[b] + torch.arange(len(rows))[:, None]
        columns = torch.arange(keys.shape[1])[None]
        seen = columns <= places
        if s.window:
            seen = seen & (columns > places - s.window)
        attend = torch.nn.functional.scaled_dot_product_attention
        if s.softcap or sinks is not None:
            scores = queries @ keys.transpose(-1, -2) * s.width**-0.5
            if s.softcap:
                scores = s.softcap * torch.tanh(scores / s.softcap)
            extra = torch.full((s.heads, len(rows), 1), -torch.inf, dtype=scores.dtype)
            if sinks is not None:
                extra[:] = torch.tensor(sinks)[:, None, None]
            masked = torch.cat((scores.masked_fill(~seen, -torch.inf), extra), -1)
            out = torch.softmax(masked, -1)[..., :-1] @ values
        else:
            out = attend(queries, keys, values, attn_mask=seen)
        results.append(out.transpose(0, 1).reshape(len(rows), -1).numpy())
    return np.concatenate(results)


def case(s: Shape, dtype: DataType, seed: int, cached: DataType | None = None) -> Case:
    """Returns the test case of a shape. cached: the type of keys and values, if it differs from the
    queries' type.
    """
    rng = np.random.default_rng(seed)
    cache = (s.pool, s.kv_heads, s.page, s.width)
    inputs = [
        (rng.standard_normal((s.rows, s.heads * s.width)), dtype),
        *((rng.standard_normal(cache), cached or dtype) for _ in range(2)),
        (table(s, seed), ark.int32),
        (np.array(s.positions), ark.int32),
    ]
    if s.sinks:
        inputs.append((rng.standard_normal(s.heads), ark.fp32))

    def build(*tensors: Any) -> Any:
        sinks = tensors[5] if s.sinks else None
        more = {"window": s.window, "softcap": s.softcap, "sinks": sinks}
        return ark.paged_attention(*tensors[:5], **more)

    def want(*arrays: Any) -> np.ndarray:
        return by_torch(s, *arrays)

    tolerance = TOLERANCE[dtype.name]
    return Case(f"{s} {dtype}", inputs, build, want, tolerance)
