"""Converts the sampling parameters of a sequence to the arrays that the device reads
(ark.tasks.adjusted). Called by ark.models.sequences and ark.serving.rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.tasks.adjusted import IN_PROMPT, OPTIONS


def check_tokens(sampling: SamplingParams, vocabulary: int, stops: Collection[int] = ()) -> None:
    """Raises InvalidUsageError if a token of logit_bias or suppress_tokens is not in the
    vocabulary, or if no token can be sampled. stops: further stop tokens, which cannot be sampled
    either before min_tokens is reached.
    """
    for token in (*sampling.logit_bias, *sampling.suppress_tokens):
        if token >= vocabulary:
            raise InvalidUsageError(
                f"the sampling parameters name the token {token}, but the vocabulary has "
                f"{vocabulary} tokens, 0 to {vocabulary - 1}"
            )
    held = {*stops, *sampling.stop_token_ids} if sampling.min_tokens else set()
    if (
        len({token for token in (*sampling.suppress_tokens, *held) if token < vocabulary})
        == vocabulary
    ):
        raise InvalidUsageError(
            f"suppress_tokens, and the stop tokens that min_tokens={sampling.min_tokens} holds "
            f"back, are all {vocabulary} tokens of the vocabulary, so that none can be sampled; "
            "leave at least one"
        )


def option_words(sampling: SamplingParams, masked: bool = False) -> np.ndarray:
    """The values of ark.tasks.adjusted.OPTIONS as int32 words. masked: True if the row has a mask
    of allowed tokens.
    """
    values = {name: getattr(sampling, name) for name in OPTIONS if name != "masked"}
    values["masked"] = int(masked)
    values["logprobs"] = 0 if sampling.logprobs is None else sampling.logprobs + 1
    words = [
        int(np.float32(v).view(np.int32)) if isinstance(v, float) else v for v in values.values()
    ]
    return np.array(words, np.int32)


def bias_of(
    sampling: SamplingParams, vocabulary: int, never: Collection[int] = ()
) -> np.ndarray | None:
    """The numbers that are added to the logits before sampling, fp32 (vocabulary,). None if all are
    0. never: further tokens that must not be sampled.
    """
    suppressed = (*sampling.suppress_tokens, *(t for t in never if t < vocabulary))
    if not sampling.logit_bias and not suppressed:
        return None
    bias = np.zeros(vocabulary, np.float32)
    bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    bias[list(suppressed)] = -np.inf
    return bias


def counts_of(
    sampling: SamplingParams, vocabulary: int, prompt: Sequence[int], text: Sequence[int] = ()
) -> np.ndarray | None:
    """How often each token occurs in `text`, int32 (vocabulary,), with the flag IN_PROMPT for
    tokens of the prompt. None if the sampling parameters have no penalty.
    """
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if penalties == (1.0, 0.0, 0.0):
        return None
    counts = np.bincount(np.array(text, np.int64), minlength=vocabulary).astype(np.int32)
    counts[list(prompt)] |= IN_PROMPT
    return counts
