"""Compares a token of one request over HTTP with a token through the engine, on one device.

    python bench/http_token.py --config llama-3.2-1b --backend cuda --tokens 400

It writes a checkpoint of the shape that --config names, with random weights, and a tokenizer with a
word for each token. `ark.LLM` and `ark serve`, which streams to a client, alternately generate the
same text with this checkpoint. The report has the mean time per token of each after the first
token, and the ratio.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
import transformers

import ark
from ark.models.config import LlamaConfig, builtin_config

PROMPT = "t11 t12 t13 t14 t15 t16 t17 t18"


def write_checkpoint(folder: Path, config: LlamaConfig) -> None:
    """Writes a Llama of this shape with random weights in bf16, and its tokenizer."""
    sizes = {
        name: getattr(config, name)
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
        )
    }
    shape = transformers.LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(place):
        model = transformers.LlamaForCausalLM(shape)
    model.to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def engine_s(llm: ark.LLM, tokens: int) -> float:
    """Mean seconds of a token after the first, through the engine alone."""
    params = ark.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return mean_gap([time.monotonic() for _ in llm.stream(PROMPT, params)], tokens)


def client_s(address: tuple[str, int], tokens: int) -> float:
    """Mean seconds of a token after the first, as a client of the server sees them."""
    asked = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    asked |= {"temperature": 0}
    connection = http.client.HTTPConnection(*address, timeout=120)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"the server answers {answer.status}: {answer.read().decode()}")
    times = [time.monotonic() for line in answer if b'"text"' in line]
    return mean_gap(times, tokens)


def mean_gap(times: list[float], tokens: int) -> float:
    """Mean seconds per token after the first one. times: when each event arrived; an event may have
    several tokens.
    """
    if len(times) < 2:
        raise SystemExit(f"{len(times)} events arrived for {tokens} tokens")
    return (times[-1] - times[0]) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="llama-3.2-1b")
    parser.add_argument("--backend")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ark-http-") as folder:
        write_checkpoint(Path(folder), builtin_config(args.config))
        longest = 2 * args.tokens
        with ark.LLM(
            folder, backend=args.backend, max_num_seqs=args.slots, max_model_len=longest
        ) as llm:
            engine_s(llm, args.tokens)
            alone = [engine_s(llm, args.tokens) for _ in range(args.repeats)]
        words = [sys.executable, "-m", "ark", "serve", folder, "--port", "0"]
        words += ["--slots", str(args.slots), "--context", str(longest)]
        words += ["--backend", args.backend] if args.backend else []
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address = re.search(r"http://([\w.]+):(\d+)", process.stdout.readline())
            if address is None:
                raise SystemExit(f"{' '.join(words)} ended without serving")
            place = (address[1], int(address[2]))
            client_s(place, args.tokens)
            served = [client_s(place, args.tokens) for _ in range(args.repeats)]
        finally:
            process.terminate()
            process.wait()
    engine, client = (1e6 * statistics.median(times) for times in (alone, served))
    print(f"engine {engine:.1f} us a token, over HTTP {client:.1f} us: {client / engine:.3f}")
    print(
        "  engine", *(f"{1e6 * t:.1f}" for t in alone), " HTTP", *(f"{1e6 * t:.1f}" for t in served)
    )


if __name__ == "__main__":
    main()
