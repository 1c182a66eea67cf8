"""Rotary frequencies and their scale equal transformers', for every kind of RoPE scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ark.models.fields import Fields
from ark.models.rope import KINDS, inverse_frequencies, read_rope
from tests.slow import examples

BASES = st.sampled_from([10000.0, 500000.0, 1e6]) | st.floats(100, 1e7)
STRETCH = st.integers(1, 64).map(float) | st.floats(1.0, 100.0)


@st.composite
def ropes(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    """Draws a head width, the model's number of positions, and rope_parameters."""
    width, kind = 4 * draw(st.integers(2, 64)), draw(st.sampled_from(KINDS))
    context, original = draw(st.integers(64, 131072)), draw(st.integers(64, 131072))
    part = draw(st.sampled_from([1.0, 1.0, 0.5, 0.75]))
    rotated = int(width * part) // 2 * 2
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(BASES)}
    if part != 1:
        rope["partial_rotary_factor"] = rotated / width
    if kind in ("linear", "dynamic", "llama3"):
        rope["factor"] = draw(STRETCH)
    if kind == "yarn":
        for name, values in {
            "factor": STRETCH,
            "attention_factor": st.floats(0.5, 2),
            "beta_fast": st.floats(8, 64),
            "beta_slow": st.floats(0.5, 4),
            "mscale": st.floats(0.2, 2),
            "mscale_all_dim": st.floats(0.2, 2),
            "truncate": st.booleans(),
        }.items():
            if name == "factor" or draw(st.booleans()):
                rope[name] = draw(values)
    if kind == "llama3":
        rope["low_freq_factor"] = draw(st.floats(0.5, 3))
        rope["high_freq_factor"] = rope["low_freq_factor"] + draw(st.floats(0.5, 5))
    if kind == "longrope":
        factors = st.lists(st.floats(0.5, 60), min_size=rotated // 2, max_size=rotated // 2)
        rope |= {"short_factor": draw(factors), "long_factor": draw(factors)}
        if draw(st.booleans()):
            rope["factor"] = draw(STRETCH)
    if kind in ("llama3", "yarn", "longrope") and draw(st.booleans()):
        rope["original_max_position_embeddings"] = original
    return width, context, rope


@settings(max_examples=examples(400), deadline=None)
@given(ropes(), st.booleans())
def test_frequencies_and_scale_are_those_of_transformers(
    drawn: tuple[int, int, dict[str, Any]], long: bool
) -> None:
    width, context, parameters = drawn
    config: Any = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=context,
        rope_parameters=dict(parameters),
    )
    kind = parameters["rope_type"]
    rope = read_rope(Fields("config.json", {"rope_parameters": parameters}), context)
    places = rope.original_context + (1 if long else 0)
    if kind == "default":
        result = ROPE_INIT_FUNCTIONS["linear"]
        config.rope_parameters["factor"] = 1.0
    else:
        result = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scale = result(config, seq_len=places if kind == "longrope" else None)
    pairs = len(frequencies)
    assert pairs == rope.rotated(width) // 2
    ours = inverse_frequencies(rope, width, places)
    assert ours.shape == (width // 2,) and ours.dtype == np.float32
    assert not ours[pairs:].any()
    # The kind llama3 subtracts low_freq_factor from a number of at most high_freq_factor and
    # divides by their difference, which magnifies differences in the last bit of the powers.
    low, high = rope.low_freq_factor, rope.high_freq_factor
    magnified = high / (high - low) if kind == "llama3" else 1.0
    np.testing.assert_allclose(ours[:pairs], frequencies.numpy(), rtol=3e-6 * magnified)
    assert rope.attention_factor == pytest.approx(scale, rel=1e-12)
