"""The task kind `choose_each`, which chooses the next token of each of several sequences that are
decoded as a batch. The launch ends when all sequences have ended. Emitted by
ark.lower.ops.sequences.

`choose_each` params: tiles, batch.

operands: those of `choose` (ark.tasks.tokens), with a row (logits) or consecutive elements
(settings, position, candidates, tokens, output) for each sequence; all sequences share the stop
tokens. For a sequence within its prompt the next token is known, so only its position advances. The
position of a sequence that has ended does not change. Whether a sequence has ended is computed from
its settings, its position and its last token; no state records it. An optional last operand (1,) is
a word that the host writes while the kernel runs: if it is not 0, the iteration is the launch's
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
    Splits,
    count,
    is_dense,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.advance import leaving
from ark.tasks.tokens import HEADERS, SETTINGS

MAX_BATCH = 64
"""The most sequences that one plan decodes."""
WRITTEN = (2, 4, 5)  # position, tokens, output
LEAVE_OPERAND = 7  # the index of the word that the host writes, if there is one


class ChooseEachParams(Params, frozen=True):
    tiles: Splits
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]


class ChooseEach(TaskKind):
    name = "choose_each"
    params = ChooseEachParams
    headers = (*HEADERS, text.header("sequences.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ChooseEachParams)
        count(sig, LEAVE_OPERAND, LEAVE_OPERAND + 1)
        tiles, batch = params.tiles, params.batch
        rows, vocabulary = matrix(sig, 0)
        need(rows == batch, f"got {rows} rows of logits, expected {batch}")
        need(is_dense(sig.operands[0]), "the logits must be dense")
        need(
            tiles <= vocabulary and vocabulary + tiles <= INT_MAX,
            f"{tiles} tiles for {vocabulary} logits; expected at most one tile per logit, and "
            "32-bit indices",
        )
        shaped(sig, 1, (batch * len(SETTINGS),), "int32", dense=True)
        shaped(sig, 2, (batch,), "int32", dense=True)
        shaped(sig, 3, (batch * tiles, 2), "fp32", dense=True)
        tokens, stops = (typed(sig, index, "int32").shape for index in (4, 6))
        need(len(tokens) == len(stops) == 1, "tokens and stops must have one dimension")
        need(tokens[0] % batch == 0, f"{tokens[0]} tokens are not divisible by {batch} sequences")
        shaped(sig, 4, tokens, "int32", dense=True)
        shaped(sig, 5, tokens, "int32", dense=True)
        if len(sig.operands) > LEAVE_OPERAND:
            shaped(sig, LEAVE_OPERAND, (1,), "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return [whole(i, operand) for i, operand in enumerate(sig.operands)] + [
            whole(i, sig.operands[i], write=True) for i in WRITTEN
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        params = sig.read(ChooseEachParams)
        return 0.0, 8.0 * params.tiles * params.batch

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ChooseEachParams)
        batch, tiles = params.batch, params.tiles
        context, stops = sig.operands[4].shape[0] // batch, sig.operands[6].shape[0]
        constants = (sig.operands[0].shape[1], tiles, context, stops, batch, len(SETTINGS))
        operands = [text.given(sig, i, const=i not in WRITTEN) for i in range(LEAVE_OPERAND)]
        if len(sig.operands) == LEAVE_OPERAND:
            return text.call(name, "ark_choose_each", constants, operands)
        return leaving(
            name, sig, LEAVE_OPERAND, text.called("ark_choose_each", constants, operands)
        )


register(ChooseEach())
