"""Draws tokens by a sampling op, and by its NumPy reference, for tests of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark
from ark.lower import registry
from ark.ops.tokens import MAX_STOPS, TokenState
from ark.tasks.adjusted import IN_PROMPT, OPTIONS
from ark.tasks.tokens import key_halves, noise_key

DEFAULTS = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logprobs": 0,
    "masked": 0,
}
LAST_PLACE = 1  # position of the prompt's last token
SPREAD = np.random.default_rng(4).standard_normal(61).astype(np.float32) * 2


@dataclass
class Drawn:
    """Results of `draw`. tokens: of each sequence. logprobs: (batch, context, 1 + 2 * top) words.
    given: the op's inputs.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray
    given: dict[str, np.ndarray] = field(default_factory=dict)


def words(options: dict[str, Any]) -> list[int]:
    values = {**DEFAULTS, **options}
    return [
        int(np.float32(values[n]).view(np.int32)) if isinstance(DEFAULTS[n], float) else values[n]
        for n in OPTIONS
    ]


def draw(
    logits: np.ndarray,
    steps: int,
    temperature: float = 0.0,
    *,
    bias: dict[int, float] | None = None,
    prompt: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    top: int = 0,
    seed: int = 0,
    last: tuple[int, ...] | None = None,
    allowed: np.ndarray | None = None,
    **options: Any,
) -> Drawn:
    """Draws `steps` tokens from each row of logits, which do not change."""
    batch, vocabulary = logits.shape
    context = LAST_PLACE + steps + 2
    state = TokenState.make(context, batch, vocabulary=vocabulary, logprobs=top)
    assert state.sampling is not None
    rows = ark.tensor(logits.shape)
    ark.sample(rows, state)
    bits = int(np.float32(temperature).view(np.int32))
    lasts = last or (LAST_PLACE,) * batch
    settings = []
    for b in range(batch):
        low, high = key_halves(noise_key(seed, b))
        settings.append([bits, 0, low, lasts[b], context, len(stops), high])
    counts = np.zeros((batch, vocabulary), np.int32)
    counts[:, list(prompt)] = IN_PROMPT
    added = np.zeros((batch, vocabulary), np.float32)
    for token, value in (bias or {}).items():
        added[:, token] = value
    mask = np.zeros((batch, -(-vocabulary // 32) * 4), np.uint8)
    if allowed is not None:
        bits = np.packbits(allowed, axis=1, bitorder="little")
        mask[:, : bits.shape[1]], options = bits, {**options, "masked": 1}
    values = {
        "settings": np.array(settings, np.int32).ravel(),
        "position": np.full(batch, LAST_PLACE),
        "tokens": np.zeros(batch * context),
        "output": np.full(batch * context, -1),
        "stops": np.array([*stops, *[-1] * (MAX_STOPS - len(stops))]),
        "options": np.array(words(options) * batch),
        "bias": added,
        "allowed": mask.view(np.int32),
        "counts": counts,
        "logprobs": np.full(batch * context * (1 + 2 * top), -1),
    }
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        rows.from_numpy(logits)
        for name, array in values.items():
            tensor = getattr(state, name, None) or getattr(state.sampling, name)
            tensor.from_numpy(array.astype(tensor.dtype().numpy))
        runtime.run(steps)
        after = Drawn(
            state.tokens.to_numpy().reshape(batch, context)[:, LAST_PLACE + 1 :],
            state.sampling.logprobs.to_numpy().reshape(batch, context, 1 + 2 * top),
            state.sampling.counts.to_numpy(),
            {**values, "logits": logits},
        )
    ark.Model.reset()
    return after


def referenced(drawn: Drawn, steps: int) -> np.ndarray:
    """Returns the tokens that the op's NumPy reference draws."""
    define = registry.get("sample_adjusted").reference
    assert define is not None
    own = drawn.given
    names = ("logits", "settings", "position", "tokens", "output", "stops")
    names += ("options", "bias", "allowed", "counts", "logprobs")
    inputs = [own[name].copy() for name in names]
    inputs[3] = inputs[3].astype(np.int64)
    for _ in range(steps):
        inputs[2], inputs[3], inputs[4], inputs[9], inputs[10] = define(inputs, {})
    return inputs[3].reshape(len(own["logits"]), -1)[:, LAST_PLACE + 1 :]
