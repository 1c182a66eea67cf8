"""Signatures. A signature has a task kind, its static parameters and the types and layouts of its
operands; one C++ function is specialised for each. Ops with equal signatures share a function, so
equal layers of a model are compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from ark.ir.dtype import by_name

Form = TypeVar("Form", bound=msgspec.Struct)

WIDEST_ACCESS_BYTES = 16  # bytes of the widest access
# Arenas (allocations for one kind of memory) in which the alignment of each buffer is known: the
# arena begins at a multiple of WIDEST_ACCESS_BYTES, and the plan sets each buffer's offset.
ARRANGED = ("activation", "parameter", "state")
# The key of a plan's metadata for the alignment of external buffers: the caller places each of them
# at a multiple of this number of bytes. Without this entry external buffers may be unaligned.
EXTERNAL_ALIGNMENT = "external_alignment"
SHORT_PACKET = 4


def packet_bytes(dtype: str) -> int:
    """Bytes of a packet: 8 for {32-bit value, epoch}, 4 for {16-bit value, 16 bits of the
    epoch}.
    """
    return SHORT_PACKET if by_name(dtype).bits == 16 else 8


@dataclass(frozen=True)
class OperandType:
    """The properties of an operand that are known when source is written. aligned: True if its
    address is certainly a multiple of WIDEST_ACCESS_BYTES.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packet: bool = False
    system: bool = False
    aligned: bool = False

    @property
    def ctype(self) -> str:
        storage = by_name(self.dtype).storage
        if not self.packet:
            return storage
        return f"ArkShort<{storage}>" if self.itemsize == SHORT_PACKET else "ark_u64"

    @property
    def itemsize(self) -> int:
        """Bytes of an item. An item is an element, or the byte that several elements of less than 8
        bits share.
        """
        return packet_bytes(self.dtype) if self.packet else by_name(self.dtype).itemsize

    @property
    def per_item(self) -> int:
        """The number of elements in an item (see itemsize)."""
        return 1 if self.packet else by_name(self.dtype).per_item


@dataclass(frozen=True)
class Signature:
    """The key of one specialised function: a task kind, its static parameters and its operand
    types.
    """

    kind: str
    params: Mapping[str, Any]
    operands: tuple[OperandType, ...]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable and sortable key."""
        return (self.kind, repr(sorted(self.params.items())), self.operands)

    def read(self, form: type[Form]) -> Form:
        """The parameters as a struct of type `form`. The conversion is cached, so it runs once per
        signature.
        """
        if form not in self._forms:
            self._forms[form] = msgspec.convert(dict(self.params), form, strict=True)
        values: Form = self._forms[form]
        return values

    @cached_property
    def _forms(self) -> dict[type, Any]:
        return {}

    def with_aligned(self, aligned: Sequence[bool]) -> Signature:
        """A copy of the signature with other alignments. aligned: for each operand, True if it is
        aligned.
        """
        pairs = zip(self.operands, aligned, strict=True)
        return replace(self, operands=tuple(replace(o, aligned=a) for o, a in pairs))
