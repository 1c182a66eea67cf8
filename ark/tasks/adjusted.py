"""Two task kinds for sampling a token with penalties, biases, filters of the distribution and
reported log probabilities: `adjust_logits` changes the logits of a tile, and `sample_adjusted`
draws a token from them. Emitted by ark.lower.ops.adjusted.

`adjust_logits` params: tiles.

operands: logits (1, vocab), options, settings, position, tokens, stops, bias (1, vocab), counts (1,
vocab), scores (1, vocab), candidates (tiles, 2), shares (tiles, 3), allowed (1, vocab / 32).

coord: tile. A task adds the bias, excludes the tokens whose bit of `allowed` is 0 if the option
`masked` is not 0, applies the penalties and stores the scores. It stores its best candidate in
`candidates`, as `sample` does. In `shares` it stores the largest of its logits, the sum of their
exponentials relative to that, and its largest score.

`sample_adjusted` params: tiles, top.

operands: logits, options, settings, position, tokens, stops, scores, candidates, shares, counts,
drawn (1, 2), logprobs (host).

coord: 0. It keeps the tokens that pass the filters top-k, top-p, min-p and typical-p, applied in
this order as by transformers' logits processors, and draws one of them. It adds 1 to the token's
count. It reports the token's log probability, and the highest log probabilities, computed from the
unchanged logits.

A sequence that is within its prompt or has ended draws nothing. `choose` and `choose_each`
(ark.tasks.tokens, ark.tasks.sequences) use the drawn token as their only candidate.

options: OPTIONS. counts: for each token how often it was sampled, plus IN_PROMPT if it is in the
prompt. logprobs: 1 + 2 * top words for each position of the text. They are the log probability of
the sampled token, then the ids of the `top` most probable tokens, then their log probabilities. A
word is -1 until it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import INT_MAX, Params, Places, Splits, count, matrix, need, shaped, typed
from ark.tasks import text
from ark.tasks.tokens import HEADERS, SETTINGS

OPTIONS = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logprobs",
    "masked",
)
"""The names of a sequence's options, in the order in which the device reads them. Each is an int32;
floats are stored as their bits. logprobs: 0 to report nothing, otherwise the number of log
probabilities plus 1. masked: 1 if the sequence has a mask of allowed tokens, otherwise 0.
"""
MASK_BITS = 32  # tokens per word of a mask
IN_PROMPT = 1 << 30
MAX_LOGPROBS = 64
DIGIT_VALUES = 16
ADJUST_WRITTEN, SAMPLE_WRITTEN = (8, 9, 10), (9, 10, 11)
_HEADERS = (*HEADERS, text.header("sequences.h"), text.header("adjusted.h"))


class AdjustParams(Params, frozen=True):
    tiles: Splits


class SampleAdjustedParams(Params, frozen=True):
    tiles: Splits
    top: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


def _check_state(sig: Signature, tiles: int) -> int:
    """Checks the first six operands, which both task kinds of this module share. Returns the
    vocabulary's size.
    """
    rows, vocabulary = matrix(sig, 0)
    need(
        rows == 1 and tiles <= vocabulary,
        f"got {rows} rows of {vocabulary} logits in {tiles} tiles; expected 1 row and no more "
        "tiles than logits",
    )
    need(vocabulary + tiles <= INT_MAX, f"{vocabulary} logits exceed 32-bit indices")
    shaped(sig, 1, (len(OPTIONS),), "int32", dense=True)
    shaped(sig, 2, (len(SETTINGS),), "int32", dense=True)
    shaped(sig, 3, (1,), "int32")
    context, stops = (typed(sig, index, "int32").shape for index in (4, 5))
    need(len(context) == len(stops) == 1, "tokens and stops must have one dimension")
    return vocabulary


class AdjustLogits(TaskKind):
    name = "adjust_logits"
    params = AdjustParams
    headers = _HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 12)
        tiles = sig.read(AdjustParams).tiles
        row = (1, _check_state(sig, tiles))
        shaped(sig, 6, row, "fp32", dense=True)
        shaped(sig, 7, row, "int32", dense=True)
        shaped(sig, 8, row, "fp32", dense=True)
        shaped(sig, 9, (tiles, 2), "fp32", dense=True)
        shaped(sig, 10, (tiles, 3), "fp32", dense=True)
        shaped(sig, 11, (1, -(-row[1] // MASK_BITS)), "int32", dense=True)

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.read(AdjustParams).tiles),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        tile, tiles, vocabulary = coord[0], sig.read(AdjustParams).tiles, sig.operands[0].shape[1]
        lo, hi = vocabulary * tile // tiles, vocabulary * (tile + 1) // tiles
        return [
            *(Access(i, (0, lo), (1, hi)) for i in (0, 6, 7)),
            *(whole(i, sig.operands[i]) for i in range(1, 6)),
            Access(11, (0, lo // MASK_BITS), (1, -(-hi // MASK_BITS))),
            Access(8, (0, lo), (1, hi), write=True),
            Access(9, (tile, 0), (tile + 1, 2), write=True),
            Access(10, (tile, 0), (tile + 1, 3), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 16.0 * sig.operands[0].shape[1] / sig.read(AdjustParams).tiles

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        context, stops = sig.operands[4].shape[0], sig.operands[5].shape[0]
        constants = (sig.operands[0].shape[1], sig.read(AdjustParams).tiles, context, stops)
        operands = [text.given(sig, i, const=i not in ADJUST_WRITTEN) for i in range(12)]
        return text.call(name, "ark_adjust_logits", constants, operands)


class SampleAdjusted(TaskKind):
    name = "sample_adjusted"
    params = SampleAdjustedParams
    headers = _HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 12)
        given = sig.read(SampleAdjustedParams)
        tiles = given.tiles
        row = (1, _check_state(sig, tiles))
        shaped(sig, 6, row, "fp32", dense=True)
        shaped(sig, 7, (tiles, 2), "fp32", dense=True)
        shaped(sig, 8, (tiles, 3), "fp32", dense=True)
        shaped(sig, 9, row, "int32", dense=True)
        shaped(sig, 10, (1, 2), "fp32", dense=True)
        words = sig.operands[4].shape[0] * (1 + 2 * given.top)
        shaped(sig, 11, (words,), "int32", dense=True)

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return [whole(i, sig.operands[i]) for i in range(10)] + [
            whole(i, sig.operands[i], write=True) for i in SAMPLE_WRITTEN
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 4 * DIGIT_VALUES * machine.warps

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 8.0 * sig.read(SampleAdjustedParams).tiles

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        context, stops = sig.operands[4].shape[0], sig.operands[5].shape[0]
        vocabulary, given = sig.operands[0].shape[1], sig.read(SampleAdjustedParams)
        constants = (vocabulary, given.tiles, context, stops, given.top)
        operands = [text.given(sig, i, const=i not in SAMPLE_WRITTEN) for i in range(12)]
        return text.call(name, "ark_sample_adjusted", constants, operands)


for _kind in (AdjustLogits(), SampleAdjusted()):
    register(_kind)
