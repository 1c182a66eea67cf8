"""Structs of attributes: frozen, by name, which a node holds as plain values.

ark.ir.attributes has the struct of each op. All elementwise ops share `ElementwiseAttributes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

Form = TypeVar("Form", bound="Attributes")
Part = TypeVar("Part", bound="PartialAttributes")
FormType = type[Form]  # for classes in whose body `type` is another name


@cache
def _defaults(form: type[msgspec.Struct]) -> dict[str, Any]:
    return {f.name: f.default for f in msgspec.structs.fields(form) if not f.required}


def without_defaults(struct: msgspec.Struct, keep: Sequence[str] = ()) -> dict[str, Any]:
    """The fields by name as plain values, but for those that equal their default, and those in
    `keep`. (msgspec's own omit_defaults compares identity, so that a computed 0.0 would stay.)
    """
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in keep}
    values: dict[str, Any] = msgspec.to_builtins(fields)
    defaults = _defaults(type(struct))
    return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}


class Attributes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes of an op."""

    def to_node(self) -> dict[str, Any]:
        """The attributes as a node holds them, without those that have their default."""
        return without_defaults(self)

    @classmethod
    def from_node(cls: type[Form], values: Mapping[str, Any]) -> Form:
        """The attributes that a node holds; msgspec.ValidationError where they are not the op's."""
        read: Form = msgspec.convert(dict(values), cls, strict=True)
        return read


class PartialAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """Some attributes of ops of several kinds, which have others as well."""

    @classmethod
    def of(cls: type[Part], values: Mapping[str, Any]) -> Part:
        """Those of a node's attributes."""
        part: Part = msgspec.convert(dict(values), cls, strict=True)
        return part


class ElementwiseAttributes(PartialAttributes, frozen=True):
    """What an op computes of its inputs' elements at a place: expr, an expression, or the function
    of its name; of them and of a number behind them (scalar). shape: of the result, where it is not
    that of the inputs together.
    """

    expr: list[Any] | None = None
    scalar: int | float | None = None
    shape: list[int] | None = None
