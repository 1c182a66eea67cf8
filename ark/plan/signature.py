"""What one C++ function is specialised for: kind, static parameters and operand layouts.

Ops of one signature share a function, so that equal layers compile once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ark.ir.dtype import by_name


@dataclass(frozen=True)
class OperandType:
    """Everything about an operand that is fixed when source is written."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packet: bool = False
    system: bool = False

    @property
    def ctype(self) -> str:
        return "ark_u64" if self.packet else by_name(self.dtype).storage

    @property
    def itemsize(self) -> int:
        """Bytes of an item: an element, or the byte that elements of 4 bits share."""
        return 8 if self.packet else by_name(self.dtype).itemsize

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
