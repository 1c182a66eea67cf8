"""The interface of a weight format: which tensors a weight has, how it is stored in ark's memory,
and how it is decoded.

Each format has a file in this folder with a frozen dataclass, whose fields are read from
config.json. The checkpoint reader asks the format which tensors a weight has (`pieces`), checks
them, and reads values by `decode`. The planner asks for the layout in ark's memory (`layout`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ark.errors import ModelError, UnsupportedError
from ark.ir.dtype import bf16, fp16, fp32
from ark.models.fields import Fields
from ark.models.formats.layout import Array, Codes, Layout
from ark.models.shards import StoredTensor, read_array

FLOATS = ("F32", "F16", "BF16")
FLOAT_SCALES = {"F32": fp32, "F16": fp16, "BF16": bf16}
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Piece:
    """A tensor of a quantised weight. types, shapes: the types and shapes that the tensor may have;
    empty if the tensor is not read. needed: True if the weight cannot be read without the tensor.
    """

    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    needed: bool = True


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantised weight in a checkpoint. pieces: its tensors, by the suffixes of their names."""

    name: str
    shape: tuple[int, ...]
    format: Format
    pieces: Mapping[str, StoredTensor]

    def read(self, end: str) -> Array:
        """Reads a whole tensor of the weight, in its own type."""
        return read_array(self.pieces[end])

    def decode(self) -> Codes | Floats:
        """Returns the weight's codes, or its values if ark cannot compute with its codes."""
        return self.format.decode(self)

    def layout(self) -> Layout | None:
        """The layout in which ark stores the weight; None if it is stored as floats."""
        return self.format.layout(self)

    def wrong(self, fault: str) -> ModelError:
        """The error for tensors of this weight that contradict each other."""
        where = next(iter(self.pieces.values())).path
        return ModelError(
            f"{where} holds {self.name} quantised, but {fault}. The file is damaged, or "
            "config.json belongs to another one: download both again."
        )


class Format(Protocol):
    """One weight format with its parameters. name: the format's name in messages. A format whose
    class has `stacked = True` stores the weights of all experts in one tensor. Its methods get the
    shape (experts, outputs, inputs), and it decodes to (experts * outputs, inputs).
    """

    @property
    def name(self) -> str: ...

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        """The tensors of the weight `name` (its stored name without `weight`), by the suffixes of
        their names. The first tensor has the codes; a weight without this tensor is not quantised.
        """

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        """A weight's layout in ark's memory; None if ark.quantized_linear cannot read its codes."""

    def decode(self, tensor: QuantizedTensor) -> Codes | Floats:
        """Decodes the whole weight."""


def find(
    format: Format, stored_name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
) -> QuantizedTensor | None:
    """The quantised weight with a stored name; None if the weight is not quantised. Raises
    ModelError if one of its tensors is missing or has the wrong type or shape.
    """
    stem = stored_name.removesuffix("weight")
    stacked = len(shape) == 3 and getattr(format, "stacked", False)
    if not (stacked or (stored_name.endswith("weight") and len(shape) == 2)):
        return None
    pieces = format.pieces(stem, shape)
    first = next(iter(pieces))
    codes = stored.get(stem + first)
    others = [end for end in pieces if end != first and stem + end in stored]
    if codes is None and (stored_name in stored or not others):
        return None
    if codes is not None and codes.dtype_code in FLOATS and not others:
        return None
    present = {}
    for end, piece in pieces.items():
        tensor = stored.get(stem + end)
        if tensor is None:
            if piece.needed:
                where = (codes or stored[stem + others[0]]).path
                raise ModelError(
                    f"{where} holds {stored_name} quantised ({format.name}), but lacks {stem + end}"
                    ". Download the weights again."
                )
            continue
        if piece.types:
            _check(format, tensor, piece)
        present[end] = tensor
    return QuantizedTensor(stored_name, shape, format, present)


def _check(format: Format, tensor: StoredTensor, piece: Piece) -> None:
    """Raises ModelError unless the tensor has one of the piece's types and one of its shapes."""
    if tensor.dtype_code not in piece.types:
        kind, expected = tensor.dtype_code, " or ".join(piece.types)
    elif tensor.shape not in piece.shapes:
        kind = f"shape {list(tensor.shape)}"
        expected = "shape " + " or ".join(str(list(shape)) for shape in piece.shapes)
    else:
        return
    raise ModelError(
        f"{tensor.path} holds {tensor.name} as {kind}, but {format.name} of this config requires "
        f"{expected}. Correct the config, or download the weights again."
    )


def unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """The codes in 32-bit words, along the last dimension. The lowest bits of a word are the first
    code.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    small: npt.NDArray[np.uint8] = values.astype(np.uint8)
    return small.reshape(*words.shape[:-1], -1)


def by_blocks(codes: Array, scales: Array, zeros: Array | None, block: tuple[int, int]) -> Codes:
    """Codes whose scales and zero points belong to blocks. block: the numbers of rows and columns
    of a block (0 for all). Blocks at the end may be smaller.
    """
    outputs, inputs = codes.shape
    rows, columns = block[0] or outputs, block[1] or inputs
    group = math.gcd(columns, inputs)
    places = np.ix_(np.arange(outputs) // rows, np.arange(0, inputs, group) // columns)
    shape = (-(-outputs // rows), -(-inputs // columns))
    wide = [None if part is None else part.reshape(shape)[places] for part in (scales, zeros)]
    assert wide[0] is not None
    return Codes(codes, wide[0], wide[1])


def read_group(fields: Fields, name: str) -> int:
    """The number of inputs that share a scale. The file's -1 means all inputs, for which 0 is
    returned.
    """
    return 0 if fields.get(name) == -1 else fields.size(name)


def choice(fields: Fields, name: str, values: tuple[object, ...], default: object) -> object:
    """The value of a field that must be one of `values`. Raises UnsupportedError for other
    values.
    """
    value = fields.get(name)
    value = default if value is None else value
    if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
        raise UnsupportedError(
            f"{fields.source}: {name} is {str(value)[:200]!r}, but ark reads quantised weights "
            f"with {' or '.join(map(str, values))}. Use a checkpoint with one of these."
        )
    return value
