"""The ops with which a decoder generates tokens on the device: embed, advance and sample. Also the
state that these ops read and write.

A decoder's phases (docs/models.md) begin with `embed`, which looks up the embeddings of the current
tokens. A phase ends with `sample`, which appends the next token, or with `advance`, which adds a
chunk of the prompt to the position. So the host does nothing between the first token and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, TensorLike, as_tensor
from ark.ir.attributes import RowsAttributes
from ark.ir.dtype import fp32, int32
from ark.lower.ops.tokens import lower_advance, lower_choose, lower_embed, lower_sample
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.ops.sampling_state import SamplingState
from ark.ops.views import new_tensor, refer
from ark.tasks.tokens import SETTINGS

MAX_STOPS = 16
KEY = SETTINGS.index("key_low"), SETTINGS.index("key_high")


@dataclass(frozen=True)
class TokenState:
    """The state of token generation. It stays on the device between iterations and launches.

    tokens: (context,) int32, the text so far. position: (1,) int32, the index of the token that the
    next iteration reads. settings: int32, the words of ark.tasks.tokens.SETTINGS. stops: (16,)
    int32, the tokens that end the text. output: (context,) int32, the new tokens, in memory that
    the host can read while the kernel runs.

    With several sequences, tokens, position, settings and output have those of all sequences
    concatenated; `of` returns the state of one sequence.

    pages: (sequences, max_pages) int32, the page table of a paged KV cache, otherwise None.
    sampling: the further state that the options of ark.SamplingParams need, or None. leave: (1,)
    int32, a word that the host sets to end the kernel after the current iteration, or None.

    Examples:
        >>> ark.TokenState.make(8).batch
        1
    """

    tokens: Tensor
    position: Tensor
    settings: Tensor
    stops: Tensor
    output: Tensor
    pages: Tensor | None = None
    sampling: SamplingState | None = None
    leave: Tensor | None = None

    @classmethod
    def make(
        cls,
        context: int,
        batch: int = 1,
        pages: int = 0,
        prefix: str = "",
        vocabulary: int = 0,
        logprobs: int = 0,
        leaves: bool = False,
    ) -> TokenState:
        """A new state in the current model, for `batch` sequences of at most `context` tokens each.

        pages: the largest number of pages of a sequence; 0 for caches that are not paged. prefix:
        the start of the tensors' names. vocabulary: the number of tokens of the vocabulary if
        `sample` is to support all options of ark.SamplingParams, otherwise 0. logprobs: the largest
        number of log probabilities that it then reports, besides that of the sampled token. leaves:
        True if the state has the word `leave`.
        """

        def state(name: str, *shape: int, arena: str = "state") -> Tensor:
            tensor = new_tensor("TokenState", arena, shape, int32, (), (), (), prefix + name)
            tensor.rename(prefix + name)
            return tensor

        return cls(
            state("tokens", batch * context),
            state("position", batch),
            state("settings", batch * len(SETTINGS)),
            state("stops", MAX_STOPS),
            state("output", batch * context, arena="host"),
            state("pages", batch, pages) if pages else None,
            SamplingState.make(context, batch, vocabulary, logprobs) if vocabulary else None,
            state("leave", 1, arena="host") if leaves else None,
        )

    @property
    def batch(self) -> int:
        """The number of sequences of the state."""
        return self.position.ir.shape[0]

    def of(self, sequence: int) -> TokenState:
        """The state of one of the sequences."""
        return self._rows(lambda tensor: sequence_part(tensor, self.batch, sequence))

    def first(self, sequences: int) -> TokenState:
        """The state of the first `sequences` sequences."""

        def part(tensor: Tensor) -> Tensor:
            size, *others = tensor.ir.shape
            shape = (size // self.batch * sequences, *others)
            return refer(tensor, shape, [0] * len(shape), f"{tensor.ir.name}.first{sequences}")

        return self if sequences == self.batch else self._rows(part)

    def _rows(self, part: Callable[[Tensor], Tensor]) -> TokenState:
        """The state of some of the sequences. part: a function that returns the part of a tensor
        that belongs to these sequences.
        """
        return TokenState(
            part(self.tokens),
            part(self.position),
            part(self.settings),
            self.stops,
            part(self.output),
            None if self.pages is None else part(self.pages),
            None if self.sampling is None else self.sampling.rows(part),
            self.leave,
        )


def sequence_part(tensor: Tensor, batch: int, sequence: int) -> Tensor:
    """The part of one sequence in a tensor whose first dimension is divided equally among `batch`
    sequences. It is a view, or the tensor itself if there is one sequence.
    """
    if batch == 1:
        return tensor
    size, *others = tensor.ir.shape
    offsets = (sequence * (size // batch), *(0 for _ in others))
    return refer(tensor, (size // batch, *others), offsets, f"{tensor.ir.name}.{sequence}")


def check_position(op: str, position: Tensor, rows: int = 1) -> int:
    """The number of sequences of an op, which is the number of elements of `position`.

    It is 1, or `rows` if each row belongs to another sequence. Raises ModelError for any other
    number, or if the type is not int32.
    """
    count = position.ir.shape[0]
    if position.ir.shape not in ((1,), (rows,)) or position.ir.dtype != int32:
        each = f", or {rows} of them, one a row" if rows > 1 else ""
        raise ModelError(
            f"{op}: the position has shape {list(position.ir.shape)} and type "
            f"{position.ir.dtype.name}; expected one int32{each}"
        )
    return count


def by_sequence(
    inputs: Sequence[np.ndarray], count: int, shared: Sequence[int]
) -> list[list[np.ndarray]]:
    """The inputs of an op, separately for each of `count` sequences. Each input is divided equally
    among the sequences. Inputs whose index is in `shared` are not divided; every sequence gets the
    whole tensor.
    """
    parts = [[x] * count if i in shared else np.split(x, count) for i, x in enumerate(inputs)]
    return [list(each) for each in zip(*parts, strict=True)]


def embed(
    tokens: TensorLike, weight: TensorLike, position: TensorLike, rows: int = 1, name: str = ""
) -> Tensor:
    """The embeddings of `rows` tokens of a text, from `position` on.

    tokens: (context,) int32. weight: (vocabulary, dim), fp32, fp16 or bf16. position: (1,) int32.
    The result is (rows, dim) fp32: row i is weight[tokens[position + i]], or weight[0] beyond the
    context. A token outside of the vocabulary ends the run with a GpuError that names it.

    If `position` has the shape (batch,), there are `batch` texts. Their tokens are concatenated,
    (batch * context,), and the result (batch, dim) has one row per text.

    Examples:
        >>> text = torch.tensor([2, 0], dtype=torch.int32)
        >>> position = torch.tensor([0], dtype=torch.int32)
        >>> ark.embed(text, torch.arange(6.0).reshape(3, 2), position).eval()
        tensor([[4., 5.]])
    """
    ids, table, at = as_tensor(tokens), as_tensor(weight), as_tensor(position)
    float_dtype("embed", table)
    batch = check_position("embed", at, at.ir.shape[0] if rows == 1 else 1)
    if ids.ir.shape[0] % batch:
        raise ModelError(f"embed: {ids.ir.shape[0]} tokens are not divisible by {batch} sequences")
    if ids.ir.dtype != int32 or len(ids.ir.shape) != 1 or len(table.ir.shape) != 2 or rows < 1:
        raise ModelError(
            f"embed: {rows} rows were requested, the tokens are {ids.ir.dtype.name} "
            f"{list(ids.ir.shape)}, and the table has shape {list(table.ir.shape)}; expected at "
            "least one row, int32 tokens (context,) and a table (vocabulary, dim)"
        )
    shape = (batch * rows, table.ir.shape[1])
    return result(
        "embed", [ids, table, at], shape, fp32, attrs=RowsAttributes(rows=rows).to_node(), name=name
    )


def advance(state: TokenState, rows: int, name: str = "") -> None:
    """Adds `rows`, the number of tokens of a chunk of the prompt, to the state's position.

    The position does not advance beyond the prompt's last token. If the state has the word `leave`,
    the host can end the launch after this iteration. Raises ModelError if `rows` is
    below 1.

    Examples:
        >>> state = ark.TokenState.make(8)
        >>> ark.advance(state, 4)
    """
    if rows < 1:
        raise ModelError(f"advance: {rows} rows; expected at least one")
    model = Model.get_model()
    position = model.graph.rewrite(as_tensor(state.position).ir)
    given = (state.settings, state.position, state.leave)
    inputs = [as_tensor(t).ir for t in given if t is not None]
    model.graph.add("advance", inputs, [position], {"rows": int(rows)}, name)


def sample(logits: TensorLike, state: TokenState, name: str = "") -> None:
    """Samples the next token from logits, appends it and advances the position.

    logits: (batch, vocabulary), fp32, fp16 or bf16, one row per sequence of the state. Temperature
    and top_k are settings of the state. Temperature 0 selects the token with the largest logit (the
    first of equals). Otherwise the token is a sample of softmax(logits / temperature). If top_k is
    above 0, only the top_k tokens with the largest logits are possible (and those equal to the last
    of them). The sample is the token with the largest logit / temperature + Gumbel noise (Gumbel
    1954). The noise is a hash of key, position and token, so all backends sample the same token.

    A sampled stop token, or reaching the limit of positions, ends the run. With several sequences
    or a paged cache, the run ends when all sequences have ended; the position of an ended sequence
    stays the same, and for a sequence within its prompt only the position advances. If the state
    has `sampling`, all options of ark.SamplingParams apply (ark.tasks.adjusted). Raises ModelError
    for other types or shapes.

    Examples:
        >>> state = ark.TokenState.make(8)
        >>> ark.sample(ark.tensor([1, 100]), state)
    """
    tensor = as_tensor(logits)
    float_dtype("sample", tensor)
    if len(tensor.ir.shape) != 2 or tensor.ir.shape[0] != state.batch:
        raise ModelError(
            f"sample: the logits have shape {list(tensor.ir.shape)}; expected ({state.batch}, "
            "vocabulary)"
        )
    model = Model.get_model()
    kept = (state.settings, state.position, state.tokens, state.output, state.stops)
    inputs = [tensor.ir, *(as_tensor(t).ir for t in kept)]
    outputs = [model.graph.rewrite(t) for t in inputs[2:5]]
    leave = [] if state.leave is None else [as_tensor(state.leave).ir]
    if state.sampling is not None:
        inputs += state.sampling.tensors
        outputs += [model.graph.rewrite(t) for t in inputs[-2:]]
        model.graph.add("sample_adjusted", [*inputs, *leave], outputs, {}, name)
        return
    alone = state.batch == 1 and state.pages is None
    type_name = "sample" if alone else "sample_each"
    model.graph.add(type_name, [*inputs, *leave], outputs, {}, name)


def _embed(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    ids, table, position = inputs
    if len(position) > 1:
        each = by_sequence(inputs, len(position), (1,))
        return [np.concatenate([_embed(one, attrs)[0] for one in each])]
    places = int(position[0]) + np.arange(RowsAttributes.from_node(attrs).rows)
    tokens = np.where(places < len(ids), ids[np.minimum(places, len(ids) - 1)], 0)
    return [table[tokens.astype(np.int64)]]


def _advance(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    settings, position = inputs[:2]
    return [
        np.minimum(
            position + RowsAttributes.from_node(attrs).rows, settings[SETTINGS.index("last")]
        )
    ]


def _mix(z: np.ndarray) -> np.ndarray:
    """The mixing function of splitmix64 for 64 bits (Steele, Lea and Flood 2014)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _scores(
    logits: np.ndarray, temperature: np.float32, top_k: int, key: int, at: int
) -> np.ndarray:
    """The score (logit / temperature + noise) of each token; `sample` selects the largest one. -inf
    for tokens that top_k excludes.
    """
    if temperature <= 0:
        return logits
    places = np.uint64(at << 32) | np.arange(len(logits), dtype=np.uint64)
    bits = _mix(np.uint64(key) ^ places)
    uniform = ((bits >> np.uint64(41)).astype(np.float64) + 0.5) * 2.0**-23
    scores: np.ndarray = logits / np.float64(temperature) - np.log(-np.log(uniform))
    if 0 < top_k < len(logits):
        scores[logits < np.sort(logits)[-top_k]] = -np.inf
    return scores


def sample_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of sample for one sequence. Returns the new position, tokens and output.
    It ignores stop tokens, which end the run on the device.
    """
    logits, settings, position, tokens, output, _ = inputs
    row = np.asarray(settings, np.int64).astype(np.int32)
    at = int(position[0])
    key = int(row[KEY[0]]) & 0xFFFFFFFF | (int(row[KEY[1]]) & 0xFFFFFFFF) << 32
    scores = _scores(logits[0], row[:1].view(np.float32)[0], int(row[1]), key, at)
    tokens, output = tokens.copy(), output.copy()
    tokens[at + 1] = output[at + 1] = scores.argmax()
    return [np.array([at + 1]), tokens, output]


def _choose_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of choose. It searches the logits itself and ignores input 3, the
    candidates.
    """
    return sample_reference([*inputs[:3], *inputs[4:7]], attrs)


register("embed", _embed, lower_embed)
register("advance", _advance, lower_advance)
register("sample", sample_reference, lower_sample)
register("choose", _choose_reference, lower_choose)
