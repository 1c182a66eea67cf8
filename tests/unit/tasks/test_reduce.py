"""The expressions of terms that a reduction refuses, and the error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import ark  # noqa: F401  (the kinds are registered)
from ark.errors import PlanError
from ark.plan import kind as kinds
from ark.plan.signature import OperandType, Signature

PRODUCT = ["mul", ["input", 0], ["input", 1]]
COUNTED = ["where", ["greater", ["input", 0], ["number", 0.5]], ["index", -1], ["number", 9]]


def reduction(
    shapes: Sequence[Sequence[int]], term: Any, dtype: str = "fp32", axis: int = 3
) -> None:
    """Checks the parameters of a sum of a (3, 40) tensor over an axis."""
    operands = []
    for shape in shapes:
        strides = [shape[1], 1]
        kind = dtype if shape is shapes[-1] else "fp32"
        operands.append(OperandType(kind, tuple(shape), tuple(strides)))
    tile = [1, 1, 3, 1] if axis == 3 else [1, 1, 1, 40]
    params = {"function": "sum", "axis": axis, "count": 40, "tile": tile, "term": term}
    kinds.get("reduce").check(Signature("reduce", params, tuple(operands)))


def test_terms_of_one_and_two_inputs_are_taken() -> None:
    reduction([(3, 40), (3, 40), (3, 1)], PRODUCT)
    reduction([(3, 40), (3, 1), (3, 1)], PRODUCT)
    reduction([(3, 40), (1, 40), (1, 40)], PRODUCT, axis=2)
    reduction([(3, 40), (3, 1)], COUNTED, "int64")


@pytest.mark.parametrize(
    ("shapes", "term", "dtype", "axis", "says"),
    [
        ([(3, 40), (1, 40), (3, 1)], PRODUCT, "fp32", 3, "does not broadcast"),
        ([(3, 40)] * 3 + [(3, 1)], ["mul", PRODUCT, ["input", 2]], "fp32", 3, "3 inputs"),
        ([(3, 40), (3, 1), (3, 1)], ["neg", ["input", 0]], "fp32", 3, "does not read all"),
        ([(3, 40), (3, 1)], ["greater", ["input", 0], ["number", 1.0]], "bool", 3, "support bool"),
        ([(3, 40), (3, 1)], COUNTED, "fp32", 3, "int"),
        ([(3, 40), (1, 40)], COUNTED, "int64", 2, "uses the last dimension's index"),
        ([(3, 40), (3, 1)], ["input", 1], "fp32", 3, "1"),
    ],
)
def test_other_terms_are_refused(
    shapes: Sequence[Sequence[int]], term: Any, dtype: str, axis: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        reduction(shapes, term, dtype, axis)


def test_term_with_indices_has_at_most_four_dimensions() -> None:
    strides = (120, 120, 120, 40, 1)
    operands = (
        OperandType("fp32", (1, 1, 1, 3, 40), strides),
        OperandType("int64", (1, 1, 1, 3, 1), (3, 3, 3, 1, 1)),
    )
    params = {"function": "sum", "axis": 4, "count": 40, "tile": [1, 1, 3, 1], "term": COUNTED}
    with pytest.raises(PlanError, match="at most 4 dimensions, got 5"):
        kinds.get("reduce").check(Signature("reduce", params, operands))
