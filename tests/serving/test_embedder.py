"""Embeddings of small random decoders compared with transformers' hidden values."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.serving.embedder import Embedder, Pooling
from tests.checkpoints import make_checkpoint
from tests.slow import slow

CONTEXT_TOKENS = 40


def ids_of(count: int) -> list[int]:
    return np.random.default_rng(count).integers(2, 320, count).tolist()


def hidden(directory: Path, ids: list[int]) -> np.ndarray:
    """Returns transformers' hidden value of the last token."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()


def embeddings(directory: Path, texts: list[list[int]]) -> list[np.ndarray]:
    backend, _ = registry.choose("cpu")
    with (
        closing(backend.open(0)) as device,
        Embedder.open(directory, backend, device, chunk=16) as embedder,
    ):
        with pytest.raises(InvalidUsageError, match="shorten the text"):
            embedder.embed([2] * (CONTEXT_TOKENS + 1))
        with pytest.raises(InvalidUsageError, match="320"):
            embedder.embed([320])
        return [embedder.embed(ids) for ids in texts]


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=slow) for kind in ("qwen3", "gemma2", "granite", "phi3"))],
)
def test_embeddings_equal_transformers_last_hidden_values(tmp_path: Path, kind: str) -> None:
    """The embeddings are right for texts that end at any position of a chunk, and also if a longer
    text was embedded before.
    """
    directory = make_checkpoint(tmp_path / kind, context=CONTEXT_TOKENS, kind=kind)
    texts = [ids_of(count) for count in (CONTEXT_TOKENS, 1, 16, 17, 31)]
    for ids, vector in zip(texts, embeddings(directory, texts), strict=True):
        expected = hidden(directory, ids)
        assert np.allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


def test_decoder_stored_without_its_head(tmp_path: Path) -> None:
    """Embeddings of a checkpoint without an output head, as sentence-transformers stores it, whose
    pooling does not normalise.
    """
    directory = make_checkpoint(tmp_path / "whole", context=CONTEXT_TOKENS, tie=True)
    alone = tmp_path / "alone"
    AutoModel.from_pretrained(directory).save_pretrained(alone)
    config = json.loads((alone / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (alone / "config.json").write_text(json.dumps(config))
    write(alone / "modules.json", [{"type": "sentence_transformers.models.Pooling"}])
    write(alone / "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    (vector,) = embeddings(alone, [ids_of(20)])
    assert np.allclose(vector, hidden(alone, ids_of(20)), atol=1e-5)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def test_poolings(tmp_path: Path) -> None:
    assert Pooling.open(tmp_path).normalize
    kinds = [{"type": "sentence_transformers.models.Transformer"}]
    write(tmp_path / "modules.json", kinds)
    assert not Pooling.open(tmp_path).normalize
    write(tmp_path / "modules.json", [*kinds, {"type": "sentence_transformers.models.Normalize"}])
    assert Pooling.open(tmp_path).normalize
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    with pytest.raises(UnsupportedError, match="pooling_mode_mean_tokens"):
        Pooling.open(tmp_path)
    write(tmp_path / "1_Pooling/config.json", [])
    with pytest.raises(ModelError, match="download it again"):
        Pooling.open(tmp_path)
