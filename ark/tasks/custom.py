"""The task kind of custom ops, whose device function a user wrote (ark.custom_op). Emitted by
ark.lower.ops.custom.

params: name and digest of the op's form (the user's declaration, ark.tasks.custom_form), which this
process must have registered; tile: the tile size along each axis that is cut; constants by name.

operands: as the form lists them.

coord: the first index of the tile along each axis that is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ark.errors import InvalidUsageError
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Params, Places, Size, count, need, read_params, typed
from ark.tasks import custom_form, text
from ark.tasks.custom_form import Dim, Form
from ark.tasks.custom_text import macros

CUSTOM = "custom"
# The call of the user's function gets a file name of its own (by `#line`) in compiler messages.
# Otherwise an error in its arguments would point to a line of ark's source.
_CALL = '#line 1 "{name}.call"\n{call}#line 1 "loop"\n'
Value = bool | Annotated[int, msgspec.Meta(ge=-INT_MAX, le=INT_MAX)] | float
_CTYPES = {"bool": "bool", "int": "int", "float": "float"}


class CustomParams(Params, frozen=True):
    name: str
    digest: str
    tile: dict[str, Size]
    constants: dict[str, Value]


def form_of(sig: Signature) -> Form:
    """The form (the user's declaration) of a custom op. Raises PlanError if this process has not
    registered it.
    """
    params = sig.read(CustomParams)
    return custom_form.get(params.name, params.digest)


def sizes_of(sig: Signature, form: Form) -> dict[str, int]:
    """The size of each axis of a custom op, by name, from the shapes of its operands."""
    operands = zip(form.operands, sig.operands, strict=True)
    return form.sizes({f.name: o.shape for f, o in operands})


class Custom(TaskKind):
    name = CUSTOM
    params = CustomParams
    headers = text.headers("custom.h")

    def check(self, sig: Signature) -> None:
        read_params(self.name, self.params, sig.params)
        form, params = form_of(sig), sig.read(CustomParams)
        count(sig, len(form.operands))
        super().check(sig)
        for index, operand in enumerate(form.operands):
            dtype = typed(sig, index, *(operand.dtypes or (sig.operands[index].dtype,)))
            need(
                not by_name(dtype.dtype).packed,
                f"{dtype.dtype} is not supported: several elements share a byte",
            )
        try:
            sizes = sizes_of(sig, form)
        except InvalidUsageError as error:
            need(False, str(error))
        tile, constants = params.tile, params.constants
        need(
            set(tile) == set(form.tile) and all(n <= sizes[a] for a, n in tile.items()),
            f"the tile is {dict(tile)}; it must give a size for each of the axes "
            f"({', '.join(form.tile) or 'none'}), at most the axis's size in {dict(sizes)}",
        )
        kinds = {name: type(value).__name__ for name, value in constants.items()}
        need(
            kinds == form.constants,
            f"the constants are {kinds}, expected {dict(form.constants)}",
        )

    def places(self, sig: Signature) -> Places:
        form, tile = form_of(sig), sig.read(CustomParams).tile
        sizes = sizes_of(sig, form)
        return Places(tuple(range(0, sizes[a], tile[a]) for a in form.tile) or (range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        form = form_of(sig)
        begin = dict(zip(form.tile, coord, strict=False))
        accesses = []
        for index, (operand, given) in enumerate(zip(form.operands, sig.operands, strict=True)):
            spans = [
                _span(sig, dim, n, begin) for dim, n in zip(operand.dims, given.shape, strict=True)
            ]
            lo, hi = tuple(s[0] for s in spans), tuple(s[1] for s in spans)
            accesses += [Access(index, lo, hi)] if operand.read else []
            accesses += [Access(index, lo, hi, write=True)] if operand.written else []
        return accesses

    def packets(self, sig: Signature) -> frozenset[int]:
        form = form_of(sig)
        return frozenset(i for i, o in enumerate(form.operands) if o.name in form.packets)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        form = form_of(sig)
        sizes, fixed, each = sizes_of(sig, form), *form.scratch
        return fixed + sum(
            n * sig.read(CustomParams).tile.get(a, sizes[a]) for a, n in each.items()
        )

    def texts(self, sig: Signature) -> tuple[str, ...]:
        form = form_of(sig)
        undone = "".join(f"#undef {name}\n" for name in macros(form.text))
        return (
            f'namespace {_space(form)} {{\n#line 1 "{form.file}"\n{form.text}\n{undone}'
            f'#line 1 "loop"\n}}\n',
        )

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(CustomParams)
        form, tile = form_of(sig), params.tile
        members, begins = [], []
        coords = {axis: f"t.coord[{i}]" for i, axis in enumerate(form.tile)}
        for axis, n in sizes_of(sig, form).items():
            kind = f"<{tile.get(axis, n)}, {n}>"
            members.append(f"  ArkAxis{kind} {axis};\n")
            begins.append(f"ark_axis{kind}({coords.get(axis, '0')})")
        for constant, kind in form.constants.items():
            value = params.constants[constant]
            written = text.literal(value) if kind == "float" else str(value).lower()
            members.append(f"  static constexpr {_CTYPES[kind]} {constant} = {written};\n")
        operands = [text.given(sig, i, not o.written) for i, o in enumerate(form.operands)]
        listed = ",\n      ".join(["c", f"{name}_tile{{{', '.join(begins)}}}", *operands])
        call = f"  {_space(form)}::{form.name}(\n      {listed});\n"
        unused = "" if tile else "  (void)t;\n"
        body = unused + _CALL.format(name=form.name, call=call)
        return f"struct {name}_tile {{\n{''.join(members)}}};\n{text.function(name, body)}"


def _space(form: Form) -> str:
    """The namespace of the op's source text, so that several ops may define the same names."""
    return f"custom_{form.digest[:16]}"


def _span(sig: Signature, dim: Dim, n: int, begin: dict[str, int]) -> tuple[int, int]:
    """The range of indices of one dimension of an operand that a task may access: first and last +
    1. begin: the first index of the task's tile.
    """
    if dim.whole or dim.axis not in begin:
        return 0, n
    first = begin[dim.axis]
    last = min(n, first + sig.read(CustomParams).tile[dim.axis])
    return max(0, first - dim.around), min(n, last + dim.around)


register(Custom())
