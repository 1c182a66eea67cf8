"""Pieces of source text that task kinds share: operand declarations, offsets, box loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

import numpy as np

from ark.machine import Machine
from ark.plan.kind import Signature

DIMS = 4
INTEGERS = ("int32", "uint32", "int8", "uint8", "byte")


def pad4(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Left-pads to four dimensions."""
    return (fill,) * (DIMS - len(values)) + tuple(values)


def operand(sig: Signature, index: int, name: str, const: bool = True) -> str:
    """Declares a typed pointer to operand `index`."""
    ctype = sig.operands[index].ctype
    qualifier = "const " if const else ""
    pointed = f"{qualifier}{ctype}"
    return f"  {pointed}* {name} = ARK_POINTER({pointed}, t.operand[{index}]);\n"


def given(sig: Signature, index: int, const: bool = True) -> str:
    """Operand `index` as bodies in .h files take it: an ArkOperand, or none if there is no such."""
    if index >= len(sig.operands):
        return "ArkNoOperand{}"
    op = sig.operands[index]
    pointed = f"{'const ' if const else ''}{op.ctype}"
    shape, strides = pad4(op.shape, 1), pad4(op.strides, 0)
    steps = ", ".join(str(s if n != 1 else 0) for s, n in zip(strides, shape, strict=True))
    scope = "true" if op.system else "false"
    return f"ArkOperand<{pointed}, {steps}, {scope}>{{ARK_POINTER({pointed}, t.operand[{index}])}}"


def call(name: str, callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """A task body that is one call of a template of the kind's .h file: constants, arguments."""
    return function(name, f"  {called(callee, constants, arguments)};\n")


def called(callee: str, constants: Sequence[object], arguments: Sequence[str]) -> str:
    """The call of a body's template with the task and further arguments."""
    listed = ", ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in constants)
    template = f"{callee}<{listed}>" if listed else callee
    lines = ",\n      ".join(["c, t", *arguments])
    return f"{template}(\n      {lines})"


def header(name: str) -> str:
    """The text of a .h file of this package."""
    return resources.files("ark.tasks").joinpath(name).read_text()


def offset(sig: Signature, index: int, variables: Sequence[str]) -> str:
    """The element offset of operand `index` at four indices; size-1 dimensions broadcast."""
    op = sig.operands[index]
    shape = pad4(op.shape, 1)
    strides = pad4(op.strides, 0)
    terms = [
        f"static_cast<ark_i64>({v}) * {s}" if s != 1 else f"static_cast<ark_i64>({v})"
        for v, s, n in zip(variables, strides, shape, strict=True)
        if n != 1
    ]
    return " + ".join(terms) or "0"


def load(sig: Signature, index: int, pointer: str, where: str) -> str:
    """An element's value: as float, or as it is where the operand holds integers."""
    if sig.operands[index].dtype in INTEGERS:
        return f"{pointer}[{where}]"
    return f"ark_get({pointer}, {where})"


def store(sig: Signature, index: int, pointer: str, where: str, value: str) -> str:
    """Stores a value, converted to the operand's type."""
    op = sig.operands[index]
    if op.dtype in INTEGERS:
        return f"{pointer}[{where}] = static_cast<{op.ctype}>({value});"
    return f"ark_put({pointer}, {where}, {value});"


def box_loop(shape: Sequence[int], tile: Sequence[int], body: str, machine: Machine) -> str:
    """Runs `body` for every index i0..i3 of the tile at t.coord[0..3], clipped to `shape`.

    One thread: nested loops, so that the innermost vectorises. Many: one flat index.
    """
    if machine.has("single_thread"):
        text = body
        for d in range(DIMS - 1, -1, -1):
            if shape[d] == 1:
                text = f"{{ const int i{d} = 0; (void)i{d};\n{text}}}\n"
                continue
            text = (
                f"  const int e{d} = t.coord[{d}] + {tile[d]} < {shape[d]} ? "
                f"t.coord[{d}] + {tile[d]} : {shape[d]};\n"
                f"  for (int i{d} = t.coord[{d}]; i{d} < e{d}; ++i{d}) {{\n{text}}}\n"
            )
        return text
    total = math.prod(tile)
    lines = [f"  for (int e = ark_tid(); e < {total}; e += ARK_THREADS) {{\n    int r = e;\n"]
    for d in range(DIMS - 1, -1, -1):
        lines.append(f"    const int i{d} = t.coord[{d}] + r % {tile[d]}; r /= {tile[d]};\n")
    guards = [f"i{d} >= {shape[d]}" for d in range(DIMS) if shape[d] % tile[d]]
    if guards:
        lines.append(f"    if ({' || '.join(guards)}) continue;\n")
    return "".join(lines) + body + "  }\n"


def function(name: str, body: str) -> str:
    """A task body's definition."""
    return f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


def literal(value: float) -> str:
    """A float literal, rounded to fp32; infinities through the device ABI."""
    value = float(np.float32(value))
    if math.isnan(value):
        return "(ark_inf() - ark_inf())"
    if math.isinf(value):
        return "ark_inf()" if value > 0 else "(-ark_inf())"
    text = repr(float(value))
    return f"{text}f" if any(ch in text for ch in ".e") else f"{text}.0f"
