"""Computes embeddings of texts with a decoder: an embedding is the hidden state of a text's last
token after the final norm, as in vLLM's pooling. Used by the server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.llama import EMBEDDING
from ark.models.plans import choose_chunk, choose_context, usual_chunk
from ark.models.request import check_prompt_tokens
from ark.runtime.executor import BUDGET_S, Executor
from ark.serving.loading import Report, loaded
from ark.tasks.tokens import SETTINGS

POOLING = Path("1_Pooling/config.json")
MODULES = "modules.json"


@dataclass(frozen=True)
class Pooling:
    """How hidden states become an embedding. normalize: divide the embedding by its Euclidean
    norm.
    """

    normalize: bool = True

    @classmethod
    def open(cls, directory: Path) -> Pooling:
        """The pooling of a checkpoint, read from the files that sentence-transformers adds to it.
        Without these files, the embedding is the last token's hidden state, normalised. Raises
        UnsupportedError for a pooling that does not take the last token.
        """
        modules, pooling = directory / MODULES, directory / POOLING
        if pooling.exists():
            modes = _read(pooling, dict)
            chosen = [name for name, on in modes.items() if on is True and "_mode_" in name]
            if chosen != ["pooling_mode_lasttoken"]:
                raise UnsupportedError(
                    f"{pooling} asks for {', '.join(chosen) or 'no pooling mode'}, but ark pools "
                    "the last token only (pooling_mode_lasttoken); use another checkpoint"
                )
        if not modules.exists():
            return cls()
        kinds = [one.get("type") for one in _read(modules, list) if isinstance(one, dict)]
        return cls(normalize=any(str(kind).endswith("Normalize") for kind in kinds))


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; download it again") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path} is not a JSON {kind.__name__}; download it again")
    return value


class Embedder:
    """A checkpoint on a device that computes embeddings, one text at a time. A context manager."""

    def __init__(self, executor: Executor, shape: Shape, pooling: Pooling) -> None:
        """executor: the runner of a plan of the shape `shape`, which the embedder's `close`
        closes.
        """
        self._executor, self._shape, self._pooling = executor, shape, pooling
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint | Path | str,
        backend: Backend | str,
        device: Device,
        *,
        context: int | None = None,
        chunk: int | None = None,
        budget_s: float = BUDGET_S,
        progress: Report | None = None,
    ) -> Embedder:
        """An embedder on an opened device. For arguments and errors see
        ark.serving.engine.Engine.open.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(Path(checkpoint))
        chosen = backend if not isinstance(backend, str) else registry.choose(backend)[0]
        pooling = Pooling.open(checkpoint.directory)
        length = choose_context(checkpoint, context)
        dtype = DataType.from_numpy(checkpoint.dtype)
        rows = choose_chunk(chunk, length, usual_chunk(device.machine, dtype))
        if rows < 1:
            raise InvalidUsageError("embeddings need a chunk of at least 1 token; omit the chunk")
        shape = Shape(checkpoint.config, dtype, length, rows, embeds=True)
        executor = loaded(checkpoint, chosen, device, shape, budget_s, progress)
        return cls(executor, shape, pooling)

    @property
    def context(self) -> int:
        """The most tokens that a text may have."""
        return self._shape.context

    @property
    def size(self) -> int:
        """The number of elements of an embedding."""
        return self._shape.config.hidden_size

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the embedding of a text, fp32 (size,). May be called from any thread."""
        check_prompt_tokens(tokens, self._shape.config.vocab_size)
        if len(tokens) > self.context:
            raise InvalidUsageError(
                f"the text has {len(tokens):,} tokens, but the context holds {self.context:,}; "
                "shorten the text"
            )
        with self._lock:
            if self._closed:
                raise InvalidUsageError("this embedder was closed; open another one")
            self._write(tokens)
            run = self._executor.start(self._shape.iterations(len(tokens), 0))
            try:
                run.wait()
            finally:
                run.stop()
            values = self._executor.read(EMBEDDING).astype(np.float32).ravel()
        if not self._pooling.normalize:
            return values
        return values / max(float(np.linalg.norm(values)), 1e-12)

    def _write(self, tokens: Sequence[int]) -> None:
        """Writes the text's tokens to the device, with position 0 and the index of the last token,
        for the next launch.
        """
        text = np.zeros(self.context, np.int32)
        text[: len(tokens)] = tokens
        settings = np.zeros(len(SETTINGS), np.int32)
        settings[SETTINGS.index("last")] = len(tokens) - 1
        self._executor.write("tokens", text)
        self._executor.write("position", np.zeros(1, np.int32))
        self._executor.write("settings", settings)

    def close(self) -> None:
        """Frees everything. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._executor.close(collective=False)

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
