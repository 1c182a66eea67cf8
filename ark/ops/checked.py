"""Checks the types of arguments of public ops by their annotations, before the op runs.

Arguments of a wrong type thus give the same error message in every op. ark.ops wraps its public ops
in `checked`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.ir.values import whole
from ark.ops.tokens import TokenState

_F = TypeVar("_F", bound=Callable[..., Any])


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return np.ndim(value) == 0


def _are(value: Any, fits: Callable[[Any], bool] = lambda entry: True) -> bool:
    """True if the value is a sequence and `fits` returns True for each of its entries."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, dict)):
        return False
    return all(fits(entry) for entry in value)


def _is_whole(value: Any) -> bool:
    try:
        whole("", value)
    except InvalidUsageError:
        return False
    return np.ndim(value) == 0


def _is_pair(value: Any) -> bool:
    return _are(value, _is_whole) and len(list(value)) == 2


# For each annotation of a parameter: a function that tests an argument's value, and the expected
# values in words for error messages. Parameters with other annotations are not checked here; the
# ops check them.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda v: isinstance(v, str), "a word"),
    "bool": (
        lambda v: isinstance(v, (bool, np.bool_)) or (_is_whole(v) and v in (0, 1)),
        "True or False",
    ),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "DataType": (lambda v: isinstance(v, DataType), "a data type, for example ark.fp16"),
    "TokenState": (lambda v: isinstance(v, TokenState), "an ark.TokenState"),
    "Sequence[int]": (lambda v: _are(v, _is_whole), "a sequence of whole numbers"),
    "int | Sequence[int]": (
        lambda v: _is_whole(v) or _are(v, _is_whole),
        "a whole number or a sequence of them",
    ),
    "Sequence[TensorLike]": (_are, "a sequence"),
    "Sequence[tuple[int, int]]": (lambda v: _are(v, _is_pair), "a sequence of pairs of numbers"),
}
_OPTIONAL = " | None"


def checked(op: _F) -> _F:
    """Wraps an op in a function that checks the arguments and then calls the op. The function
    raises InvalidUsageError for an argument whose type is not the annotated one.
    """
    parameters: dict[str, _Parameter | None] = {}  # filled by the first call, to save start-up time

    @functools.wraps(op)
    def call(*given: Any, **named: Any) -> Any:
        if not parameters:
            parameters.update(_parameters(op))
        for name, value in (*zip(parameters, given, strict=False), *named.items()):
            known = parameters.get(name)
            if known is None or value is known.default or (value is None and known.optional):
                continue
            if not known.fits(value):
                raise InvalidUsageError(
                    f"{op.__name__}: {name} is {value!r:.60}; expected {known.expected}"
                )
        return op(*given, **named)

    return call  # type: ignore[return-value]


class _Parameter(NamedTuple):
    """An op's parameter whose arguments are checked. fits: tests a value. expected: the values that
    pass the test, in words.
    """

    fits: Callable[[Any], bool]
    expected: str
    default: Any
    optional: bool


def _parameters(op: Callable[..., Any]) -> dict[str, _Parameter | None]:
    """All parameters of an op by name. The value is None for a parameter that is not checked
    here.
    """
    parameters: dict[str, _Parameter | None] = {}
    for name, parameter in inspect.signature(op).parameters.items():
        annotation = str(parameter.annotation)
        kind = _KINDS.get(annotation.removesuffix(_OPTIONAL))
        optional = annotation.endswith(_OPTIONAL)
        parameters[name] = _Parameter(*kind, parameter.default, optional) if kind else None
    return parameters
