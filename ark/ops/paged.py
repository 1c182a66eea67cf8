"""Paged KV caches, whose pages sequences share: attention over them and appending to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import AttentionAttributes, PagedAppendAttributes
from ark.ir.dtype import int32
from ark.lower.ops.paged import lower_paged_append, lower_paged_attention
from ark.lower.registry import register
from ark.ops.attention import attention_reference, check_mask, check_sinks
from ark.ops.base import float_dtype, result
from ark.ops.caches import as_stored, cache_dtype, check_rows, codes_of


def _check(op: str, cache: Tensor, pages: Tensor, position: Tensor, rows: int) -> tuple[int, int]:
    """Returns (heads, width) of a paged cache. Raises ModelError if the shape or type of the cache,
    the page table or the position is wrong for `rows` rows.
    """
    cache_dtype(op, cache)
    shape, table, at = cache.ir.shape, pages.ir, position.ir
    if len(shape) != 4 or not cache.ir.dense:
        raise ModelError(
            f"{op}: the cache has shape {list(shape)}; expected (pages, heads, positions of a "
            "page, width), dense"
        )
    if len(table.shape) != 2 or table.dtype != int32 or not table.dense:
        raise ModelError(
            f"{op}: the table of pages is {table.dtype.name} {list(table.shape)}; expected int32 "
            "(sequences, most pages), dense"
        )
    sequences = table.shape[0]
    if at.shape != (sequences,) or at.dtype != int32 or not at.dense:
        raise ModelError(
            f"{op}: the position is {at.dtype.name} {list(at.shape)}; expected int32 "
            f"({sequences},), one for each row of the table"
        )
    if sequences not in (1, rows):
        raise ModelError(
            f"{op}: {rows} rows do not fit {sequences} sequences; expected one row for each, or "
            "a single sequence"
        )
    return shape[1], shape[3]


def paged_append(
    cache: TensorLike,
    input: TensorLike,
    pages: TensorLike,
    position: TensorLike,
    name: str = "",
    *,
    apart: bool = False,
) -> Tensor:
    """Appends rows to a paged KV cache in place; returns the updated cache.

    cache: (pages, heads, page, width), where `page` is the number of positions of a page. input:
    (rows, heads * width), a row per token. pages: (sequences, max_pages) int32, the page table,
    which has the numbers of each sequence's pages in order. position: (sequences,) int32, read when
    the kernel runs. If there is one sequence, row r is appended at position + r. If there are
    several, row r is appended to sequence r at position[r].

    A position outside of the page table ends the run with an error. Rows beyond the table, and rows
    whose page number is not a page of the cache, are dropped. Sequences must not share a page that
    is written.

    apart: True if no row attends to a key or value that another row appends in the same iteration.
    Attention of a row then does not wait for the other rows.

    Raises ModelError for shapes or types that do not fit.

    Examples:
        >>> cache, position = ark.tensor([2, 1, 16, 8]), torch.tensor([0], dtype=torch.int32)
        >>> pages = torch.tensor([[1]], dtype=torch.int32)
        >>> ark.paged_append(cache, torch.ones(1, 8), pages, position).eval().sum(dim=(1, 2, 3))
        tensor([0., 8.])
    """
    target, rows, table, at = (as_tensor(t) for t in (cache, input, pages, position))
    heads, width = _check("paged_append", target, table, at, rows.ir.shape[0])
    check_rows("paged_append", rows, heads * width)
    model = Model.get_model()
    updated = model.graph.rewrite(target.ir, name)
    inputs = [rows.ir, table.ir, at.ir, target.ir]
    attrs = PagedAppendAttributes(apart=bool(apart), codes=codes_of(target.ir.dtype)).to_node()
    model.graph.add("paged_append", inputs, [updated], attrs, name)
    return Tensor(updated, model)


def append_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of paged_append. Returns the cache after the rows are appended."""
    rows, table, position, cache = inputs
    updated, page, codes = (
        cache.copy(),
        cache.shape[2],
        PagedAppendAttributes.from_node(attrs).codes,
    )
    for r, row in enumerate(rows):
        of = r if len(table) > 1 else 0
        at = int(position[of]) + r - of
        if not 0 <= position[of] < table.shape[1] * page:
            raise IndexError(f"position {int(position[of])} is outside of the page table")
        number = int(table[of, at // page]) if at < table.shape[1] * page else -1
        if 0 <= number < len(cache):
            heads = row.reshape(cache.shape[1], cache.shape[3])
            updated[number, :, at % page] = as_stored(heads, codes)
    return [updated]


def paged_attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    pages: TensorLike,
    position: TensorLike,
    scale: float | None = None,
    output: Output = None,
    name: str = "",
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: TensorLike | None = None,
) -> Tensor:
    """Causal grouped-query attention over a paged KV cache (PagedAttention, Kwon et al. 2023).

    query: (rows, heads * width), a row per token. key, value: (pages, kv_heads, page, width), of
    one shape and type, where `page` is the number of positions of a page; heads must be a multiple
    of kv_heads. pages: (sequences, max_pages) int32, the page table: the numbers of each sequence's
    pages in order.

    position: (sequences,) int32. With several sequences row r belongs to sequence r and attends to
    its positions 0 to position[r]; with one sequence it attends to the positions 0 to position + r.

    A page number that is read and is not a page of the cache, or a position outside of the page
    table, ends the run with an error. Numbers of pages to which no row attends are not read.

    scale: the factor of scores, by default width ** -0.5. window, softcap, sinks: as for
    ark.attention.

    The result has the query's shape and type, fp32, fp16 or bf16; sums and exponentials are
    computed in fp32. Raises ModelError for shapes or types that do not fit.

    Examples:
        >>> keys, position = torch.ones(2, 1, 16, 8), torch.tensor([3], dtype=torch.int32)
        >>> pages = torch.tensor([[1]], dtype=torch.int32)
        >>> ark.paged_attention(torch.ones(1, 8), keys, keys, pages, position).eval()
        tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """
    q, k, v, table, at = (as_tensor(t) for t in (query, key, value, pages, position))
    dtype = float_dtype("paged_attention", q)
    if len(q.ir.shape) != 2:
        raise ModelError(
            f"paged_attention: the query has shape {list(q.ir.shape)}; expected (rows, heads * "
            "width)"
        )
    rows, columns = q.ir.shape
    kv_heads, width = _check("paged_attention", k, table, at, rows)
    if v.ir.shape != k.ir.shape or v.ir.dtype != k.ir.dtype or not v.ir.dense:
        raise ModelError(
            f"paged_attention: keys are {k.ir.dtype.name} {list(k.ir.shape)}, values are "
            f"{v.ir.dtype.name} {list(v.ir.shape)}; they must have one dtype and shape and be dense"
        )
    if columns % (kv_heads * width):
        raise ModelError(
            f"paged_attention: the query has shape {[rows, columns]}; expected (rows, heads * "
            f"{width}) with heads a multiple of {kv_heads}"
        )
    heads = columns // width
    check_mask("paged_attention", window, softcap)
    inputs = [q, k, v, table, at]
    if sinks is not None:
        inputs.append(check_sinks("paged_attention", sinks, heads))
    attrs = AttentionAttributes(
        heads=heads,
        head_dim=width,
        scale=float(width**-0.5 if scale is None else scale),
        window=int(window),
        softcap=float(softcap),
        sinks=sinks is not None,
    )
    return result("paged_attention", inputs, q.ir.shape, dtype, output, attrs.to_node(), name)


def _attention(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    q, key, value, table, position, *others = inputs
    sinks = others if AttentionAttributes.from_node(attrs).sinks else []
    results = []
    for of, rows in enumerate(np.split(q, len(table))):
        numbers = table[of].astype(np.int64)
        numbers = np.where((numbers >= 0) & (numbers < len(key)), numbers, 0)
        caches = (
            c[numbers].transpose(1, 0, 2, 3).reshape(c.shape[1], -1, c.shape[3])
            for c in (key, value)
        )
        results += attention_reference([rows, *caches, position[of : of + 1], *sinks], attrs)
    return [np.concatenate(results)]


register("paged_append", append_reference, lower_paged_append)
register("paged_attention", _attention, lower_paged_attention, aliasing="none")
