"""The options of `ark generate` and `ark chat` that set fields of SamplingParams."""

from __future__ import annotations

import argparse
from typing import Any

from ark.cli.parser import option, positive
from ark.models.sampling import SamplingParams

OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
)
"""Options whose names are fields of SamplingParams."""
NUMBERS = (
    ("--temperature", "X", "divides the logits before sampling; 0 takes the likeliest token"),
    ("--top-k", "K", "sample of the K likeliest tokens; 0 of all"),
    ("--top-p", "P", "sample of the likeliest tokens of probability P in sum; 1 of all"),
    ("--min-p", "P", "sample of tokens of at least P times the likeliest one's probability"),
    ("--typical-p", "P", "sample of the most typical tokens of probability P in sum; 1 of all"),
    ("--repetition-penalty", "X", "divides or multiplies logits of tokens that were there; 1: off"),
    ("--presence-penalty", "X", "subtracted from logits of tokens that were sampled"),
    ("--frequency-penalty", "X", "subtracted from logits for each time that a token was sampled"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the sampling options. They take precedence over the values of generation_config.json."""
    option(
        parser,
        "--max-new-tokens N",
        "tokens to make, at most (default: generation_config.json's, else 128)",
        positive,
    )
    for name, metavar, meaning in NUMBERS:
        kind = int if name == "--top-k" else float
        text = f"{meaning} (default: generation_config.json's)"
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the text before this one; may be given several times (default: none)",
    )


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that options set. Raises InvalidUsageError if a value is not
    valid.
    """
    fields = {name: getattr(args, name) for name in OPTIONS}
    fields |= {"max_tokens": args.max_new_tokens, "seed": args.seed}
    given = {name: value for name, value in fields.items() if value is not None}
    SamplingParams(**given)
    return given
