"""Elementwise ops that read each other's results become one op with one expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify


def kinds(build: Callable[[Any], Any]) -> list[str]:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build(ark.tensor((64, 64), ark.bf16))
    planned = make_plan(model.graph, registry.machine("cpu"))
    verify([planned])
    return [op.kind for op in planned.ops]


def soft(x: Any) -> Any:
    """Returns an expression in which a comparison and a function read one value and `where`
    combines them.
    """
    scaled = ark.mul(x, 2.0)
    return ark.where(ark.greater(scaled, 20.0), x, ark.mul(ark.log_sigmoid(scaled), -0.5))


def wide(x: Any) -> Any:
    return ark.cast(ark.elu(ark.cast(x, ark.fp32)), ark.bf16)


@pytest.mark.parametrize("build", [soft, wide])
def test_values_read_by_parts_of_one_op_are_not_written(build: Callable[[Any], Any]) -> None:
    assert kinds(build) == ["elementwise"]


def test_values_read_by_two_ops_are_written_once() -> None:
    """A value that two ops read is computed by a separate op, unless one of the two ops reads the
    result of the other.
    """

    def two(x: Any) -> Any:
        shared = ark.exp(ark.mul(x, 2.0))
        return ark.add(shared, 1.0), ark.sqrt(shared)

    assert kinds(two) == ["elementwise", "elementwise", "elementwise"]
