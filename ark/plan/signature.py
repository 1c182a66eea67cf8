"""Signatures: the kind, static parameters and operand layouts for which one C++ function is
specialised.

Ops of one signature share a function, so that equal layers compile once.
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
# Arenas that begin at a multiple of it, and keep their place.
ARRANGED = ("activation", "parameter", "state")
SHORT_PACKET = 4


def packet_bytes(dtype: str) -> int:
    """Bytes of a packet: {32-bit word, epoch}, or {16-bit value, 16 bits of the epoch}."""
    return SHORT_PACKET if by_name(dtype).bits == 16 else 8


@dataclass(frozen=True)
class OperandType:
    """Everything about an operand that is fixed when source is written. aligned: wherever its arena
    lies, its address is a multiple of WIDEST_ACCESS_BYTES.
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
        """Bytes of an item: an element, or the byte that elements of 4 bits share."""
        return packet_bytes(self.dtype) if self.packet else by_name(self.dtype).itemsize

    @property
    def per_item(self) -> int:
        """Elements of an item."""
        return 1 if self.packet else by_name(self.dtype).per_item


@dataclass(frozen=True)
class Signature:
    """What one specialised function serves."""

    kind: str
    params: Mapping[str, Any]
    operands: tuple[OperandType, ...]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Hashable and sortable identity."""
        return (self.kind, repr(sorted(self.params.items())), self.operands)

    def read(self, form: type[Form]) -> Form:
        """The parameters by name, once for a signature; `form` is the kind's struct of them."""
        if form not in self._forms:
            self._forms[form] = msgspec.convert(dict(self.params), form, strict=True)
        values: Form = self._forms[form]
        return values

    @cached_property
    def _forms(self) -> dict[type, Any]:
        return {}

    def with_aligned(self, aligned: Sequence[bool]) -> Signature:
        """The same with other known alignments, by operand."""
        pairs = zip(self.operands, aligned, strict=True)
        return replace(self, operands=tuple(replace(o, aligned=a) for o, a in pairs))
