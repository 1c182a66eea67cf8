"""Fields missing in config.json have the defaults of transformers' class of the architecture, and
the same layers have sliding windows.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from ark.errors import ModelError
from ark.models.config import LlamaConfig
from ark.models.gemma2 import GemmaConfig
from ark.models.gemma3 import Gemma3Config
from ark.models.mixtral import MixtureConfig
from ark.models.registry import ARCHITECTURES, MODEL_TYPES
from ark.models.smollm3 import SmolLm3Config

FULL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "max_position_embeddings": 777,
    "rms_norm_eps": 3e-4,
    "rope_theta": 12345.0,
    "bos_token_id": 7,
    "eos_token_id": [8, 9],
    "tie_word_embeddings": True,
}
MIXTURE: dict[str, Any] = {**FULL, "num_experts_per_tok": 3, "sliding_window": 33}
GEMMA: dict[str, Any] = {
    **{n: v for n, v in FULL.items() if n != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 33,
    "sliding_window": 44,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 12.0,
    "attn_logit_softcapping": 13.0,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": FULL,
    "mistral": {**FULL, "sliding_window": 33},
    "mixtral": {**MIXTURE, "num_local_experts": 12},
    "qwen2": {
        **{n: v for n, v in FULL.items() if n != "head_dim"},
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "smollm3": {
        **FULL,
        "vocab_size": 128300,
        "use_sliding_window": True,
        "sliding_window": 33,
        "no_rope_layers": [0, 1, 1],
        "no_rope_layer_interval": 2,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "olmo2": {**FULL, "vocab_size": 50300},
    "granite": {
        **FULL,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "phi3": {
        **{n: v for n, v in FULL.items() if n != "head_dim"},
        "vocab_size": 32100,
        "sliding_window": 33,
        "original_max_position_embeddings": 55,
    },
    "gemma2": GEMMA,
    "gemma3_text": {
        **GEMMA,
        "vocab_size": 262208,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_local_base_freq": 77.0,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": None,
    },
    "glm": {**FULL, "vocab_size": 151400, "head_dim": 20, "attention_bias": True},
    "glm4": {**FULL, "vocab_size": 151400, "head_dim": 20, "attention_bias": True},
    "qwen3": {
        **FULL,
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        **MIXTURE,
        "use_sliding_window": True,
        "num_experts": 12,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 50,
        "norm_topk_prob": True,
    },
}
LATENT: dict[str, Any] = {
    **{name: value for name, value in FULL.items() if name not in ("head_dim",)},
    "num_key_value_heads": 32,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 50,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
FIELDS["deepseek_v2"] = {**LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
FIELDS["deepseek_v3"] = LATENT
FIELDS["gpt_oss"] = {
    **FULL,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 33,
    "swiglu_limit": 6.5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
# Fields that transformers leaves empty if they are missing, and that the model needs.
NEEDED = {"deepseek_v2": ("num_experts_per_tok", "n_group", "topk_group")}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
)


def theirs(kind: str, values: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **values)


def windows(kind: str, config: PreTrainedConfig) -> list[int]:
    """Returns the sliding window of each layer in transformers, 0 for layers without one."""
    layers = range(config.num_hidden_layers)
    if kind in ("llama", "olmo2", "granite", "glm", "glm4", "deepseek_v2", "deepseek_v3"):
        return [0 for _ in layers]
    window = config.sliding_window or 0
    if getattr(config, "layer_types", None) and kind != "qwen3_moe":
        return [window * (config.layer_types[n] == "sliding_attention") for n in layers]
    return [window for _ in layers]


def check(kind: str, values: dict[str, Any]) -> None:
    """Asserts that every field that ark reads has the value that transformers reads from the same
    config.
    """
    ours = LlamaConfig.from_dict({**values, "architectures": [architecture(kind)]})
    right = theirs(kind, values)
    latent = kind.startswith("deepseek")  # one key head of latent rows
    for name in SIZES:
        if not (latent and name == "num_key_value_heads"):
            assert getattr(ours, name) == getattr(right, name), name
    heads = right.hidden_size // right.num_attention_heads
    assert latent or ours.head_dim == (getattr(right, "head_dim", None) or heads)
    stops = right.eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    assert list(ours.eos_token_ids) == stops
    ropes = right.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.rope.partial == ropes.get("partial_rotary_factor", 1.0)
    if isinstance(ours, Gemma3Config):
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
        assert list(ours.sliding) == [k == "sliding_attention" for k in right.layer_types]
    if isinstance(ours, GemmaConfig):
        assert ours.query_scalar == right.query_pre_attn_scalar
        assert ours.logits_cap == (right.final_logit_softcapping or 0)
        if kind == "gemma2":
            assert ours.attention_cap == (right.attn_logit_softcapping or 0)
    assert [ours.window(n) for n in range(ours.num_hidden_layers)] == windows(kind, right)
    for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier"):
        assert getattr(ours, name, None) == getattr(right, name, None)
    if isinstance(ours, SmolLm3Config):
        assert list(ours.rotating) == [bool(r) for r in right.no_rope_layers]
    if isinstance(ours, MixtureConfig):
        assert ours.experts_per_token == right.num_experts_per_tok
        assert ours.experts == (right.n_routed_experts if latent else right.num_local_experts)
        moe = kind == "qwen3_moe" or latent
        assert ours.normalised == (right.norm_topk_prob if moe else True)
        inner = right.moe_intermediate_size if moe else right.intermediate_size
        assert ours.expert_size == inner


def architecture(kind: str) -> str:
    return MODEL_TYPES[kind]


def test_every_architecture_is_tested() -> None:
    assert {architecture(kind) for kind in FIELDS} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", FIELDS)
def test_all_fields_are_read(kind: str) -> None:
    check(kind, FIELDS[kind])


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, fields in FIELDS.items() for field in fields]
)
def test_absent_field_has_the_architectures_own_value(kind: str, field: str) -> None:
    """A config without one field is read as by transformers. The other fields keep their values,
    except those that contradict the default.
    """
    values = {name: value for name, value in FIELDS[kind].items() if name != field}
    if field in ("num_hidden_layers", "use_sliding_window", "sliding_window"):
        values.pop("layer_types", None)
        values.pop("no_rope_layers", None)
    if field in NEEDED.get(kind, ()):
        with pytest.raises(ModelError, match=f"{field} should be a positive integer"):
            check(kind, values)
        return
    check(kind, values)


@pytest.mark.parametrize("kind", FIELDS)
def test_empty_config_gives_the_architectures_defaults(kind: str) -> None:
    check(kind, {name: FIELDS[kind][name] for name in NEEDED.get(kind, ())})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": None}),
        ("mixtral", {"num_local_experts": 8, "num_experts": 4}),
        ("qwen3", {"layer_types": None}),
        ("qwen3", {"layer_types": None, "max_window_layers": 0}),
        ("qwen3", {"layer_types": None, "max_window_layers": 3}),
        ("qwen3", {"layer_types": None, "max_window_layers": 9}),
        ("qwen3", {"layer_types": None, "use_sliding_window": False}),
        ("qwen3", {"layer_types": None, "sliding_window": None}),
        ("gemma2", {"layer_types": None}),
        ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("glm4", {"eos_token_id": None}),
        ("smollm3", {"no_rope_layers": None, "layer_types": None}),
        ("smollm3", {"use_sliding_window": False, "layer_types": None}),
        ("qwen2", {"layer_types": None}),
        ("qwen3_moe", {"use_sliding_window": False}),
        ("qwen3_moe", {"sliding_window": None}),
        ("llama", {"sliding_window": 64}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}),
        ("llama", {"bos_token_id": None, "eos_token_id": None}),
    ],
)
def test_null_is_not_absent(kind: str, change: dict[str, Any]) -> None:
    check(kind, {**FIELDS[kind], **change})


def test_experts_have_two_names() -> None:
    values = {n: v for n, v in FIELDS["qwen3_moe"].items() if n != "num_experts"}
    check("qwen3_moe", {**values, "num_local_experts": 5})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"]}, "3 layers, but attention windows for 1"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types should be a list"),
        ({"layer_types": "full_attention"}, "layer_types should be a list"),
        ({"use_sliding_window": False}, "give no window"),
        ({"layer_types": None, "max_window_layers": -1}, "max_window_layers should be"),
        ({"sliding_window": 0}, "sliding_window should be"),
    ],
)
def test_invalid_windows_are_refused(change: dict[str, Any], words: str) -> None:
    values = {**FIELDS["qwen3"], "architectures": ["Qwen3ForCausalLM"], **change}
    with pytest.raises(ModelError, match=words):
        LlamaConfig.from_dict(values)
