"""Checkpoints for fuzzing: the shipped model's files, one of which is mutated."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from ark.errors import BaseError
from tests.fuzz import mutate

NOAH = Path(__file__).parent.parent.parent / "examples" / "noah"


def mutated(rng: random.Random, keep: Callable[[str], None], folder: str) -> None:
    """Writes the shipped checkpoint with one mutated file into a folder."""
    names = [n for n in sorted(os.listdir(NOAH)) if (NOAH / n).is_file()]
    name = rng.choice(names)
    data = (NOAH / name).read_bytes()
    if name.endswith(".json") and rng.random() < 0.8:
        data = mutate.text_of(mutate.of_json(json.loads(data), rng)).encode("utf-8", "replace")
    elif name.endswith(".safetensors") and rng.random() < 0.8:
        length = int.from_bytes(data[:8], "little")
        header = mutate.of_json(json.loads(data[8 : 8 + length]), rng)
        head = mutate.text_of(header).encode("utf-8", "replace")
        data = len(head).to_bytes(8, "little") + head + data[8 + length :]
    else:
        data = mutate.of_bytes(data, rng)
    keep(f"{name}\n{data[:20000]!r}")
    for other in names:
        if other == name:
            Path(folder, other).write_bytes(data)
        else:
            os.symlink(NOAH / other, Path(folder, other))


def checkpoint(rng: random.Random, keep: Callable[[str], None]) -> bool:
    """The target: opens a mutated checkpoint."""
    with tempfile.TemporaryDirectory(prefix="ark-fuzz-") as folder:
        mutated(rng, keep, folder)
        return _open(folder)


def _open(folder: str) -> bool:
    from ark.models.checkpoint import Checkpoint
    from ark.models.tokenizer import Tokenizer

    try:
        opened = Checkpoint.open(folder)
        tokens = Tokenizer.open(folder, vocab_size=opened.config.vocab_size)
        tokens.decode(tokens.encode("The king"))
        for _ in opened:
            pass
    except BaseError:
        return False
    return True
