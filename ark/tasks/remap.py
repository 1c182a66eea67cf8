"""Two task kinds that copy elements to other indices: `remap` by index arithmetic, `gather` by an
index tensor. Emitted by ark.lower.ops.indexing and ark.lower.ops.lookup.

`remap` params: rules (one per dimension of the input: terms [output dimension, factor]..., add,
divide, edge), fill, tile.

operands: input, output. For each dimension, the input's index is the sum of the terms and `add`,
divided by `divide` (rounded down). If this index is outside of the input, `edge` selects the
element: `fill` ("fill"; with "exact" also if the division has a remainder), the nearest element
("edge"), the reflection without repeating the edge ("reflect"), or the index modulo the size
("wrap"). The ops pad, steps, flip, repetition, resizing to the nearest element and windows of
convolutions use this kind.

`gather` params: axis, elements, from_end, tile.

operands: input, indices, output. With `elements` all three have the same rank: an output element
reads the input at its own index, except along the axis, where the index is the element of
`indices`. Otherwise the input is (a, n, b), the indices (m,), the output (a, m, b). With `from_end`
negative indices count from the end. An index out of range ends the launch.

coord of both: the tile's first index of the output (four dimensions; more are folded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ark.ir.fold import fold
from ark.ir.values import MAX_DIMS
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INDEX_NAMES,
    INT_MAX,
    Dim,
    Params,
    Places,
    Size,
    Tile,
    box,
    copyable,
    count,
    covers,
    need,
    shaped,
)
from ark.tasks import text, turned
from ark.tasks.box_text import NAMES, Vectors, declared, unused_names
from ark.tasks.box_writer import BoxWriter, write_box
from ark.tasks.elementwise import COPY, HEADERS, claim_tile, tile_box

Factor = Annotated[int, msgspec.Meta(ge=-INT_MAX, le=INT_MAX)]
Shift = Annotated[int, msgspec.Meta(ge=-(1 << 30), le=1 << 30)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How the index into one dimension of the input is computed from the output's indices: (sum of
    terms + add) / divide, rounded down. edge: the element that is used if the index is out of
    bounds.
    """

    terms: tuple[tuple[Dim, Factor], ...]
    add: Shift
    divide: Size
    edge: Literal["fill", "exact", "edge", "reflect", "wrap"]


Rules = Annotated[tuple[Rule, ...], msgspec.Meta(min_length=1, max_length=MAX_DIMS)]


class RemapParams(Params, frozen=True):
    rules: Rules
    fill: float
    tile: Tile


def rules_of(sig: Signature) -> tuple[Rule, ...]:
    """The rules of a checked signature."""
    return msgspec.convert(sig.read(RemapParams).rules, tuple[Rule, ...])


