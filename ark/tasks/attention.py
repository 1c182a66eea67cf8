"""Two task kinds for causal grouped-query attention of a few rows over a key/value cache.
`attention` has one task for each row, key/value head (or share of its query heads) and part (split)
of the positions; `attention_merge` combines the splits. Emitted by ark.lower.ops.attention.

`attention` params: heads, kv_heads, head_dim, splits, scale, streamed, shares, window.

operands: q (m, heads * head_dim), key cache and value cache (kv_heads, context, head_dim), position
(1,), output, [fresh (1, 2 * kv_heads * head_dim)]. Row r attends to positions 0 .. position + r.
With `fresh` there is one row: its own key and value are read from `fresh`, and earlier ones from
the caches. The caches may then be streamed through a ring in shared memory; `streamed` is the
number of positions in a stage of the ring (0: the caches are read in place). `shares` is the number
of tasks that divide the query heads of a key/value head among themselves. With `window` above 0, a
row attends only to that number of latest positions, and the splits divide these.

coord: row, kv head * shares + share, split. With one split the output is (m, heads * head_dim).
With several splits it is a partial result (m, heads, splits, head_dim + 2): the unnormalised sum,
then maximum and denominator. `attention_merge` combines the partial results (flash-decoding, Dao et
al. 2023).

`attention_merge` params: heads, head_dim, splits, group (heads per task).

operands: partial, output, [sinks (heads,) fp32: a further score of each head, without a value].

coord: row, first head. Positions are processed in chunks with a running maximum (online softmax,
Milakov and Gimelshein 2018), so shared memory does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Heads,
    Params,
    Places,
    Splits,
    count,
    grouped_heads,
    matrix,
    need,
    shaped,
)
from ark.plan.types import Fetch, Growth
from ark.tasks import text
from ark.tasks.cache_rows import cache_operand, cache_texts, element_bytes

CHUNK_POSITIONS = 256
NEW_ROWS_OPERAND = 5  # the index of the operand `fresh`: this iteration's keys and values


class SplitAttentionParams(Params, frozen=True):
    heads: Heads
    kv_heads: Heads
    head_dim: Heads
    splits: Splits
    scale: float
    streamed: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0


class AttentionParams(SplitAttentionParams, frozen=True):
    shares: Heads = 1
    window: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)] = 0

    @property
    def group(self) -> int:
        """The number of query heads of a task."""
        return self.heads // (self.kv_heads * self.shares)


class SplitAttention(TaskKind):
    """Attention of single rows over keys and values (operands 1 and 2), split by positions."""

    def places(self, sig: Signature) -> Places:
        p, rows = sig.read(AttentionParams), sig.operands[0].shape[0]
        return Places((range(rows), range(p.kv_heads * p.shares), range(p.splits)))

    def check_rows(self, sig: Signature, fresh: int, context: int) -> None:
        """Checks the query, the result (the operand before number `fresh`), the newest key and
        value (number `fresh`, if given) and streaming. context: the number of positions.
        """
        p, (rows, columns) = sig.read(AttentionParams), matrix(sig, 0)
        heads, kv_heads, width, splits = p.heads, p.kv_heads, p.head_dim, p.splits
        grouped_heads(heads, kv_heads)
        need(columns == heads * width, f"q has {columns} columns, expected {heads} heads * {width}")
        large = heads * splits * (width + 2) > INT_MAX or context + rows > INT_MAX
        need(not large, "element indices exceed 32 bits")
        if splits == 1:
            shaped(sig, fresh - 1, (rows, columns))
        else:
            shaped(sig, fresh - 1, (rows, heads, splits, width + 2), "fp32")
        newest = len(sig.operands) > fresh
        if newest:
            need(rows == 1, f"operand `fresh` needs one query row, got {rows}")
            shaped(sig, fresh, (1, 2 * kv_heads * width))
        if p.streamed:
            need(
                newest,
                "a cache that is loaded ahead needs the newest keys and values as an operand",
            )
            row = width * sig.operands[1].itemsize
            need(row % 16 == 0, f"cache rows must be a multiple of 16 bytes, got {row}")

    def wide(self, sig: Signature) -> frozenset[int]:
        row = sig.read(AttentionParams).head_dim * sig.operands[1].itemsize
        return frozenset({1, 2} if row % 16 == 0 else ())


class Attention(SplitAttention):
    name = "attention"
    streams = True
    params = AttentionParams
    packet_types = ("fp32", "fp16", "bf16")
    headers = text.headers("attention.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, NEW_ROWS_OPERAND, NEW_ROWS_OPERAND + 1)
        p = sig.read(AttentionParams)
        cache = cache_operand(sig, 1)
        need(
            len(cache.shape) == 3, f"the cache has shape {list(cache.shape)}, expected 3 dimensions"
        )
        context = cache.shape[1]
        for index in (1, 2):
            shaped(sig, index, (p.kv_heads, context, p.head_dim), cache.dtype, dense=True)
        shaped(sig, 3, (1,), "int32")
        self.check_rows(sig, NEW_ROWS_OPERAND, context)
        group = p.heads // p.kv_heads
        need(
            group % p.shares == 0,
            f"{group} query heads of a key/value head are not divisible by {p.shares}",
        )

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        p = sig.read(AttentionParams)
        row, place, split = coord[:3]
        first, end = place * p.group, (place + 1) * p.group
        head, width = place // p.shares, p.head_dim
        context = sig.operands[1].shape[1]
        q0, q1 = first * width, end * width
        cache = ((head, 0, 0), (head + 1, context, width))
        if p.splits == 1:
            out = Access(4, (row, q0), (row + 1, q1), write=True)
        else:
            lo = (row, first, split, 0)
            out = Access(4, lo, (row + 1, end, split + 1, width + 2), write=True)
        fresh = len(sig.operands) > NEW_ROWS_OPERAND
        accesses = [
            Access(0, (row, q0), (row + 1, q1)),
            Access(1, *cache, append_only=fresh),
            Access(2, *cache, append_only=fresh),
            whole(3, sig.operands[3]),
            out,
        ]
        if fresh:
            for new in (head, p.kv_heads + head):
                accesses.append(Access(NEW_ROWS_OPERAND, (0, new * width), (1, (new + 1) * width)))
        return accesses

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        params = sig.read(AttentionParams)
        rows, (_, place, split) = params.streamed, coord[:3]
        if not rows:
            return ()
        head = place // params.shares
        cache = sig.operands[1]
        row = params.head_dim * cache.itemsize
        room = cache.shape[1] * row
        growth = Growth(3, row, split, params.splits, beside=2, window=params.window)
        return (Fetch(1, head * room, room, rows * row, growth),)

    def packets(self, sig: Signature) -> frozenset[int]:
        read = {i for i in (0, NEW_ROWS_OPERAND) if i < len(sig.operands)}
        return frozenset({4, *(i for i in read if sig.operands[i].dtype == "fp32")})

    def early(self, sig: Signature) -> frozenset[int]:
        # Operands 1 and 2 are the key and value caches. The device function may read them before
        # the task's waits are complete under two conditions: it reads them itself (they are not
        # streamed through the ring), and no task of this iteration writes the rows that it reads
        # (the new row is in the operand `fresh`).
        older = len(sig.operands) > NEW_ROWS_OPERAND and not sig.read(AttentionParams).streamed
        return frozenset({1, 2, 3} if older else {3})

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        p = sig.read(AttentionParams)
        context = sig.operands[1].shape[1]
        share = min(p.window or context, context) * p.head_dim / p.splits
        return 4.0 * share * p.group, 2.0 * share * element_bytes(sig.operands[1])

    def scratch(self, sig: Signature, machine: Machine) -> int:
        p = sig.read(AttentionParams)
        return in_place_bytes(p.group, p.head_dim)

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return cache_texts(sig, 1)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p = sig.read(AttentionParams)
        context, heads = sig.operands[1].shape[1], (p.group, p.kv_heads, p.shares)
        constants = (*heads, p.head_dim, context, p.splits, CHUNK_POSITIONS, p.window)
        operands = [text.given(sig, i, const=i != 4) for i in range(NEW_ROWS_OPERAND + 1)]
        return text.call(name, "ark_attention", constants, (text.literal(p.scale), *operands))


def in_place_bytes(group: int, width: int) -> int:
    """Bytes of shared memory that attention needs if it reads keys and values in place: for the
    queries, the newest key and value, and the scores of a chunk. group: the number of query heads
    of a key/value head. width: the elements of a head.
    """
    return 4 * ((group + 1) * width * 2 + group * (CHUNK_POSITIONS + 3))


def staged_bytes(group: int, width: int, warps: int) -> int:
    """Bytes of shared memory that attention needs if keys and values are streamed: for the queries,
    the newest key and value, and each warp's partial result.
    """
    per_warp = -(-group * (width + 2) // 4) * 4
    return 4 * ((group + 2) * width + warps * per_warp)


def staged_warps(group: int, width: int, machine: Machine) -> int:
    """The most warps that compute attention whose keys and values are streamed: those whose partial
    results fit in shared memory.
    """
    room = machine.task_bytes - staged_bytes(group, width, 0)
    each = staged_bytes(group, width, 1) - staged_bytes(group, width, 0)
    return max(0, min(machine.warps, room // each))


def merged(sig: Signature) -> tuple[str, ...]:
    """The C++ texts of the operands with which the function of `attention_merge` is called."""
    return tuple(text.given(sig, i, const=i != 1) for i in range(3))


class AttentionMergeParams(Params, frozen=True):
    heads: Heads
    head_dim: Heads
    splits: Splits
    group: Heads = 1


class AttentionMerge(TaskKind):
    name = "attention_merge"
    params = AttentionMergeParams
    packet_types = ("fp32", "fp16", "bf16")
    headers = text.headers("attention.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2, 3)
        params = sig.read(AttentionMergeParams)
        heads, width, splits = params.heads, params.head_dim, params.splits
        rows, _ = matrix(sig, 1)
        shaped(sig, 0, (rows, heads, splits, width + 2), "fp32")
        shaped(sig, 1, (rows, heads * width))
        if len(sig.operands) > 2:
            shaped(sig, 2, (heads,), "fp32", dense=True)
        group = params.group
        need(heads % group == 0, f"{heads} heads are not divisible by the group of {group}")
        need(group * splits * (width + 2) <= INT_MAX, "element indices exceed 32 bits")

    def places(self, sig: Signature) -> Places:
        params = sig.read(AttentionMergeParams)
        heads = range(0, params.heads, params.group)
        return Places((range(sig.operands[1].shape[0]), heads))

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(AttentionMergeParams)
        row, head = coord[:2]
        width, splits = params.head_dim, params.splits
        end = head + params.group
        return [
            Access(0, (row, head, 0, 0), (row + 1, end, splits, width + 2)),
            Access(1, (row, head * width), (row + 1, end * width), write=True),
            *(whole(i, o) for i, o in enumerate(sig.operands[2:], 2)),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        params = sig.read(AttentionMergeParams)
        parts = params.group * params.splits
        return 4 * parts * (params.head_dim + 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(AttentionMergeParams)
        constants = (params.head_dim, params.splits, params.group)
        return text.call(name, "ark_attention_merge", constants, merged(sig))


register(Attention())
register(AttentionMerge())
