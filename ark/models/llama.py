"""The Llama decoder (Touvron et al. 2023).

The decoder is written for one rank, op by op. docs/models.md lists the passes that fuse its ops.
ark.models.shard divides it among ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.errors import ModelError
from ark.models.config import LlamaConfig, read_common
from ark.models.fields import Fields
from ark.models.rope import inverse_frequencies
from ark.models.stored import Stored

EMBEDDING = "embedding_of_text"
LOGITS = "logits_of_text"


class Attention(ark.Module):
    """Causal grouped-query attention of layer `number`. `setup` creates its caches. With a window,
    each token attends to that number of latest positions.

    SPLIT: the dimension along which each parameter is divided among ranks (see FeedForward).
    """

    SPLIT: ClassVar[dict[str, int]] = {"query": -2, "key": -2, "value": -2, "output": -1}

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__()
        self.window = c.window(number)
        self.kv_heads, self.head_dim = c.num_key_value_heads, c.head_dim
        self.cache_type = c.cache_type(dtype)
        self.scale = c.head_dim**-0.5 * c.rope.attention_factor**2
        self.softcap = 0.0
        self.sinks: ark.Tensor | None = None
        self.query = ark.parameter((c.query_size, c.hidden_size), dtype)
        self.key = ark.parameter((c.kv_size, c.hidden_size), dtype)
        self.value = ark.parameter((c.kv_size, c.hidden_size), dtype)
        self.output = ark.parameter((c.hidden_size, c.query_size), dtype)

    def split_heads(self, ranks: int) -> None:
        """Keeps this rank's part of the heads, one of `ranks` equal parts."""
        self.kv_heads //= ranks

    def setup(self, context: int, batch: int = 1) -> None:
        """Creates the KV caches, for `context` positions of each of `batch` sequences."""
        self._cached(context, (batch * self.kv_heads, context, self.head_dim))

    def setup_pages(self, context: int, pool: int, page: int, apart: bool) -> None:
        """Creates the KV caches as `pool` pages of `page` positions, which sequences of at most
        `context` positions share. apart: True if no two rows of a decoding phase belong to the same
        sequence.
        """
        self.apart = apart
        self._cached(context, (pool, self.kv_heads, page, self.head_dim))

    def _cached(self, context: int, shape: tuple[int, ...]) -> None:
        self.keys, self.values = (ark.tensor(shape, self.cache_type) for _ in "kv")
        if self.window >= context:  # the window contains all positions
            self.window = 0

    def forward(self, x: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        """Attention of x (rows, hidden), with frequencies (head_dim / 2,). The result is (rows,
        hidden).

        If the state has one position, the rows are consecutive tokens from that position on. If it
        has several, each row belongs to a different sequence and has its own position.
        """
        position, pages = state.position, state.pages
        query, key, value = self.projections(x)
        query = self.rotated(query, position, frequencies)
        key = self.rotated(key, position, frequencies)
        keywords: dict[str, Any] = {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        if pages is None:
            keys = ark.kv_append(self.keys, key, position)
            values = ark.kv_append(self.values, value, position)
            a = ark.attention(query, keys, values, position, **keywords)
        else:
            apart = self.apart and position.shape() == [x.shape()[0]]
            keys = ark.paged_append(self.keys, key, pages, position, apart=apart)
            values = ark.paged_append(self.values, value, pages, position, apart=apart)
            a = ark.paged_attention(query, keys, values, pages, position, **keywords)
        return ark.linear(a, self.output)

    def rotated(self, x: ark.Tensor, position: ark.Tensor, frequencies: ark.Tensor) -> ark.Tensor:
        """Queries or keys with rotary position embedding, for the given positions."""
        return ark.rotary_embedding(x, position, frequencies)

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        """Queries, keys and values of rows, (rows, heads * head_dim) each."""
        return ark.linear(x, self.query), ark.linear(x, self.key), ark.linear(x, self.value)


class Gated(ark.Module):
    """The base class of modules with a gated activation, such as silu(gate) * up."""

    def gated(self, gate: ark.Tensor, up: ark.Tensor) -> ark.Tensor:
        """The activation of `gate`, times `up`."""
        return ark.swiglu(gate, up)


class FeedForward(Gated):
    """The gated multilayer perceptron.

    SPLIT: by parameter, the dimension along which ranks share it. If it is the last dimension of a
    weight, the module's results are summed over the ranks.
    """

    SPLIT: ClassVar[dict[str, int]] = {"gate": -2, "up": -2, "down": -1}

    def __init__(self, c: LlamaConfig, dtype: ark.DataType) -> None:
        super().__init__()
        self.gate = ark.parameter((c.intermediate_size, c.hidden_size), dtype)
        self.up = ark.parameter((c.intermediate_size, c.hidden_size), dtype)
        self.down = ark.parameter((c.hidden_size, c.intermediate_size), dtype)

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        """Maps x (rows, hidden) to (rows, hidden)."""
        gated = self.gated(ark.linear(x, self.gate), ark.linear(x, self.up))
        return ark.linear(gated, self.down)


class Layer(ark.Module):
    """One layer: attention and the feed-forward part. The input of each is normalised, and its
    output is added to its input.
    """

    def __init__(
        self, c: LlamaConfig, dtype: ark.DataType, attention: Attention, mlp: ark.Module
    ) -> None:
        super().__init__()
        self.eps = c.rms_norm_eps
        self.attention_norm = ark.parameter((c.hidden_size,), dtype)
        self.attention = attention
        self.mlp_norm = ark.parameter((c.hidden_size,), dtype)
        self.mlp = mlp

    def forward(self, h: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        """Maps h (rows, hidden) to (rows, hidden). state, frequencies: see Attention."""
        x = ark.rmsnorm(h, self.attention_norm, self.eps)
        h = h + self.attention(x, state, frequencies)
        fed: ark.Tensor = self.mlp(ark.rmsnorm(h, self.mlp_norm, self.eps))
        return h + fed


class Head(ark.Module):
    """Computes logits from hidden states."""

    def __init__(self, c: LlamaConfig, dtype: ark.DataType) -> None:
        super().__init__()
        self.weight: ark.Tensor = ark.parameter((c.vocab_size, c.hidden_size), dtype)

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        """Maps x (rows, hidden) to logits (rows, vocabulary)."""
        return ark.linear(x, self.weight, name="logits")


class Llama(ark.Module):
    """The Llama decoder. Its entry points are `prompt`, `begin` and `decode`.

    DEFAULTS: values of fields that config.json omits, as in transformers' class of the
    architecture. WEIGHTS: the name of the checkpoint's tensor for each parameter. UNQUANTIZED:
    matrices that `--quantize` does not quantise.
    """

    UNQUANTIZED: ClassVar[tuple[str, ...]] = ("embedding", "head.weight")

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as attention heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens.weight",
        "layers.{}.attention_norm": "model.layers.{}.input_layernorm.weight",
        "layers.{}.attention.query": "model.layers.{}.self_attn.q_proj.weight",
        "layers.{}.attention.key": "model.layers.{}.self_attn.k_proj.weight",
        "layers.{}.attention.value": "model.layers.{}.self_attn.v_proj.weight",
        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj.weight",
        "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.mlp.gate": "model.layers.{}.mlp.gate_proj.weight",
        "layers.{}.mlp.up": "model.layers.{}.mlp.up_proj.weight",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj.weight",
        "norm": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }

    def __init__(self, c: LlamaConfig, dtype: ark.DataType) -> None:
        super().__init__()
        self.eps = c.rms_norm_eps
        self.embedding = ark.parameter((c.vocab_size, c.hidden_size), dtype)
        self.frequencies = ark.parameter((c.head_dim // 2,), ark.fp32)
        self.context = c.max_position_embeddings
        self.frequencies.initializer = lambda: inverse_frequencies(c.rope, c.head_dim, self.context)
        self.frequencies.requires_grad = False
        self.layers = [self.layer(c, dtype, n) for n in range(c.num_hidden_layers)]
        self.norm = ark.parameter((c.hidden_size,), dtype)
        self.head = self.head_of(c, dtype)
        if c.tie_word_embeddings:
            self.head.weight = self.embedding

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        """Creates one layer. Decoders with other layers override it."""
        return Layer(c, dtype, Attention(c, dtype, number), FeedForward(c, dtype))

    def head_of(self, c: LlamaConfig, dtype: ark.DataType) -> Head:
        """Creates the module that computes the logits. Decoders that scale or cap logits override
        it.
        """
        return Head(c, dtype)

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. Absent fields have been filled from DEFAULTS.
        Raises an error that names an unsupported field.
        """
        return read_common(fields)

    @classmethod
    def stored_name(cls, c: LlamaConfig, parameter: str) -> str:
        """The name of the checkpoint's tensor for the parameter that has this name in WEIGHTS."""
        if parameter not in cls.WEIGHTS:
            raise ModelError(
                f"{cls.__name__}.WEIGHTS has no entry for its parameter {parameter!r}; add one "
                "with the name of the checkpoint's tensor"
            )
        return cls.WEIGHTS[parameter]

    @classmethod
    def unused(cls, c: LlamaConfig, stored_name: str) -> bool:
        """True for a tensor in a checkpoint that the decoder does not use."""
        return False

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        """Describes which part of a stored tensor is the parameter with this name in WEIGHTS. None
        if the parameter is the whole tensor.
        """
        return None

    def setup(self, context: int, batch: int = 1) -> None:
        """Creates caches for `context` positions of each of `batch` sequences in all layers."""
        self.context = context
        for layer in self.layers:
            layer.attention.setup(context, batch)

    def setup_pages(self, context: int, pool: int, page: int, apart: bool) -> None:
        """Creates `pool` pages of `page` positions in all layers, for sequences of at most
        `context` positions. apart: see Attention.setup_pages.
        """
        self.context = context
        for layer in self.layers:
            layer.attention.setup_pages(context, pool, page, apart)

    def forward(self, state: ark.TokenState, rows: int) -> ark.Tensor:
        """Hidden states (rows, hidden) of `rows` tokens from the state's position on. Fills the
        caches.

        With several sequences: the hidden states of one token of each sequence, (batch, hidden).
        """
        h = self.embedded(state, rows)
        for layer in self.layers:
            h = layer(h, state, self.frequencies)
        return h

    def embedded(self, state: ark.TokenState, rows: int) -> ark.Tensor:
        """The embeddings (rows, hidden) of `rows` tokens from the state's position on."""
        return ark.embed(state.tokens, self.embedding, state.position, rows)

    def prompt(self, state: ark.TokenState, rows: int) -> None:
        """Reads a chunk of the prompt."""
        self(state, rows)
        ark.advance(state, rows)

    def begin(self, state: ark.TokenState, rows: int) -> None:
        """Reads the prompt's last chunk and samples the first token."""
        h = ark.rmsnorm(ark.last_row(self(state, rows), state), self.norm, self.eps)
        ark.advance(state, rows)
        ark.sample(self.head(h), state)

    def embed(self, state: ark.TokenState, rows: int) -> None:
        """Reads a text's last chunk, and stores the hidden state of its last token, after the norm,
        in the state EMBEDDING (1, hidden) fp32.
        """
        last = ark.last_row(self(state, rows), state)
        stored = ark.tensor(last.shape(), ark.fp32, name=EMBEDDING)
        ark.rmsnorm(last, self.norm, self.eps, output=stored)

    def score(self, state: ark.TokenState, rows: int) -> None:
        """Reads a chunk of a text, and stores the logits of all its tokens in the state LOGITS
        (rows, vocabulary) fp32.
        """
        h = ark.rmsnorm(self(state, rows), self.norm, self.eps)
        ark.advance(state, rows)
        logits = self.head(h)
        ark.copy(logits, ark.tensor(logits.shape(), ark.fp32, name=LOGITS))

    def decode(self, state: ark.TokenState) -> None:
        """Reads one token of each sequence and samples the next."""
        h = self(state, 1)
        ark.sample(self.head(ark.rmsnorm(h, self.norm, self.eps)), state)
