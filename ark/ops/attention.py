"""Attention over a key/value cache, and writing to one, as users call them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import NullTensor, Tensor, as_tensor, is_torch
from ark.ir import values as ir
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.machine import Machine
from ark.ops.base import float_dtype, result, same_dtype
from ark.ops.communication import copy_box
from ark.ops.movement import whole_view
from ark.ops.tokens import check_position
from ark.tasks.attention import staged_bytes
from ark.variant import COMMUNICATE


def check_cache(what: str, cache: Tensor, position: Tensor) -> tuple[int, int, int]:
    """A cache's sizes (heads, context, width); ModelError if it or the position is none."""
    float_dtype(what, cache)
    shape = cache.ir.shape
    if len(shape) != 3 or not cache.ir.dense:
        raise ModelError(
            f"{what}: the cache has shape {list(shape)}; expected (heads, context, width), dense"
        )
    check_position(what, position)
    return shape[0], shape[1], shape[2]


def kv_append(cache: Any, input: Any, position: Any, name: str = "") -> Tensor:
    """Writes rows into a cache from `position` on; returns the new tensor on the cache's memory.

    cache (heads, context, width), input (rows, heads * width), position (1,) int32. Rows past the
    context are dropped.
    """
    target, rows, at = as_tensor(cache), as_tensor(input), as_tensor(position)
    heads, _, width = check_cache("kv_append", target, at)
    float_dtype("kv_append", rows)
    if len(rows.ir.shape) != 2 or rows.ir.shape[1] != heads * width:
        raise ModelError(
            f"kv_append: the input has shape {list(rows.ir.shape)}; expected (rows, "
            f"{heads * width})"
        )
    model = Model.get_model()
    made = model.graph.rewrite(target.ir, name)
    model.graph.add("kv_append", [rows.ir, at.ir, target.ir], [made], {}, name)
    return Tensor(made, model)


def _lower_append(lowering: Lowering, node: Node) -> None:
    rows, position, _ = node.inputs
    cache = node.outputs[0]
    coords = [(head,) for head in range(cache.shape[0])]
    lowering.emit("kv_append", {}, [rows, position, cache], coords)