class Remap(TaskKind):
    name = "remap"
    params = RemapParams
    headers = (*HEADERS, text.header("transpose.h"), text.header("turned.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        source, out = sig.operands
        rules = rules_of(sig)
        copyable(source, out)
        need(
            len(rules) == len(source.shape),
            f"got {len(rules)} rules for {list(source.shape)}, expected one per dimension",
        )
        for rule, n in zip(rules, source.shape, strict=True):
            need(
                all(d < len(out.shape) for d, _ in rule.terms),
                "an index rule uses a dimension that the output does not have",
            )
            reach = sum(abs(f) * (out.shape[d] - 1) for d, f in rule.terms) + abs(rule.add)
            need(reach + 2 * n < 1 << 31, "indices in an index rule exceed 32 bits")
            need(
                rule.edge != "reflect" or reach <= 64 * n,
                "an index rule reflects more than 64 times",
            )
        covers(sig.read(RemapParams).tile, out.shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.read(RemapParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        source, out = (o.shape for o in sig.operands)
        lo, hi = tile_box(out, coord, sig.read(RemapParams).tile)
        low, high = [], []
        for rule, n in zip(rules_of(sig), source, strict=True):
            ends = [(f * lo[d], f * (hi[d] - 1)) for d, f in rule.terms]
            first = (sum(min(e) for e in ends) + rule.add) // rule.divide
            last = (sum(max(e) for e in ends) + rule.add) // rule.divide
            if rule.edge in ("reflect", "wrap") and not 0 <= first <= last < n:
                first, last = 0, n - 1
            low.append(min(max(first, 0), n - 1))
            high.append(min(max(last, 0), n - 1) + 1)
        return [Access(0, tuple(low), tuple(high)), Access(1, lo, hi, write=True)]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """The floating-point operations and bytes of a task. At most one source element is counted
        per output element. The box that the task accesses may be larger, because indices that wrap
        around can reach a whole dimension.
        """
        out = sig.operands[1]
        lo, hi = tile_box(out.shape, coord, sig.read(RemapParams).tile)
        elements = math.prod(h - n for n, h in zip(lo, hi, strict=True))
        work, moved = super().cost(sig, coord)
        return work, min(moved, float(2 * elements * out.itemsize))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return turned.scratch(sig) if _turns(sig, machine) else 0

    def coalesced(self, sig: Signature, machine: Machine) -> bool:
        return _turns(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(RemapParams)
        names = text.indices(sig.operands[1].shape, NAMES)[-len(sig.operands[1].shape) :]
        texts, nearest, conditions = [], [], []
        for rule, n in zip(rules_of(sig), sig.operands[0].shape, strict=True):
            at, guards = _index(rule, n, names, sig.operands[1].shape)
            texts.append(at)
            nearest.append(f"ark_edge({at}, {n})" if guards else at)
            conditions += guards
        integer = sig.operands[0].dtype not in text.FLOATS
        value = params.fill
        fill = f"{int(value)}ll" if integer else text.literal(value)
        guard = (" && ".join(conditions), fill)
        tile = params.tile
        if _turns(sig, machine):
            return turned.turned_text(name, sig, tile, machine, texts, conditions)
        if conditions and NAMES[3] not in guard[0] and machine.cooperative:
            texts = nearest  # in bounds, so that several vectors are loaded without branches
        return text.function(
            name, write_box(sig, COPY, tile, machine, places={0: texts}, guard=guard, apart=True)
        )


def _turns(sig: Signature, machine: Machine) -> bool:
    """True if the copy exchanges dimensions through shared memory (ark.tasks.turned)."""
    params = sig.read(RemapParams)
    rules = [(r.terms, r.add, r.divide, r.edge) for r in rules_of(sig)]
    form = turned.turns(rules, params.fill, *sig.operands)
    return form and turned.serves(sig, params.tile, machine)


def _index(rule: Rule, n: int, names: Sequence[str], shape: Sequence[int]) -> tuple[str, list[str]]:
    """The text of the input's index in one dimension, and the conditions under which it is in
    bounds.
    """
    parts = [
        names[d] if f == 1 else f"({names[d]}) * {f}" for d, f in rule.terms if shape[d] > 1 and f
    ]
    low = sum(min(0, f * (shape[d] - 1)) for d, f in rule.terms) + rule.add
    high = sum(max(0, f * (shape[d] - 1)) for d, f in rule.terms) + rule.add
    if rule.add or not parts:
        parts.append(str(rule.add))
    at = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    guards = []
    if rule.edge == "exact":
        guards.append(f"{at} % {rule.divide} == 0")
    if rule.divide > 1:
        at = f"ark_floor_div({at}, {rule.divide})"
    low, high = low // rule.divide, high // rule.divide
    if low >= 0 and high < n:
        return at, guards
    if rule.edge in ("fill", "exact"):
        guards += [f"{at} >= 0"] if low < 0 else []
        guards += [f"{at} < {n}"] if high >= n else []
        return at, guards
    return f"ark_{rule.edge}({at}, {n})", guards


class GatherParams(Params, frozen=True):
    axis: Dim
    elements: bool
    tile: Tile
    from_end: bool = True


class Gather(TaskKind):
    name = "gather"
    claimable = True
    params = GatherParams
    headers = (*HEADERS, text.header("gather.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(GatherParams)
        count(sig, 3)
        source, ids, out = sig.operands
        axis = params.axis
        copyable(source, out)
        need(ids.dtype in INDEX_NAMES, f"indices are {ids.dtype}, expected int32 or int64")
        if params.elements:
            shaped(sig, 1, out.shape, *INDEX_NAMES)
            fits = len(source.shape) == len(out.shape) > axis and all(
                n <= m or d == axis
                for d, (n, m) in enumerate(zip(out.shape, source.shape, strict=True))
            )
        else:
            fits = len(source.shape) == len(out.shape) == 3 and axis == 1 and len(ids.shape) == 1
            fits = fits and (source.shape[0], ids.shape[0], source.shape[2]) == out.shape
        need(
            fits,
            f"indices of shape {list(ids.shape)} into a source of shape {list(source.shape)} do "
            f"not give an output of shape {list(out.shape)}",
        )
        covers(params.tile, out.shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[2].shape), sig.read(GatherParams).tile)

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """The operations and bytes of a task. Of the source, only the elements that are copied are
        counted.
        """
        params = sig.read(GatherParams)
        _, ids, out = sig.operands
        lo, hi = tile_box(out.shape, coord, params.tile)
        elements = math.prod(h - n for n, h in zip(lo, hi, strict=True))
        read = elements if params.elements else hi[1] - lo[1]
        return float(elements), float(2 * elements * out.itemsize + read * ids.itemsize)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(GatherParams)
        source, out = sig.operands[0].shape, sig.operands[2].shape
        axis = params.axis
        lo, hi = tile_box(out, coord, params.tile)
        chosen = (lo, hi) if params.elements else (lo[1:2], hi[1:2])
        return [
            Access(
                0, (*lo[:axis], 0, *lo[axis + 1 :]), (*hi[:axis], source[axis], *hi[axis + 1 :])
            ),
            Access(1, *chosen),
            Access(2, lo, hi, write=True),
        ]

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any]:
        # A task of a gather must wait until its indices are loaded before it can copy. So its tiles
        # are twice as large as those of other copies, which halves the number of these waits.
        return claim_tile(sig, 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(GatherParams)
        out = sig.operands[2].shape
        names = text.indices(out, NAMES)[-len(out) :]
        own = names if params.elements else names[1:2]
        at = f"p1[{text.offset(sig, 1, own)}]"
        size = sig.operands[0].shape[params.axis]
        texts = list(names)
        texts[params.axis] = f"ark_looked_up<{str(params.from_end).lower()}>(c, {at}, {size})"
        places: dict[int, Any] = {0: texts, 1: own}
        if not machine.cooperative:
            return text.function(name, write_box(sig, COPY, params.tile, machine, places=places))
        writer = BoxWriter(sig, COPY, params.tile, places)
        places_of_k = [*texts[: params.axis], "k", *texts[params.axis + 1 :]]
        source, target = text.offset(sig, 0, places_of_k), text.offset(sig, 2, names)

        def copied(vectors: Vectors) -> str:
            rounds = writer.rounds(vectors, machine)
            constants = (writer.box, vectors.size, rounds, str(params.from_end).lower(), size)
            head = f"({declared(NAMES)}) {{ {unused_names(NAMES)}"
            chosen = f"(int k, {declared(NAMES)}) {{ (void)k; {unused_names(NAMES)}"
            return (
                f"  ark_gather_tile<{', '.join(map(str, constants))}>(\n      c, t.coord,\n"
                f"      [&]{head} return {at}; }},\n"
                f"      [&]{chosen} return p0 + {source}; }},\n"
                f"      [&]{head} return p2 + {target}; }});\n"
            )

        declare = "".join(text.operand(sig, i, f"p{i}", const=i != 2) for i in range(3))
        single, vectors = copied(Vectors()), writer.vectors()
        if vectors.size == 1 or writer.shape[3] % vectors.size:
            return text.function(name, declare + single)
        addresses = text.addresses(sig, sorted(vectors.whole))
        aligned = copied(vectors)
        either = f"  if (ark_aligned({addresses})) {{\n{aligned}  }} else {{\n{single}  }}\n"
        return text.function(name, declare + either)


register(Remap())
register(Gather())
