"""Helpers with which task kinds check a plan's parameters, operands and coordinates. They raise
PlanError.

A kind declares its parameters as a `Params` struct with types and ranges, which refuses unknown
names. It checks its operands with the functions of this module. It states the coordinates that its
tasks must have as `Places`. A plan may come from an untrusted source, so the verifier runs all
three checks before a signature is used for anything else. If they pass, source code can be written
for the signature, and its tasks stay inside their operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ark.errors import PlanError
from ark.ir.attribute_forms import without_defaults
from ark.ir.dtype import FLOATS, INTEGERS
from ark.ir.fold import fold, is_block
from ark.ir.values import MAX_DIMS
from ark.plan.signature import Form, OperandType, Signature

INT_MAX = (1 << 31) - 1  # source code uses 32-bit integers
FLOAT_NAMES = tuple(t.name for t in FLOATS)
INTEGER_NAMES = tuple(t.name for t in INTEGERS)
INDEX_NAMES = ("int32", "int64")

Size = Annotated[int, msgspec.Meta(ge=1, le=INT_MAX)]
Rows = Annotated[int, msgspec.Meta(ge=1, le=INT_MAX)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Few = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
Splits = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Dim = Annotated[int, msgspec.Meta(ge=0, le=MAX_DIMS - 1)]
Epsilon = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Tile = Annotated[tuple[Size, ...], msgspec.Meta(min_length=4, max_length=4)]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class for the static parameters of a task kind, which has no parameters itself.
    `Signature.read` returns a signature's parameters as such a struct.
    """

    def to_plan(self) -> dict[str, Any]:
        """The parameters in the form that a plan has in memory and after reading its JSON: lists
        instead of tuples, without parameters that have their default value.
        """
        values: dict[str, Any] = listed(without_defaults(self))
        return values

    @classmethod
    def from_plan(cls: type[Form], values: Mapping[str, Any]) -> Form:
        """The parameters from a plan's values. Raises msgspec.ValidationError if these do not fit
        the schema.
        """
        read: Form = msgspec.convert(dict(values), cls, strict=True)
        return read


def listed(value: Any) -> Any:
    """The value with tuples replaced by lists, as in JSON."""
    if isinstance(value, dict):
        return {key: listed(of) for key, of in value.items()}
    return [listed(of) for of in value] if isinstance(value, (list, tuple)) else value


class PartialParams(Params, frozen=True, forbid_unknown_fields=False):
    """The base class for reading some of a kind's parameters: other parameters are ignored. Used by
    functions that serve several kinds.
    """


class TiledParams(PartialParams, frozen=True):
    """The parameter `tile` (the sizes of a tile), which all kinds have whose tasks are tiles of a
    result.
    """

    tile: tuple[Size, ...]


def read_params(kind: str, schema: type[Params], values: Mapping[str, Any]) -> None:
    """Raises PlanError unless the parameters of a task kind have the names, types and ranges of its
    schema.
    """
    try:
        msgspec.convert(dict(values), schema, strict=True)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise PlanError(f"the parameters of a task of kind {kind!r} do not fit: {error}") from error


def need(condition: bool, message: str) -> None:
    """Raises PlanError with the message unless the condition holds."""
    if not condition:
        raise PlanError(message)


def count(sig: Signature, *wanted: int) -> None:
    """Raises PlanError unless the number of the signature's operands is one of `wanted`."""
    need(
        len(sig.operands) in wanted,
        f"got {len(sig.operands)} operands, expected {' or '.join(str(n) for n in wanted)}",
    )


def copyable(source: OperandType, out: OperandType) -> None:
    """Raises PlanError unless elements of `source` can be copied to `out` one by one."""
    need(
        source.dtype == out.dtype,
        f"source type {source.dtype} and output type {out.dtype} differ",
    )
    need(source.per_item == 1, f"{source.dtype} is not supported: several elements share a byte")


def grouped_heads(heads: int, kv_heads: int) -> None:
    """Raises PlanError unless each key/value head belongs to the same number of query heads."""
    need(
        heads % kv_heads == 0,
        f"{heads} query heads are not divisible by {kv_heads} key/value heads",
    )


def typed(sig: Signature, index: int, *names: str) -> OperandType:
    """The operand number `index`. Raises PlanError unless its data type is one of the expected ones
    (default: any floating-point type).
    """
    operand = sig.operands[index]
    expected = names or FLOAT_NAMES
    need(
        operand.dtype in expected,
        f"operand {index} is {operand.dtype}, expected {' or '.join(expected)}",
    )
    return operand


