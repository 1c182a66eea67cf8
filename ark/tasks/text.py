"""Helpers with which task kinds write C++ text: operand declarations, offsets of elements, loads,
stores and calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import resources

import numpy as np

from ark.backend.codegen.layout import RECORD_OPERANDS
from ark.ir.dtype import FLOATS as FLOAT_TYPES
from ark.ir.dtype import SMALL_FLOATS, RowType, by_name
from ark.ir.fold import leading, pad
from ark.plan.kind import Signature

MIN_ADDRESS_DIMS = 4
VECTOR_BYTES = 16  # most bytes of a vector, which one access moves (backend/codegen/device/pack.h)
FLOATS = tuple(t.name for t in (*FLOAT_TYPES, *SMALL_FLOATS))


def pad4(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """The values, with `fill` added in front until there are at least four."""
    return pad(values, fill)


def address(sig: Signature, index: int) -> str:
    """The C++ text of the address of operand `index`. The address is read from the task's record
    (the struct that the device reads). If there are too many operands, the record's last entry is
    the address of a list of operand addresses.
    """
    last = RECORD_OPERANDS - 1
    if len(sig.operands) <= RECORD_OPERANDS or index < last:
        return f"t.operand[{index}]"
    return f"ARK_POINTER(const ark_u64, t.operand[{last}])[{index - last}]"


def addresses(sig: Signature, indices: Iterable[int]) -> str:
    """The C++ text of the bitwise OR of these operands' addresses, which `ark_aligned` tests.
    Operands that are known to be aligned are omitted ("0u" if all are).
    """
    asked = (address(sig, i) for i in indices if not sig.operands[i].aligned)
    return " | ".join(asked) or "0u"


def where_aligned(sig: Signature, indices: Iterable[int], body: str, single: str) -> str:
    """Statements of a device function that run `body`, which accesses vectors of these operands, if
    their addresses are aligned, and otherwise `single`, which accesses single elements.
    """
    asked = addresses(sig, indices)
    if asked == "0u":
        return body
    return f"  if (ark_aligned({asked})) {{\n{body}  }} else {{\n{single}  }}\n"


def pointer(sig: Signature, index: int, const: bool = True) -> str:
    """The C++ text of a pointer to operand `index`, with the type of its elements."""
    pointed = f"{'const ' if const else ''}{sig.operands[index].ctype}"
    return f"ARK_POINTER({pointed}, {address(sig, index)})"


def operand(sig: Signature, index: int, name: str, const: bool = True) -> str:
    """A C++ declaration of the variable `name`, a typed pointer to operand `index`."""
    pointed = f"{'const ' if const else ''}{sig.operands[index].ctype}"
    return f"  {pointed}* {name} = {pointer(sig, index, const)};\n"


def given(sig: Signature, index: int, const: bool = True) -> str:
    """The C++ text of operand `index` as an argument of device functions in .h files: an
    ArkOperand, or ArkNoOperand if the signature has no such operand.
    """
    if index >= len(sig.operands):
        return "ArkNoOperand{}"
    op = sig.operands[index]
    assert len(op.shape) <= MIN_ADDRESS_DIMS, "an ArkOperand has four strides"
    qualifier = "const " if const else ""
    pointed, at = f"{qualifier}{op.ctype}", pointer(sig, index, const)
    shape, strides = pad4(op.shape, 1), pad4(op.strides, 0)
    if isinstance(by_name(op.dtype), RowType):  # a step is a row; the type's name has commas
        strides = (*(s // op.per_item for s in strides[:-1]), 0)
        bytes_of = f"ARK_POINTER({qualifier}unsigned char, {address(sig, index)})"
        at = f"reinterpret_cast<{pointed}*>({bytes_of})"
    steps = ", ".join(str(s if n != 1 else 0) for s, n in zip(strides, shape, strict=True))
    scope = "true" if op.system else "false"
    return f"ArkOperand<{pointed}, {steps}, {scope}>{{{at}}}"


def call(name: str, callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """The definition of a task's device function that only calls a template in a .h file, with the
    given template constants and arguments.
    """
    return function(name, f"  {called(callee, constants, arguments)};\n")


def called(callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """The C++ text of a call of a template in a .h file. Its first arguments are the context and
    the task.
    """
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
    """The text of a C++ lambda that maps its parameters to the address of an element of operand
    `index`, which may have any number of dimensions. variables: texts of the element's indices, as
    in `offset`.
    """
    listed = ", ".join(f"int {p}" for p in parameters)
    unused = "".join(f"(void){p}; " for p in parameters)
    at = pointer(sig, index, const)
    return f"[&]({listed}) {{ {unused}return {at} + ({offset(sig, index, variables)}); }}"


def header(name: str) -> str:
    """The text of a .h file of this package."""
    return resources.files("ark.tasks").joinpath(name).read_text()


def headers(*names: str) -> tuple[str, ...]:
    """The texts of several .h files of this package."""
    return tuple(map(header, names))


def indices(shape: Sequence[int], variables: Sequence[str]) -> list[str]:
    """C++ texts of an element's indices in all dimensions of `shape`. variables: texts of its
    indices in the same shape folded to four dimensions.
    """
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
    """The C++ text of the offset, in elements, of an element of operand `index`. variables: texts
    of its indices, of which the last belongs to the last dimension. Dimensions of size 1 broadcast.
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
    """The C type of the value that `load` returns."""
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return "ark_i32" if op.dtype in ("int4", "uint4") else "float"
    return op.ctype


def load(sig: Signature, index: int, pointer: str, where: str) -> str:
    """The C++ text of an element's value. Floating-point values are converted to float, integers
    keep their type.
    """
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return f"ark_get({pointer}, {where})"
    return f"{pointer}[{where}]"


def store(sig: Signature, index: int, pointer: str, where: str, value: str) -> str:
    """A statement that stores a value, converted to the operand's type."""
    op = sig.operands[index]
    if op.dtype in FLOATS or by_name(op.dtype).packed:
        return f"ark_put({pointer}, {where}, {value});"
    if op.dtype == "bool":
        return f"{pointer}[{where}] = {value} != 0;"
    return f"{pointer}[{where}] = static_cast<{op.ctype}>({value});"


def function(name: str, body: str) -> str:
    """The C++ definition of a task's device function with this name and body."""
    return f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


def run(name: str, body: str, before: str = "") -> str:
    """The C++ definition of a device function that executes several consecutive tasks, with `body`
    for each. before: declarations before the loop over tasks.
    """
    return (
        f"ARK_BODY void {name}(ArkCtx& c, const ArkTask* tasks, ark_u32 count) {{\n{before}"
        "  for (ark_u32 n = 0u; n < count; ++n) {\n  const ArkTask& t = tasks[n];\n"
        f"{body}  }}\n}}\n"
    )


def literal(value: float) -> str:
    """A float literal, rounded to fp32; values that are too large become infinity, as in the device
    ABI.
    """
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if math.isnan(value):
        return "(ark_inf() - ark_inf())"
    if math.isinf(value):
        return "ark_inf()" if value > 0 else "(-ark_inf())"
    text = repr(float(value))
    return f"{text}f" if any(ch in text for ch in ".e") else f"{text}.0f"
