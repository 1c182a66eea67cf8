"""The task kind for the gradients of attention of many rows. A task has a tile of the rows of one
head, and computes the attention weights again from the scores and from each query row's logarithm
of the sum of exponentials (FlashAttention-2, Dao 2023). Neither scores nor weights are stored.
Emitted by ark.lower.ops.attention_gradient.

`attention_gradient` params: heads, head_dim, rows (of a tile), scale, causal, keys, mask, fill.

operands: q (batch, m, heads * head_dim), k and v (batch, context, heads * head_dim), the gradient
of the result (as q), logarithms and slopes (batch, m, heads) fp32, [mask as in ark.tasks.
attention_tiles], gradients. The logarithm of a row is that of the sum of its exponentials, infinity
for a row without a visible key. The slope is the dot product of a row's result with its gradient.
With `keys`, a tile has rows of keys and values, and the gradients are those of k and v; otherwise a
tile has rows of queries, and the gradient is that of q.

coord: batch, head, first row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ark.ir.attributes import MaskForm
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INT_MAX,
    Heads,
    Params,
    Places,
    Size,
    count,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.attention_masks import check_mask, mask_of

LOGARITHMS, SLOPES = 4, 5  # indices of operands
MAX_UNIT_HEAD_ELEMENTS = 128  # elements of a head, for bodies on matrix units


class AttentionGradientParams(Params, frozen=True):
    heads: Heads
    head_dim: Heads
    rows: Size
    scale: float
    causal: bool
    keys: bool
    mask: MaskForm = ""
    fill: float = -math.inf


class AttentionGradient(TaskKind):
    name = "attention_gradient"
    params = AttentionGradientParams
    headers = text.headers("pages.h", "attention_tiles.h", "attention_gradient.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(AttentionGradientParams)
        count(sig, 7 + p.keys + bool(p.mask))
        query, key = typed(sig, 0), typed(sig, 1)
        need(
            len(query.shape) == 3, f"queries have shape {list(query.shape)}, expected 3 dimensions"
        )
        batch, rows, columns = query.shape
        need(
            columns == p.heads * p.head_dim,
            f"queries have {columns} columns, expected {p.heads} heads * {p.head_dim}",
        )
        context = key.shape[1] if len(key.shape) == 3 else 0
        for index in (1, 2):
            shaped(sig, index, (batch, context, columns), query.dtype)
        shaped(sig, 3, query.shape, query.dtype)
        for index in (LOGARITHMS, SLOPES):
            shaped(sig, index, (batch, rows, p.heads), "fp32")
        for index in outputs(sig):
            shaped(sig, index, key.shape if p.keys else query.shape, query.dtype)
        if p.mask:
            check_mask(sig, SLOPES + 1, p.mask, (batch, p.heads, rows, context))
            need(p.fill == -math.inf, f"the score of hidden keys must be -inf, got {p.fill}")
        need(context + rows <= INT_MAX, "element indices exceed 32 bits")

    def places(self, sig: Signature) -> Places:
        p = sig.read(AttentionGradientParams)
        batch, rows, _ = sig.operands[1 if p.keys else 0].shape
        return Places((range(batch), range(p.heads), range(0, rows, p.rows)))

    def wide(self, sig: Signature) -> frozenset[int]:
        whole = (0, 1, 2, 3, *outputs(sig))
        steps = [s * sig.operands[i].itemsize for i in whole for s in sig.operands[i].strides[:-1]]
        steps.append(sig.read(AttentionGradientParams).head_dim * sig.operands[0].itemsize)
        return frozenset(whole if all(s % 16 == 0 for s in steps) else ())

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        p = sig.read(AttentionGradientParams)
        batch, head, row = coord
        queries, keys = ranges(sig, row)

        def box(index: int, rows: tuple[int, int], width: int, write: bool = False) -> Access:
            first, last = (batch, rows[0], head * width), (batch + 1, rows[1], (head + 1) * width)
            return Access(index, first, last, write=write)

        accesses = [
            *(box(i, rows, p.head_dim) for i, rows in enumerate((queries, keys, keys, queries))),
            *(box(i, queries, 1) for i in (LOGARITHMS, SLOPES)),
        ]
        if p.mask:
            shape = sig.operands[SLOPES + 1].shape
            lo = (
                batch % shape[0],
                head if shape[1] > 1 else 0,
                *(r[0] if n > 1 else 0 for n, r in zip(shape[2:], (queries, keys), strict=True)),
            )
            sides = zip(shape[2:], (queries, keys), strict=True)
            sizes = [r[1] - r[0] if n > 1 else 1 for n, r in sides]
            accesses.append(Access(SLOPES + 1, lo, tuple(map(operator.add, lo, (1, 1, *sizes)))))
        own = keys if p.keys else queries
        return [*accesses, *(box(i, own, p.head_dim, True) for i in outputs(sig))]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """The operations of a tile. A tile of keys has four products, a tile of queries three."""
        p = sig.read(AttentionGradientParams)
        sizes = sig.operands[0].shape[1], sig.operands[1].shape[1]
        products = 4 if p.keys else 3
        return 2.0 * products * p.head_dim * scores(p, *sizes, coord[2]), super().cost(sig, coord)[
            1
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _scratch(sig, *_cut(sig, machine), machine.cooperative)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        keys = str(bool(sig.read(AttentionGradientParams).keys)).lower()
        constants = (shape(sig), *_cut(sig, machine), keys)
        return text.call(name, "ark_attention_gradient", constants, given(sig))


def outputs(sig: Signature) -> range:
    """The indices of the gradients among the operands."""
    p = sig.read(AttentionGradientParams)
    first = SLOPES + 1 + bool(p.mask)
    return range(first, first + 1 + p.keys)


def ranges(sig: Signature, row: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows of queries and the rows of keys, each as (first, last + 1), that the tile which
    begins at `row` reads.
    """
    p = sig.read(AttentionGradientParams)
    return _ranges(p, sig.operands[0].shape[1], sig.operands[1].shape[1], row)


