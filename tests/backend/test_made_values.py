"""Ops on values that are not stored in memory (indices, one-hot rows, constants, comparisons,
casts): each computes in its tensor's type, as NumPy does with an array of that type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.ir.dtype import DataType
from tests.emulated import few_emulated
from tests.opcheck import Case, check

FLOATS = (ark.fp32, ark.fp16, ark.bf16)
INTEGERS = (ark.int64, ark.int32, ark.uint32, ark.int8, ark.uint8)
SHAPE = [3, 7]
IDS = np.array([[4, 0, 6]])

SOURCES: dict[str, tuple[Callable[[Any, DataType], Any], np.ndarray]] = {
    "iota": (lambda ids, d: ark.iota(SHAPE, 1, d), np.arange(7) + np.zeros((3, 1))),
    "one_hot": (lambda ids, d: ark.reshape(ark.one_hot(ids, 7, d), SHAPE), np.eye(7)[IDS[0]]),
    "constant": (lambda ids, d: ark.constant(3, SHAPE, d), np.full(SHAPE, 3)),
    "compared": (
        lambda ids, d: ark.cast(ark.less(ark.iota(SHAPE, 1, ark.int32), 4), d),
        (np.arange(7) < 4) + np.zeros((3, 1)),
    ),
    "cast": (
        lambda ids, d: ark.cast(ark.iota(SHAPE, 0, ark.fp32), d),
        np.arange(3)[:, None] + np.zeros(7),
    ),
}


def _quotient(x: np.ndarray) -> np.ndarray:
    return x / 3 if x.dtype.kind == "f" else x // 3


# Ops on a value x, and the expected results in float64 or int64, which the check wraps to the type.
USES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "itself": (lambda x: x, lambda x: x),
    "quotient": (lambda x: ark.div(x, 3), _quotient),
    "square": (lambda x: ark.mul(ark.mul(x, 30), ark.mul(x, 30)), lambda x: x * 30 * (x * 30)),
    "shifted": (lambda x: ark.sub(ark.add(x, 100), 50), lambda x: x + 50),
    "turned": (lambda x: ark.sub(5, x), lambda x: 5 - x),
    "larger": (lambda x: ark.maximum(x, 2), lambda x: np.maximum(x, 2)),
    "sum": (lambda x: ark.reduce_sum(x, 1), lambda x: x.sum(1, keepdims=True)),
    "least": (lambda x: ark.reduce_min(ark.neg(x), 0), lambda x: (-x).min(0, keepdims=True)),
    "above": (lambda x: ark.greater(x, 1), lambda x: x > 1),
    "moved": (lambda x: ark.transpose(ark.mul(x, 2), [1, 0]), lambda x: (x * 2).T),
    "running": (lambda x: ark.cumsum(ark.mul(x, 2), 1), lambda x: (x * 2).cumsum(1)),
}
OF_FLOATS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "part": (lambda x: ark.mul(x, 0.25), lambda x: x * 0.25),
    "exp": (lambda x: ark.exp(ark.mul(x, 0.5)), lambda x: np.exp(x * 0.5)),
    "silu": (ark.silu, lambda x: x / (1 + np.exp(-x))),
    "relu": (ark.relu, lambda x: np.maximum(x, 0)),
    "root": (ark.sqrt, np.sqrt),
    "mean": (lambda x: ark.reduce_mean(x, 1), lambda x: x.mean(1, keepdims=True)),
    "softmax": (ark.softmax, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "product": (lambda x: ark.matmul(x, x, transpose_other=True), lambda x: x @ x.T),
}
OF_WIDE: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "wide": (
        lambda x: ark.mul(ark.mul(x, 1 << 20), ark.mul(x, 1 << 20)),
        lambda x: x * (1 << 20) * (x * (1 << 20)),
    ),
}


@pytest.mark.parametrize(
    "dtype", few_emulated((*FLOATS, *INTEGERS), ark.fp32, ark.int64), ids=lambda d: d.name
)
def test_intermediate_values_are_rounded_to_their_type(backend: str, dtype: DataType) -> None:
    uses = {**USES, **(OF_FLOATS if dtype in FLOATS else {})}
    uses |= OF_WIDE if dtype in (ark.int64, ark.fp32) else {}
    cases = []
    for source, (make, values) in SOURCES.items():
        known = values.astype(np.float64 if dtype in FLOATS else np.int64)
        for use, (build, expected) in uses.items():
            name = f"{use} of {source} {dtype.name}"
            # In an unsigned type negative numbers are large numbers.
            if dtype.name.startswith("u") and use == "least":
                expected = _least_unsigned(dtype)

            def called(ids: Any, make: Any = make, build: Any = build) -> Any:
                return build(make(ids, dtype))

            def reference(_: np.ndarray, e: Any = expected, x: np.ndarray = known) -> np.ndarray:
                return e(x)

            cases.append(Case(name, [(IDS, ark.int64)], called, reference))
    check(cases)


def _least_unsigned(dtype: DataType) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (-x).astype(dtype.numpy).min(0, keepdims=True)
