"""Expressions of elementwise tasks: refusals, evaluation and emitted source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ark.errors import PlanError
from ark.tasks import expression, text


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (["input", 2], "reads"),
        (["input", True], "reads"),
        (["number", "1.0f; evil()"], "number"),
        (["evil", ["input", 0]], "calls"),
        (["add", ["input", 0]], "calls 'add' with 1"),
        (["cast", "fp64", ["input", 0]], "casts"),
        ("input", "not an expression"),
        (["gelu", ["input", 1]], "integers is not supported"),
    ],
)
def test_invalid_expressions_are_refused(tree: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        expression.check(tree, ["fp32", "int32"])


def test_size_is_bounded() -> None:
    tree: list[Any] = expression.leaf(0)
    for _ in range(expression.MAX_NODES):
        tree = ["relu", tree]
    with pytest.raises(PlanError, match="parts"):
        expression.check(tree, ["fp32"])


def test_chains_are_put_together() -> None:
    inner = ["add", expression.leaf(0), expression.leaf(1)]
    tree = expression.substitute(["mul", expression.leaf(0), expression.number(0.5)], [inner])
    expression.check(tree, ["fp32", "fp32"])
    a, b = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    np.testing.assert_array_equal(expression.evaluate(tree, [a, b]), (a + b) * 0.5)


def test_each_part_is_written_once() -> None:
    writer = expression.Writer([("v", "float")], text.literal)
    value, kind = writer.write(["relu", ["exp", ["input", 0]]])
    assert (value, kind) == ("x2", "float")
    assert writer.statements == [
        "const float x0 = v;",
        "const float x1 = ark_exp(x0);",
        "const float x2 = (x1 < 0.0f ? 0.0f : x1);",
    ]
