"""The task kind `kv_append`, which appends rows of keys or values to a cache, beginning at the
sequence's position. Emitted by ark.lower.ops.caches.

operands: rows (m, heads * width), position (1,), cache (heads, context, width).

coord: the head that the task appends.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import INT_MAX, Places, count, matrix, need, shaped
from ark.tasks import text
from ark.tasks.cache_rows import appender, cache_operand, cache_texts


class KvAppend(TaskKind):
    name = "kv_append"
    headers = text.headers("kv_append.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        rows, columns = matrix(sig, 0)
        shaped(sig, 1, (1,), "int32")
        cache = cache_operand(sig, 2).shape
        need(
            len(cache) == 3 and columns == cache[0] * cache[2] and rows * cache[2] <= INT_MAX,
            f"rows of {columns} columns do not fit a cache of shape {list(cache)}",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.operands[2].shape[0]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        rows = sig.operands[0].shape[0]
        _, context, width = sig.operands[2].shape
        head = coord[0]
        return [
            Access(0, (0, head * width), (rows, (head + 1) * width)),
            whole(1, sig.operands[1]),
            Access(2, (head, 0, 0), (head + 1, context, width), write=True, append_only=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 2.0 * sig.operands[0].shape[0] * sig.operands[2].shape[2] * 4

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return cache_texts(sig, 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        _, context, width = sig.operands[2].shape
        constants = (sig.operands[0].shape[0], width, context)
        operands = [text.given(sig, i, const=i != 2) for i in range(3)]
        return text.call(name, appender(sig, 2, "ark_kv_append"), constants, operands)


register(KvAppend())
