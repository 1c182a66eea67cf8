"""Computes the perplexity of a checkpoint on a text, for `ark bench perplexity`. It is the
exponential of the mean negative log likelihood of each token, given the earlier tokens of its
window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.llama import LOGITS
from ark.models.plans import choose_chunk, choose_context
from ark.runtime.executor import Executor
from ark.serving.loading import loaded
from ark.tasks.tokens import SETTINGS

USUAL_CHUNK = 32
"""The default number of tokens per iteration. The logits of all of them are in memory at the same
time.
"""


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text. value: the perplexity. tokens: the number of predicted tokens.
    context: the number of tokens of a window.
    """

    value: float
    tokens: int
    context: int


def perplexity(
    checkpoint: Checkpoint,
    backend: Backend,
    device: Device,
    tokens: Sequence[int],
    *,
    context: int | None = None,
    chunk: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of a checkpoint on a text's tokens.

    The text is cut into windows of `context` tokens (by default the model's limit, at most 4,096).
    The first token of a window is not predicted. chunk: the number of tokens per iteration; with 1
    the model computes one token at a time, as in decoding. Raises InvalidUsageError for fewer than
    two tokens.
    """
    if len(tokens) < 2:
        raise InvalidUsageError(
            f"the text has {len(tokens)} tokens; perplexity needs at least 2, the second of which "
            "is predicted"
        )
    length = min(choose_context(checkpoint, context), len(tokens))
    if length < 2:
        raise InvalidUsageError("a window of 1 token predicts nothing; give a context of 2 or more")
    rows = choose_chunk(chunk, length, USUAL_CHUNK)
    if rows < 1:
        raise InvalidUsageError("perplexity needs a chunk of at least 1 token; omit the chunk")
    dtype = DataType.from_numpy(checkpoint.dtype)
    shape = Shape(checkpoint.config, dtype, length, rows, scores=True)
    tell = progress or (lambda step, done, total: None)
    executor = loaded(checkpoint, backend, device, shape, budget_s=60.0, progress=progress)
    total, count = 0.0, 0
    try:
        for first in range(0, len(tokens), length):
            window = tokens[first : first + length]
            total += _negative_log_likelihood(executor, window, rows, length)
            count += len(window) - 1
            tell("reading the text", first + len(window), len(tokens))
    finally:
        executor.close(collective=False)
    return Perplexity(math.exp(total / count), count, length)


def _negative_log_likelihood(
    executor: Executor, window: Sequence[int], rows: int, context: int
) -> float:
    """The sum of the negative log likelihoods of a window's tokens, except the first token."""
    text = np.zeros(context, np.int32)
    text[: len(window)] = window
    settings = np.zeros(len(SETTINGS), np.int32)
    settings[SETTINGS.index("last")] = len(window) - 1
    executor.write("tokens", text)
    executor.write("position", np.zeros(1, np.int32))
    executor.write("settings", settings)
    total = 0.0
    for first in range(0, len(window) - 1, rows):
        run = executor.start([1])
        try:
            run.wait()
        finally:
            run.stop()
        targets = np.asarray(window[first + 1 : first + 1 + rows])
        logits = executor.read(LOGITS).reshape(rows, -1)[: len(targets)].astype(np.float64)
        most = logits.max(axis=1)
        sums = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
        total += float((sums - logits[np.arange(len(targets)), targets]).sum())
    return total
