"""The types of ops that a plan in ARK's own layout (ark.runtime.api.task_schema) may contain.

The function for a type is called with the op's inputs, its output, its arguments and its name.
Called by ark.runtime.api.task_graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ark import ops
from ark.errors import PlanError
from ark.frontend.tensor import Tensor
from ark.ops.math import GATED
from ark.runtime.api.task_schema import OpEntry


class Arguments:
    """Access to the arguments of an op in a plan file, some of which have several names. Raises
    PlanError if an argument is missing or has the wrong type.
    """

    def __init__(self, op: OpEntry) -> None:
        self._op = op

    def __call__(self, kind: Any, *names: str) -> Any:
        for name in names:
            if name in self._op.args:
                (value,) = self._op.args[name].values()
                try:
                    return msgspec.convert(value, kind, strict=True)
                except (msgspec.ValidationError, UnicodeError) as error:
                    raise PlanError(f"op {self._op.name!r}: {name} is wrong: {error}") from error
        raise PlanError(f"op {self._op.name!r} of type {self._op.type} has no argument {names[0]}")

    def has(self, *names: str) -> bool:
        return any(name in self._op.args for name in names)


Call = Callable[[Sequence[Tensor], Any, Arguments, str], Tensor]
_SCALAR = ("Factor", "scalar")


def _op(name: str) -> Any:
    return getattr(ops, name)


def _plain(name: str) -> Call:
    return lambda reads, out, args, label: _op(name)(*reads, output=out, name=label)


def _binary(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: Arguments, label: str) -> Tensor:
        given = [*reads, args(float, *_SCALAR)] if args.has(*_SCALAR) else reads
        return _op(name)(*given, output=out, name=label)  # type: ignore[no-any-return]

    return call


def _reduction(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: Arguments, label: str) -> Tensor:
        axis, keep = args(int, "Axis", "axis"), args(bool, "KeepDim", "keepdims")
        return _op(name)(*reads, axis, keep, output=out, name=label)  # type: ignore[no-any-return]

    return call


def _matmul(reads: Sequence[Tensor], out: Any, args: Arguments, label: str) -> Tensor:
    left = args(bool, "TransposeInput", "transpose_a")
    right = args(bool, "TransposeOther", "transpose_b")
    return _op("matmul")(*reads, out, left, right, name=label)  # type: ignore[no-any-return]


def _normed(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: Arguments, label: str) -> Tensor:
        eps = args(float, "Eps", "eps")
        return _op(name)(*reads, eps, output=out, name=label)  # type: ignore[no-any-return]

    return call


_BINARY, _REDUCTIONS = ("add", "sub", "mul", "div"), ("reduce_sum", "reduce_max", "reduce_mean")
_PLAIN = (
    *("copy", "exp", "sqrt", "rsqrt", "relu", "gelu", "sigmoid", "silu", "softmax"),
    *("rope", "embedding", "argmax"),
    *GATED,
)


def _type(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


CALLS: dict[str, Call] = {
    **{_type(name): _plain(name) for name in _PLAIN},
    **{_type(name): _binary(name) for name in _BINARY},
    **{f"Scalar{_type(name)}": _binary(name) for name in _BINARY},
    **{_type(name): _reduction(name) for name in _REDUCTIONS},
    **{_type(name): _normed(name) for name in ("layernorm", "rmsnorm")},
    "Matmul": _matmul,
    "Transpose": lambda reads, out, args, label: _op("transpose")(
        *reads, args(list[int], "Permutation", "perm"), output=out, name=label
    ),
    "Cast": lambda reads, out, args, label: _op("cast")(*reads, out.ir.dtype, out, name=label),
    "ScalarAssign": lambda reads, out, args, label: _op("copy")(
        args(float, "Val", *_SCALAR), out, name=label
    ),
    "Constant": lambda reads, out, args, label: _op("copy")(
        args(float, "Val", *_SCALAR), out, name=label
    ),
}