def _append(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    rows, position, cache = inputs
    heads, context, width = cache.shape
    made = cache.copy()
    for r in range(len(rows)):
        if 0 <= int(position[0]) + r < context:
            made[:, int(position[0]) + r] = rows[r].reshape(heads, width)
    return [made]


def kv_cache_slot(cache: Any, token: Any, position: Any, name: str = "") -> Tensor:
    """Writes a token into one slot of a cache in place; returns what was written, of its shape.

    cache (max_seq, *slot), contiguous, a tensor of the model or a torch tensor; token (slot) of the
    cache's type, fp32, fp16 or bf16; position (1,) int32, read when the kernel runs. A position
    outside of the cache writes nothing. ModelError where shapes, types or contiguity do not fit.
    Calls on one cache run in program order.
    """
    if is_torch(cache) and not cache.is_contiguous():
        raise ModelError("kv_cache_slot: the cache is not contiguous; pass cache.contiguous()")
    target, row, at = as_tensor(cache), as_tensor(token), as_tensor(position)
    float_dtype("kv_cache_slot", target)
    same_dtype("kv_cache_slot", target, row)
    check_position("kv_cache_slot", at)
    shape, slot = target.ir.shape, target.ir.shape[1:]
    if len(shape) < 2 or target.ir.extents[1:] != slot:
        raise ModelError(
            f"kv_cache_slot: the cache has shape {list(shape)} in memory of "
            f"{list(target.ir.extents)}; expected (max_seq, *slot), contiguous"
        )
    if row.ir.shape != slot:
        raise ModelError(
            f"kv_cache_slot: the token has shape {list(row.ir.shape)}; a slot of the cache has "
            f"{list(slot)}"
        )
    model = Model.get_model()
    kept = model.graph.rewrite(target.ir)
    made = model.new_tensor(slot, row.ir.dtype, name=name)
    model.graph.add("kv_cache_slot", [row.ir, at.ir, target.ir], [kept, made], {}, name)
    return Tensor(made, model)


def _lower_slot(lowering: Lowering, node: Node) -> None:
    """The cache as one head's, whose width is the whole slot."""
    token, position, _ = node.inputs
    cache, made = node.outputs
    width = math.prod(token.shape)
    rows = (1, cache.shape[0], width)
    one_head = dataclasses.replace(
        cache,
        shape=rows,
        padded=rows,
        extents=(1, cache.extents[0], width),
        offsets=(0, cache.offsets[0], 0),
    )
    row = whole_view(lowering, token, (1, width), fill=True)
    lowering.emit("kv_append", {}, [row, position, one_head], [(0,)])
    copy_box(lowering, token, made, ".written")


def _slot(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    token, position, cache = inputs
    made = cache.copy()
    if 0 <= int(position[0]) < len(cache):
        made[int(position[0])] = token
    return [made, token]


def attention(
    query: Any,
    key: Any,
    value: Any,
    position: Any,
    scale: float | None = None,
    output: Any = NullTensor,
    name: str = "",
) -> Tensor:
    """Causal grouped-query attention over a cache (Ainslie et al. 2023).

    query (rows, heads * width), key and value caches (kv_heads, context, width), position (1,)
    int32: row r attends to positions 0 .. position + r. scale: default width ** -0.5. Result (rows,
    heads * width) of the query's type. heads must be a multiple of kv_heads.
    """
    q, k, v, at = (as_tensor(t) for t in (query, key, value, position))
    dtype = float_dtype("attention", q)
    kv_heads, _, width = check_cache("attention", k, at)
    if v.ir.shape != k.ir.shape or v.ir.dtype != k.ir.dtype or not v.ir.dense:
        raise ModelError(
            f"attention: keys are {k.ir.dtype.name} {list(k.ir.shape)}, values are "
            f"{v.ir.dtype.name} {list(v.ir.shape)}; they must be alike"
        )
    columns = q.ir.shape[-1]
    if len(q.ir.shape) != 2 or columns % (kv_heads * width):
        raise ModelError(
            f"attention: the query has shape {list(q.ir.shape)}; expected (rows, heads * {width}) "
            f"with heads a multiple of {kv_heads}"
        )
    attrs = {
        "heads": columns // width,
        "head_dim": width,
        "scale": float(width**-0.5 if scale is None else scale),
    }
    return result("attention", [q, k, v, at], q.ir.shape, dtype, output, attrs, name)


def attention_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The definition, one row and head at a time.

    A fifth input holds the keys and values of a lone row (ark.lower.pack), (1, 2 kv_heads width).
    """
    q, key, value, position, *fresh = inputs
    if fresh:  # the newest row, which the caches need not have yet
        newest = np.split(fresh[0].reshape(-1, attrs["head_dim"]), 2)
        key, value = (c.copy() for c in (key, value))
        for cache, row in zip((key, value), newest, strict=True):
            cache[:, int(position[0])] = row
    heads, width = attrs["heads"], attrs["head_dim"]
    group = heads // key.shape[0]
    out = np.zeros(q.shape)
    for r in range(len(q)):
        count = min(int(position[0]) + r + 1, key.shape[1])
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = key[h // group, :count] @ q[r, part] * attrs["scale"]
            weights = np.exp(scores - scores.max())
            out[r, part] = weights / weights.sum() @ value[h // group, :count]
    return [out]


STREAMED, MOST_STREAMED = 8, 64  # positions that matrix units take at once, and a warp holds
MOST_GROUP = 8  # query heads of a key/value head that they take at once


def attention_splits(
    rows: int, kv_heads: int, context: int, processors: int, least: int = 64
) -> int:
    """Into how many parts a head's positions are cut so that most processors have one.

    least: positions of a part below which it is not worth its hand-over.
    """
    wanted = max(1, processors // (rows * kv_heads))
    return min(wanted, max(1, context // least))


def _older(lowering: Lowering, node: Node) -> bool:
    """Is what the stream would take older than the iteration: caches that are only appended to, up
    to a position that is not written before?
    """
    _, key, value, position, *_ = (t.buffer.id for t in node.inputs)
    phase = [n for n in lowering.graph.nodes if n.phase == node.phase]
    written = {t.buffer.id for n in phase for t in n.outputs}
    before = {t.buffer.id for n in phase if n.id < node.id for t in n.outputs}
    return not {key, value} & written and position not in before


def _streamed(cache: ir.Tensor, group: int, machine: Machine) -> int:
    """Positions whose keys and values fill a stage of the operand stream; 0 where bodies read the
    caches in place.
    """
    width, row = cache.shape[-1], cache.dtype.nbytes(cache.shape[-1])
    if cache.dtype.name not in ("bf16", "fp16") or width not in (32, 64, 128):
        return 0
    rows = min(machine.stage_bytes // (2 * row) // STREAMED * STREAMED, MOST_STREAMED)
    if not machine.ring_bytes:
        return rows
    room = machine.shared_bytes - machine.ring_bytes
    fits = group <= MOST_GROUP and staged_bytes(group, width, machine.warps) <= room
    return rows if fits and machine.variant.role(COMMUNICATE) else 0


def _lower_attention(lowering: Lowering, node: Node) -> None:
    q, key, value, position, *fresh = node.inputs
    out = node.outputs[0]
    rows = out.shape[0]
    kv_heads, context, _ = key.shape
    machine = lowering.machine
    least = 32 if machine.variant.role(COMMUNICATE) else 64
    splits = attention_splits(rows, kv_heads, context, machine.processors, least)
    params = {**node.attrs, "kv_heads": kv_heads, "splits": splits}
    if fresh and _older(lowering, node):
        params["streamed"] = _streamed(key, node.attrs["heads"] // kv_heads, machine)
    coords = [(r, h, s) for s in range(splits) for r in range(rows) for h in range(kv_heads)]
    if splits == 1:
        lowering.emit("attention", params, [q, key, value, position, out, *fresh], coords)
        return
    heads, width = node.attrs["heads"], node.attrs["head_dim"]
    partial = lowering.temp((rows, heads, splits, width + 2), fp32, f"{node.name}.partial")
    operands = [q, key, value, position, partial, *fresh]
    lowering.emit("attention", params, operands, coords)
    merge = {"heads": heads, "head_dim": width, "splits": splits}
    lowering.emit(
        "attention_merge",
        merge,
        [partial, out],
        [(r, h) for r in range(rows) for h in range(heads)],
        ".merge",
    )


register("attention", attention_reference, _lower_attention, aliasing="none")
register("kv_append", _append, _lower_append)
register("kv_cache_slot", _slot, _lower_slot)
