"""The Qwen3-MoE decoder (Qwen team 2025): Qwen3's attention before a mixture of experts."""

from __future__ import annotations

from typing import ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig
from ark.models.fields import Fields
from ark.models.llama import Layer
from ark.models.mixtral import Experts, MixtureConfig, read_mixture
from ark.models.qwen3 import Qwen3, Qwen3Attention


class Qwen3Moe(Qwen3):
    """The decoder."""

    WEIGHTS: ClassVar[dict[str, str]] = {
        **Qwen3.WEIGHTS,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate.weight",
        "layers.{}.mlp.gate.{}": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "layers.{}.mlp.up.{}": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "layers.{}.mlp.down.{}": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType) -> Layer:
        assert isinstance(c, MixtureConfig)
        return Layer(c, dtype, Qwen3Attention(c, dtype), Experts(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> MixtureConfig:
        """As Llama.read_config, with this architecture's fields."""
        if fields.size("decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers"):
            raise UnsupportedError(
                f"{fields.source}: some layers have no experts (decoder_sparse_step, "
                "mlp_only_layers), but ark runs models whose layers all have. Use one of these."
            )
        name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
        return read_mixture(
            fields,
            fields.size(name),
            fields.size("moe_intermediate_size"),
            fields.flag("norm_topk_prob", False),
        )