def _ranges(
    p: AttentionGradientParams, rows: int, context: int, row: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    if p.keys:
        end = min(row + p.rows, context)
        return (min(row, rows - 1) if p.causal else 0, rows), (row, end)
    end = min(row + p.rows, rows)
    return (row, end), (0, min(end, context) if p.causal else context)


def scores(p: AttentionGradientParams, rows: int, context: int, row: int) -> float:
    """The number of scores that the tile which begins at `row` computes. rows, context: the number
    of queries and of keys.
    """
    (first, last), (begin, end) = _ranges(p, rows, context, row)
    hidden = min(p.rows, last - first, end - begin) ** 2 / 2 if p.causal else 0.0
    return (last - first) * (end - begin) - hidden


def shape(sig: Signature) -> str:
    """The text of the C++ type that holds the compile-time constants of a signature."""
    p = sig.read(AttentionGradientParams)
    batch, rows, _ = sig.operands[0].shape
    causal = str(bool(p.causal)).lower()
    sizes = (batch, p.heads, p.heads, p.head_dim, rows, sig.operands[1].shape[1], p.rows)
    words = (*sizes, causal, 0, "false", "true", 0, 1)
    return f"ArkAttentionShape<{', '.join(map(str, words))}>"


def given(sig: Signature) -> tuple[str, ...]:
    """The texts of the arguments with which the device function is called: the scale, the operands
    that are read, the mask, and two gradients.
    """
    p = sig.read(AttentionGradientParams)
    read = [text.given(sig, i) for i in range(SLOPES + 1)]
    mask = mask_of(sig, SLOPES + 1, p.mask, p.fill, sig.operands[0].shape[0])
    written = [text.given(sig, i, const=False) for i in outputs(sig)]
    if not p.keys:
        written.append("ArkNoOperand{}")
    return (text.literal(p.scale), *read, mask, *written)


def _scratch(sig: Signature, chunk: int, strip: int, cooperative: bool) -> int:
    width = sig.read(AttentionGradientParams).head_dim
    held = 0 if cooperative else 4 * chunk * width
    return 4 * (strip * (4 * width + 2 * chunk) + max(1, held))


def _cut(sig: Signature, machine: Machine) -> tuple[int, int]:
    """The numbers of rows that the common device function processes at a time: of the side over
    which a tile walks, and of the tile. It processes fewer rows of the tile if little shared memory
    is free.
    """
    chunk = 32
    strip = min(16 if machine.cooperative else 32, sig.read(AttentionGradientParams).rows)
    room = machine.task_bytes
    while strip > 1 and _scratch(sig, chunk, strip, machine.cooperative) > room:
        strip = -(-strip // 2)
    return chunk, strip


register(AttentionGradient())
