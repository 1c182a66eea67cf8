"""Pieces of source text that task kinds share: operand declarations, offsets, box loops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import resources

import numpy as np

from ark.codegen.layout import RECORD_OPERANDS
from ark.ir.dtype import FLOATS as FLOAT_TYPES
from ark.ir.dtype import SMALL_FLOATS, RowType, by_name
from ark.ir.fold import leading, pad
from ark.plan.kind import Signature

MIN_ADDRESS_DIMS = 4
FLOATS = tuple(t.name for t in (*FLOAT_TYPES, *SMALL_FLOATS))


def pad4(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Left-pads to four dimensions at least."""
    return pad(values, fill)


def address(sig: Signature, index: int) -> str:
    """The address of operand `index`: in the task's record, or in the list that its end names."""
    last = RECORD_OPERANDS - 1
    if len(sig.operands) <= RECORD_OPERANDS or index < last:
        return f"t.operand[{index}]"
    return f"ARK_POINTER(const ark_u64, t.operand[{last}])[{index - last}]"


def addresses(sig: Signature, indices: Iterable[int]) -> str:
    """The bits of these operands' addresses, for `ark_aligned`: of those that may have low ones."""
    asked = (address(sig, i) for i in indices if not sig.operands[i].aligned)
    return " | ".join(asked) or "0u"


def pointer(sig: Signature, index: int, const: bool = True) -> str:
    """A typed pointer to operand `index`."""
    pointed = f"{'const ' if const else ''}{sig.operands[index].ctype}"
    return f"ARK_POINTER({pointed}, {address(sig, index)})"


def operand(sig: Signature, index: int, name: str, const: bool = True) -> str:
    """Declares a typed pointer to operand `index`."""
    pointed = f"{'const ' if const else ''}{sig.operands[index].ctype}"
    return f"  {pointed}* {name} = {pointer(sig, index, const)};\n"


def given(sig: Signature, index: int, const: bool = True) -> str:
    """Operand `index` as bodies in .h files take it: an ArkOperand, or none if there is no such."""
    if index >= len(sig.operands):
        return "ArkNoOperand{}"
    op = sig.operands[index]
    assert len(op.shape) <= MIN_ADDRESS_DIMS, "an ArkOperand has four strides"
    qualifier = "const " if const else ""
    pointed, at = f"{qualifier}{op.ctype}", pointer(sig, index, const)
    shape, strides = pad4(op.shape, 1), pad4(op.strides, 0)
    if isinstance(by_name(op.dtype), RowType):  # a step is a row, whose type's name has commas
        strides = (*(s // op.per_item for s in strides[:-1]), 0)
        bytes_of = f"ARK_POINTER({qualifier}unsigned char, {address(sig, index)})"
        at = f"reinterpret_cast<{pointed}*>({bytes_of})"
    steps = ", ".join(str(s if n != 1 else 0) for s, n in zip(strides, shape, strict=True))
    scope = "true" if op.system else "false"
    return f"ArkOperand<{pointed}, {steps}, {scope}>{{{at}}}"


def call(name: str, callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """A task body that is one call of a template of the kind's .h file: constants, arguments."""
    return function(name, f"  {called(callee, constants, arguments)};\n")


def called(callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """The call of a body's template with the task and further arguments."""
    listed = ", ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in constants)
    template = f"{callee}<{listed}>" if listed else callee
    lines = ",\n      ".join(["c, t", *arguments])
    return f"{template}(\n      {lines})"


def place(
    sig: Signature,
    index: int,
    parameters: Sequence[str],
    variables: Sequence[str],
    const: bool = True,
) -> str:
    """A lambda from indices, the parameters, to where the element of operand `index` lies that has
    the variables as indices (as of `offset`); for operands of any number of dimensions.
    """
    listed = ", ".join(f"int {p}" for p in parameters)
    unused = "".join(f"(void){p}; " for p in parameters)
    at = pointer(sig, index, const)
    return f"[&]({listed}) {{ {unused}return {at} + ({offset(sig, index, variables)}); }}"


def header(name: str) -> str:
    """The text of a .h file of this package."""
    return resources.files("ark.tasks").joinpath(name).read_text()


def indices(shape: Sequence[int], variables: Sequence[str]) -> list[str]:
    """Texts of the index in every dimension of `shape`, from those of the four that it folds to."""
    if len(shape) <= MIN_ADDRESS_DIMS:
        return list(variables)
    terms, step = [], 1
    lead = leading(shape)
    for place, n in reversed(list(enumerate(lead))):
        text = f"({variables[0]})" if step == 1 else f"({variables[0]}) / {step}"
        terms.append("0" if n == 1 else f"({text})" if place == 0 else f"({text} % {n})")
        step *= n
    return [*reversed(terms), *variables[1:]]


def offset(sig: Signature, index: int, variables: Sequence[str]) -> str:
    """The element offset of operand `index` at the indices given, the last for its last dimension;
    size-1 dimensions broadcast.
    """
    op = sig.operands[index]
    missing = len(variables) - len(op.shape)
    shape = (1,) * missing + op.shape
    strides = (0,) * missing + op.strides
    terms = [
        f"static_cast<ark_i64>({v}) * {s}" if s != 1 else f"static_cast<ark_i64>({v})"
        for v, s, n in zip(variables, strides, shape, strict=True)
        if n != 1
    ]
    return " + ".join(terms) or "0"


def loaded(sig: Signature, index: int) -> str:
    """The C type of what `load` gives."""
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return "ark_i32" if op.dtype in ("int4", "uint4") else "float"
    return op.ctype


def load(sig: Signature, index: int, pointer: str, where: str) -> str:
    """An element's value: as float, or as it is where the operand holds integers."""
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return f"ark_get({pointer}, {where})"
    return f"{pointer}[{where}]"


def store(sig: Signature, index: int, pointer: str, where: str, value: str) -> str:
    """Stores a value, converted to the operand's type."""
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return f"ark_put({pointer}, {where}, {value});"
    if op.dtype == "bool":
        return f"{pointer}[{where}] = {value} != 0;"
    return f"{pointer}[{where}] = static_cast<{op.ctype}>({value});"


def function(name: str, body: str) -> str:
    """A task body's definition."""
    return f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


def run(name: str, body: str, before: str = "") -> str:
    """The definition of a body that takes a run of tasks; before: what they share."""
    return (
        f"ARK_BODY void {name}(ArkCtx& c, const ArkTask* tasks, ark_u32 count) {{\n{before}"
        "  for (ark_u32 n = 0u; n < count; ++n) {\n  const ArkTask& t = tasks[n];\n"
        f"{body}  }}\n}}\n"
    )


def literal(value: float) -> str:
    """A float literal, rounded to fp32; larger values are infinite, by the device ABI."""
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if math.isnan(value):
        return "(ark_inf() - ark_inf())"
    if math.isinf(value):
        return "ark_inf()" if value > 0 else "(-ark_inf())"
    text = repr(float(value))
    return f"{text}f" if any(ch in text for ch in ".e") else f"{text}.0f"
