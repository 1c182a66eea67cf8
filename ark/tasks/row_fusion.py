"""The task kind `row_fusion`: elementwise expressions over rows, with sums over each row between
them, such as the gradient of a norm. A row stays in registers, so that it is read once. The nodes
are created by ark.lower.rewrite.fuse_rows.

params: inputs (the number of operands that are inputs; the others are outputs), columns, rows (rows
of a task), stages (pairs of a word and an expression of ark.tasks.expression, which are computed in
this order) and stores (for each output the number of the value to store). The words are:

- each: a value for each element of the row
- sum: the sum of the expression's values over the row
- row: one value for the whole row; its expression reads only such values

An expression's inputs are numbered: first the input operands, then the values of all stages.

operands: inputs..., outputs..., all of two dimensions. The first has the size of the rows or is 1,
the second has the size of the columns or is 1. Operands with one column have a value for each row.
Intermediate values are fp32. An output may be the same memory as an input of the same shape.

coord: the last but one number is the first row of the task. row_fusion.h has the loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import FLOAT_NAMES, Params, Places, Rows, Size, need, typed
from ark.tasks import expression, text
from ark.tasks.elementwise import broadcast_access
from ark.tasks.row_norm import MANY_REGISTERS, row_places, vector_elements

MAX_ROW_ELEMENTS = 8192
MAX_STAGES = 256
# Elements of the rows of all inputs that a thread holds, if threads have at least MANY_REGISTERS
# registers, and otherwise.
MAX_HELD_ELEMENTS, MAX_FEW_HELD_ELEMENTS = 96, 64
MAX_EACH_ELEMENTS = 24  # elements of one row that a thread holds

Stage = tuple[Literal["each", "sum", "row"], list[Any]]
Numbers = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class RowFusionParams(Params, frozen=True):
    inputs: Size
    columns: Annotated[int, msgspec.Meta(ge=2, le=MAX_ROW_ELEMENTS)]
    rows: Rows
    stages: Annotated[list[Stage], msgspec.Meta(max_length=MAX_STAGES)]
    stores: Numbers


class RowFusion(TaskKind):
    name = "row_fusion"
    params = RowFusionParams
    headers = text.headers("box.h", "folds.h", "row_fusion.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(RowFusionParams)
        inputs, stores = params.inputs, params.stores
        need(
            len(sig.operands) == inputs + len(stores),
            f"got {len(sig.operands)} operands, expected {inputs} inputs and {len(stores)} outputs",
        )
        rows = max((o.shape[0] for o in sig.operands if o.shape), default=0)
        need(rows > 1 and params.rows <= rows, f"got {params.rows} of {rows} rows")
        for i in range(len(sig.operands)):
            operand = typed(sig, i, *FLOAT_NAMES)
            fits = len(operand.shape) == 2 and operand.shape[0] in (1, rows)
            need(
                fits and operand.shape[1] in (1, params.columns),
                f"operand {i} has shape {list(operand.shape)}, expected {rows} or 1 rows and "
                f"{params.columns} columns or 1",
            )
            need(operand.strides[1] == 1, f"the rows of operand {i} are not contiguous")
        wide = [_wide(sig, i) for i in range(inputs)]
        for word, tree in params.stages:
            kind = expression.check(tree, ["fp32"] * len(wide), 0)
            need(kind == "float", f"an expression has type {kind}, expected float")
            need(
                word != "row" or not any(wide[i] for i in expression.reads(tree)),
                "an expression of 'row' reads elements of the row",
            )
            wide.append(word == "each")
        for place, number in enumerate(stores):
            out = sig.operands[inputs + place]
            need(
                inputs <= number < len(wide) and out.shape[0] == rows,
                f"stored value {number} is not one of the values of stages",
            )
            need(wide[number] == (out.shape[1] > 1), f"value {number} has another shape")

    def places(self, sig: Signature) -> Places:
        return row_places(_full(sig), sig.read(RowFusionParams).rows)

    def in_place(self, sig: Signature) -> frozenset[int]:
        inputs = sig.read(RowFusionParams).inputs
        return frozenset(i for i in range(inputs) if sig.operands[i].shape == _full(sig))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params, (rows, columns) = sig.read(RowFusionParams), _full(sig)
        lo, hi = (coord[2], 0), (min(coord[2] + params.rows, rows), columns)
        return [
            broadcast_access(sig, i, lo, hi, i >= params.inputs) for i in range(len(sig.operands))
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 2 * 4 * machine.warps * max((len(g) for g in _sums(sig)), default=0)

    def rounds(self, sig: Signature, machine: Machine) -> int:
        return 1 + len(_sums(sig))

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        params = sig.read(RowFusionParams)
        each = sum(expression.written_size(tree) for word, tree in params.stages if word != "row")
        return float(params.rows * params.columns * each), super().cost(sig, coord)[1]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows, params = _full(sig)[0], sig.read(RowFusionParams)
        n = params.rows
        count = (
            str(n) if rows % n == 0 else f"(t.coord[2] + {n} < {rows} ? {n} : {rows} - t.coord[2])"
        )
        head = f"  const int rows = {count};\n" + "".join(
            text.operand(sig, i, f"p{i}", const=i < params.inputs) for i in range(len(sig.operands))
        )
        if not machine.cooperative:
            return text.function(name, head + _Alone(sig).write())
        vector = vector_elements([o for o in sig.operands if o.shape[1] > 1], params.columns)
        unsure = vector > 1 and not all(o.aligned for o in sig.operands if o.shape[1] > 1)
        body = _Team(sig, machine, vector).write()
        if unsure:
            wide = [i for i, o in enumerate(sig.operands) if o.shape[1] > 1]
            single = _Team(sig, machine, 1).write()
            condition = f"ark_aligned({text.addresses(sig, wide)})"
            body = f"  if ({condition}) {{\n{body}  }} else {{\n{single}  }}\n"
        return text.function(name, head + body)


def _full(sig: Signature) -> tuple[int, int]:
    """The numbers of rows and columns."""
    return max(o.shape[0] for o in sig.operands), sig.read(RowFusionParams).columns


def _wide(sig: Signature, index: int) -> bool:
    """True if the operand has a value for each column."""
    return sig.operands[index].shape[1] > 1


def _levels(sig: Signature) -> list[int]:
    """For each stage the number of exchanges between threads before it. All sums that have the same
    number before them are exchanged together.
    """
    params = sig.read(RowFusionParams)
    after, levels = [0] * params.inputs, list[int]()  # after: exchanges before a value is there
    for word, tree in params.stages:
        levels.append(max((after[i] for i in expression.reads(tree)), default=0))
        after.append(levels[-1] + (word == "sum"))
    return levels


def _sums(sig: Signature) -> list[list[int]]:
    """The stages that are sums, in the groups that are exchanged together."""
    levels, stages = _levels(sig), sig.read(RowFusionParams).stages
    sums = [i for i, (word, _) in enumerate(stages) if word == "sum"]
    return [[i for i in sums if levels[i] == n] for n in range(max(levels, default=-1) + 1)]


class _Alone:
    """Writes the function for one thread, which computes row after row."""

    def __init__(self, sig: Signature) -> None:
        self.sig, self.params = sig, sig.read(RowFusionParams)

    def leaf(self, number: int) -> str:
        """The C++ text of value `number`, of element k if it has elements."""
        if number >= self.params.inputs:
            wide = self.params.stages[number - self.params.inputs][0] == "each"
            return f"y{number}[k]" if wide else f"y{number}"
        return text.load(self.sig, number, f"p{number}", self.at(number))

    def at(self, number: int) -> str:
        return text.offset(self.sig, number, ("row", "k"))

    def written(self, tree: expression.Tree) -> tuple[str, str]:
        """The statements that compute a tree, and the text of its value."""
        count = self.params.inputs + len(self.params.stages)
        writer = expression.Writer([(self.leaf(i), "float") for i in range(count)], text.literal)
        value = writer.write(tree)[0]
        return " ".join(writer.statements), value

    def write(self) -> str:
        columns, lines = self.params.columns, ""
        for number, (word, tree) in enumerate(self.params.stages, self.params.inputs):
            statements, value = self.written(tree)
            if word == "row":
                computed = f"[&] {{ const int k = 0; (void)k; {statements} return {value}; }}()"
                lines += f"    const float y{number} = {computed};\n"
            elif word == "sum":
                term = f"[&](int k) {{ {statements} return {value}; }}"
                lines += f"    const float y{number} = ark_row_total<{columns}>({term});\n"
            else:
                body = f"[&](int k) {{ {statements} y{number}[k] = {value}; }}"
                lines += f"    float y{number}[{columns}];\n"
                lines += f"    ark_vector_loop(0, {columns}, {body});\n"
        for index, number in enumerate(self.params.stores, self.params.inputs):
            store = text.store(self.sig, index, f"p{index}", self.at(index), self.leaf(number))
            count = columns if _wide(self.sig, index) else 1
            lines += f"    ark_vector_loop(0, {count}, [&](int k) {{ {store} }});\n"
        return (
            "  for (int r = 0; r < rows; ++r) {\n    const ark_i64 row = t.coord[2] + r;\n"
            f"{lines}  }}\n"
        )


class _Team:
    """Writes the function for all threads. A team of warps holds a row in registers, and loads its
    next row while it computes. vector: elements of a vector access.
    """

    def __init__(self, sig: Signature, machine: Machine, vector: int) -> None:
        self.sig, self.params, self.machine, self.vector = (
            sig,
            sig.read(RowFusionParams),
            machine,
            vector,
        )
        self.wide = [i for i in range(self.params.inputs) if _wide(sig, i)]

    def layout(self) -> tuple[int, int]:
        """The number of vectors of a row per thread, and the number of warps that share a row."""
        machine, columns = self.machine, self.params.columns
        many = machine.variant.registers(COMPUTE) >= MANY_REGISTERS
        most = (MAX_HELD_ELEMENTS if many else MAX_FEW_HELD_ELEMENTS) // len(self.wide)
        most = min(most, MAX_EACH_ELEMENTS)
        teams = [1, machine.warps]
        if machine.has(Capability.NAMED_BARRIERS):
            teams = sorted({*teams, *(t for t in (2, 4, 8) if machine.warps % t == 0)})
        for team in teams:
            vectors = -(-columns // (self.vector * machine.lanes * team))
            if vectors * self.vector <= most or team == teams[-1]:
                return vectors, team
        raise AssertionError("teams is not empty")

    def leaf(self, number: int) -> str:
        if number < self.params.inputs:
            return f"y{number}[i]" if number in self.wide else f"y{number}"
        wide = self.params.stages[number - self.params.inputs][0] == "each"
        return f"y{number}[i]" if wide else f"y{number}"

    def written(self, tree: expression.Tree) -> tuple[str, str]:
        count = self.params.inputs + len(self.params.stages)
        writer = expression.Writer([(self.leaf(i), "float") for i in range(count)], text.literal)
        value = writer.write(tree)[0]
        return " ".join(writer.statements), value

    def row(self, number: int, row: str) -> str:
        """The C++ text of the address of the first element of a row of an operand."""
        return f"p{number} + {text.offset(self.sig, number, (row, '0'))}"

    def write(self) -> str:
        sig, inputs = self.sig, self.params.inputs
        vectors, team = self.layout()
        part = f"ArkRowPart<{self.params.columns}, {self.vector}, {vectors}, {team}>"
        moving = [i for i in self.wide if sig.operands[i].shape[0] > 1]
        fixed = [i for i in self.wide if i not in moving]
        declared = "".join(
            f"  ArkRowHeld<{sig.operands[i].ctype}, {self.vector}, {vectors}> h{i} = {{}};\n"
            for i in self.wide
        )
        load = "".join(f"ark_row_load(part, h{i}, {self.row(i, 'row')}); " for i in moving)
        once = "".join(f"    ark_row_load(part, h{i}, {self.row(i, '0')});\n" for i in fixed)
        lines = "".join(
            f"    float y{i}[{vectors * self.vector}];\n    ark_row_take(y{i}, h{i});\n"
            for i in self.wide
        )
        lines += f"    if (r + {part}::teams < rows) load(r + {part}::teams);\n"
        for i in range(inputs):
            if i not in self.wide:
                value = text.load(sig, i, f"p{i}", text.offset(sig, i, ("row", "0")))
                lines += f"    const float y{i} = {value};\n"
        lines += self._stages(vectors, team) + self._stores()
        return (
            f"  const auto part = {part}::mine();\n  if (part.team >= {part}::teams) return;\n"
            "  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));\n  int parity = 0;\n"
            f"  (void)red; (void)parity;\n{declared}"
            "  const auto load = [&](int r) {\n    const ark_i64 row = t.coord[2] + r;\n"
            f"    (void)row; {load}\n  }};\n"
            f"  if (part.team < rows) {{\n    load(part.team);\n{once}  }}\n"
            f"  for (int r = part.team; r < rows; r += {part}::teams) {{\n"
            f"    const ark_i64 row = t.coord[2] + r;\n{lines}  }}\n"
        )

    def _stages(self, vectors: int, team: int) -> str:
        """The statements that compute all values. Sums are added up by as few exchanges between
        threads as possible.
        """
        levels, groups, lines = _levels(self.sig), _sums(self.sig), ""
        # All exchanges between warps have the same size, so that their memory does not overlap.
        most = max(map(len, groups))
        for level, group in enumerate(groups):
            for stage in range(len(levels)):
                if levels[stage] == level:
                    lines += self._stage(stage, vectors)
            if group:
                names = [f"y{self.params.inputs + stage}" for stage in group]
                size = len(names) if team == 1 else most
                lines += f"    float sums{level}[{size}] = {{{', '.join(names)}}};\n"
                lines += f"    ark_fold<ArkAddFold, {team}>(sums{level}, red, parity);\n"
                lines += "".join(f"    {n} = sums{level}[{i}];\n" for i, n in enumerate(names))
        return lines

    def _stage(self, stage: int, vectors: int) -> str:
        number, (word, tree) = self.params.inputs + stage, self.params.stages[stage]
        statements, value = self.written(tree)
        if word == "row":
            computed = f"[&] {{ {statements} return {value}; }}()"
            return f"    const float y{number} = {computed};\n"
        declared = (
            f"y{number} = 0.0f" if word == "sum" else f"y{number}[{vectors * self.vector}] = {{}}"
        )
        store = f"y{number} += {value};" if word == "sum" else f"y{number}[i] = {value};"
        each = f"ark_row_each(part, [&](int i) {{ {statements} {store} }})"
        return f"    float {declared};\n    {each};\n"

    def _stores(self) -> str:
        lines = ""
        for index, number in enumerate(self.params.stores, self.params.inputs):
            if _wide(self.sig, index):
                lines += f"    ark_row_store(part, y{number}, {self.row(index, 'row')});\n"
            else:
                at = text.offset(self.sig, index, ("row", "0"))
                store = text.store(self.sig, index, f"p{index}", at, f"y{number}")
                lines += f"    if (part.first == 0) {store}\n"
        return lines


register(RowFusion())
