"""Small random checkpoints in Hugging Face's format, for tests that read or run one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BOS, EOS = "<s>", "</s>"
SMALLEST_VOCAB = 258
TEXT = (
    "The quick brown fox jumps over the lazy dog. A tile of a matmul leaves for its peer when it "
    "is done, not when the op is; the other tiles of the matmul follow it over the same channel."
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 16,
    hidden: int = 64,
    intermediate: int = 96,
    layers: int = 2,
    vocab: int = 320,
    context: int = 128,
    tie: bool = False,
    rope: dict[str, Any] | None = None,
    kind: str = "llama",
    **others: Any,
) -> Path:
    """Writes config, weights, tokenizer and generation config into `directory` and returns it.

    `kind` is the model_type, `others` are further fields of its config. `rope` is what newer
    transformers call rope_parameters; `vocab` is at least 258 (the bytes, a begin and an end
    token); `shards` above 1 writes about that many files of weights and an index. Weights are
    random but scaled so that logits spread and greedy decoding seldom meets a tie.
    """
    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"vocab {vocab} is below {SMALLEST_VOCAB}")
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **({} if head_dim is None else {"head_dim": head_dim}),
        vocab_size=vocab,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope or {"rope_type": "default", "rope_theta": 10000.0}),
        tie_word_embeddings=tie,
        bos_token_id=0,
        eos_token_id=1,
        **{"pad_token_id": None, **others},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(
        directory, max_shard_size=math.ceil(size / shards) if shards > 1 else "9GB"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(vocab), bos_token=BOS, eos_token=EOS
    ).save_pretrained(directory)
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint. It uses attention in plain torch operators, because its
    default may be `sdpa`, which omits the soft cap of scores (Gemma 2 in transformers 5.17). It
    loops over experts, because transformers' grouped products support only multiples of 16 bytes.
    The clamp of gpt-oss is set from the config, which transformers 5.17 does not read.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()
    model.config._experts_implementation = "eager"
    if model.config.model_type == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp.experts.limit = model.config.swiglu_limit
    return model


def make_endless(directory: Path, context: int) -> Path:
    """A small model that runs quickly, with a long context and no end token."""
    result = make_checkpoint(
        directory,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=8,
        hidden=32,
        intermediate=48,
        context=context,
    )
    for name in ("config.json", "generation_config.json"):
        path = result / name
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    return result


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fills every weight from one seeded generator; norms vary about 1, biases about 0.

    A tied embedding is small compared with the layers' results; otherwise each token would predict
    itself.
    """
    embedding = 0.05 if model.config.tie_word_embeddings else 1.0
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(noise)
        elif weight.ndim == 1:
            weight.copy_(1 + 0.1 * noise)
        elif "embed_tokens" in name:
            weight.copy_(noise * embedding)
        else:
            weight.copy_(noise * (3 if "lm_head" in name else 1) / math.sqrt(weight.shape[-1]))


def make_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` tokens that opens each text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return tokenizer
