"""ATen operators that compare elements, combine truth values and bits, and select elements."""

from __future__ import annotations

from typing import Any

import ark
from ark.interop.torch.values import Call, Value, cast, number, operator, promoted, refuse

for _name, _comparison in {
    "eq": ark.equal,
    "ne": ark.not_equal,
    "lt": ark.less,
    "le": ark.less_equal,
    "gt": ark.greater,
    "ge": ark.greater_equal,
}.items():

    def _compare(call: Call, x: Value, y: Any, function: Any = _comparison) -> Any:
        kind = promoted(x, y)
        if kind == ark.bool and function not in (ark.equal, ark.not_equal):
            kind = ark.uint8
        if kind == ark.bool and not isinstance(y, Value):
            y = Value((), x.dtype, ark.constant(int(y), [1], ark.bool))
        return function(cast(x, kind), cast(number(y, kind), kind))

    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_compare)


def _truth(value: Value) -> Any:
    return cast(value, ark.bool)


for _name, _join in {
    "logical_and": ark.logical_and,
    "logical_or": ark.logical_or,
    "logical_xor": ark.logical_xor,
}.items():

    def _logical(call: Call, x: Value, y: Value, function: Any = _join) -> Any:
        return function(_truth(x), _truth(y))

    operator(f"{_name}.default")(_logical)

for _name, _bits, _bools in (
    ("bitwise_and", ark.bitwise_and, ark.logical_and),
    ("bitwise_or", ark.bitwise_or, ark.logical_or),
    ("bitwise_xor", ark.bitwise_xor, ark.logical_xor),
):

    def _bitwise(call: Call, x: Value, y: Any, bits: Any = _bits, bools: Any = _bools) -> Any:
        if call.dtype == ark.bool:
            other = y if isinstance(y, Value) else None
            if other is None:
                raise refuse("a bitwise operator of bool and a number")
            return bools(x.tensor, other.tensor)
        return bits(cast(x, call.dtype), cast(y, call.dtype))

    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_bitwise)


for _side, _shift in {"left": ark.shift_left, "right": ark.shift_right}.items():

    def _shifted(call: Call, x: Value, y: Any, function: Any = _shift) -> Any:
        return function(cast(x, call.dtype), cast(number(y, call.dtype), call.dtype))

    _name, _short = f"bitwise_{_side}_shift", f"__{_side[0]}shift__"
    for _word in (_name, _short):
        operator(f"{_word}.Tensor", f"{_word}.Scalar", f"{_word}.Tensor_Scalar")(_shifted)


@operator("logical_not.default")
def _logical_not(call: Call, x: Value) -> Any:
    return ark.logical_not(_truth(x))


@operator("bitwise_not.default")
def _bitwise_not(call: Call, x: Value) -> Any:
    return (ark.logical_not if call.dtype == ark.bool else ark.bitwise_not)(x.tensor)


@operator("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(call: Call, test: Value, x: Any, y: Any) -> Any:
    sides = [cast(number(v, call.dtype), call.dtype) for v in (x, y)]
    if not any(isinstance(v, Value) for v in (x, y)):
        sides[0] = ark.constant(sides[0], [1], call.dtype)
    return ark.where(_truth(test), *sides)


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(call: Call, x: Value, mask: Value, value: Any) -> Any:
    return ark.where(_truth(mask), cast(number(value, call.dtype), call.dtype), x.tensor)