def shaped(
    sig: Signature, index: int, wanted: Sequence[int], *names: str, dense: bool = False
) -> OperandType:
    """The operand number `index`. Raises PlanError unless it has the shape `wanted` and an expected
    data type and, if `dense` is True, its elements are consecutive in memory.
    """
    operand = typed(sig, index, *names)
    need(
        operand.shape == tuple(wanted),
        f"operand {index} has shape {list(operand.shape)}, expected {list(wanted)}",
    )
    need(not dense or is_dense(operand), f"operand {index} is strided, expected dense")
    return operand


def is_dense(operand: OperandType) -> bool:
    """True where the elements are consecutive; a dimension of size 1 may have any stride."""
    step = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def matrix(sig: Signature, index: int, *names: str) -> tuple[int, int]:
    """The sizes of a two-dimensional operand. Raises PlanError if it has another rank or type."""
    operand = typed(sig, index, *names)
    need(
        len(operand.shape) == 2,
        f"operand {index} has shape {list(operand.shape)}, expected 2 dimensions",
    )
    return operand.shape[0], operand.shape[1]


def fits(tile: Sequence[int], shape: Sequence[int]) -> None:
    """Raises PlanError unless the tile lies inside the shape and its elements can be counted in 32
    bits.
    """
    need(
        all(t <= n for t, n in zip(tile, shape, strict=True)) and math.prod(tile) <= INT_MAX,
        f"the tile {list(tile)} does not fit the shape {list(shape)}",
    )


def covers(tile: Sequence[int], shape: Sequence[int]) -> None:
    """Raises PlanError unless a tile of four sizes fits into a shape that may have more than four
    dimensions. All dimensions of the shape before the last three are folded into one, and the
    tile's first size counts elements of this folded dimension. It must be a size into which the
    folded dimensions can be divided (ark.ir.fold).
    """
    fits(tile, fold(shape))
    need(
        is_block(shape, tile[0]),
        f"tile {list(tile)} does not divide the leading dimensions of {list(shape)} into boxes",
    )


@dataclass(frozen=True)
class Places:
    """The coordinates that an op's tasks must have. `ranges` has one range of numbers per
    coordinate; every combination of their values must occur in exactly one task.

    span: True if a task covers an interval of the last range. Then its last two coordinates are the
    interval's first value and the value after its last; the intervals together cover the range.
    first: if set, only the first `first` combinations must occur. Combinations are counted with the
    last range varying fastest.
    """

    ranges: tuple[range, ...]
    span: bool = False
    first: int | None = None

    @property
    def count(self) -> int:
        """The number of combinations."""
        return math.prod(map(len, self.ranges))

    def check(self, coords: Sequence[tuple[int, ...]]) -> None:
        """Raises PlanError unless `coords` contains all coordinates, each once."""
        width = len(self.ranges) + self.span
        for r in self.ranges:
            need(r.stop + r.step <= INT_MAX, "task coordinates exceed 32 bits")
        for coord in coords:
            inside = len(coord) == width and all(
                c in r for c, r in zip(coord, self.ranges, strict=False)
            )
            if inside and self.span:
                last, end = self.ranges[-1], coord[-1]
                inside = coord[-2] < end and (end == last.stop or end in last)
            need(inside, f"no tile has the coordinates {list(coord)}")
        need(len(set(coords)) == len(coords), "two tasks compute the same tile")
        lines = math.prod(len(r) for r in (self.ranges[:-1] if self.span else self.ranges))
        if self.first is not None:
            begun = itertools.islice(itertools.product(*self.ranges), self.first)
            need(
                set(coords) == set(begun),
                f"the tasks must be those of the first {self.first} tiles",
            )
            return
        if not self.span:
            need(len(coords) == lines, f"only {len(coords)} of {lines} tiles are computed")
            return
        cuts: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for coord in coords:
            cuts.setdefault(coord[:-2], []).append((coord[-2], coord[-1]))
        need(len(cuts) == lines, f"only {len(cuts)} of {lines} rows are computed")
        for cut in cuts.values():
            ends = [0, *(end for _, end in sorted(cut))]
            begins = [begin for begin, _ in sorted(cut)] + [self.ranges[-1].stop]
            need(ends == begins, "the tasks of a row compute part of it twice or not at all")


def box(shape: Sequence[int], tile: Sequence[int]) -> Places:
    """The `Places` (coordinates that tasks must have) of the tiles of a shape. If the shape has
    more dimensions than the tile, leading dimensions are folded into one so that four remain.
    """
    sizes = fold(shape) if len(shape) > len(tile) else shape
    return Places(tuple(range(0, n, t) for n, t in zip(sizes, tile, strict=True)))
