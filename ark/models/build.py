"""Builds the graph of one rank from a decoder's shape: creates the model, splits it over ranks and
traces its entry points. Called by ark.models.plans, and by ark.models.load for the shapes of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import ark
from ark.errors import InvalidUsageError
from ark.frontend.model import Model, use_model
from ark.ir import values as ir
from ark.ir.dtype import DataType, fp32
from ark.ir.graph import Graph
from ark.models import registry
from ark.models.adapted import Adapters, adapt, choose, chosen_state, first
from ark.models.config import LlamaConfig
from ark.models.formats.layout import Layout
from ark.models.llama import Llama
from ark.models.quantized import quantise
from ark.models.shard import Share, check_ranks, split
from ark.ops.tokens import TokenState
from ark.tasks.adjusted import MAX_LOGPROBS
from ark.tasks.sequences import MAX_BATCH

# If chunks have at least this number of tokens, there is a separate phase for the prompt's last
# chunk, which also samples the first token.
MIN_BEGIN_CHUNK_TOKENS = 128
FULL = "full"  # value of Shape.sampling for all parameters
LASTING = ("parameter", "state", "host")  # arenas that outlive a launch


@dataclass(frozen=True)
class Pages:
    """The pages of the KV cache of a model that serves many requests (ark.serving). pool: the total
    number of pages. size: the number of positions in a page. forms: the batch sizes for which there
    is a decoding phase, ascending; the last one is the largest batch. apart: True if no two rows of
    a phase belong to the same sequence.
    """

    pool: int
    size: int
    forms: tuple[int, ...]
    apart: bool = True

    def most(self, context: int) -> int:
        """The most pages of a sequence of `context` positions."""
        return -(-context // self.size)


@dataclass(frozen=True)
class Shape:
    """The parameters from which one rank's graph of a model is built.

    context: positions in the cache. chunk: prompt tokens per iteration; 0 if prompts are not read
    in chunks. batch: the number of sequences that are decoded together; the decoding phase then
    also reads their prompts, one token per iteration, so chunk is 0. split: how ranks divide the
    model; empty for tensor parallelism by ark.models.shard, otherwise a name of
    ark.parallel.plans.PLANS. pages: if given, keys and values are stored in pages; a phase `chunk`
    reads chunks of one prompt, and each further phase decodes a number of sequences. sampling: FULL
    for a plan that supports all of ark.SamplingParams and reports up to `logprobs` of the highest
    log probabilities; empty for greedy and top-k sampling only. embeds: True if a launch computes
    the embedding of one text instead of next tokens. scores: True if an iteration computes the
    logits of all tokens of a chunk. adapters: the adapters that rows may use, in paged plans on one
    rank.

    If a chunk has at least MIN_BEGIN_CHUNK_TOKENS tokens, there is a separate entry point for the
    prompt's last chunk, which also samples the first token.
    """

    config: LlamaConfig
    dtype: DataType
    context: int
    chunk: int
    rank: int = 0
    world_size: int = 1
    batch: int = 1
    split: str = ""
    pages: Pages | None = None
    sampling: str = ""
    logprobs: int = 0
    embeds: bool = False
    scores: bool = False
    adapters: Adapters | None = None

    @property
    def begins(self) -> bool:
        """True if there is an entry point for the prompt's last chunk."""
        return self.chunk >= MIN_BEGIN_CHUNK_TOKENS

    @property
    def vocabulary(self) -> int:
        """The argument `vocabulary` of TokenState.make: the size of the vocabulary if sampling is
        FULL, otherwise 0.
        """
        return self.config.vocab_size if self.sampling else 0

    def iterations(self, prompt: int, new: int) -> list[int]:
        """The iterations of each phase for a prompt of `prompt` tokens and `new` new tokens."""
        if self.embeds:
            return [-(-prompt // self.chunk) - 1, 1]
        if self.batch > 1:
            return [prompt - 1 + new]
        if not self.chunk:
            return [new]
        if not self.begins:
            return [-(-(prompt - 1) // self.chunk), new]
        return [-(-prompt // self.chunk) - 1, 1, new - 1] if prompt > 1 else [0, 0, new]

    def __post_init__(self) -> None:
        if not self.split:
            check_ranks(self.config, self.world_size)
        else:
            _check_split(self.split)
            if self.config.layouts and self.world_size > 1:
                raise InvalidUsageError(
                    f"the plan {self.split!r} cannot share quantised weights; omit the split, or "
                    "use a checkpoint that is not quantised"
                )
            if self.config.cache_codes and self.world_size > 1:
                raise InvalidUsageError(
                    f"the plan {self.split!r} cannot share keys and values of "
                    f"{self.config.cache_codes}; omit the split, or --kv-cache-dtype"
                )
        if not 1 <= self.batch <= MAX_BATCH:
            raise InvalidUsageError(
                f"batch={self.batch} is out of range; 1 to {MAX_BATCH} sequences can be decoded "
                "together"
            )
        if self.sampling not in ("", FULL) or not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidUsageError(
                f"sampling={self.sampling!r} with {self.logprobs} log probabilities is not "
                f"supported; give {FULL!r} or an empty text, and 0 to {MAX_LOGPROBS} log "
                "probabilities"
            )
        if self.batch > 1 and self.chunk and self.pages is None:
            raise InvalidUsageError(
                f"chunk={self.chunk} and batch={self.batch} cannot be combined, because several "
                "prompts are read one token per iteration; omit the chunk"
            )
        if self.batch > 1 and self.pages is None and self.world_size > 1:
            raise InvalidUsageError(
                f"batch={self.batch} on {self.world_size} ranks is not supported without pages: "
                "such sequences are decoded on one rank; omit the batch or the ranks"
            )


@dataclass(frozen=True)
class Built:
    """A traced decoder. lasting: its parameters and state by name. shares: the parameters of which
    the rank holds only a part, each with the slices of this part. constants: functions that compute
    parameters from the config instead of reading them. layouts: the layouts of the rank's quantised
    weights, by parameter.
    """

    graph: Graph
    lasting: dict[str, ir.Tensor]
    shares: dict[str, Share]
    constants: dict[str, Callable[[], np.ndarray]]
    layouts: dict[str, Layout]


def build(shape: Shape) -> Built:
    """Builds the graph of one rank. It has entry points for decoding and, if the shape has a chunk
    size, for the prompt.
    """
    if shape.split and shape.world_size > 1:
        return _by_plan(shape)
    model = Model(shape.rank, shape.world_size)
    with use_model(model):
        decoder = registry.decoder(shape.config.architecture)(shape.config, shape.dtype)
        decoder.name_tensors()
        shares = split(decoder, shape.rank, shape.world_size) if shape.world_size > 1 else {}
        layouts = quantise(decoder, shape.dtype, dict(shape.config.layouts), shares)
        if shape.embeds:
            _trace_embedding(model, decoder, shape)
        elif shape.scores:
            _trace_scores(model, decoder, shape)
        elif shape.pages is not None:
            _trace_paged(model, decoder, shape, shape.pages)
        else:
            _trace(model, decoder, shape)
        parameters = decoder.params_dict().values()
        constants = {p.ir.name: p.initializer for p in parameters if p.initializer}
    lasting = {t.name: t for n in model.graph.nodes for t in n.inputs if _names_buffer(t)}
    named = {p.ir.name: share for p, share in shares.items()}
    return Built(model.graph, lasting, named, constants, layouts)


def _trace(model: Model, decoder: Llama, shape: Shape) -> None:
    """Traces the entry points of a decoder in which each sequence has its own cache."""
    decoder.setup(shape.context, shape.batch)
    decoder.name_tensors()
    state = TokenState.make(
        shape.context, shape.batch, vocabulary=shape.vocabulary, logprobs=shape.logprobs
    )
    if shape.chunk:
        with model.graph.entry("prompt"):
            decoder.prompt(state, shape.chunk)
    if shape.begins:
        with model.graph.entry("begin"):
            decoder.begin(state, shape.chunk)
    with model.graph.entry("decode"):
        decoder.decode(state)


def _trace_embedding(model: Model, decoder: Llama, shape: Shape) -> None:
    """Traces the entry points of a decoder that computes the embedding of a text: `prompt` for all
    chunks except the last, and `embed` for the last chunk.
    """
    decoder.setup(shape.context)
    decoder.name_tensors()
    state = TokenState.make(shape.context)
    with model.graph.entry("prompt"):
        decoder.prompt(state, shape.chunk)
    with model.graph.entry("embed"):
        decoder.embed(state, shape.chunk)


def _trace_scores(model: Model, decoder: Llama, shape: Shape) -> None:
    """Traces the entry point of a decoder that computes the logits of a text's tokens."""
    decoder.setup(shape.context)
    decoder.name_tensors()
    state = TokenState.make(shape.context)
    with model.graph.entry("score"):
        decoder.score(state, shape.chunk)


def _trace_paged(model: Model, decoder: Llama, shape: Shape, pages: Pages) -> None:
    """Traces the entry points of a decoder whose sequences share the pages of a KV cache. One entry
    point reads chunks of a prompt; it has a state of its own. Each other entry point decodes a
    batch of a fixed size.
    """
    decoder.setup_pages(shape.context, pages.pool, pages.size, pages.apart)
    decoder.name_tensors()
    adapted = adapt(decoder, shape.adapters, shape.dtype)
    most = pages.most(shape.context)
    state = TokenState.make(
        shape.context,
        shape.batch,
        most,
        vocabulary=shape.vocabulary,
        logprobs=shape.logprobs,
        leaves=True,
    )
    if shape.chunk:
        prompt = replace(
            TokenState.make(shape.context, 1, most, prefix="prompt_"), leave=state.leave
        )
        if adapted:
            choose(adapted, chosen_state(shape.chunk, "prompt_adapters"))
        with model.graph.entry("chunk"):
            decoder.prompt(prompt, shape.chunk)
    chosen = chosen_state(shape.batch, "adapters") if adapted else None
    for rows in pages.forms:
        if chosen is not None:
            choose(adapted, first(chosen, rows))
        with model.graph.entry(f"decode{rows}"):
            decoder.decode(state.first(rows))


def _check_split(name: str) -> None:
    """Raises InvalidUsageError unless ark.parallel has a plan of that name."""
    from ark.parallel.plans import PLANS

    if name not in PLANS:
        raise InvalidUsageError(
            f"the plan {name!r} does not exist; ranks can share a model by {', '.join(PLANS)}"
        )


def _by_plan(shape: Shape) -> Built:
    """The graph of one rank. The one-device model is traced and then divided among ranks by a named
    plan (ark.parallel).
    """
    from ark.parallel import parallelize

    one = build(replace(shape, rank=0, world_size=1, split=""))
    ranks = parallelize(one.graph, shape.world_size, shape.split).ranks
    graph, held = ranks.graphs[shape.rank], ranks.held[shape.rank]
    lasting = {t.name: t for t in graph.tensors if t.name in held and _names_buffer(t)}
    shares = {
        name: tuple(slice(*side) for side in view.box)
        for name, view in held.items()
        if view.shape != one.lasting[name].shape
    }
    return Built(graph, lasting, shares, one.constants, {})


def whole_pass(config: LlamaConfig, dtype: DataType, rows: int) -> Graph:
    """The graph of one forward pass over a sequence of `rows` tokens, as in training: it computes
    the logits of all tokens. Plans for many ranks are made from it.
    """
    model = Model(0, 1)
    with use_model(model):
        decoder = registry.decoder(config.architecture)(config, dtype)
        decoder.name_tensors()
        decoder.setup(rows)
        decoder.name_tensors()
        with model.graph.entry("forward"):
            hidden = decoder(TokenState.make(rows), rows)
            decoder.head(ark.rmsnorm(hidden, decoder.norm, decoder.eps))
    return model.graph


def _names_buffer(tensor: ir.Tensor) -> bool:
    return tensor.buffer.arena in LASTING and tensor.name == tensor.buffer.name


def parameters(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, by name, that a checkpoint of an unsplit model must have."""
    with use_model(Model(0, 1)):
        decoder = registry.decoder(config.architecture)(config, fp32)
        shapes = decoder.params_dict()
        return {name: p.ir.shape for name, p in shapes.items() if not p.initializer}
