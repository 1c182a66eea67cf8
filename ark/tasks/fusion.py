"""The task kind `fusion`: several elementwise expressions, with sums over one dimension between
them, in one device function. Intermediate values that several expressions use stay in registers.
The nodes are created by ark.lower.rewrite.fuse_regions.

params: inputs (the number of operands that are inputs; the others are outputs), axis (the summed
dimension, of four; -1: none), count (that dimension's size, or 1), tile (4 sizes of the outputs'
shape), and four lists of expressions (ark.tasks.expression), which are computed in this order:

- first: once for each index of the outputs
- each: for each of the `count` elements along the axis
- sums: like `each`, but their values are summed over these elements
- last: once for each index of the outputs; they may use the sums

A tree's inputs are numbered: first the input operands, then the values of all lists. stores: for
each output the number of the value to store.

operands: inputs..., which broadcast, outputs..., all of one shape, of size 1 along the axis.
Intermediate values are fp32. An output may be the same memory as an input.

coord: the tile's first index. fusion.h has the loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import FLOAT_NAMES, Params, Places, Size, Tile, box, covers, need, typed
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.box_writer import by_threads
from ark.tasks.elementwise import HEADERS, broadcast_access, claim_tile, tile_box
from ark.tasks.region_writer import RegionWriter

STAGES = ("first", "each", "sums", "last")
MAX_LISTED_VALUES = 1024  # expressions per list
ROW_SLICE_ELEMENTS = 256  # neighbours whose values are kept between loops, with one thread

Trees = Annotated[list[Any], msgspec.Meta(max_length=MAX_LISTED_VALUES)]
Numbers = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class FusionParams(Params, frozen=True):
    inputs: Size
    axis: Annotated[int, msgspec.Meta(ge=-1, le=MAX_FOLDED_DIMS - 2)]
    count: Size
    tile: Tile
    first: Trees
    each: Trees
    sums: Trees
    last: Trees
    stores: Numbers

    def trees(self, stage: str) -> list[Any]:
        """The expressions of one of the four lists in STAGES (first, each, sums, last)."""
        of_stage: list[Any] = getattr(self, stage)
        return of_stage


class Fusion(TaskKind):
    name = "fusion"
    claimable = True
    params = FusionParams
    headers = (*HEADERS, text.header("fusion.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(FusionParams)
        inputs, stores = params.inputs, params.stores
        need(
            len(sig.operands) == inputs + len(stores),
            f"got {len(sig.operands)} operands, expected {inputs} inputs and {len(stores)} outputs",
        )
        self._check_shapes(sig)
        outside = [_along(sig, i) == 1 for i in range(inputs)]  # constant along the axis
        read: set[int] = set()
        for stage in STAGES:
            reach = len(outside)
            for tree in params.trees(stage):
                reach = reach if stage == "sums" else len(outside)
                kind = expression.check(tree, ["fp32"] * reach, 0)
                need(kind == "float", f"an expression of {stage!r} has type {kind}, expected float")
                once = stage in ("first", "last")
                need(
                    not once or all(outside[i] for i in expression.reads(tree)),
                    f"an expression of {stage!r} reads an operand that varies along the summed "
                    "dimension",
                )
                read |= expression.reads(tree)
                outside.append(stage != "each")
        need(read.issuperset(range(inputs)), "an input is not read by any expression")
        for number in stores:
            fits = inputs <= number < len(outside) and outside[number]
            need(fits, f"stored value {number} is not in the lists first, sums or last")

    def _check_shapes(self, sig: Signature) -> None:
        params, out = sig.read(FusionParams), sig.operands[-1].shape
        axis, count, inputs = params.axis, params.count, params.inputs
        full = text.pad4(out, 1)
        summed = axis >= 0
        need(
            (count > 1) == summed == bool(params.sums),
            f"got axis {axis}, count {count} and {len(params.sums)} sums; sums need an axis and "
            "a count above 1, and other fusions have axis -1 and count 1",
        )
        need(summed or not params.each, "expressions in `each` need sums, got none")
        need(
            len(full) == MAX_FOLDED_DIMS and (not summed or full[axis] == 1),
            f"output {list(out)} does not have one element along the summed dimension",
        )
        wide = (*full[:axis], count, *full[axis + 1 :]) if summed else full
        for i, operand in enumerate(sig.operands):
            typed(sig, i, *FLOAT_NAMES)
            given = text.pad4(operand.shape, 1)
            if i >= inputs:
                need(
                    operand.shape == out,
                    f"output operand {i} has shape {list(operand.shape)}, others {list(out)}",
                )
                continue
            need(
                len(operand.shape) <= len(out)
                and all(n in (1, m) for n, m in zip(given, wide, strict=True)),
                f"operand {i} of shape {list(operand.shape)} does not broadcast to {list(wide)}",
            )
        covers(params.tile, out)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[-1].shape), sig.read(FusionParams).tile)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(sig.read(FusionParams).inputs))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(FusionParams)
        inputs, out = params.inputs, sig.operands[-1].shape
        lo, hi = tile_box(out, coord, params.tile)
        axis = params.axis - MAX_FOLDED_DIMS + len(out)
        wide = hi if params.axis < 0 else (*hi[:axis], params.count, *hi[axis + 1 :])
        return [
            broadcast_access(sig, i, lo, hi if i >= inputs else wide, i >= inputs)
            for i in range(len(sig.operands))
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        params = sig.read(FusionParams)
        elements = 1.0
        for size in params.tile:
            elements *= size
        each = len(params.each) + 2 * len(params.sums)
        once = len(params.first) + len(params.last)
        return elements * (once + each * params.count), super().cost(sig, coord)[1]

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any]:
        return claim_tile(sig)

    def apart(self, sig: Signature, machine: Machine) -> int:
        if not machine.cooperative:
            return 0
        if sig.read(FusionParams).axis >= 0:
            return 1
        vectors = _region(sig).vectors()
        return vectors.size if all(sig.operands[i].aligned for i in vectors.whole) else 0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        if machine.cooperative and sig.read(FusionParams).axis < 0:
            return text.function(name, by_threads(_region(sig), machine))
        return text.function(name, _Body(sig).write(1 if machine.lanes > 1 else ROW_SLICE_ELEMENTS))

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        if sig.read(FusionParams).axis < 0:
            writer = _region(sig)
            return text.run(name, writer.declare() + writer.flat(writer.vectors(), machine))
        return text.run(name, _Body(sig).write(1))


def _region(sig: Signature) -> RegionWriter:
    """The writer for a fusion without sums."""
    params = sig.read(FusionParams)
    trees = [tree for stage in STAGES for tree in params.trees(stage)]
    return RegionWriter(sig, trees, params.stores, params.tile)


class _Body:
    """Writes the code of a fused region for one index of the outputs: one C++ function for each of
    its three loops (before, over and after the summed elements).
    """

    def __init__(self, sig: Signature) -> None:
        self.sig, self.params = sig, sig.read(FusionParams)
        self.leaves: list[tuple[str, str]] = [("", "float")] * sig.read(FusionParams).inputs
        self.writer = expression.Writer(self.leaves, text.literal)
        self.kept: dict[int, int] = {}  # by value number: its place in `kept`

    def write(self, lanes: int) -> str:
        sig, params = self.sig, self.params
        declare = "".join(
            text.operand(sig, i, f"p{i}", const=i < params.inputs) for i in range(len(sig.operands))
        )
        numbers = iter(range(params.inputs, 5 * MAX_LISTED_VALUES))
        number = {stage: [next(numbers) for _ in params.trees(stage)] for stage in STAGES}
        later = [*params.each, *params.sums, *params.last]
        used = set(params.stores).union(*(expression.reads(tree) for tree in later))
        passed = [*(n for n in number["first"] if n in used), *number["sums"]]
        self.kept = {n: place for place, n in enumerate(passed)}
        bodies = [
            self._first(number["first"], number["sums"]),
            self._each(number["sums"]),
            self._last(number["last"]),
        ]
        shape = fold(sig.operands[-1].shape)
        tile = tile_type(params.tile, shape)
        constants = f"{tile}, {params.count if params.sums else 0}, {max(1, len(passed))}"
        head = f"[&](int {', int '.join(NAMES)}, int k, int v, auto& kept) {{\n"
        unused = "".join(f"(void){n}; " for n in (*NAMES, "k", "v", "kept"))
        listed = ",\n".join(f"      {head}      {unused}\n{body}      }}" for body in bodies)
        return f"{declare}  ark_fused<{constants}, {lanes}>(t.coord,\n{listed});\n"

    def _at(self, index: int) -> str:
        names: list[str] = list(NAMES)
        if index < self.params.inputs and _along(self.sig, index) > 1:
            names[self.params.axis] = "k"
        return text.offset(self.sig, index, names)

    def _compute(self, trees: Sequence[expression.Tree]) -> list[str]:
        """The C++ texts of the values of several trees. Statements that load each input once are
        added before them.
        """
        read = set().union(*(expression.reads(tree) for tree in trees)) if trees else set()
        for i in sorted(i for i in read if i < self.params.inputs):
            load = text.load(self.sig, i, f"p{i}", self._at(i))
            self.leaves[i] = (self.writer.let("float", load), "float")
        lines = []
        for tree in trees:
            lines.append(self.writer.write(tree)[0])
            self.leaves.append((lines[-1], "float"))
        return lines

    def _taken(self, lines: Iterable[str]) -> str:
        """The text of the statements that the writer has added since the last call of this method,
        followed by the given lines.
        """
        start, self.begun = getattr(self, "begun", 0), len(self.writer.statements)
        self.writer.known.clear()  # the next function does not see these constants
        return "".join(f"        {s}\n" for s in (*self.writer.statements[start:], *lines))

    def _pass_on(self) -> None:
        for number, place in self.kept.items():
            if number < len(self.leaves):
                self.leaves[number] = (f"kept[{place}][v]", "float")

    def _first(self, numbers: Sequence[int], sums: Sequence[int]) -> str:
        names = dict(zip(numbers, self._compute(self.params.first), strict=True))
        lines = [f"kept[{self.kept[n]}][v] = {t};" for n, t in names.items() if n in self.kept]
        lines += [f"kept[{self.kept[n]}][v] = 0.0f;" for n in sums]
        body = self._taken(lines)
        self._pass_on()
        return body

    def _each(self, sums: Sequence[int]) -> str:
        each, count = self.params.each, len(self.leaves) + len(self.params.each)
        names = self._compute([*each, *self.params.sums])[len(each) :]
        lines = [
            f"kept[{self.kept[n]}][v] += {value};" for n, value in zip(sums, names, strict=True)
        ]
        body = self._taken(lines)
        assert len(self.leaves) == count + len(sums)
        self._pass_on()
        return body

    def _last(self, numbers: Sequence[int]) -> str:
        self._compute(self.params.last)
        lines = []
        for place, number in enumerate(self.params.stores):
            index = self.params.inputs + place
            to = self._at(index)
            lines.append(text.store(self.sig, index, f"p{index}", to, self.leaves[number][0]))
        return self._taken(lines)


def _along(sig: Signature, index: int) -> int:
    """The size of operand `index` in the summed dimension; 1 if there is none."""
    params = sig.read(FusionParams)
    if params.axis < 0:
        return 1
    return int(text.pad4(sig.operands[index].shape, 1)[params.axis])


register(Fusion())
