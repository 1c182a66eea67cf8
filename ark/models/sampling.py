"""How tokens of a request are chosen, in vLLM's names where they mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How a request is continued.

    temperature: 0 is greedy. top_k: 0 considers every token. top_p, min_p, typical_p: 1, 0 and 1
    switch them off. repetition_penalty: 1 is none. seed: None draws one. max_tokens: at most so
    many new tokens; None up to the context. stop: strings that end the text. logprobs: how many of
    the most probable tokens are reported beside the chosen one; None reports nothing.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
