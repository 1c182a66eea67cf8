"""Checks of the arguments with which a custom op is declared and called. Called by
ark.ops.custom.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Tensor
from ark.ir import values as ir
from ark.ir.dtype import DataType
from ark.ir.values import whole
from ark.plan.params import INT_MAX
from ark.tasks.custom_form import Form

Types = DataType | Sequence[DataType]


def text_of(name: str, source: Any) -> tuple[str, str]:
    """Returns (file name, text) of a custom op's source, which is given as a text or as the path of
    a file. Compiler messages show the file name.
    """
    if isinstance(source, str):
        return f"{name}.h", source
    if not isinstance(source, os.PathLike):
        raise InvalidUsageError(
            f"custom op {name!r}: the source is {source!r:.60}; expected the text or a pathlib.Path"
        )
    path = Path(source)
    try:
        return re.sub(r"[^\w.-]", "_", path.name), path.read_text()
    except (OSError, UnicodeError) as error:
        raise InvalidUsageError(f"custom op {name!r}: {path} cannot be read: {error}") from None


def cut_of(name: str, tile: Mapping[str, int | None]) -> dict[str, int | None]:
    for axis, n in tile.items():
        if n is not None and whole(f"custom op {name!r}: the tile of {axis}", n) < 1:
            raise InvalidUsageError(
                f"custom op {name!r}: the tile of {axis} is {n}; give 1 or more"
            )
    return dict(tile)


def scratch_of(name: str, fixed: Any, each: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    sizes = {axis: whole(f"custom op {name!r}", n) for axis, n in each.items()}
    if any(n < 0 for n in (whole(f"custom op {name!r}", fixed), *sizes.values())):
        raise InvalidUsageError(
            f"custom op {name!r}: scratch is {fixed} bytes and scratch_each is {sizes}; no size "
            "may be negative"
        )
    return int(fixed), sizes


def types_of(name: str, word: str, given: Types) -> tuple[DataType, ...]:
    types = (given,) if isinstance(given, DataType) else tuple(given)
    for dtype in types:
        if not isinstance(dtype, DataType):
            raise InvalidUsageError(
                f"custom op {name!r}: the type of {word} is {dtype!r:.60}, which is not a data "
                "type; pass for example ark.fp16"
            )
    if not types:
        raise InvalidUsageError(f"custom op {name!r}: {word} accepts no type; name at least one")
    return types


def constant_of(name: str, word: str, kind: str, value: Any) -> Any:
    """The value of a custom op's constant `word`, converted to its type `kind` as plans store it.
    Raises InvalidUsageError if it is not of that type.
    """
    fits = isinstance(value, (bool, np.bool_)) if kind == "bool" else np.ndim(value) == 0
    try:
        if fits and kind == "bool":
            return bool(value)
        if fits and kind == "float":
            return float(value)
        number = whole(word, value) if fits else INT_MAX + 1
    except (TypeError, ValueError):
        number = INT_MAX + 1
    if abs(number) > INT_MAX:
        raise InvalidUsageError(
            f"{name}: the constant {word} is {value!r:.60}; expected {kind}"
            f"{' of 32 bits' if kind == 'int' else ''}"
        )
    return int(number)


def sizes_of(form: Form, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    try:
        return form.sizes(shapes)
    except InvalidUsageError as error:
        raise ModelError(str(error)) from None


def results_by_name(form: Form, tensors: Sequence[ir.Tensor]) -> dict[str, ir.Tensor]:
    """The result tensors of a call of a custom op, by their names in the signature."""
    return dict(zip(form.results, tensors, strict=True))


def check_types(form: Form, tensors: Mapping[str, ir.Tensor]) -> None:
    for operand in form.operands:
        dtype = tensors[operand.name].dtype
        if dtype.packed:
            raise ModelError(
                f"{form.name}: {operand.name} is {dtype.name}, whose elements share bytes; "
                "ark.cast it"
            )
        if operand.dtypes and dtype.name not in operand.dtypes:
            raise ModelError(
                f"{form.name}: {operand.name} is {dtype.name}; expected "
                f"{' or '.join(operand.dtypes)}: use ark.cast"
            )


def check_no_overlap(
    form: Form, tensors: Mapping[str, Tensor], outputs: Sequence[ir.Tensor]
) -> None:
    """Raises ModelError if an output overlaps another operand, because the tasks of an op are not
    ordered among themselves.
    """
    for place, (name, out) in enumerate(results_by_name(form, outputs).items()):
        others = {n: t.ir for n, t in tensors.items() if n != name}
        others |= dict(list(results_by_name(form, outputs).items())[:place])
        for other, tensor in others.items():
            if ir.overlap(out, tensor):
                raise ModelError(
                    f"{form.name}: {name} would overwrite {other}; give it memory of its own,"
                    f" or declare in the signature that {other} is updated in place"
                )
