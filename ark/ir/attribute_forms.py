"""Base classes of the structs that hold the attributes of ops, such as a transpose's permutation.

ark.ir.attributes has the struct of each op. All elementwise ops share `ElementwiseAttributes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

Form = TypeVar("Form", bound="Attributes")
Part = TypeVar("Part", bound="PartialAttributes")
FormType = type[Form]  # for annotations in classes that have a field named `type`
ReduceFunction = Literal[
    "sum", "mean", "max", "min", "prod", "squares", "moments", "sums", "logsumexp"
]


@cache
def _defaults(form: type[msgspec.Struct]) -> dict[str, Any]:
    return {f.name: f.default for f in msgspec.structs.fields(form) if not f.required}


def without_defaults(struct: msgspec.Struct, keep: Sequence[str] = ()) -> dict[str, Any]:
    """The fields by name as plain values, without those that equal their default, except the fields
    in `keep`. (msgspec's omit_defaults compares by identity, so a computed 0.0 would not be
    omitted.)
    """
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in keep}
    values: dict[str, Any] = msgspec.to_builtins(fields)
    defaults = _defaults(type(struct))
    return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}


class Attributes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the structs with an op's attributes."""

    def to_node(self) -> dict[str, Any]:
        """The attributes as the dict that a node holds, without those that equal their default."""
        return without_defaults(self)

    @classmethod
    def from_node(cls: type[Form], values: Mapping[str, Any]) -> Form:
        """The struct with a node's attributes. Raises msgspec.ValidationError if they are not those
        of this struct.
        """
        read: Form = msgspec.convert(dict(values), cls, strict=True)
        return read


class PartialAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of structs with attributes that several ops have in common. Reading one
    ignores an op's other attributes.
    """

    @classmethod
    def of(cls: type[Part], values: Mapping[str, Any]) -> Part:
        """The fields of this struct, taken from a node's attributes."""
        part: Part = msgspec.convert(dict(values), cls, strict=True)
        return part


class ElementwiseAttributes(PartialAttributes, frozen=True):
    """Attributes of elementwise ops. expr: the expression that computes an element of the result
    from the inputs' elements at the same index. Without `expr`, the op's name is the function; its
    arguments are the inputs and, if given, the number `scalar`. shape: the result's shape, if it is
    not the broadcast shape of the inputs.
    """

    expr: list[Any] | None = None
    scalar: int | float | None = None
    shape: list[int] | None = None
