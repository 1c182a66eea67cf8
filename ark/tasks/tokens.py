"""The token loop on the device: embedding look-up and sampling.

`embedding` params: columns (per task), rows, dynamic. operands: ids, table, output. With `dynamic`
the position follows, which is added to row numbers. A second output, of another type, may follow
the position. coord: first row, first column.

`sample` params: tiles, shares, first. The logits are divided into `shares` equal shares, one per
rank. In memory share number `first` comes first, and the others follow cyclically. operands: logits
(1, vocab), settings, position, candidates. coord: tile. Each tile finds its best candidate for the
next token. With temperature 0 this is the token with the largest logit. Otherwise it is the token
with the largest logit / temperature + Gumbel noise; the best one of all tiles is then a sample of
the softmax (Gumbel 1954). The noise is a hash of key, position and token, so every backend draws
the same token.

`choose` takes the best candidate of all tiles (for top-k it finds the k-th largest logit by
bisection over the ordered bits, and searches again), appends the token, passes it to the host,
advances the position and ends the loop at a stop token. operands: logits, settings, position,
candidates, tokens, output (host), stops.

settings (int32): temperature (float bits), top_k, low half of the key, last position of the prompt,
limit of positions, number of stop tokens, high half of the key. `noise_key` computes a sequence's
key from the seed and the sequence's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INDEX_NAMES,
    INT_MAX,
    Few,
    Params,
    PartialParams,
    Places,
    Rows,
    Size,
    Splits,
    box,
    count,
    fits,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.rotary import VECTOR_COLUMNS

SETTINGS = ("temperature", "top_k", "key_low", "last", "limit", "stops", "key_high")
HEADERS = (text.header("sampling.h"), text.header("tokens.h"))
_ALL_BITS = (1 << 64) - 1


def mix(z: int) -> int:
    """The mixing function of splitmix64 (Steele, Lea and Flood 2014), `ark_mix` in sampling.h."""
    z = (z + 0x9E3779B97F4A7C15) & _ALL_BITS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _ALL_BITS
    return z ^ (z >> 31)


def noise_key(seed: int, sequence: int = 0) -> int:
    """The 64-bit key for the noise of a sequence of a batch: mix(mix(seed) ^ sequence).

    It differs between any two sequences of one seed, and between any two seeds for one sequence.
    seed: taken modulo 2^64.
    """
    return mix(mix(seed & _ALL_BITS) ^ sequence)


def key_halves(key: int) -> tuple[int, int]:
    """The two halves of a 64-bit key, as the settings `key_low` and `key_high`."""
    low, high = key & 0xFFFFFFFF, key >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


class SampledParams(PartialParams, frozen=True):
    """Parameters of a linear layer that computes logits and finds candidates for the next token
    (epilogue `sample`). rows: the number of weight rows in a stage of the ring. tiles: the number
    of tasks, each of which finds one candidate.
    """

    rows: Rows = 1
    tiles: Few = 0


def sample_check(sig: Signature, first: int, candidates: int, rows: int, stages: int) -> None:
    """Checks the operands that the epilogue `sample` adds to a product. first: the index of
    `settings`, which the position follows. candidates: the index of the candidates. stages: the
    number of stages of the weights.
    """
    tiles = sig.read(SampledParams).tiles
    need(
        0 < tiles <= stages,
        f"{stages} stages of weights are divided among {tiles} tasks; expected 1 to {stages} tasks",
    )
    shaped(sig, first, (rows * len(SETTINGS),), "int32", dense=True)
    shaped(sig, first + 1, (rows,), "int32", dense=True)
    shaped(sig, candidates, (rows * tiles, 2), "fp32", dense=True)


def sample_tile(sig: Signature, weight: int, row: int) -> int:
    """The number of the task that begins at this row of the weights. The product's stages are
    divided equally among the tasks.
    """
    params = sig.read(SampledParams)
    stages = -(-sig.operands[weight].shape[0] // params.rows)
    return -(-(row // params.rows) * params.tiles // stages)


class EmbeddingParams(Params, frozen=True):
    rows: Rows
    columns: Size
    dynamic: bool


class Embedding(TaskKind):
    name = "embedding"
    params = EmbeddingParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(EmbeddingParams)
        dynamic = params.dynamic
        count(sig, *((4, 5) if dynamic else (3,)))
        ids = typed(sig, 0, *INDEX_NAMES).shape
        (_, width), (rows, columns) = matrix(sig, 1), matrix(sig, 2)
        need(
            len(ids) == 1 and (dynamic or ids[0] >= rows),
            f"ids have shape {list(ids)}, expected [{rows}] or longer",
        )
        need(width == columns, f"the table's rows have {width} columns, expected {columns}")
        fits((params.rows, params.columns), (rows, columns))
        if dynamic:
            shaped(sig, 3, (1,), "int32")
        for copy in self._outputs(sig)[1:]:
            shaped(sig, copy, (rows, columns))

    def _outputs(self, sig: Signature) -> tuple[int, ...]:
        return (2, *range(4, len(sig.operands)))

    def places(self, sig: Signature) -> Places:
        params = sig.read(EmbeddingParams)
        return box(sig.operands[2].shape, (params.rows, params.columns))

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset(self._outputs(sig))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(EmbeddingParams)
        rows, width = sig.operands[2].shape
        r1 = min(coord[0] + params.rows, rows)
        c1 = min(coord[1] + params.columns, width)
        accesses = [
            whole(0, sig.operands[0]),
            Access(1, (0, coord[1]), (sig.operands[1].shape[0], c1)),
            *(Access(i, (coord[0], coord[1]), (r1, c1), write=True) for i in self._outputs(sig)),
        ]
        if params.dynamic:
            accesses.append(whole(3, sig.operands[3]))
        return accesses

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        params = sig.read(EmbeddingParams)
        moved = params.rows * params.columns * sig.operands[1].itemsize * 2.0
        return 0.0, moved

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(EmbeddingParams)
        (rows, width), vocabulary = sig.operands[2].shape, sig.operands[1].shape[0]
        rows_each = params.rows
        constants = (
            rows_each,
            params.columns,
            rows,
            width,
            vocabulary,
            sig.operands[0].shape[0],
        )
        ids, table, output, position = (text.given(sig, i, const=i != 2) for i in range(4))
        for copy in self._outputs(sig)[1:]:
            output = f"ark_both({text.given(sig, copy, const=False)}, {output})"
        given = (ids, table, output, position)
        if not self._packed(sig):
            return text.call(name, "ark_embedding", constants, given)
        return (
            f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n"
            f"  if (ark_aligned({text.addresses(sig, (1, 2))})) {{\n"
            f"    {text.called('ark_embedding_packs', (rows_each, *constants[2:]), given)};\n"
            f"  }} else {{\n    {text.called('ark_embedding', constants, given)};\n  }}\n}}\n"
        )

    def _packed(self, sig: Signature) -> bool:
        """True if rows of the table can be copied by vector accesses."""
        table, out = sig.operands[1:3]
        return (
            sig.read(EmbeddingParams).columns == table.shape[1]
            and len(self._outputs(sig)) == 1
            and not out.packet
            and all(
                n % VECTOR_COLUMNS == 0 for o in (table, out) for n in (o.shape[1], o.strides[0])
            )
        )


class SampleParams(Params, frozen=True):
    tiles: Splits
    shares: Splits = 1
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0


def _turned(params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
    """The op's parameters on the rank that is `by` ranks after this one. There another share of the
    logits comes first.
    """
    given = SampleParams.from_plan(params)
    return replace(given, first=(given.first + by) % given.shares).to_plan()


def _first_token(sig: Signature) -> int:
    """The number of the token to which the first logit in memory belongs."""
    params = sig.read(SampleParams)
    return int(sig.operands[0].shape[1] // params.shares * params.first)


def _shared(sig: Signature) -> str:
    """The C++ text `true` if each rank computes a share of the logits, otherwise `false`."""
    return "true" if sig.read(SampleParams).shares > 1 else "false"


def _shares(sig: Signature, index: int, axis: int) -> list[Access]:
    """Accesses to all of an operand, one for each rank's equal share along an axis, because each
    rank may write its own share.
    """
    shape = sig.operands[index].shape
    shares = sig.read(SampleParams).shares
    size, rest = divmod(shape[axis], shares)
    if rest:
        return [whole(index, sig.operands[index])]

    def corner(share: int, other: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(share * size if d == axis else n for d, n in enumerate(other))

    return [Access(index, corner(s, (0, 0)), corner(s + 1, shape)) for s in range(shares)]


def _check_sampling(sig: Signature) -> None:
    """Checks the operands of `sample` and `choose`. Both kinds have the same first operands."""
    params = sig.read(SampleParams)
    rows, vocabulary = matrix(sig, 0)
    tiles = params.tiles
    need(rows == 1 and vocabulary + tiles <= INT_MAX, f"got {rows} rows of logits, expected 1")
    need(tiles <= vocabulary, f"{vocabulary} logits are divided into {tiles} tiles")
    shares, first = params.shares, params.first
    need(
        vocabulary % shares == 0 and first < shares,
        f"{vocabulary} logits are not divisible by {shares} shares, or first share {first} is out "
        "of range",
    )
    shaped(sig, 1, (len(SETTINGS),), "int32", dense=True)
    shaped(sig, 2, (1,), "int32")
    shaped(sig, 3, (tiles, 2), "fp32", dense=True)


class Sample(TaskKind):
    name = "sample"
    params = SampleParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        _check_sampling(sig)

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.read(SampleParams).tiles),))

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        return _turned(params, by)

    def own(self, sig: Signature) -> tuple[int, ...]:
        return (_first_token(sig),)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        lo, hi = _tile(sig, coord[0])
        return [
            Access(0, (0, lo), (1, hi)),
            whole(1, sig.operands[1]),
            whole(2, sig.operands[2]),
            Access(3, (coord[0], 0), (coord[0] + 1, 2), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        constants = (sig.operands[0].shape[1], _shared(sig), sig.read(SampleParams).tiles)
        operands = [text.given(sig, i, const=i != 3) for i in range(4)]
        return text.call(name, "ark_sample_tile", constants, operands)


class Choose(TaskKind):
    name = "choose"
    params = SampleParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 7)
        _check_sampling(sig)
        context, stops = (typed(sig, index, "int32").shape for index in (4, 6))
        need(len(context) == len(stops) == 1, "tokens and stops must have one dimension")
        shaped(sig, 5, context, "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        return _turned(params, by)

    def own(self, sig: Signature) -> tuple[int, ...]:
        return (_first_token(sig),)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        written = (2, 4, 5)
        shared = [*_shares(sig, 0, 1), *_shares(sig, 3, 0)]
        read = [whole(i, sig.operands[i]) for i in range(7) if i not in (0, 3)]
        return shared + read + [whole(i, sig.operands[i], write=True) for i in written]

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({3})

    def early(self, sig: Signature) -> frozenset[int]:
        return frozenset({1, 2, 3, 6} if sig.operands[3].packet else ())

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 8.0 * sig.read(SampleParams).tiles

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return text.function(name, f"  {choice('ark_choose', sig)};\n")


def choice(callee: str, sig: Signature) -> str:
    """The C++ call of the template `callee` with the arguments of the task kind `choose`."""
    context, stops = sig.operands[4].shape[0], sig.operands[6].shape[0]
    vocabulary, tiles = sig.operands[0].shape[1], sig.read(SampleParams).tiles
    constants = (vocabulary, _shared(sig), tiles, context, stops)
    operands = [text.given(sig, i, const=i not in (2, 4, 5)) for i in range(7)]
    return text.called(callee, constants, operands)


def _tile(sig: Signature, tile: int) -> tuple[int, int]:
    vocabulary, tiles = sig.operands[0].shape[1], sig.read(SampleParams).tiles
    return vocabulary * tile // tiles, vocabulary * (tile + 1) // tiles


for _kind in (Embedding(), Sample(), Choose()):
    register(_kind)
