"""ATen operators whose results are copies of elements, a constant, or indices."""

from __future__ import annotations

from typing import Any

import ark
from ark.interop.torch.values import Call, Value, cast, number, operator


@operator("_to_copy.default", "clone.default", "alias.default", "detach.default")
def _copied(call: Call, x: Value, **_: Any) -> Any:
    return x.tensor


for _name in ("lift_fresh_copy", "lift_fresh", "positive", "contiguous", "view_of"):
    operator(f"{_name}.default")(_copied)


@operator("copy.default")
def _copy(call: Call, x: Value, y: Value, non_blocking: bool = False) -> Any:
    return ark.expand(y.tensor, list(x.shape) or [1])


@operator("full.default", "full_like.default", "new_full.default")
def _full(call: Call, _: Any, *rest: Any, **__: Any) -> Any:
    return _filled(call, rest[-1])


def _filled(call: Call, value: Any) -> Any:
    if isinstance(value, Value):
        return ark.expand(cast(value, call.dtype), list(call.shape) or [1])
    value = int(value) if isinstance(value, bool) else value
    return ark.constant(value, list(call.shape) or [1], call.dtype)


for _name, _value in (("zeros", 0), ("ones", 1)):
    for _form in ("{}.default", "{}_like.default", "new_{}.default"):

        def _fill(call: Call, *_: Any, value: int = _value, **__: Any) -> Any:
            return _filled(call, value)

        operator(_form.format(_name))(_fill)

for _name in ("empty.memory_format", "empty_like.default", "new_empty.default"):
    operator(_name)(lambda call, *_, **__: _filled(call, 0))


@operator("fill.Scalar", "fill.Tensor")
def _fill_with(call: Call, _: Value, value: Any) -> Any:
    return _filled(call, value)


@operator("scalar_tensor.default")
def _scalar_tensor(call: Call, value: Any, **_: Any) -> Any:
    return _filled(call, value)


@operator("arange.start_step", "arange.default", "arange.start")
def _arange(call: Call, *bounds: Any, **_: Any) -> Any:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    places = ark.iota([call.shape[0]], 0, call.dtype)
    return ark.add(ark.mul(places, number(step, call.dtype)), number(start, call.dtype))
