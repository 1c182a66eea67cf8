"""Records which architectures and formats the passed tests have covered, for ci/decoders.py. A test
that has compared a checkpoint's results reports it here, and tests/conftest.py writes it if the
test passes.
"""

from __future__ import annotations

import os
from pathlib import Path

from ark.models.checkpoint import Checkpoint

FILE = "ARK_DECODER_CELLS"
"""The environment variable with the name of the output file. Without it nothing is written."""

_pending: list[tuple[str, str, str]] = []


def compared(checkpoint: Checkpoint, backend: str) -> None:
    """Reports that this checkpoint's results on a backend equal the reference's."""
    _pending.append((backend, checkpoint.config.architecture, format_of(checkpoint)))


def finish(passed: bool) -> None:
    """Writes what the test that has ended reported by `compared`, if it passed."""
    path = os.environ.get(FILE)
    if path and passed and _pending:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines("\t".join(cell) + "\n" for cell in _pending)
    _pending.clear()


def format_of(checkpoint: Checkpoint) -> str:
    """The format of the weights, and of keys and values if these are codes."""
    config, dtype = checkpoint.config, checkpoint.dtype.name
    codes = sorted({layout.codes.name for _, layout in config.layouts})
    if checkpoint.on_load is not None:
        weights = f"quantised on load: {checkpoint.on_load.name}"
    elif config.format is not None and checkpoint.quantized:
        weights = f"{config.format.name}: {', '.join(codes) or f'dequantised to {dtype}'}"
    else:
        weights = dtype
    return weights + (f"; keys and values {config.cache_codes}" if config.cache_codes else "")
