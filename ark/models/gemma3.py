"""The text decoder of Gemma 3 (Gemma team 2025). It is Gemma 2 with normalised queries and keys
instead of soft caps, and with separate rotary frequencies for sliding layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig, read_common, sliding_layers
from ark.models.fields import Fields
from ark.models.gemma2 import Gemma2, GemmaConfig, optional_window, read_gemma
from ark.models.llama import Attention
from ark.models.qwen3 import Qwen3Attention
from ark.models.rope import Rope, inverse_frequencies, rope_of


@dataclass(frozen=True)
class Gemma3Config(GemmaConfig):
    """The additional fields of Gemma 3's config. local_rope: the rotary embedding of layers with
    the sliding window. sliding: for each layer, True if its attention has the sliding window.
    """

    local_rope: Rope = field(default_factory=Rope)
    sliding: tuple[bool, ...] = ()


class Gemma3Attention(Qwen3Attention):
    """Attention with its own scale of scores, and norms of each head of queries and keys."""

    def __init__(self, c: Gemma3Config, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.query_norm = ark.parameter((c.head_dim,), ark.fp32)
        self.key_norm = ark.parameter((c.head_dim,), ark.fp32)
        rope = c.local_rope if c.sliding[number] else c.rope
        self.scale = c.query_scalar**-0.5 * rope.attention_factor**2


class Gemma3(Gemma2):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Gemma2.DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Gemma2.WEIGHTS,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm.weight",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm.weight",
    }

    def __init__(self, c: Gemma3Config, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.sliding = c.sliding
        self.local_frequencies = ark.parameter((c.head_dim // 2,), ark.fp32)
        self.local_frequencies.requires_grad = False
        self.local_frequencies.initializer = lambda: inverse_frequencies(
            c.local_rope, c.head_dim, self.context
        )

    def attention(self, c: GemmaConfig, dtype: ark.DataType, number: int) -> Attention:
        assert isinstance(c, Gemma3Config)
        return Gemma3Attention(c, dtype, number)

    def forward(self, state: ark.TokenState, rows: int) -> ark.Tensor:
        h = self.embedded(state, rows)
        for layer, slides in zip(self.layers, self.sliding, strict=True):
            h = layer(h, state, self.local_frequencies if slides else self.frequencies)
        return h

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json, as in Gemma 2. In addition, `layer_types`
        selects the layers with the sliding window; by default all layers have it except every
        `sliding_window_pattern`th. The layers with and without a window each have their own table
        in rope_parameters. In older files rope_scaling is for the layers without a window.
        """
        if fields.get("attn_logit_softcapping") is not None:
            raise UnsupportedError(
                f"{fields.source}: attn_logit_softcapping is given, but this architecture does "
                "not use it. Set it to null."
            )
        plain = {**fields.values, "rope_parameters": None, "rope_scaling": None}
        common = read_common(Fields(fields.source, plain), activation="gelu_pytorch_tanh")
        config = read_gemma(fields, common)
        tables = fields.table("rope_parameters") or Fields(fields.source, {})
        ropes = {}
        for kind, base in (("full", "rope_theta"), ("sliding", "rope_local_base_freq")):
            own = tables.table(f"{kind}_attention") or Fields(fields.source, {})
            older = fields.table("rope_scaling") if kind == "full" else None
            values = {**own.values, **(older.values if older else {})}
            whole = Fields(fields.source, {**plain, "rope_theta": fields.get(base)})
            ropes[kind] = rope_of(whole, Fields(own.source, values), config.max_position_embeddings)
        pattern = fields.size("sliding_window_pattern")
        usual = [(n + 1) % pattern != 0 for n in range(config.num_hidden_layers)]
        # With a window of 1 instead of the config's window, sliding layers are also found if the
        # config's window is null.
        slid = sliding_layers(config, fields, 1, usual).windows
        config = replace(config, rope=ropes["full"])
        gemma = Gemma3Config(
            **vars(config), local_rope=ropes["sliding"], sliding=tuple(map(bool, slid))
        )
        return sliding_layers(gemma, fields, optional_window(fields), usual)
