"""The Llama decoder as a graph, and the weights in the order its kernels want them.

Two phases share weights, cache and state: `prompt` takes a chunk of tokens an iteration and only
fills the cache, `decode` takes one token, samples the next and feeds it back. With several ranks,
heads, the inner dimension of the MLP and the output layer's vocabulary are split (tensor
parallelism as in Megatron-LM, Shoeybi et al. 2019); each half of a layer ends in an all-reduce, the
logits are gathered. Called by ark.models.generate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType, fp32, int32
from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.models.checkpoint import Checkpoint
from ark.models.config import LlamaConfig, rope_inverse_frequencies
from ark.tasks.tokens import SETTINGS

MAX_STOPS = 16


@dataclass(frozen=True)
class Shape:
    """What one rank of a model computes. context: positions the cache holds. chunk: prompt tokens
    an iteration, 0 for a model that only decodes.
    """

    config: LlamaConfig
    dtype: DataType
    context: int
    chunk: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        c = self.config
        for what, size in (
            ("key/value heads", c.num_key_value_heads),
            ("intermediate size", c.intermediate_size),
        ):
            if size % self.world_size:
                raise InvalidUsageError(
                    f"the model has {what} {size}, which {self.world_size} ranks cannot share "
                    "equally; use a number of ranks that divides it"
                )

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.world_size

    @property
    def kv_heads(self) -> int:
        return self.config.num_key_value_heads // self.world_size

    @property
    def mlp(self) -> int:
        return self.config.intermediate_size // self.world_size

    @property
    def vocabulary(self) -> slice:
        """Tokens whose logits this rank computes: an equal share, all where none is equal."""
        share, rest = divmod(self.config.vocab_size, self.world_size)
        if rest:
            return slice(0, self.config.vocab_size)
        return slice(self.rank * share, (self.rank + 1) * share)


class _Builder:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.config = shape.config
        self.graph = Graph(shape.rank, shape.world_size)
        self.parameters: dict[str, Tensor] = {}

    def parameter(self, name: str, dims: tuple[int, ...], dtype: DataType) -> Tensor:
        if name not in self.parameters:
            self.parameters[name] = self.graph.tensor(dims, dtype, arena="parameter", name=name)
        return self.parameters[name]

    def op(
        self, type: str, inputs: list[Tensor], dims: tuple[int, ...], name: str, **attrs: Any
    ) -> Tensor:
        out = self.graph.tensor(dims, fp32, name=name)
        self.graph.add(type, inputs, [out], attrs, name)
        return out

    def matmul(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        dims = (x.shape[0], weight.shape[0])
        return self.op("matmul", [x, weight], dims, name, transpose_a=False, transpose_b=True)

    def state(self) -> None:
        """The tensors that live from launch to launch."""
        graph, context = self.graph, self.shape.context
        self.tokens = graph.tensor((context,), int32, arena="state", name="tokens")
        self.position = graph.tensor((1,), int32, arena="state", name="position")
        self.settings = graph.tensor((len(SETTINGS),), int32, arena="state", name="settings")
        self.stops = graph.tensor((MAX_STOPS,), int32, arena="state", name="stops")
        self.output = graph.tensor((context,), int32, arena="host", name="output")
        dims = (self.shape.kv_heads, context, self.config.head_dim)
        self.caches = [
            tuple(
                graph.tensor(dims, self.shape.dtype, arena="state", name=f"layers.{i}.{kind}")
                for kind in ("keys", "values")
            )
            for i in range(self.config.num_hidden_layers)
        ]

    def join(self, x: Tensor, name: str) -> Tensor:
        """The sum over ranks of a partial result."""
        if self.shape.world_size == 1:
            return x
        return self.op("all_reduce", [x], x.shape, name)

    def layer(self, i: int, h: Tensor, tag: str) -> Tensor:
        c, shape, dtype = self.config, self.shape, self.shape.dtype
        rows, hidden, width = h.shape[0], c.hidden_size, c.head_dim
        key, value = self.caches[i]
        at, name = f"layers.{i}.", f"{tag}.{i}."
        norm = self.parameter(at + "attention_norm", (hidden,), dtype)
        x = self.op("rmsnorm", [h, norm], h.shape, name + "attention_norm", eps=c.rms_norm_eps)
        columns = (shape.heads + 2 * shape.kv_heads) * width
        qkv = self.matmul(x, self.parameter(at + "qkv", (columns, hidden), dtype), name + "qkv")
        frequencies = self.parameter("rope_frequencies", (width // 2,), fp32)
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": width}
        inputs = [qkv, self.position, frequencies, key, value]
        q = self.graph.tensor((rows, shape.heads * width), fp32, name=name + "rope")
        # A lone row hands its own key and value on directly: nobody has to wait for the cache.
        columns = 2 * shape.kv_heads * width
        fresh = [self.graph.tensor((1, columns), fp32, name=name + "fresh")] if rows == 1 else []
        self.graph.add("rope_kv", inputs, [q, *fresh], heads, name + "rope")
        attrs = {"heads": shape.heads, "head_dim": width, "scale": width**-0.5}
        inputs = [q, key, value, self.position, *fresh]
        a = self.op("attention", inputs, q.shape, name + "attention", **attrs)
        output = self.parameter(at + "output", (hidden, shape.heads * width), dtype)
        o = self.join(self.matmul(a, output, name + "output"), name + "output.sum")
        h = self.op("add", [o, h], h.shape, name + "attention_residual")
        norm = self.parameter(at + "mlp_norm", (hidden,), dtype)
        x = self.op("rmsnorm", [h, norm], h.shape, name + "mlp_norm", eps=c.rms_norm_eps)
        weight = self.parameter(at + "gate_up", (2 * shape.mlp, hidden), dtype)
        gate_up = self.matmul(x, weight, name + "gate_up")
        s = self.op("swiglu", [gate_up], (rows, shape.mlp), name + "swiglu")
        down = self.parameter(at + "down", (hidden, shape.mlp), dtype)
        d = self.join(self.matmul(s, down, name + "down"), name + "down.sum")
        return self.op("add", [d, h], h.shape, name + "mlp_residual")

    def body(self, rows: int, tag: str) -> Tensor:
        c = self.config
        table = self.parameter("embedding", (c.vocab_size, c.hidden_size), self.shape.dtype)
        inputs = [self.tokens, table, self.position]
        h = self.op("embed", inputs, (rows, c.hidden_size), f"{tag}.embedding")
        for i in range(c.num_hidden_layers):
            h = self.layer(i, h, tag)
        return h

    def logits(self, x: Tensor) -> Tensor:
        """One row of logits over the whole vocabulary, of which each rank computes its share."""
        c, shape = self.config, self.shape
        first, own = shape.vocabulary.start, shape.vocabulary.stop - shape.vocabulary.start
        name, whole = "decode.logits", (c.vocab_size, c.hidden_size)
        if not c.tie_word_embeddings:
            table = self.parameter("head", (own, c.hidden_size), shape.dtype)
        else:
            table = self.parameter("embedding", whole, shape.dtype)
        if own == c.vocab_size:
            return self.matmul(x, table, name)
        if c.tie_word_embeddings:
            table = self.graph.tensor(
                (own, c.hidden_size),
                shape.dtype,
                buffer=table.buffer,
                extents=whole,
                offsets=(first, 0),
                name="head",
            )
        share = self.matmul(x, table, f"{name}.share")
        from ark.comm import synthesize
        from ark.comm.topology import full_mesh

        program = synthesize(full_mesh(shape.world_size), "all_gather", "one_shot")
        gathered = self.op("collective", [share], (shape.world_size, own), name, program=program)
        row = self.graph.tensor((1, c.vocab_size), fp32, buffer=gathered.buffer, name=name)
        self.graph.depend(row, [gathered])
        return row

    def build(self) -> Graph:
        c, graph = self.config, self.graph
        self.state()
        graph.phases = ("prompt", "decode") if self.shape.chunk else ("decode",)
        if self.shape.chunk:
            self.body(self.shape.chunk, "prompt")
            rows = {"rows": self.shape.chunk}
            graph.add("advance", [self.settings, self.position], [], rows, "prompt.advance")
            graph.phase = 1
        h = self.body(1, "decode")
        norm = self.parameter("norm", (c.hidden_size,), self.shape.dtype)
        x = self.op("rmsnorm", [h, norm], h.shape, "decode.norm", eps=c.rms_norm_eps)
        logits = self.logits(x)
        inputs = [logits, self.settings, self.position, self.tokens, self.output, self.stops]
        graph.add("sample", inputs, [], {}, "decode.sample")
        return graph


def build_graph(shape: Shape) -> Graph:
    """The graph of one rank."""
    return _Builder(shape).build()


def _pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders a projection's rows so that the two halves of each head interleave.

    Hugging Face's checkpoints rotate element i with i + head_dim / 2; neighbours rotate here. Both
    queries and keys are reordered, so their products stay the same.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def weights(checkpoint: Checkpoint, shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter of the graph with this rank's part of the checkpoint, in graph order."""
    c, rank = checkpoint.config, shape.rank
    queries = slice(rank * shape.heads * c.head_dim, (rank + 1) * shape.heads * c.head_dim)
    keys = slice(rank * shape.kv_heads * c.head_dim, (rank + 1) * shape.kv_heads * c.head_dim)
    inner = slice(rank * shape.mlp, (rank + 1) * shape.mlp)
    read = checkpoint.read
    yield "embedding", read("embedding")
    yield "rope_frequencies", rope_inverse_frequencies(c)
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}."
        yield at + "attention_norm", read(at + "attention_norm")
        parts = [
            _pairs(read(at + "query", queries), c.head_dim),
            _pairs(read(at + "key", keys), c.head_dim),
            read(at + "value", keys),
        ]
        yield at + "qkv", np.concatenate(parts)
        yield at + "output", read(at + "output", columns=queries)
        yield at + "mlp_norm", read(at + "mlp_norm")
        pair = np.stack([read(at + "gate", inner), read(at + "up", inner)], axis=1)
        yield at + "gate_up", pair.reshape(2 * shape.mlp, -1)
        yield at + "down", read(at + "down", columns=inner)
    yield "norm", read("norm")
    if not c.tie_word_embeddings:
        yield "head", read("head", shape.vocabulary)
