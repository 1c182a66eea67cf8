"""LlamaConfig compared with transformers' reading of the same config.json, and the configs that it
refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.models.checkpoint import model_weights
from ark.models.config import LlamaConfig, Rope, builtin_config, rope_inverse_frequencies
from tests.checkpoints import LLAMA3_ROPE

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    {**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "factor": 32.0},
]
ODD_ROPE = {
    **LLAMA3_ROPE,
    "rope_theta": 25000.0,
    "factor": 3.0,
    "low_freq_factor": 1.2,
    "high_freq_factor": 3.7,
}


def transformers_frequencies(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    values = {**BASE, "head_dim": head_dim, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(**values, rope_parameters=dict(rope))
    return LlamaRotaryEmbedding(config).inv_freq.numpy()


def ark_frequencies(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    values = {**BASE, "head_dim": head_dim, "rope_parameters": rope}
    return rope_inverse_frequencies(LlamaConfig.from_dict(values))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}")
@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
def test_frequencies_are_those_of_transformers_bit_for_bit(
    rope: dict[str, Any], head_dim: int
) -> None:
    ours, theirs = ark_frequencies(rope, head_dim), transformers_frequencies(rope, head_dim)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}")
def test_frequencies_of_an_unusual_head_are_within_two_last_bits(rope: dict[str, Any]) -> None:
    """On processors without AVX-512, PyTorch's power is not the nearest float32 for one of the
    frequencies.
    """
    ours, theirs = ark_frequencies(rope, 48), transformers_frequencies(rope, 48)
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=2)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_frequencies_of_unusual_bases_are_within_two_last_bits(head_dim: int) -> None:
    ours, theirs = ark_frequencies(ODD_ROPE, head_dim), transformers_frequencies(ODD_ROPE, head_dim)
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=2)


@pytest.mark.parametrize("rope", [*ROPES, ODD_ROPE])
def test_old_and_new_spelling_of_the_rope_give_the_same(rope: dict[str, Any]) -> None:
    scaling = {name: rope[name] for name in rope if name not in ("rope_theta", "rope_type")}
    old, oldest = (
        {
            **BASE,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {spelling: rope["rope_type"], **scaling},
        }
        for spelling in ("rope_type", "type")
    )
    new = LlamaConfig.from_dict({**BASE, "rope_parameters": rope})
    assert LlamaConfig.from_dict(old) == LlamaConfig.from_dict(oldest) == new
    assert new.rope.theta == rope["rope_theta"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_theta": 500000,
            "eos_token_id": [3, 7],
        },
        {"bos_token_id": 5, "torch_dtype": "bfloat16", "rope_scaling": LLAMA3_ROPE},
    ],
)
def test_fields_are_those_of_transformers(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **change}))
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    for directory in (tmp_path, tmp_path / "saved"):
        ours = LlamaConfig.from_directory(directory)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "tie_word_embeddings",
            "bos_token_id",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
        stops = theirs.eos_token_id
        assert list(ours.eos_token_ids) == (stops if isinstance(stops, list) else [stops])
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.rope.kind == theirs.rope_parameters["rope_type"]


def test_dtype_is_read_in_both_spellings() -> None:
    assert LlamaConfig.from_dict(BASE).dtype is None
    assert LlamaConfig.from_dict({**BASE, "torch_dtype": "float16"}).dtype == "float16"
    assert LlamaConfig.from_dict({**BASE, "dtype": "torch.bfloat16"}).dtype == "bfloat16"


def test_generation_config_names_the_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert LlamaConfig.from_directory(tmp_path).eos_token_ids == (2, 9)
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert LlamaConfig.from_directory(tmp_path).eos_token_ids == (2,)


def test_mistral_without_a_window_is_a_llama() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    actual = LlamaConfig.from_dict(mistral)
    assert actual.architecture == "MistralForCausalLM"
    assert replace(actual, architecture="LlamaForCausalLM") == LlamaConfig.from_dict(BASE)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedError, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gpt_neox"}, UnsupportedError, "gpt_neox"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, UnsupportedError, "LlamaForCausalLM, X"),
        ({"architectures": 3}, UnsupportedError, "architecture 3"),
        ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"mlp_bias": True}, UnsupportedError, "mlp_bias"),
        ({"torch_dtype": "int8"}, UnsupportedError, "int8"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "quant_method is 'None'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, UnsupportedError, "spiral"),
        ({"partial_rotary_factor": 1.5}, ModelError, "partial_rotary_factor should be at most 1"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
            ModelError,
            "1 factors of rotary frequencies for 8 pairs",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": 3, "long_factor": [2]}},
            ModelError,
            "short_factor should be a list of positive numbers",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelError, "factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, ModelError, "greater"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            UnsupportedError,
            "differs between kinds of layers",
        ),
        ({"rope_theta": None}, ModelError, "rope_theta should be a positive number"),
        ({"rms_norm_eps": None}, ModelError, "rms_norm_eps should be a positive number"),
        ({"rope_scaling": [1]}, ModelError, "rope_scaling should be an object"),
        ({"hidden_size": "64"}, ModelError, r'hidden_size .* found "64"'),
        ({"hidden_size": None}, ModelError, "hidden_size should be a positive integer"),
        ({"num_hidden_layers": 0}, ModelError, "num_hidden_layers"),
        ({"vocab_size": True}, ModelError, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, ModelError, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, ModelError, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, ModelError, "4 attention heads and 3 key/value heads"),
        ({"num_attention_heads": 128, "head_dim": None}, ModelError, "head_dim"),
        ({"head_dim": 15}, ModelError, "even"),
        ({"eos_token_id": 320}, ModelError, "320 tokens"),
        ({"eos_token_id": ["</s>"]}, ModelError, "eos_token_id"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LlamaConfig.from_dict({**BASE, **change})


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        LlamaConfig.from_directory(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        LlamaConfig.from_directory(tmp_path / "nowhere")
    config = tmp_path / "config.json"
    for content, words in (
        (b'{"hidden_size": ', "not valid JSON"),
        (b"[]", "holds an array"),
        (b"null", "holds null"),
    ):
        config.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            LlamaConfig.from_directory(tmp_path)
    config.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not valid JSON"):
        LlamaConfig.from_directory(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        LlamaConfig.from_directory(config)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248)]
)
def test_builtin_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    config = builtin_config(name)
    stored = {weight.stored_name: weight.shape for weight in model_weights(config)}
    assert sum(int(np.prod(shape)) for shape in stored.values()) == parameters
    assert config.rope == Rope(500000.0, "llama3", 32.0 if "1b" in name else 8.0, 1.0, 4.0, 8192)


def test_unknown_builtin_shape_names_the_known_ones() -> None:
    with pytest.raises(InvalidUsageError, match=r"llama-3\.2-1b, llama-3\.1-8b"):
        builtin_config("llama-9")
