"""/v1/embeddings: the `openai` package compared with transformers, and the requests that the route
refuses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from ark.backend import registry
from ark.errors import GpuError
from ark.models.tokenizer import Tokenizer
from ark.serving.embedder import Embedder
from ark.serving.http.app import Limits
from ark.serving.http.embeddings import EmbeddingEngine
from ark.serving.http.run import Options
from tests.checkpoints import make_checkpoint
from tests.server.running import Running, noah_model, running, until

TEXTS = ["The quick brown fox", "a tile of a matmul leaves for its peer" * 2, "é"]


class StandIn:
    """An embedder that returns the text's length."""

    context = 16
    delay_s = 0.0
    fail = False

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        time.sleep(self.delay_s)
        if self.fail:
            raise GpuError("the device reported a fault")
        return np.array([len(tokens)], np.float32)

    def close(self) -> None:
        pass


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def server(stand_in: StandIn) -> Iterator[Running]:
    model = replace(noah_model(16), embedding_size=1)
    options = Options(limits=Limits(request_s=0.3, queue=1))
    with closing(EmbeddingEngine(stand_in)) as engine, running(engine, model, options) as started:
        yield started


def post(server: Running, content: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=content, timeout=20)


def test_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "small")
    peer = AutoModel.from_pretrained(directory, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(directory)
    ids = [words(text).input_ids for text in TEXTS]
    with torch.no_grad():
        last = [peer(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    expected = torch.nn.functional.normalize(torch.stack(last), dim=1).numpy()
    backend, _ = registry.choose("cpu")
    model = replace(noah_model(128), name="small", vocab_size=320, embedding_size=64)
    model = replace(model, tokenizer=Tokenizer.open(directory, vocab_size=320))
    with (
        closing(backend.open(0)) as device,
        closing(EmbeddingEngine(Embedder.open(directory, backend, device))) as engine,
        running(engine, model) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for given in (TEXTS, ids):  # the package requests base64
            answer = client.embeddings.create(model="small", input=given)
            vectors = [entry.embedding for entry in answer.data]
            assert np.allclose(vectors, expected, atol=1e-5)
            assert answer.usage.prompt_tokens == sum(map(len, ids))
        for one in (TEXTS[0], ids[0]):
            answer = client.embeddings.create(model="small", input=one, encoding_format="float")
            assert np.allclose(answer.data[0].embedding, expected[0], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [2048]}, "input"),
        ({"input": [[3], []]}, "input[1]"),
        ({"input": [3] * 17}, "input"),
        ({"input": "king " * 50}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "mean"}, "pooling"),
    ],
)
def test_refusals(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = post(server, fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_limits(server: Running, stand_in: StandIn) -> None:
    assert [e["embedding"] for e in post(server, {"input": [[3] * 16, [5]]}).json()["data"]] == [
        [16],
        [1],
    ]
    stand_in.delay_s = 0.2
    late = post(server, {"input": [[3], [4], [5]]})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert server.service.engine.stats().running == 0
    stand_in.delay_s, stand_in.fail = 0.0, True
    server.service.on_failure = lambda: None
    assert post(server, {"input": "a"}).status_code == 500
    until(lambda: server.service.failure, "the server knows of the failure")
    assert httpx.get(f"{server.url}/health").status_code == 503


def test_routes_of_another_task_are_refused(server: Running, engine: Any) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    refused = httpx.post(f"{server.url}/v1/completions", json=asked)
    assert refused.status_code == 400 and "--task embed" in refused.json()["error"]["message"]
    with running(engine, noah_model(128)) as other:
        error = post(other, {"input": "a"})
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "embeddings_not_supported"
