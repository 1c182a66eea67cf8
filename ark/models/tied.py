"""Handles checkpoints whose config ties the output head to the embedding (the same weights)
although the files contain both. Called by ark.models.checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from ark import log
from ark.models.config import LlamaConfig
from ark.models.registry import decoder
from ark.models.shards import StoredTensor, same_bytes


def untied(config: LlamaConfig, stored: dict[str, StoredTensor]) -> LlamaConfig:
    """Returns the config, changed if the files have a head that differs from the embedding. Then
    the returned config does not tie the two, so that the stored head is used, as in transformers.
    """
    table = decoder(config.architecture).WEIGHTS
    head, embedding = (stored.get(table[name]) for name in ("head.weight", "embedding"))
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config
    if same_bytes(head, embedding):
        return config
    log.warn(
        f"config.json of {head.path.parent} ties the head to the embedding, but the weights have "
        f"a {head.name} that differs from {embedding.name}; ark uses this head, as transformers "
        "does. Set tie_word_embeddings to false"
    )
    return replace(config, tie_word_embeddings=False)
