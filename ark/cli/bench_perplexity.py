"""`ark bench perplexity`: computes the perplexity of a checkpoint on a text, for each format of
weights and each type of cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json

from ark.backend import registry
from ark.cli.common import progress, read_file, tell_backend, write_file
from ark.cli.engines import open_checkpoint
from ark.cli.measure.perplexity import perplexity
from ark.cli.parser import (
    FIGURES,
    Subparsers,
    add_backend,
    add_device,
    add_directory,
    add_kv_cache,
    add_quantize,
    option,
    positive,
)
from ark.models.tokenizer import Tokenizer


def register(kinds: Subparsers) -> None:
    p = kinds.add_parser("perplexity", help="perplexity of a checkpoint on a text")
    add_directory(p)
    option(p, "--text FILE", "the text, in UTF-8", required=True)
    option(
        p,
        "--context N",
        "tokens of a window, without the windows before it (default: the model's limit, at "
        "most 4096)",
        positive,
    )
    option(
        p,
        "--chunk N",
        "tokens of an iteration; 1 reads the text as decoding does (default: 32)",
        positive,
    )
    add_quantize(p)
    add_kv_cache(p)
    add_backend(p)
    add_device(p)
    option(p, "--json FILE", FIGURES)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    text = read_file(args.text, "a text")
    checkpoint = open_checkpoint(args)
    tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=checkpoint.config.vocab_size)
    backend, probe = registry.choose(args.backend)
    tell_backend(args.backend, backend, probe)
    with contextlib.closing(backend.open(args.device)) as device, progress(bool(args.json)) as tell:
        result = perplexity(
            checkpoint,
            backend,
            device,
            tokenizer.encode(text),
            context=args.context,
            chunk=args.chunk,
            progress=tell,
        )
    if args.json:
        values = {"perplexity": result.value, "tokens": result.tokens, "context": result.context}
        write_file(args.json, json.dumps(values) + "\n")
    if args.json != "-":
        print(
            f"perplexity {result.value:.4f} of {result.tokens:,} tokens in windows of "
            f"{result.context:,}"
        )
    return 0
