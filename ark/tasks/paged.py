"""Two task kinds for caches of keys and values in pages of a pool that sequences share (vLLM's
PagedAttention, Kwon et al. 2023): `paged_attention` for attention of single rows, `paged_append` to
append rows. Tiles of many rows are in ark.tasks.attention_tiles. pages.h computes addresses of
positions, paged.h has the device functions.

A cache is (pool, kv_heads, page, head_dim). Position p of a sequence is row p % page of a page; the
page's number is entry p // page in the sequence's row of the table.

`paged_attention` params: heads, kv_heads, head_dim, splits, scale, streamed (as of `attention`).

operands: q (m, heads * head_dim), keys, values, the table's row (1, most), position (1,), output,
[fresh (1, 2 * kv_heads * head_dim): the newest key and value, if nothing else is appended in the
iteration]. Row r of q sees positions 0 .. position + r. coord, output and splits as of `attention`
(ark.tasks.attention); `attention_merge` combines the splits.

`paged_append` operands: rows (m, heads * head_dim), table (sequences, most), position (sequences,),
cache.

coord: head. Either each row belongs to a different sequence, or all rows belong to one, beginning
at its position. A row whose position has no place in the table or the pool is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Places,
    count,
    matrix,
    need,
    shaped,
)
from ark.plan.types import Fetch, FetchPages, Growth
from ark.tasks import text
from ark.tasks.attention import (
    CHUNK_POSITIONS,
    SplitAttention,
    SplitAttentionParams,
    in_place_bytes,
)
from ark.tasks.cache_rows import appender, cache_operand, cache_texts, element_bytes

PAGED_FRESH = 6  # the operand `fresh`


def has_newest(sig: Signature) -> bool:
    """True if the newest key and value are an operand besides the caches."""
    return len(sig.operands) > PAGED_FRESH


class PagedAttention(SplitAttention):
    name = "paged_attention"
    params = SplitAttentionParams
    headers = text.headers("attention.h", "pages.h", "paged.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, PAGED_FRESH, PAGED_FRESH + 1)
        p = sig.read(SplitAttentionParams)
        pool, page = _pool(sig, 1)
        for index in (1, 2):
            shaped(
                sig, index, (pool, p.kv_heads, page, p.head_dim), sig.operands[1].dtype, dense=True
            )
        most = sig.operands[3].shape[-1]
        shaped(sig, 3, (1, most), "int32")
        shaped(sig, 4, (1,), "int32")
        self.check_rows(sig, PAGED_FRESH, page * most)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        p, (row, head, split) = sig.read(SplitAttentionParams), coord[:3]
        group, width = p.heads // p.kv_heads, p.head_dim
        pool, _, page, _ = sig.operands[1].shape
        begin, end = head * group, (head + 1) * group
        cache = (0, head, 0, 0), (pool, head + 1, page, width)
        box = (row, begin * width), (row + 1, end * width)
        written = Access(5, *box, write=True)
        if p.splits > 1:
            part = (row, begin, split, 0), (row + 1, end, split + 1, width + 2)
            written = Access(5, *part, write=True)
        older = has_newest(sig)
        read = [Access(0, *box), *(Access(i, *cache, append_only=older) for i in (1, 2))]
        for first in (head, p.kv_heads + head) if older else ():
            read.append(Access(PAGED_FRESH, (0, first * width), (1, (first + 1) * width)))
        tables = [whole(i, sig.operands[i]) for i in (3, 4)]
        return [*read, *tables, written]

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        params = sig.read(SplitAttentionParams)
        rows, (_, head, split) = params.streamed, coord[:3]
        if not rows:
            return ()
        cache = sig.operands[1]
        count, kv_heads, page, width = cache.shape
        row = width * cache.itemsize
        pages = FetchPages(3, page, kv_heads * page * row, count)
        growth = Growth(4, row, split, params.splits, beside=2, pages=pages)
        room = sig.operands[3].shape[-1] * page * row
        return (Fetch(1, head * page * row, room, rows * row, growth),)

    def packets(self, sig: Signature) -> frozenset[int]:
        newest = {PAGED_FRESH} if has_newest(sig) else set()
        return frozenset({0, 5} | {i for i in newest if sig.operands[i].dtype == "fp32"})

    def early(self, sig: Signature) -> frozenset[int]:
        return frozenset({1, 2, 3, 4} if has_newest(sig) else {3, 4})

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        p = sig.read(SplitAttentionParams)
        context = sig.operands[3].shape[-1] * sig.operands[1].shape[2]
        share = context * p.head_dim / p.splits
        return 4.0 * share * p.heads / p.kv_heads, 2.0 * share * element_bytes(sig.operands[1])

    def scratch(self, sig: Signature, machine: Machine) -> int:
        p = sig.read(SplitAttentionParams)
        return in_place_bytes(p.heads // p.kv_heads, p.head_dim)

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return cache_texts(sig, 1)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p = sig.read(SplitAttentionParams)
        pool, page = _pool(sig, 1)
        group, most = p.heads // p.kv_heads, sig.operands[3].shape[-1]
        constants = (group, p.kv_heads, p.head_dim, page, pool, most, p.splits, CHUNK_POSITIONS)
        operands = [text.given(sig, i, const=i != 5) for i in range(PAGED_FRESH + 1)]
        given = (text.literal(p.scale), *operands)
        return text.call(name, "ark_paged_attention", constants, given)


class PagedAppend(TaskKind):
    name = "paged_append"
    headers = text.headers("attention.h", "pages.h", "paged.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        rows, columns = matrix(sig, 0)
        pool, page = _pool(sig, 3)
        _, heads, _, width = sig.operands[3].shape
        shaped(sig, 3, (pool, heads, page, width), sig.operands[3].dtype, dense=True)
        table = sig.operands[1].shape
        need(
            len(table) == 2 and table[0] in (1, rows),
            f"the page table has shape {list(table)}, expected (sequences, pages)",
        )
        shaped(sig, 1, table, "int32", dense=True)
        shaped(sig, 2, (table[0],), "int32", dense=True)
        need(
            columns == heads * width,
            f"rows have {columns} columns, expected {heads} heads * {width}",
        )
        need(
            rows * width <= INT_MAX and page * table[1] + rows <= INT_MAX,
            "element indices exceed 32 bits",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.operands[3].shape[1]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        rows, head = sig.operands[0].shape[0], coord[0]
        pool, _, page, width = sig.operands[3].shape
        return [
            Access(0, (0, head * width), (rows, (head + 1) * width)),
            *(whole(i, sig.operands[i]) for i in (1, 2)),
            Access(3, (0, head, 0, 0), (pool, head + 1, page, width), write=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 2.0 * sig.operands[0].shape[0] * sig.operands[3].shape[3] * 4

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return cache_texts(sig, 3)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        sequences, most = sig.operands[1].shape
        pool, _, page, width = sig.operands[3].shape
        constants = (sig.operands[0].shape[0], sequences, width, page, pool, most)
        operands = [text.given(sig, i, const=i != 3) for i in range(4)]
        return text.call(name, appender(sig, 3, "ark_paged_append"), constants, operands)


def _pool(sig: Signature, index: int) -> tuple[int, int]:
    """The number of pages of a pool, and of positions per page."""
    shape = cache_operand(sig, index).shape
    need(len(shape) == 4, f"the cache has shape {list(shape)}, expected 4 dimensions")
    return shape[0], shape[2]


register(PagedAttention())
register(PagedAppend())
