"""Every public op is called with a wrong argument in each position. Each call must raise an error
of ark, and a position that accepts the argument must support it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

import ark

WRONG: list[Any] = [
    *(None, "x", "", 1.5, -1, 0, 2**70, float("nan"), True, b"x", 1j, [], {}, [None], ["a"]),
    *([1.5], [-1], [2**70], np.zeros(3), object(), len, ark.fp32, ark.Model),
]
OPS = sorted(
    name
    for name in {*ark.__all__, *ark.ops.__all__}
    if inspect.isfunction(getattr(ark, name)) and getattr(ark, name).__module__[:7] == "ark.ops"
)


def plausible(parameter: inspect.Parameter) -> Any:
    """Returns a valid argument for a parameter of an op."""
    if parameter.name in ("index", "indices"):
        return ark.tensor([4], ark.int32)
    by_name = {"shape": [4, 8], "axis": 1, "dtype": ark.fp32, "perm": [1, 0], "kernel": [2, 2]}
    if parameter.name in by_name:
        return by_name[parameter.name]
    return ark.tensor([4, 8]) if parameter.default is parameter.empty else parameter.default


@pytest.mark.parametrize("op", OPS)
def test_each_value_is_accepted_or_refused_with_a_reason(op: str) -> None:
    function = getattr(ark, op)
    places = inspect.signature(function).parameters
    for place in places:
        for wrong in WRONG:
            ark.init(backend="cpu")
            given = {name: plausible(parameter) for name, parameter in places.items()}
            try:
                function(**{**given, place: wrong})
            except ark.InternalError:
                raise
            except ark.BaseError as error:
                assert str(error), (op, place, wrong)


# Matches a data type in a parameter's documentation: names of types, or phrases that refer to
# another operand's type.
TYPES = re.compile(r"fp32|any type|[Tt]ypes?\b|int\d|bool|integers|[Aa]s (for )?`?\w+")


@pytest.mark.parametrize("op", sorted({*OPS} - {"advance"}))  # advance takes no tensor
def test_each_docstring_names_types(op: str) -> None:
    assert TYPES.search(inspect.getdoc(getattr(ark, op)) or "")


def test_list_of_ops_is_not_empty() -> None:
    assert len(OPS) > 130


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ark.relu(x, name=3), "relu: name is 3; expected a word"),
        (lambda x: ark.argmax(x, last="no"), "argmax: last is 'no'; expected True or False"),
        (lambda x: ark.split(x, "ab", 0), "split: sizes is 'ab'; expected a sequence of whole"),
        (lambda x: ark.elu(x, None), "elu: alpha is None; expected a number"),
        (lambda x: ark.cast(x, "fp16"), "cast: dtype is 'fp16'; expected a data type"),
    ],
)
def test_errors_name_op_and_argument(call: Any, message: str) -> None:
    with pytest.raises(ark.InvalidUsageError, match=message):
        call(ark.tensor([4, 8]))
