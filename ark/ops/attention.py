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
from ark.ops.tokens import by_sequence, check_position
from ark.tasks.attention import staged_bytes
from ark.tasks.attention_tiles import balanced_group
from ark.variant import COMMUNICATE


def check_rows(op: str, rows: Tensor, columns: int) -> None:
    """Raises ModelError if these are no rows that a cache can take: (any number, columns)."""
    float_dtype(op, rows)
    if len(rows.ir.shape) != 2 or rows.ir.shape[1] != columns:
        raise ModelError(
            f"{op}: the input has shape {list(rows.ir.shape)}; expected (rows, {columns})"
        )


def check_cache(what: str, cache: Tensor, position: Tensor, rows: int = 1) -> tuple[int, int, int]:
    """A cache's sizes (heads, context, width) for each sequence; ModelError if it or the position
    is none. rows: with as many positions each is of a sequence of its own.
    """
    float_dtype(what, cache)
    shape = cache.ir.shape
    if len(shape) != 3 or not cache.ir.dense:
        raise ModelError(
            f"{what}: the cache has shape {list(shape)}; expected (heads, context, width), dense"
        )
    sequences = check_position(what, position, rows)
    if shape[0] % sequences:
        raise ModelError(f"{what}: {shape[0]} heads of a cache are not those of {sequences} texts")
    return shape[0] // sequences, shape[1], shape[2]


def kv_append(cache: Any, input: Any, position: Any, name: str = "") -> Tensor:
    """Writes rows into a cache from `position` on; returns the new tensor on the cache's memory.

    cache (heads, context, width), input (rows, heads * width), position (1,) int32. Rows past the
    context are dropped. With as many positions as rows each row is a sequence's, whose heads lie
    one behind the other's in the cache, (rows * heads, context, width).
    """
    target, rows, at = as_tensor(cache), as_tensor(input), as_tensor(position)
    heads, _, width = check_cache("kv_append", target, at, rows.ir.shape[0])
    check_rows("kv_append", rows, heads * width)
    model = Model.get_model()
    made = model.graph.rewrite(target.ir, name)
    model.graph.add("kv_append", [rows.ir, at.ir, target.ir], [made], {}, name)
    return Tensor(made, model)


