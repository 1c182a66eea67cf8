"""Runs transformers' Llama in float64 with the weights of one of ark's plans.

A plan has packed weights. Query, key and value are one weight, in which the rows of query and key
are in pairs that are rotated together. In the weight of gate and up, the rows alternate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import transformers

from ark.ir.dtype import DataType
from ark.models.config import LlamaConfig


def logits(
    config: LlamaConfig, dtype: DataType, weights: Mapping[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """Returns (tokens, vocabulary): the logits of the token that follows each token of the
    sequence.

    weights: by their names in the plan, before they are rounded to `dtype`.
    """
    theirs = transformers.LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(theirs).double()
    model.load_state_dict(_state(config, dtype, weights))
    model.model.rotary_emb.inv_freq = torch.tensor(weights["frequencies"], dtype=torch.float32)
    with torch.no_grad():
        result = model(torch.tensor(np.asarray(tokens, np.int64))[None], use_cache=False)
    return np.asarray(result.logits[0])


def _state(
    config: LlamaConfig, dtype: DataType, weights: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    def rounded(name: str) -> torch.Tensor:
        return torch.tensor(weights[name].astype(dtype.numpy).astype(np.float64))

    width = config.head_dim

    def unpaired(rows: torch.Tensor) -> torch.Tensor:
        pairs = rows.reshape(-1, width // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    sizes = [width * n for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    state = {
        "model.embed_tokens.weight": rounded("embedding"),
        "model.norm.weight": rounded("norm"),
        "lm_head.weight": rounded("head.weight"),
    }
    for i in range(config.num_hidden_layers):
        ours, name = f"layers.{i}.", f"model.layers.{i}."
        query, key, value = rounded(f"{ours}attention.query+key+value").split(sizes)
        gate_and_up = rounded(f"{ours}mlp.gate+up")
        state |= {
            f"{name}self_attn.q_proj.weight": unpaired(query),
            f"{name}self_attn.k_proj.weight": unpaired(key),
            f"{name}self_attn.v_proj.weight": value,
            f"{name}self_attn.o_proj.weight": rounded(f"{ours}attention.output"),
            f"{name}mlp.gate_proj.weight": gate_and_up[0::2],
            f"{name}mlp.up_proj.weight": gate_and_up[1::2],
            f"{name}mlp.down_proj.weight": rounded(f"{ours}mlp.down"),
            f"{name}input_layernorm.weight": rounded(f"{ours}attention_norm"),
            f"{name}post_attention_layernorm.weight": rounded(f"{ours}mlp_norm"),
        }
    return state
