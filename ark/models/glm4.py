"""The GLM-4 decoders (GLM team 2024): Llama with biases of queries, keys and values, fused gate and
up projections, and rotation of the first half of each head, in neighbouring pairs. GLM-4-0414 also
normalises the outputs of attention and of the feed-forward part.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig, read_common
from ark.models.fields import Fields
from ark.models.gemma2 import FourNormLayer
from ark.models.llama import FeedForward, Layer, Llama
from ark.models.phi3 import FUSED
from ark.models.qwen2 import BIASES, BiasedAttention
from ark.models.stored import Stored, parts


class GlmAttention(BiasedAttention):
    """Attention in which the two elements of a rotated pair are neighbours."""

    def rotated(self, x: ark.Tensor, position: ark.Tensor, frequencies: ark.Tensor) -> ark.Tensor:
        return ark.rotary_embedding(x, position, frequencies, interleaved=True)


class Glm(Llama):
    """The decoder of GLM-4-9B."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
        "attention_bias": True,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        **BIASES,
        **{n: f"model.layers.{{}}.{f}.weight" for n, f in FUSED.items() if ".mlp." in n},
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return Layer(c, dtype, GlmAttention(c, dtype, number), FeedForward(c, dtype))

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        gate, up = parts([c.intermediate_size, c.intermediate_size])
        return {"mlp.gate": gate, "mlp.up": up}.get(parameter.removeprefix("layers.{}."))

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. A config without end tokens gets those of the
        architecture.
        """
        if not fields.flag("attention_bias"):
            raise UnsupportedError(
                f"{fields.source}: attention_bias is false, but ark supports this architecture "
                "only with biases of queries, keys and values. Use a checkpoint with biases."
            )
        if fields.get("eos_token_id") is None:
            own = {"eos_token_id": cls.DEFAULTS["eos_token_id"]}
            fields = Fields(fields.source, {**fields.values, **own})
        return read_common(fields, biased=True, partial=True)


class Glm4(Glm):
    """The decoder of GLM-4-0414."""

    WEIGHTS: ClassVar[dict[str, str]] = {
        **Glm.WEIGHTS,
        "layers.{}.attention_after": "model.layers.{}.post_self_attn_layernorm.weight",
        "layers.{}.mlp_after": "model.layers.{}.post_mlp_layernorm.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return FourNormLayer(
            c, dtype, GlmAttention(c, dtype, number), FeedForward(c, dtype), norms=dtype
        )