def _lower_append(lowering: Lowering, node: Node) -> None:
    rows, position, _ = node.inputs
    batch, cache = position.shape[0], node.outputs[0]
    coords = [(head,) for head in range(cache.shape[0] // batch)]
    for b in range(batch):
        operands = [lowering.part(t, batch, b) for t in (rows, position, cache)]
        lowering.emit("kv_append", {}, operands, coords)


def _append(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    rows, position, cache = inputs
    if len(position) > 1:
        each = by_sequence(inputs, len(position), ())
        return [np.concatenate([_append(one, attrs)[0] for one in each])]
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
    position: Any = None,
    scale: float | None = None,
    output: Any = NullTensor,
    name: str = "",
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any = None,
) -> Tensor:
    """Grouped-query attention (Vaswani et al. 2017, Ainslie et al. 2023).

    query ([batch,] rows, heads * width), keys and values ([batch,] kv_heads, context, width), as a
    cache has them; heads must be a multiple of kv_heads. Row r stands at position + r and, if
    causal, sees keys 0 to there, else all of them. position: (1,) int32, 0 without it. window: of
    the keys that it sees the last so many, 0 for all. scale: of scores, by default width ** -0.5.
    softcap: above 0, scores become softcap * tanh(score / softcap) (Gemma 2). sinks: (heads,) fp32,
    scores that take their share of a row's weights and have no value (GPT-OSS). What nobody sees of
    keys and values must be finite numbers. Where a query (rows, heads * width) has as many
    positions as rows, each row is a sequence's with keys and values of its own, whose heads lie one
    behind the other's (rows * kv_heads, context, width). Result of the query's shape and type,
    fp32, fp16 or bf16; sums and exponentials are in fp32. ModelError for what does not fit.
    """
    q, k, v = (as_tensor(t) for t in (query, key, value))
    dtype = float_dtype("attention", q)
    float_dtype("attention", k)
    shape, columns = k.ir.shape, q.ir.shape[-1]
    batch = q.ir.shape[:-2]
    if len(q.ir.shape) not in (2, 3) or len(shape) != len(batch) + 3 or shape[:-3] != batch:
        raise ModelError(
            f"attention: the query has shape {list(q.ir.shape)} and the keys {list(shape)}; "
            "expected ([batch,] rows, heads * width) and ([batch,] kv_heads, context, width)"
        )
    if v.ir.shape != shape or v.ir.dtype != k.ir.dtype or not (v.ir.dense and k.ir.dense):
        raise ModelError(
            f"attention: keys are {k.ir.dtype.name} {list(shape)}, values are "
            f"{v.ir.dtype.name} {list(v.ir.shape)}; they must have one dtype and shape and be dense"
        )
    many = len(q.ir.shape) == 2 and position is not None
    at = as_tensor(position) if position is not None else None
    sequences = check_position("attention", at, q.ir.shape[0] if many else 1) if at else 1
    width, kv_heads = shape[-1], shape[-3] // sequences
    if columns % (kv_heads * width) or shape[-3] % sequences:
        raise ModelError(
            f"attention: the query has shape {list(q.ir.shape)}; expected (rows, heads * {width}) "
            f"with heads a multiple of {kv_heads}"
        )
    if window < 0 or softcap < 0 or (window and not causal):
        raise ModelError(
            f"attention: the window is {window}, the soft cap {softcap}, causal {causal}; both are "
            "at least 0, and a window is of the past: it needs causal=True"
        )
    heads = columns // width
    attrs: dict[str, Any] = {
        "heads": heads,
        "head_dim": width,
        "scale": float(width**-0.5 if scale is None else scale),
    }
    more = {"causal": bool(causal), "window": int(window), "softcap": float(softcap)}
    attrs |= {k: v for k, v in more.items() if v != _PLAIN[k]}
    inputs = [q, k, v]
    if at is not None:
        inputs.append(at)
    else:
        attrs["placed"] = False
    if sinks is not None:
        extra = as_tensor(sinks)
        if extra.ir.shape != (heads,) or extra.ir.dtype != fp32:
            raise ModelError(
                f"attention: the sinks are {extra.ir.dtype.name} {list(extra.ir.shape)}; expected "
                f"fp32 ({heads},), one a head"
            )
        inputs.append(extra)
        attrs["sinks"] = True
    return result("attention", inputs, q.ir.shape, dtype, output, attrs, name)


_PLAIN: dict[str, Any] = {
    "causal": True,
    "window": 0,
    "softcap": 0.0,
    "placed": True,
    "sinks": False,
}
"""What a node's attributes are where it does not say; only such a one decodes by splits."""


def attention_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The definition, one row and head at a time.

    A fifth input holds the keys and values of a lone row (ark.lower.pack), (1, 2 kv_heads width).
    """
    q, key, value, *rest = inputs
    how = {name: attrs.get(name, plain) for name, plain in _PLAIN.items()}
    if how["placed"] and len(rest[0]) > 1:
        each = by_sequence(inputs, len(rest[0]), (4,) if how["sinks"] else ())
        return [np.concatenate([attention_reference(one, attrs)[0] for one in each])]
    position = int(rest.pop(0)[0]) if how["placed"] else 0
    sinks = rest.pop(0) if how["sinks"] else None
    if rest:  # the newest row, which the caches need not have yet
        newest = np.split(rest[0].reshape(-1, attrs["head_dim"]), 2)
        key, value = (c.copy() for c in (key, value))
        for cache, row in zip((key, value), newest, strict=True):
            cache[:, position] = row
    if q.ndim == 3:
        options = {**attrs, "placed": True}
        extra = [np.array([position]), *([] if sinks is None else [sinks])]
        rows = zip(q, key, value, strict=True)
        return [np.stack([attention_reference([*row, *extra], options)[0] for row in rows])]
    heads, width, context = attrs["heads"], attrs["head_dim"], key.shape[1]
    group = heads // key.shape[0]
    out = np.zeros(q.shape)
    for r in range(len(q)):
        end = min(position + r + 1, context) if how["causal"] else context
        begin = max(0, position + r + 1 - how["window"]) if how["window"] else 0
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = key[h // group, begin:end] @ q[r, part] * attrs["scale"]
            if how["softcap"]:
                scores = how["softcap"] * np.tanh(scores / how["softcap"])
            if sinks is not None:
                scores = np.append(scores, sinks[h])
            if not len(scores):
                continue
            weights = np.exp(scores - scores.max())
            seen = weights[: max(0, end - begin)]
            out[r, part] = seen / weights.sum() @ value[h // group, begin:end]
    return [out]


STREAMED, MOST_STREAMED = 8, 64  # positions that matrix units take at once, and a warp holds
MOST_GROUP = 8  # query heads of a key/value head that they take at once
TILED_ROWS = 8  # queries from which on a task takes tiles of them
L2_SHARE = 16 << 20  # bytes of keys and values that are read together


def _lower_tiles(lowering: Lowering, node: Node) -> None:
    """Tiles of queries; where loads run ahead, a processor has all its tiles as one task."""
    q, key, value, *rest = node.inputs
    out, machine = node.outputs[0], lowering.machine
    how = {name: node.attrs.get(name, plain) for name, plain in _PLAIN.items()}
    width, length = node.attrs["head_dim"], q.shape[-2]
    rows = 128 if machine.variant.name == "matrix" else 32 if width <= 128 else 16
    rows = min(rows, length)
    heads, batch = node.attrs["heads"], q.shape[0] if len(q.shape) == 3 else 1
    params = {**node.attrs, **how, "kv_heads": key.shape[-3], "rows": rows}
    tiles = batch * heads * -(-length // rows)
    each = 2 * key.shape[-2] * width * key.dtype.itemsize * key.shape[-3] / heads
    # Heads together: what L2 holds, and enough for tiles of all lengths to be dealt at once.
    enough = -(-2 * machine.processors * rows // length)
    most = max(1, min(batch * heads, max(enough, int(L2_SHARE / each))))
    params["group"] = most
    if machine.variant.name == "matrix" and lowering.graph.world_size == 1:
        params["tasks"] = min(tiles, machine.processors)
        blocks = -(-length // rows)
        window = -(-how["window"] // rows) + 1 if how["window"] else blocks
        seen = min(blocks, window) if how["causal"] else 1
        params["group"] = balanced_group(batch * heads, blocks, params["tasks"], seen, most)
        coords: list[tuple[int, ...]] = [(t,) for t in range(params["tasks"])]
    else:
        starts = range(0, length, rows)
        coords = [(b, h, r) for b in range(batch) for h in range(heads) for r in starts]
    lowering.emit("attention_tiles", params, [q, key, value, out, *rest], coords)


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
    """One row of a cache by splits of its positions, all else by tiles of queries."""
    placed = node.attrs.get("placed", True)
    batch = node.inputs[3].shape[0] if placed else 1
    sinks = node.inputs[3 + placed] if node.attrs.get("sinks") else None
    merges = []
    for b in range(batch):
        inputs = [t if t is sinks else lowering.part(t, batch, b) for t in node.inputs]
        outputs = (lowering.part(node.outputs[0], batch, b),)
        one = dataclasses.replace(node, inputs=tuple(inputs), outputs=outputs)
        merges.append(_lower_sequence(lowering, one, batch))
    # No processor waits for one sequence's parts before it has made its own of all.
    for partial, one in (m for m in merges if m is not None):
        rows, heads, splits, width = partial.shape
        merge = {"heads": heads, "head_dim": node.attrs["head_dim"], "splits": splits}
        group = merge_group(batch * rows * heads, heads, 4 * splits * width, lowering.machine)
        merge |= {"group": group} if group > 1 else {}
        coords = [(r, h) for r in range(rows) for h in range(0, heads, group)]
        lowering.emit("attention_merge", merge, [partial, one.outputs[0]], coords, ".merge")


def merge_group(heads: int, most: int, size: int, machine: Machine) -> int:
    """Heads, of so many, that a task merges: enough that processors have one task each. most: of a
    row. size: bytes of a head's parts, all of which are in shared memory.
    """
    room = (machine.shared_bytes - machine.ring_bytes) // size
    wanted = min(-(-heads // machine.processors), room)
    return max(n for n in range(1, max(1, wanted) + 1) if most % n == 0)


def _lower_sequence(lowering: Lowering, node: Node, batch: int) -> tuple[ir.Tensor, Node] | None:
    """Attention of one of `batch` sequences; its parts, if there are several, and the node."""
    plain = all(node.attrs.get(name, usual) == usual for name, usual in _PLAIN.items())
    if not plain or len(node.inputs[0].shape) == 3 or node.inputs[0].shape[0] >= TILED_ROWS:
        _lower_tiles(lowering, node)
        return None
    q, key, value, position, *fresh = node.inputs
    out = node.outputs[0]
    rows = out.shape[0]
    kv_heads, context, _ = key.shape
    machine = lowering.machine
    streamed = 0
    if fresh and _older(lowering, node):
        streamed = _streamed(key, node.attrs["heads"] // kv_heads, machine)
    # A processor of which the ring takes keys and values has a stage of them at least.
    least = max(32, streamed) if machine.variant.role(COMMUNICATE) else 64
    least *= 2 if streamed and batch > 1 and machine.ring_bytes else 1
    splits = attention_splits(rows * batch, kv_heads, context, machine.processors, least)
    # Halves of what the ring holds are not worth the exchange that merges them.
    if splits == 2 and batch > 1 and context <= streamed * machine.variant.stages:
        splits = 1
    # All parts of a head are in shared memory when they are merged.
    part = 4 * (node.attrs["head_dim"] + 2)
    splits = max(1, min(splits, (machine.shared_bytes - machine.ring_bytes) // part))
    params = {**node.attrs, "kv_heads": kv_heads, "splits": splits}
    if fresh and _older(lowering, node):
        params["streamed"] = streamed
    coords = [(r, h, s) for s in range(splits) for r in range(rows) for h in range(kv_heads)]
    if splits == 1:
        lowering.emit("attention", params, [q, key, value, position, out, *fresh], coords)
        return None
    heads, width = node.attrs["heads"], node.attrs["head_dim"]
    partial = lowering.temp((rows, heads, splits, width + 2), fp32, f"{node.name}.partial")
    operands = [q, key, value, position, partial, *fresh]
    lowering.emit("attention", params, operands, coords)
    return partial, node


register("attention", attention_reference, _lower_attention, aliasing="none")
register("kv_append", _append, _lower_append)
register("kv_cache_slot", _slot, _lower_slot)
