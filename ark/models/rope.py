"""Rotary position embeddings: reads their description in config.json, and computes their
frequencies.

Called by ark.models.config and the decoders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ark.errors import ModelError, UnsupportedError
from ark.models.fields import Fields


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding. `theta` is the base, `kind` the kind of scaling.

    `kind` is one of KINDS. `factor`: the factor by which "linear", "llama3" and "yarn" extend
    positions. `low_freq_factor` and `high_freq_factor` are used by llama3, `original_context`
    (tokens) by llama3, yarn and longrope. `partial`: the fraction of a head's elements that is
    rotated, from the first element on. `attention_factor`: multiplies cosine and sine (yarn,
    longrope). `beta_fast`, `beta_slow`: pairs that make between beta_slow and beta_fast rotations
    over the original context get a blend of scaled and unscaled frequencies (yarn). `truncate`:
    True if the bounds of these pairs are rounded to whole pairs. `short` and `long`: longrope's
    factors of each frequency, for contexts up to the original one and for longer ones.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    partial: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """The number of elements of a head that are rotated."""
        return int(head_dim * self.partial)


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(fields: Fields, context: int) -> Rope:
    """The rotary embedding from `rope_parameters` or, in older files, `rope_scaling`.

    context: the number of the model's positions, which is the default of the original context.
    """
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    table = table or Fields(fields.source, {})
    if any(isinstance(value, dict) for value in table.values.values()):
        raise UnsupportedError(
            f"{table.source}: the rotary embedding differs between kinds of layers "
            f"({', '.join(table.values)}), but this architecture has one for all layers; use a "
            "checkpoint with one rotary embedding"
        )
    return rope_of(fields, table, context)


def rope_of(fields: Fields, table: Fields, context: int) -> Rope:
    """The rotary embedding that `table` describes. fields: the fields of the whole config."""
    theta = (table if "rope_theta" in table.values else fields).number("rope_theta")
    kind = table.text("rope_type") or table.text("type") or "default"
    place = table if table.get("partial_rotary_factor") is not None else fields
    partial = place.number("partial_rotary_factor", 1.0)
    if partial > 1:
        raise place.wrong("partial_rotary_factor", "at most 1")
    plain = Rope(theta, partial=partial)
    # Dynamic scaling changes frequencies only for positions beyond the model's own. ark does not
    # support such positions, so the scaling has no effect.
    if kind in ("default", "dynamic"):
        return plain
    if kind == "linear":
        return replace(plain, kind=kind, factor=table.number("factor"))
    name = "original_max_position_embeddings"
    original = (fields if fields.get(name) is not None else table).size(name, context)
    stretched = replace(plain, kind=kind, original_context=original)
    if kind == "yarn":
        return _yarn(table, stretched, context)
    if kind in ("longrope", "su"):
        return _longrope(table, stretched, context)
    if kind != "llama3":
        raise UnsupportedError(
            f"{table.source}: the rotary embedding is scaled by {kind!r}, but ark supports "
            f"{', '.join(KINDS)}. Use a checkpoint with one of these."
        )
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"{table.source}: high_freq_factor {high:g} should be greater than low_freq_factor "
            f"{low:g}. Correct the two fields, or download the file again."
        )
    factor = table.number("factor")
    return replace(stretched, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(table: Fields, rope: Rope, context: int) -> Rope:
    """Reads yarn's fields (Peng et al., YaRN, 2023)."""
    factor = table.number("factor", context / rope.original_context)
    scales = [table.get(name) for name in ("mscale", "mscale_all_dim")]
    usual = _growth(factor)
    if all(scales):
        usual = _growth(factor, table.number("mscale"))
        usual /= _growth(factor, table.number("mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        attention_factor=table.number("attention_factor", usual),
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
    )


def _growth(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(table: Fields, rope: Rope, context: int) -> Rope:
    """Reads longrope's fields (Ding et al., LongRoPE, 2024)."""
    factor = table.number("factor", context / rope.original_context)
    usual = math.sqrt(1 + math.log(factor) / math.log(rope.original_context)) if factor > 1 else 1.0
    return replace(
        rope,
        kind="longrope",
        attention_factor=table.number("attention_factor", usual),
        short=table.numbers("short_factor"),
        long=table.numbers("long_factor"),
    )


def inverse_frequencies(
    rope: Rope, head_dim: int, context: int | None = None
) -> npt.NDArray[np.float32]:
    """The rotation per token, in radians, of each pair of a head's elements: float32, [head_dim /
    2]. It is 0 for pairs that are not rotated, which are the last ones.

    context: the number of reserved positions. If it is longer than the original context, longrope
    uses other factors.

    Su et al., RoFormer (2021), section 3.2; the kind llama3 divides low frequencies by `factor`,
    keeps high ones, and blends in between (reference code of Llama 3.1). Each step rounds to
    float32 as `transformers` does; the power is correctly rounded, which differs from PyTorch's in
    the last bit for a few frequencies of unusual bases.
    """
    rotated = rope.rotated(head_dim)
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    scaled = _stretched(rope, powers, context)
    return np.pad(scaled, (0, head_dim // 2 - len(scaled)))


def _stretched(
    rope: Rope, powers: npt.NDArray[np.float32], context: int | None
) -> npt.NDArray[np.float32]:
    """The frequencies after scaling by the rope's kind. Unscaled frequencies are 1 / `powers`."""
    one = np.float32(1)
    frequencies: npt.NDArray[np.float32] = one / powers
    factor = np.float32(rope.factor)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return np.asarray(frequencies / factor, np.float32)
    if rope.kind == "longrope":
        long = context is not None and context > rope.original_context
        factors = np.asarray(rope.long if long else rope.short, np.float32)
        return np.asarray(one / (factors * powers), np.float32)
    if rope.kind == "yarn":
        keep = one - _ramp(rope, len(powers))
        kept = one / (factor * powers) * (one - keep) + frequencies * keep
        return np.asarray(kept, np.float32)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    original = np.float32(rope.original_context)
    wavelengths = np.float32(2 * np.pi) / frequencies
    long = wavelengths > np.float32(rope.original_context / rope.low_freq_factor)
    short = wavelengths < np.float32(rope.original_context / rope.high_freq_factor)
    blend = (original / wavelengths - low) / (high - low)
    blended = (one - blend) * frequencies / factor + blend * frequencies
    return np.where(long, frequencies / factor, np.where(short, frequencies, blended))


def _ramp(rope: Rope, pairs: int) -> npt.NDArray[np.float32]:
    """How strongly yarn scales the frequency of each pair: from 0 for pairs that rotate often to 1
    for pairs that rotate rarely.
    """

    def pair(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return 2 * pairs * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 * (low == high)
    steps = np.arange(pairs, dtype=np.float32) - np.float32(low)
    ramp = np.clip(steps / np.float32(high - low), np.float32(0), np.float32(1))
    return np.asarray(ramp, np.float32)
