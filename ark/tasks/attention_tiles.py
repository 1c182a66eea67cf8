"""The task kind for attention of many rows. A task has tiles of queries of one head and processes
the keys in blocks with a running softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
2022). Emitted by ark.lower.ops.attention and ark.lower.ops.paged.

`attention_tiles` params: heads, kv_heads, head_dim, rows (of a tile), scale, causal, window,
softcap, placed, sinks, by_rows, paged, tasks, group, mask, fill, strict, logarithms.

operands: q ([batch,] m, heads * head_dim), keys and values, output, [position (1,) if placed], [the
page numbers (1, most) if paged; ark.tasks.paged], [sinks (heads,) fp32 if sinks], [mask (batch,
heads, m, context) if mask], [logarithms ([batch,] m, heads) fp32 if logarithms]. The shape of keys
and values is ([batch,] kv_heads, context, head_dim), dense; if by_rows, ([batch,] context, kv_heads
* head_dim), like the queries; if paged, (pool, kv_heads, page, head_dim). Each dimension of a mask
has its full size or size 1. If there are fewer masks than batches, they repeat.

Row r is at position + r (at r if not placed). If causal, it sees the keys up to its own position,
otherwise all; with a window, only the last `window` of these. The scores are q k scale; if softcap
is not 0, they become softcap * tanh(score / softcap). A sink is a further score of a head, without
a value. Depending on `mask`, the mask is added to the scores, is true for visible keys, or is true
for hidden keys, whose score is `fill`. Scores of -inf have weight 0. A row that has only such
scores gives zeros, or NaN if strict. The logarithm of a row is that of the sum of the exponentials
of its scores; it is infinity if all its scores are -inf.

coord: batch, head, first row. If `tasks` is not 0, a task has several tiles, and coord is the
task's number. Tiles are numbered by sections. A section is `group` heads, whose keys stay in the L2
cache together. In the last section, tiles are numbered from the last rows, which see most keys, to
the first. The direction alternates from section to section, so that consecutive tiles have similar
costs. Tiles are dealt to the tasks forwards and backwards in turn, which gives all tasks about the
same work.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from ark.ir.attributes import MaskForm
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Heads,
    Params,
    Places,
    Size,
    grouped_heads,
    need,
    shaped,
    typed,
)
from ark.plan.params import count as counted
from ark.tasks import text
from ark.tasks.attention_masks import check_mask, mask_of
from ark.tasks.cache_rows import cache_operand, cache_texts

T = TypeVar("T", int, np.ndarray)
Whole = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]


class AttentionTilesParams(Params, frozen=True):
    heads: Heads
    kv_heads: Heads
    head_dim: Heads
    rows: Size
    scale: float
    causal: bool
    window: Whole
    softcap: float
    placed: bool
    sinks: bool
    by_rows: bool = False
    paged: bool = False
    tasks: Whole = 0
    group: Size = 1
    mask: MaskForm = ""
    fill: float = -math.inf
    strict: bool = False
    logarithms: bool = False


class AttentionTiles(TaskKind):
    name = "attention_tiles"
    params = AttentionTilesParams
    headers = text.headers("pages.h", "attention_tiles.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(AttentionTilesParams)
        by_rows, paged = bool(p.by_rows), bool(p.paged)
        counted(sig, 4 + p.placed + paged + p.sinks + bool(p.mask) + p.logarithms)
        heads, kv_heads, width = p.heads, p.kv_heads, p.head_dim
        grouped_heads(heads, kv_heads)
        need(p.softcap >= 0.0, f"softcap must be at least 0, got {p.softcap}")
        query, keys = typed(sig, 0), cache_operand(sig, 1)
        need(
            len(query.shape) in (2, 3),
            f"the queries have shape {list(query.shape)}, expected 2 or 3 dimensions",
        )
        batch = query.shape[:-2]
        need(
            query.shape[-1] == heads * width,
            f"the queries have {query.shape[-1]} columns, expected {heads} heads * {width}",
        )
        rank = len(batch) + (2 if by_rows else 3 + paged)
        need(
            len(keys.shape) == rank,
            f"the keys have shape {list(keys.shape)}, expected {rank} dimensions",
        )
        need(
            not paged or (p.placed and not batch and not by_rows),
            "keys in pages need placed=True, by_rows=False and no batch dimension",
        )
        rows = keys.shape[-2]
        wanted = (rows, kv_heads * width) if by_rows else (kv_heads, rows, width)
        lead = keys.shape[:1] if paged else batch
        for index in (1, 2):
            shaped(sig, index, (*lead, *wanted), keys.dtype, dense=not by_rows)
        shaped(sig, 3, query.shape)
        if p.placed:
            shaped(sig, 4, (1,), "int32")
        if paged:
            table = sig.operands[5].shape
            need(
                len(table) == 2,
                f"the page table has shape {list(table)}, expected (sequences, pages)",
            )
            shaped(sig, 5, (1, table[-1]), "int32", dense=True)
        if p.sinks:
            shaped(sig, 4 + p.placed + paged, (heads,), "fp32", dense=True)
        if p.mask:
            full = (_batch(sig), heads, query.shape[-2], context_of(sig))
            check_mask(sig, _mask_index(sig), p.mask, full)
            need(
                not paged and p.fill < math.inf,
                f"a mask needs keys outside of pages and a fill below infinity, got {p.fill}",
            )
        if p.logarithms:
            shaped(sig, len(sig.operands) - 1, (*query.shape[:-1], heads), "fp32")
        need(context_of(sig) + query.shape[-2] <= INT_MAX, "element indices exceed 32 bits")
        need(
            p.tasks <= number_of_tiles(sig), f"{p.tasks} tasks exceed {number_of_tiles(sig)} tiles"
        )

    def places(self, sig: Signature) -> Places:
        p = sig.read(AttentionTilesParams)
        if p.tasks:
            return Places((range(p.tasks),))
        rows = sig.operands[0].shape[-2]
        return Places((range(_batch(sig)), range(p.heads), range(0, rows, p.rows)))

    def wide(self, sig: Signature) -> frozenset[int]:
        size = sig.operands[1].itemsize
        steps = [s * size for i in (1, 2) for s in sig.operands[i].strides[:-1]]
        steps += [sig.read(AttentionTilesParams).head_dim * size]
        return frozenset({1, 2} if all(s % 16 == 0 for s in steps) else ())

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        accesses: dict[Access, None] = {}
        for tile in tiles(sig, coord):
            accesses.update(dict.fromkeys(self._touched(sig, *tile)))
        return list(accesses)

    def _touched(self, sig: Signature, batch: int, head: int, row: int) -> list[Access]:
        p, query = sig.read(AttentionTilesParams), sig.operands[0]
        width, context = p.head_dim, context_of(sig)
        rows = query.shape[-2]
        end = min(row + p.rows, rows)
        lead = ((), ()) if len(query.shape) == 2 else ((batch,), (batch + 1,))
        box = (*lead[0], row, head * width), (*lead[1], end, (head + 1) * width)
        kv = head // (p.heads // p.kv_heads)
        seen = context if p.placed or not p.causal else min(context, end)
        cache = (*lead[0], kv, 0, 0), (*lead[1], kv + 1, seen, width)
        if p.by_rows:
            cache = (*lead[0], 0, kv * width), (*lead[1], seen, (kv + 1) * width)
        if p.paged:
            pool, _, page, _ = sig.operands[1].shape
            cache = (0, kv, 0, 0), (pool, kv + 1, page, width)
        accesses = [
            Access(0, *box),
            Access(1, *cache),
            Access(2, *cache),
            Access(3, *box, write=True),
        ]
        last = _mask_index(sig) if p.mask else len(sig.operands) - p.logarithms
        accesses += [whole(i, sig.operands[i]) for i in range(4, last)]
        if p.logarithms:
            rows_of = (*lead[0], row, head), (*lead[1], end, head + 1)
            accesses.append(Access(len(sig.operands) - 1, *rows_of, write=True))
        if p.mask:
            shape = sig.operands[last].shape
            begins = (batch % shape[0], head if shape[1] > 1 else 0, row if shape[2] > 1 else 0, 0)
            sizes = (1, 1, end - row if shape[2] > 1 else 1, shape[3])
            accesses.append(Access(last, begins, tuple(map(operator.add, begins, sizes))))
        return accesses

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        p, context = sig.read(AttentionTilesParams), context_of(sig)
        seen = context / 2 if p.causal else context
        each = 4.0 * p.rows * p.head_dim * (min(seen, p.window) if p.window else seen)
        return each * len(tiles(sig, coord)), super().cost(sig, coord)[1]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _scratch(sig, machine, *_cut(sig, machine))

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return cache_texts(sig, 1)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        arguments = (*given(sig), *logarithms(sig))
        return text.call(name, "ark_attention_tiles", (shape(sig), *_cut(sig, machine)), arguments)


def _scratch(sig: Signature, machine: Machine, chunk: int, strip: int) -> int:
    width = sig.read(AttentionTilesParams).head_dim
    keys = chunk * width if not machine.cooperative else 1
    return 4 * (strip * (2 * width + chunk + 3) + keys)


def _cut(sig: Signature, machine: Machine) -> tuple[int, int]:
    """The number of keys and the number of rows that the common device function processes at a
    time. It processes fewer rows if little shared memory is free.
    """
    chunk, strip = (64, 32) if not machine.cooperative else (32, 16)
    strip = min(strip, sig.read(AttentionTilesParams).rows)
    room = machine.task_bytes
    while strip > 1 and _scratch(sig, machine, chunk, strip) > room:
        strip = -(-strip // 2)
    return chunk, strip


def shape(sig: Signature) -> str:
    """The text of the C++ type that holds the compile-time constants of an attention signature."""
    p = sig.read(AttentionTilesParams)
    strict = ("true",) if p.strict else ()
    fixed = (
        _batch(sig),
        p.heads,
        p.kv_heads,
        p.head_dim,
        sig.operands[0].shape[-2],
        context_of(sig),
        p.rows,
        str(bool(p.causal)).lower(),
        p.window,
        str(p.softcap > 0.0).lower(),
        str(bool(p.by_rows)).lower(),
        p.tasks,
        p.group,
        *strict,
    )
    return f"ArkAttentionShape<{', '.join(str(v) for v in fixed)}>"


def given(sig: Signature) -> tuple[str, ...]:
    """The texts of the arguments with which the attention function is called: scale, soft cap,
    operands and mask.
    """
    p = sig.read(AttentionTilesParams)
    placed, paged, sinks = bool(p.placed), bool(p.paged), bool(p.sinks)
    caches = [text.given(sig, i) for i in (1, 2)]
    if paged:
        pool, _, page, _ = sig.operands[1].shape
        caches = [f"ark_paged<{page}, {pool}>({c}, {text.given(sig, 5)})" for c in caches]
    return (
        text.literal(p.scale),
        text.literal(p.softcap),
        text.given(sig, 0),
        *caches,
        text.given(sig, 3, const=False),
        text.given(sig, 4) if placed else "ArkNoOperand{}",
        text.given(sig, 4 + placed + paged) if sinks else "ArkNoOperand{}",
        _mask(sig),
    )


def logarithms(sig: Signature) -> tuple[str, ...]:
    """The text of the argument for the operand `logarithms`; no text if it is not given."""
    if not sig.read(AttentionTilesParams).logarithms:
        return ()
    return (text.given(sig, len(sig.operands) - 1, const=False),)


def _mask_index(sig: Signature) -> int:
    return len(sig.operands) - 1 - sig.read(AttentionTilesParams).logarithms


def _mask(sig: Signature) -> str:
    p = sig.read(AttentionTilesParams)
    return mask_of(sig, _mask_index(sig), p.mask, p.fill, _batch(sig))


def where_aligned(
    name: str, sig: Signature, machine: Machine, call: str, operands: Iterable[int] = range(4)
) -> str:
    """The text of a device function that calls a vendor's attention (`call`), which requires rows
    of these operands aligned to 16 bytes. If addresses are known only at run time, the function
    checks them and uses the common implementation for unaligned operands.
    """
    addresses = text.addresses(sig, operands)
    if addresses == "0u":
        return text.function(name, f"  {call};\n")
    common = kinds.get(sig.kind).source(f"{name}_anywhere", sig, machine)
    body = f"  if (!ark_aligned({addresses})) return {name}_anywhere(c, t);\n  {call};\n"
    return common + text.function(name, body)


def context_of(sig: Signature) -> int:
    """The number of keys that a query can see. For a cache, the number of positions that it has
    room for.
    """
    rows: int = sig.operands[1].shape[-2]
    return rows * sig.operands[5].shape[-1] if sig.read(AttentionTilesParams).paged else rows


def _batch(sig: Signature) -> int:
    query: OperandType = sig.operands[0]
    return query.shape[0] if len(query.shape) == 3 else 1


def _blocks(sig: Signature) -> int:
    return -(-sig.operands[0].shape[-2] // sig.read(AttentionTilesParams).rows)


def number_of_tiles(sig: Signature) -> int:
    return _batch(sig) * sig.read(AttentionTilesParams).heads * _blocks(sig)


def _head_and_block(number: T, heads: int, blocks: int, group: int) -> tuple[T, T]:
    """The head and the block of rows of tile number `number`. Heads are counted over the whole
    batch; block 0 has the first rows. heads, blocks: how many there are. group: see
    `balanced_group`.
    """
    section, within = number // (group * blocks), number % (group * blocks)
    high = np.minimum(group, heads - section * group)
    rising = (-(-heads // group) - 1 - section) % 2
    block = within // high
    return section * group + within % high, rising * block + (1 - rising) * (blocks - 1 - block)


MAX_TRIED_SECTION_SIZES = 32  # section sizes that are tried
TILE_OVERHEAD_KEY_BLOCKS = 1.5  # cost of a tile besides its key blocks, in key blocks


def balanced_group(heads: int, blocks: int, tasks: int, seen: int, most: int) -> int:
    """The number of heads per section for which the busiest task has the least work. A section is a
    number of consecutive heads whose tiles are executed at about the same time, so that their keys
    share the L2 cache.

    heads: the number of heads of the whole batch. Each head has `blocks` tiles; the queries of tile
        n see n + 1 blocks of keys, but at most `seen`. most: an upper bound of the result.
    """
    numbers = np.arange(heads * blocks)
    step, at = numbers // tasks, numbers % tasks
    owner = np.where(step % 2, tasks - 1 - at, at)

    def fullest(group: int) -> float:
        _, block = _head_and_block(numbers, heads, blocks, group)
        cost = np.minimum(block + 1, seen) + TILE_OVERHEAD_KEY_BLOCKS
        return float(np.bincount(owner, cost).max())

    most = max(1, min(most, heads))
    return min(range(most, max(0, most - MAX_TRIED_SECTION_SIZES), -1), key=fullest)


def tiles(sig: Signature, coord: Sequence[int]) -> list[tuple[int, int, int]]:
    """(batch, head, first row) of each tile of the task at `coord`."""
    p = sig.read(AttentionTilesParams)
    tasks, group = p.tasks, p.group
    if not tasks:
        return [(coord[0], coord[1], coord[2])]
    total, blocks = _batch(sig) * p.heads, _blocks(sig)
    shapes: list[tuple[int, int, int]] = []
    for step in itertools.count():
        number = step * tasks + (tasks - 1 - coord[0] if step % 2 else coord[0])
        if step * tasks >= total * blocks:
            return shapes
        if number >= total * blocks:
            continue
        head, block = (int(n) for n in _head_and_block(number, total, blocks, group))
        shapes.append((head // p.heads, head % p.heads, block * p.rows))
    return shapes


register(AttentionTiles())
