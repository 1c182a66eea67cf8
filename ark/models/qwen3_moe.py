"""The Qwen3-MoE decoder (Qwen team 2025): Qwen3's attention, followed by a mixture of experts."""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig, one_window, read_common
from ark.models.fields import Fields
from ark.models.llama import Layer, Llama
from ark.models.mixtral import Experts, MixtureConfig, read_mixture
from ark.models.qwen3 import Qwen3, Qwen3Attention


class Qwen3Moe(Qwen3):
    """The decoder."""

    UNQUANTIZED: ClassVar[tuple[str, ...]] = (*Qwen3.UNQUANTIZED, "layers.{}.mlp.router")
    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Qwen3.WEIGHTS,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate.weight",
        "layers.{}.mlp.gate.{}": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "layers.{}.mlp.up.{}": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "layers.{}.mlp.down.{}": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, MixtureConfig)
        return Layer(c, dtype, Qwen3Attention(c, dtype, number), Experts(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> MixtureConfig:
        """The shape of a model from its config.json, with the fields of experts.
        `num_local_experts` is another name of `num_experts`. If `use_sliding_window` is true, all
        layers have the sliding window.
        """
        if fields.size("decoder_sparse_step") != 1 or fields.get("mlp_only_layers"):
            raise UnsupportedError(
                f"{fields.source}: some layers have no experts (decoder_sparse_step, "
                "mlp_only_layers), but ark supports models with experts in all layers only. "
                "Use such a checkpoint."
            )
        name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
        config = read_mixture(
            fields,
            read_common(fields),
            fields.size(name),
            fields.size("moe_intermediate_size"),
            fields.flag("norm_topk_prob"),
        )
        return one_window(config, fields) if fields.flag("use_sliding_window") else config
