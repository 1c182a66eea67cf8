"""Heads that repeat the embedding: which of them a checkpoint's files hold. Called by
ark.models.checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ark import log
from ark.models.config import LlamaConfig
from ark.models.registry import decoder
from ark.models.shards import StoredTensor, read_bytes

PIECE_BYTES = 16 << 20  # bytes that are compared at a time


def untied(config: LlamaConfig, stored: dict[str, StoredTensor]) -> LlamaConfig:
    """The config, with tied embeddings off if the files have a head that differs from the
    embedding: then the head is used, as in transformers.
    """
    table = decoder(config.architecture).WEIGHTS
    head, embedding = (stored.get(table[name]) for name in ("head.weight", "embedding"))
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config
    if same_bytes(head, embedding):
        return config
    log.warn(
        f"config.json of {head.path.parent} ties the head to the embedding, but the weights have "
        f"a {head.name} that differs from {embedding.name}; it is used, as transformers do. Set "
        "tie_word_embeddings to false"
    )
    return replace(config, tie_word_embeddings=False)


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """True if two tensors have the same type, shape and bytes."""
    if (first.dtype_code, first.shape) != (second.dtype_code, second.shape):
        return False
    for begin in range(0, first.nbytes, PIECE_BYTES):
        size = min(PIECE_BYTES, first.nbytes - begin)
        if not np.array_equal(read_bytes(first, begin, size), read_bytes(second, begin, size)):
            return False
    return True
