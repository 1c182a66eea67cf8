"""Three task kinds on pairs of elements: `rotary_embedding` rotates rows, `rope_kv` rotates queries
and keys and stores keys and values in caches, and `swiglu_pairs` computes silu(gate) * up. Emitted
by ark.lower.ops.decoder.

If the matrix product before them is of the kind `linear`, its epilogue does the same (rotary.h),
and these tasks do not exist.

`rope_kv` params: heads, kv_heads, head_dim, head_eps.

operands: x (m, (heads + 2 kv_heads) * head_dim), output q (m, heads * head_dim), position,
frequencies, key cache and value cache (kv_heads, context, head_dim), [norms (2 * head_dim,)],
[fresh (m, 2 * kv_heads * head_dim): a copy of the new keys and values, for readers in the same
iteration]. With head_eps above 0, each head of queries and keys is divided by its root mean square
before it is rotated, and multiplied by the first or the second half of `norms`.

coord: first and last+1 column of x, for all rows, because rows share the cache. If there are m
    positions, each row belongs to a sequence of its own, and the caches are (m * kv_heads,
    context, head_dim). Caches in pages (ark.tasks.paged) are (pool, kv_heads, page, head_dim). The
    page table (sequences, most) follows them as an operand, then `fresh`. With pages, `fresh` is
    allowed only if no row reads keys that another row appends.

`rotary_embedding` params: head_dim, interleaved (True if a pair is two neighbours, otherwise an
element of a head's first half and the corresponding one of the second half).

operands: x (m, heads * head_dim), output, position, frequencies.

coord: row, first and last+1 head.

`swiglu_pairs` operands: x (m, 2 n) in which gate and up are neighbours, output (m, n).

coord: row, first and last+1 column of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import ALL_ROWS, Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Epsilon,
    Few,
    Heads,
    Params,
    PartialParams,
    Places,
    count,
    matrix,
    need,
    shaped,
)
from ark.tasks import text


class HeadCounts(PartialParams, frozen=True):
    """The parameters of all task kinds that rotate queries and keys. The columns of a projection
    are `heads` heads of queries, then kv_heads heads of keys, then kv_heads heads of values.
    """

    heads: Few = 0
    kv_heads: Few = 0
    head_dim: Few = 0
    head_eps: Epsilon = 0.0


def has_fresh(sig: Signature, first: int) -> bool:
    """True if there is an operand `fresh`, which receives a copy of the new keys and values."""
    return len(sig.operands) > fresh_operand(sig, first)


def fresh_operand(sig: Signature, first: int) -> int:
    """The index of the operand `fresh`, if it is given."""
    return norms_operand(sig, first) + (sig.read(HeadCounts).head_eps > 0)


def norms_operand(sig: Signature, first: int) -> int:
    """The index of the operand `norms`, if it is given."""
    return first + 4 + in_pages(sig, first)


def in_pages(sig: Signature, first: int) -> bool:
    """True if the caches are in pages; the page table is then the operand after them. False if
    there are too few operands.
    """
    return len(sig.operands) > first + 2 and len(sig.operands[first + 2].shape) == 4


def page_texts(sig: Signature, first: int) -> tuple[str, ...]:
    """The texts of the headers that are needed if caches are in pages; empty otherwise."""
    return (text.header("appended_pages.h"),) if in_pages(sig, first) else ()


def sequences_of(sig: Signature, first: int) -> int:
    """The number of sequences to which the rows belong: 1, or one per row."""
    return math.prod(sig.operands[first].shape)


def rotary_check(sig: Signature, out: int, first: int, shape: tuple[int, int]) -> None:
    """Raises PlanError unless a query-key-value projection of this shape can be rotated and stored.

    out: the index of the queries' operand. first: the index of the position operand. The
        frequencies, the two caches, the page table (of paged caches) and `fresh` (if given) follow
        it.
    """
    p, (rows, columns) = sig.read(HeadCounts), shape
    need(min(p.heads, p.kv_heads, p.head_dim) > 0, "heads, kv_heads and head_dim must be positive")
    width, queries = p.head_dim, p.heads * p.head_dim
    keys = p.kv_heads * width
    need(width % 2 == 0, f"head_dim must be even, got {width}")
    need(columns == queries + 2 * keys, f"x has {columns} columns, expected {queries} + 2 * {keys}")
    shaped(sig, out, (rows, queries))
    sequences = sequences_of(sig, first)
    need(sequences in (1, rows), f"{rows} rows need 1 or {rows} positions, got {sequences}")
    shaped(sig, first, (sequences,), "int32", dense=True)
    shaped(sig, first + 1, (width // 2,), "fp32", dense=True)
    cache = sig.operands[first + 2]
    need(len(cache.shape) in (3, 4), "the cache must have 3 dimensions, or 4 in pages")
    whole_cache: tuple[int, ...]
    if in_pages(sig, first):
        need(len(sig.operands) > first + 4, "caches in pages need a page table")
        fits = rows == sequences or not has_fresh(sig, first)
        need(fits, f"operand `fresh` needs one row per sequence, got {rows} rows of one sequence")
        table = sig.operands[first + 4].shape
        need(
            len(table) == 2 and table[0] == sequences,
            f"the page table has shape {list(table)}, expected (sequences, pages)",
        )
        shaped(sig, first + 4, table, "int32", dense=True)
        pool, _, page, _ = cache.shape
        need(page * table[1] + rows <= INT_MAX, "positions exceed 32-bit indices")
        whole_cache = (pool, p.kv_heads, page, width)
    else:
        whole_cache = (sequences * p.kv_heads, cache.shape[1], width)
    for index in (first + 2, first + 3):
        shaped(sig, index, whole_cache, dense=True)
    need(
        cache.dtype == sig.operands[first + 3].dtype, "key and value cache must have one data type"
    )
    if has_fresh(sig, first):
        shaped(sig, fresh_operand(sig, first), (rows, 2 * keys))


def rotary_accesses(
    sig: Signature, out: int, first: int, n0: int, n1: int, m0: int = 0, m1: int = 0
) -> list[Access]:
    """The accesses for columns n0 to n1 of a projection, for rows m0 to m1 (all rows if m1 is 0).
    first: the index of the position operand.
    """
    p = sig.read(HeadCounts)
    rows = m1 or sig.operands[out].shape[0]
    width = p.head_dim
    queries, keys = p.heads * width, p.kv_heads * width
    accesses = [whole(first, sig.operands[first]), whole(first + 1, sig.operands[first + 1])]
    if n0 < queries:
        accesses.append(Access(out, (m0, n0), (rows, min(n1, queries)), write=True))
    if has_fresh(sig, first) and n1 > queries:
        lo, hi = max(n0, queries) - queries, n1 - queries
        accesses.append(Access(fresh_operand(sig, first), (m0, lo), (rows, hi), write=True))
    paged = in_pages(sig, first)
    if paged:
        accesses.append(whole(first + 4, sig.operands[first + 4]))
    context = sig.operands[first + 2].shape[1]
    for cache, base in ((first + 2, queries), (first + 3, queries + keys)):
        for head in range(p.kv_heads):
            lo = max(n0, base + head * width)
            hi = min(n1, base + (head + 1) * width)
            if lo >= hi:
                continue
            at = base + head * width
            if paged:
                pool, _, page, _ = sig.operands[cache].shape
                pages = (0, head, 0, lo - at), (pool, head + 1, page, hi - at)
                alone = has_fresh(sig, first)
                accesses.append(Access(cache, *pages, write=True, append_only=alone))
                continue
            for s in range(sequences_of(sig, first)):
                place = s * p.kv_heads + head
                box = ((place, 0, lo - at), (place + 1, context, hi - at))
                rises = (m0, m1) if m1 else ALL_ROWS
                accesses.append(Access(cache, *box, write=True, append_only=True, appended=rises))
    return accesses


def rope(sig: Signature, out: int, first: int) -> str:
    """The C++ text of an ArkRope, the object that rotates and stores a projection's columns. out:
    the index of the queries' operand. first: the index of the position, which the other operands
    follow.
    """
    p = sig.read(HeadCounts)
    context = sig.operands[first + 2].shape[1]
    caches = [text.given(sig, first + i, const=False) for i in (2, 3)]
    if in_pages(sig, first):
        pool, _, page, _ = sig.operands[first + 2].shape
        most, table = sig.operands[first + 4].shape[1], text.given(sig, first + 4)
        context, counts = page * most, f"{p.kv_heads}, {page}, {pool}, {most}"
        caches = [f"ark_appended_pages<{counts}>({cache}, {table})" for cache in caches]
    caches.append(text.given(sig, fresh_operand(sig, first), const=False))
    constants = (p.heads, p.kv_heads, p.head_dim, context, sequences_of(sig, first))
    listed = ", ".join(str(n) for n in constants)
    operands = [text.given(sig, out, const=False)]
    operands += [text.given(sig, first + i) for i in (0, 1)]
    operands += caches
    return f"ark_rope<{listed}>({', '.join(operands)})"


VECTOR_COLUMNS = 8  # columns that a thread processes together


def vectors_fit(sig: Signature) -> bool:
    """True if rope_kv can read columns as vectors: several rows of one sequence, whose heads
    consist of whole vectors.
    """
    heads = (
        sig.read(HeadCounts).head_dim % VECTOR_COLUMNS,
        *(sig.operands[i].strides[0] % VECTOR_COLUMNS for i in (0, 1)),
    )
    plain = not any(o.packet for o in sig.operands) and not has_fresh(sig, 2)
    plain = plain and not sig.read(HeadCounts).head_eps
    return sig.operands[0].shape[0] > 1 == sequences_of(sig, 2) and plain and not any(heads)


class RopeKvParams(Params, frozen=True):
    heads: Heads
    kv_heads: Heads
    head_dim: Heads
    head_eps: Epsilon = 0.0


class RopeKv(TaskKind):
    name = "rope_kv"
    params = RopeKvParams
    headers = text.headers("rotary.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(RopeKvParams)
        count(sig, *(n + (p.head_eps > 0) for n in (6, 7, 8)))
        rows, columns = matrix(sig, 0)
        need(rows * columns <= INT_MAX, "the projection exceeds 32-bit indices")
        rotary_check(sig, 1, 2, (rows, columns))
        if p.head_eps:
            norms = norms_operand(sig, 2)
            need(norms < len(sig.operands), "the weights of the heads' norms are missing")
            shaped(sig, norms, (2 * p.head_dim,), dense=True)

    def places(self, sig: Signature) -> Places:
        p = sig.read(RopeKvParams)
        step = p.head_dim if p.head_eps else 2
        return Places((range(0, sig.operands[0].shape[1], step),), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1} | ({fresh_operand(sig, 2)} if has_fresh(sig, 2) else set()))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        n0, n1 = coord[:2]
        rows = sig.operands[0].shape[0]
        accesses = [Access(0, (0, n0), (rows, n1)), *rotary_accesses(sig, 1, 2, n0, n1)]
        if sig.read(RopeKvParams).head_eps:
            norms = norms_operand(sig, 2)
            accesses.append(whole(norms, sig.operands[norms]))
        return accesses

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = float(sig.operands[0].shape[0] * (coord[1] - coord[0]))
        return 8.0 * elements, 8.0 * elements

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return page_texts(sig, 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows, given = sig.operands[0].shape[0], (text.given(sig, 0), rope(sig, 1, 2))
        eps = sig.read(RopeKvParams).head_eps
        if eps:
            norms = text.given(sig, norms_operand(sig, 2))
            return text.call(
                name, "ark_rope_kv_normed", (rows,), (*given, norms, text.literal(eps))
            )
        if not vectors_fit(sig):
            return text.call(name, "ark_rope_kv", (rows,), given)
        return (
            f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n"
            f"  if (ark_aligned({text.addresses(sig, (0, 1, 4, 5))})) {{\n"
            f"    {text.called('ark_rope_kv_packs', (rows,), given)};\n"
            f"  }} else {{\n    {text.called('ark_rope_kv', (rows,), given)};\n  }}\n}}\n"
        )


class SwiGluPairs(TaskKind):
    name = "swiglu_pairs"
    headers = text.headers("gates.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        rows, columns = matrix(sig, 0)
        need(columns % 2 == 0, f"columns must be even, got {columns}")
        shaped(sig, 1, (rows, columns // 2))

    def places(self, sig: Signature) -> Places:
        rows, columns = sig.operands[0].shape
        return Places((range(rows), range(0, columns, 2)), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, n0, n1 = coord[:3]
        return [
            Access(0, (row, n0), (row + 1, n1)),
            Access(1, (row, n0 // 2), (row + 1, n1 // 2), write=True),
        ]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        operands = (text.given(sig, 0), text.given(sig, 1, const=False))
        return text.call(name, "ark_swiglu_pairs", (), operands)


class RotaryEmbeddingParams(Params, frozen=True):
    head_dim: Heads
    interleaved: bool


class RotaryEmbedding(TaskKind):
    name = "rotary_embedding"
    params = RotaryEmbeddingParams
    headers = text.headers("rotary.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        width = sig.read(RotaryEmbeddingParams).head_dim
        rows, columns = matrix(sig, 0)
        need(
            width % 2 == columns % width == 0,
            f"{columns} columns are not divisible by head_dim={width}, or head_dim is odd",
        )
        shaped(sig, 1, (rows, columns))
        shaped(sig, 2, (1,), "int32")
        shaped(sig, 3, (width // 2,), "fp32", dense=True)

    def places(self, sig: Signature) -> Places:
        rows, columns = sig.operands[0].shape
        return Places(
            (range(rows), range(columns // sig.read(RotaryEmbeddingParams).head_dim)), span=True
        )

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, first, last = coord[:3]
        width = sig.read(RotaryEmbeddingParams).head_dim
        box = ((row, first * width), (row + 1, last * width))
        accesses = [Access(0, *box), Access(1, *box, write=True)]
        return [*accesses, whole(2, sig.operands[2]), whole(3, sig.operands[3])]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(RotaryEmbeddingParams)
        constants = (params.head_dim, params.interleaved)
        operands = [text.given(sig, i, const=i != 1) for i in range(4)]
        return text.call(name, "ark_rotary_embedding", constants, operands)


register(RopeKv())
register(RotaryEmbedding())
register(SwiGluPairs())
