"""The Gemma 2 decoder (Gemma team 2024). It has norms before and after attention and before and
after the feed-forward part, scaled embeddings, soft caps on scores and logits, and a sliding window
in every other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig, read_common, sliding_layers
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Head, Layer, Llama
from ark.models.stored import Stored, plus_one


@dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """The additional fields of Gemma 2's config. query_scalar: attention scores are divided by its
    square root. attention_cap, logits_cap: the soft caps of scores and logits, 0 for none.
    """

    query_scalar: float = 256.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0


class GemmaFeedForward(FeedForward):
    """The gated perceptron with GELU in its tanh approximation."""

    def gated(self, gate: ark.Tensor, up: ark.Tensor) -> ark.Tensor:
        return ark.gelu(gate) * up


class FourNormLayer(Layer):
    """A layer that normalises the input and the output of its attention and of its feed-forward
    part. norms: the class of the norms.
    """

    def __init__(
        self,
        c: LlamaConfig,
        dtype: ark.DataType,
        attention: Attention,
        mlp: ark.Module,
        norms: ark.DataType,
    ) -> None:
        super().__init__(c, dtype, attention, mlp)
        self.attention_norm = ark.parameter((c.hidden_size,), norms)
        self.attention_after = ark.parameter((c.hidden_size,), norms)
        self.mlp_norm = ark.parameter((c.hidden_size,), norms)
        self.mlp_after = ark.parameter((c.hidden_size,), norms)

    def forward(self, h: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        x = ark.rmsnorm(h, self.attention_norm, self.eps)
        x = self.attention(x, state, frequencies)
        h = h + ark.rmsnorm(x, self.attention_after, self.eps)
        x = self.mlp(ark.rmsnorm(h, self.mlp_norm, self.eps))
        return h + ark.rmsnorm(x, self.mlp_after, self.eps)


class Gemma2Attention(Attention):
    """Attention with its own scale and a soft cap of the scores."""

    def __init__(self, c: GemmaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.scale = c.query_scalar**-0.5 * c.rope.attention_factor**2
        self.softcap = c.attention_cap


class CappedHead(Head):
    """Computes logits with a soft cap."""

    def __init__(self, c: GemmaConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.cap = c.logits_cap

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        scores = ark.tanh(ark.linear(x, self.weight) * (1 / self.cap))
        return ark.mul(scores, self.cap, name="logits")


class Gemma2(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        "layers.{}.attention_after": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
        "layers.{}.mlp_after": "model.layers.{}.post_feedforward_layernorm.weight",
    }

    def __init__(self, c: GemmaConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.norm = ark.parameter((c.hidden_size,), ark.fp32)
        # The factor is rounded to the type of the embeddings that it multiplies.
        self.multiplier = float(dtype.numpy(c.hidden_size**0.5))

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, GemmaConfig)
        attention, mlp = self.attention(c, dtype, number), GemmaFeedForward(c, dtype)
        return FourNormLayer(c, dtype, attention, mlp, norms=ark.fp32)

    def attention(self, c: GemmaConfig, dtype: ark.DataType, number: int) -> Attention:
        """The attention of one layer."""
        return Gemma2Attention(c, dtype, number)

    def head_of(self, c: LlamaConfig, dtype: ark.DataType) -> Head:
        assert isinstance(c, GemmaConfig)
        return CappedHead(c, dtype) if c.logits_cap else Head(c, dtype)

    def embedded(self, state: ark.TokenState, rows: int) -> ark.Tensor:
        return super().embedded(state, rows) * self.multiplier

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        if parameter.endswith(("query_norm", "key_norm")):
            return plus_one(c.head_dim)
        norm = parameter.endswith(("norm", "_after"))
        return plus_one(c.hidden_size) if norm else None

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. Every other layer has the sliding window,
        beginning with the first, unless `layer_types` is given.
        """
        config = read_gemma(fields, read_common(fields, activation="gelu_pytorch_tanh"))
        usual = [n % 2 == 0 for n in range(config.num_hidden_layers)]
        return sliding_layers(config, fields, optional_window(fields), usual)


def optional_window(fields: Fields) -> int:
    """The field `sliding_window`; 0 if it is null."""
    return fields.size("sliding_window") if fields.get("sliding_window") is not None else 0


def read_gemma(fields: Fields, common: LlamaConfig) -> GemmaConfig:
    """The config of a decoder, with Gemma's fields."""
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedError(
            f"{fields.source}: use_bidirectional_attention is true, but ark supports causal "
            "attention only. Use a checkpoint with causal attention."
        )

    def cap(name: str) -> float:
        return fields.number(name) if fields.get(name) is not None else 0.0

    return GemmaConfig(
        **vars(common),
        query_scalar=fields.number("query_pre_attn_scalar"),
        attention_cap=cap("attn_logit_softcapping"),
        logits_cap=cap("final_logit_softcapping"),
    )
