"""The route /v1/embeddings: the embeddings of texts, if the server was started with a model for
embeddings. Called by ark.serving.http.app.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from ark import log
from ark.errors import GpuError, InvalidUsageError
from ark.serving.http.choices import timeout
from ark.serving.http.errors import SERVER_ERROR, ApiError, unsupported
from ark.serving.http.jobs import request_id
from ark.serving.http.model import ServedModel
from ark.serving.http.prompts import prompt_ids
from ark.serving.http.schema import EmbeddingRequest
from ark.serving.types import Event, Request, Stats

MOST_TEXTS = 2048  # most texts of a request, as in OpenAI's interface


class EmbedderLike(Protocol):
    """The interface of ark.serving.embedder.Embedder."""

    @property
    def context(self) -> int:
        """The most tokens of a text."""

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """The embedding of a text, fp32 of one dimension."""

    def close(self) -> None:
        """Frees everything."""


class EmbeddingEngine:
    """An embedder with an engine's interface. It computes one text at a time, on a separate thread,
    and refuses completions.
    """

    def __init__(self, embedder: EmbedderLike) -> None:
        """embedder: the embedder to use, which `close` closes."""
        self._embedder = embedder
        self._thread = ThreadPoolExecutor(1, "ark-embedder")
        self._tokens = self._texts = self.requests = 0
        self.on_failure: Callable[[str], None] = log.warn

    @property
    def context(self) -> int:
        """The most tokens of a text."""
        return self._embedder.context

    async def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the embedding of a text. It is computed after the texts of earlier calls."""
        loop = asyncio.get_running_loop()
        try:
            values = await loop.run_in_executor(self._thread, self._embedder.embed, tokens)
        except GpuError as error:
            self.on_failure(f"the engine has failed and must be opened again: {error}")
            raise
        self._tokens += len(tokens)
        self._texts += 1
        return values

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Raises InvalidUsageError, because this engine computes embeddings and generates no
        tokens.
        """
        raise InvalidUsageError(
            "this server returns embeddings only; start another one without --task embed"
        )

    def cancel(self, request_id: str) -> None:
        """Does nothing, because no request was accepted."""

    def stats(self) -> Stats:
        """The current state. The engine has one slot, which is busy while a text is computed."""
        running = min(self.requests, 1)
        waiting = self.requests - running
        return Stats(1, running, waiting, 0, 0, self._tokens, 0, 0, self._texts, 0)

    def close(self, drain: bool = False) -> None:
        """Ends the thread and frees everything."""
        self._thread.shutdown(cancel_futures=not drain)
        self._embedder.close()


class Embedding:
    """The settings and the engine of the route. queue: the largest number of waiting requests.
    request_s: the most seconds that a request may take.
    """

    def __init__(self, engine: EmbeddingEngine, queue: int, request_s: float) -> None:
        self._engine, self._queue, self._request_s = engine, queue, request_s
        self.error: ApiError | None = None
        """The reason why no more texts are accepted; set when the server ends."""

    async def answer(self, model: ServedModel, asked: EmbeddingRequest) -> dict[str, Any]:
        """The answer to a request's body. Raises ApiError if the body is not valid or the queue is
        full.
        """
        model.named(asked.model)
        if asked.dimensions not in (None, model.embedding_size):
            raise unsupported(
                "dimensions",
                f"dimensions is {asked.dimensions}, but this model's embeddings have "
                f"{model.embedding_size} elements and cannot be shortened; omit it",
            )
        prompts, _ = await prompt_ids(model, asked.input, "input", _check_count, model.check_text)
        if self._engine.requests > self._queue:
            raise ApiError(
                503,
                f"the queue is full: {self._engine.requests} requests are running or waiting; try "
                "again later",
                kind=SERVER_ERROR,
                code="queue_full",
                retry_after=1,
            )
        self._engine.requests += 1
        try:
            vectors = await asyncio.wait_for(self._vectors(prompts), self._request_s)
        except asyncio.TimeoutError:
            raise timeout(self._request_s) from None
        finally:
            self._engine.requests -= 1
        count = sum(map(len, prompts))
        coded = _base64 if asked.encoding_format == "base64" else np.ndarray.tolist
        return {
            "id": request_id("embd"),
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"object": "embedding", "index": place, "embedding": coded(vector)}
                for place, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    async def _vectors(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        vectors = []
        for prompt in prompts:
            if self.error is not None:
                raise self.error
            vectors.append(await self._engine.embed(prompt))
        return vectors


def no_embeddings() -> ApiError:
    """The error for requests for embeddings if the server was not started for embeddings."""
    return ApiError(
        400,
        "this server generates text only; start another one with `ark serve DIR --task embed`",
        code="embeddings_not_supported",
    )


def _check_count(count: int) -> None:
    if count > MOST_TEXTS:
        raise ApiError(
            400,
            f"{count:,} texts were given, but a request may have {MOST_TEXTS:,}; send several",
            param="input",
        )


def _base64(vector: np.ndarray) -> str:
    """The elements as little-endian fp32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
