"""Rotary position embeddings as config.json describes them, and their frequencies.

Called by ark.models.config and the decoders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ark.errors import ModelError, UnsupportedError
from ark.models.fields import Fields


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: `theta` is the base, `kind` the way it is stretched.

    `kind` is "default", "linear" or "llama3". `factor` serves the last two; the two frequency
    factors and `original_context` (tokens) serve llama3 alone.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def read_rope(fields: Fields, context: int) -> Rope:
    """The rotary embedding from `rope_parameters` or, as older files write it, `rope_scaling`.

    context: the model's positions, for which llama3 was stretched where nothing else is said.
    """
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    table = table or Fields(fields.source, {})
    if any(isinstance(value, dict) for value in table.values.values()):
        raise UnsupportedError(
            f"{table.source}: the rotary embedding differs between kinds of layers "
            f"({', '.join(table.values)}), but ark has one for all. Use a checkpoint with one."
        )
    for place in (fields, table):
        if (part := place.number("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedError(
                f"{place.source}: partial_rotary_factor is {part:g}, but ark rotates whole heads. "
                "Use a checkpoint whose rotary embedding covers the whole head."
            )
    theta = (table if "rope_theta" in table.values else fields).number("rope_theta")
    kind = table.text("rope_type") or table.text("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, table.number("factor"))
    if kind != "llama3":
        raise UnsupportedError(
            f"{table.source}: the rotary embedding is scaled by {kind!r}, but ark knows default, "
            "linear and llama3. Use a checkpoint with one of these."
        )
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"{table.source}: high_freq_factor {high:g} should be greater than low_freq_factor "
            f"{low:g}. Correct the two fields, or download the file again."
        )
    original = table.size("original_max_position_embeddings", context)
    return Rope(theta, kind, table.number("factor"), low, high, original)


def inverse_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians a token by which each pair of a head's elements is rotated: float32, [head_dim / 2].

    Su et al., RoFormer (2021), section 3.2; the llama3 kind divides low frequencies by `factor`,
    keeps high ones and blends between (Llama 3.1's reference code). Each step rounds to float32 as
    `transformers` does; the power is the correctly rounded one, which differs from PyTorch's in the
    last bit for a few frequencies of unusual bases.
    """
    one = np.float32(1)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64))
    frequencies = one / powers.astype(np.float32)
    if rope.kind == "default":
        return frequencies
    factor = np.float32(rope.factor)
    if rope.kind == "linear":
        return frequencies / factor
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    original = np.float32(rope.original_context)
    wavelengths = np.float32(2 * np.pi) / frequencies
    long = wavelengths > np.float32(rope.original_context / rope.low_freq_factor)
    short = wavelengths < np.float32(rope.original_context / rope.high_freq_factor)
    blend = (original / wavelengths - low) / (high - low)
    blended = (one - blend) * frequencies / factor + blend * frequencies
    return np.where(long, frequencies / factor, np.where(short, frequencies, blended))
