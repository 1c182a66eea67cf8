"""Trains the small Llama checkpoint that this repository ships; run by hand, best on a GPU.

Reads the plain text that text.py writes (chapters between blank lines, one paragraph per line).
Trains a byte-level BPE vocabulary and a `LlamaForCausalLM` on it. Reports the loss on every
twentieth chapter, which is not trained on. Writes an ordinary Hugging Face directory in bfloat16.
Everything is seeded: the same text, options and machine give the same run. Needs torch,
transformers, tokenizers and safetensors.

    python examples/train/train.py bible.txt -o examples/noah
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BOS_ID, EOS_ID = 0, 1
HELD_OUT_EVERY = 20
PROMPTS = (
    "In the beginning",
    "The king said to his servants,",
    "Moses went up to the mountain, and",
    "A wise man",
    "Then Jesus went out to the sea, and the multitude",
    "Yahweh is my shepherd;",
)


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with a byte-level BPE vocabulary, which starts every text with the begin
    token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def token_stream(tokenizer: Tokenizer, chapters: list[str]) -> torch.Tensor:
    """All chapters in one row of ids: begin, text, end, begin, text, end, ..."""
    ids = [i for chapter in tokenizer.encode_batch(chapters) for i in (*chapter.ids, EOS_ID)]
    return torch.tensor(ids)


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "initializer_range": 0.02,
        "intermediate_size": args.intermediate,
        "max_position_embeddings": args.context,
        "mlp_bias": False,
        "num_attention_heads": args.heads,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": args.vocab,
    }


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Applies dropout, in training, to the results of attention and MLP blocks before they are
    added to the residual stream.
    """

    def drop(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, in nats, of each id of `batch` [rows, length] given the ids before
    it.
    """
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(batch).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class Windows:
    """Training rows: a begin token, then the text from the start of a random paragraph on."""

    def __init__(self, stream: torch.Tensor, newline: int, context: int, seed: int) -> None:
        self.stream, self.context = stream, context
        starts = 1 + torch.nonzero((stream == newline) | (stream == BOS_ID)).flatten()
        self.starts = starts[starts + context - 1 <= len(stream)].cpu()
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> torch.Tensor:
        """A batch of ids, [rows, context]."""
        picks = torch.randint(len(self.starts), (rows,), generator=self.random)
        offsets = self.starts[picks].to(self.stream.device)[:, None]
        body = self.stream[offsets + torch.arange(self.context - 1, device=self.stream.device)]
        return torch.nn.functional.pad(body, (1, 0), value=BOS_ID)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, stream: torch.Tensor, context: int) -> float:
    """The mean loss, in nats per token, over the stream, in rows that each start with a begin
    token.
    """
    model.eval()
    rows = stream[: len(stream) // (context - 1) * (context - 1)].view(-1, context - 1)
    rows = torch.nn.functional.pad(rows, (1, 0), value=BOS_ID)
    losses = [token_loss(model, part).item() * len(part) for part in rows.split(32)]
    model.train()
    return sum(losses) / len(rows)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 5% of the steps, then a cosine down to a twentieth of the peak."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def train(
    model: LlamaForCausalLM,
    rows: Windows,
    held_out: torch.Tensor,
    steps: int,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Trains in place and returns the last figures of the run."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    forward = torch.compile(model) if args.compile else model
    mean, held = 0.0, math.nan
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, args.lr)
        loss = token_loss(forward, rows.draw(args.batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach() if step == 0 else 0.98 * mean + 0.02 * loss.detach()
        if (step + 1) % args.every == 0 or step + 1 == steps:
            held = held_out_loss(model, held_out, args.context)
            print(f"step {step + 1}/{steps} train {mean:.4f} held-out {held:.4f}", flush=True)
    return {"steps": steps, "train_loss": float(mean), "held_out": held}


def save(directory: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, config: dict) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and its two companions."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().bfloat16().cpu() for k, v in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    companions = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer_config.json": {
            "bos_token": BOS,
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "model_max_length": config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, content in companions.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def print_samples(model: LlamaForCausalLM, tokenizer: Tokenizer, tokens: int, seed: int) -> None:
    """Prints two continuations of each prompt: a greedy one, and one sampled at temperature 0.8."""
    model.eval()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
        for label, how in (("greedy", {}), ("t=0.8", {"temperature": 0.8, "top_k": 50})):
            torch.manual_seed(seed)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=bool(how),
                max_new_tokens=tokens,
                pad_token_id=EOS_ID,
                **how,
            )
            print(f"--- {label}: {tokenizer.decode(out[0].tolist())}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    for name, value in (
        ("vocab", 2048),
        ("hidden", 256),
        ("intermediate", 576),
        ("layers", 6),
        ("heads", 4),
        ("kv-heads", 2),
        ("head-dim", 32),
        ("context", 512),
        ("batch", 64),
        ("every", 400),
        ("sample-tokens", 120),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--epochs", type=float, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chapters = args.text.read_text(encoding="utf-8").strip().split("\n\n")
    kept = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY]
    tokenizer = train_tokenizer(kept, args.vocab)
    stream = token_stream(tokenizer, kept).to(device)
    held_out = token_stream(tokenizer, chapters[::HELD_OUT_EVERY]).to(device)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    rows = Windows(stream, newline, args.context, args.seed)
    steps = max(1, round(args.epochs * len(stream) / (args.batch * args.context)))

    config = model_config(args)
    model = LlamaForCausalLM(LlamaConfig(**config, dtype="float32")).to(device)
    add_dropout(model, args.dropout)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {len(stream)} + {len(held_out)} tokens, {steps} steps", flush=True)
    begin = time.perf_counter()
    figures: dict[str, float] = train(model.train(), rows, held_out, steps, args)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    save(args.output, model, tokenizer, config)
    model.to(torch.bfloat16)
    figures["held_out_bfloat16"] = held_out_loss(model, held_out, args.context)
    letters = sum(map(len, chapters[::HELD_OUT_EVERY]))
    figures["bits_per_character"] = (
        figures["held_out_bfloat16"] * len(held_out) / letters / math.log(2)
    )
    print(json.dumps({"parameters": count, "train_tokens": len(stream), **figures}), flush=True)
    print_samples(model, tokenizer, args.sample_tokens, args.seed)


if __name__ == "__main__":
    main()
