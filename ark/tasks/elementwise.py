"""The task kind `elementwise`: an expression over broadcast operands; also casts, copies, fills.

params: expr (a tree of ark.tasks.expression over the inputs), tile (4 sizes). operands: inputs...,
output. coord: the tile's first index per dimension; more than four dimensions are folded
(ark.ir.fold). With no input the output is filled with the expression's value. The output may be the
same memory as an input.

ark.tasks.box_writer writes the bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ark.ir.fold import fold, tile_of, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Tile, TiledParams, box, covers, need
from ark.tasks import expression, text
from ark.tasks.box_text import Vectors
from ark.tasks.box_writer import BoxWriter, write_box
from ark.tasks.claimed import claim_constants

CLAIM_BYTES = 32768  # bytes of a tile that is claimed
COPY = expression.leaf(0)
HEADERS = (text.header("box.h"),)


def copy_params(tile: Sequence[int]) -> ElementwiseParams:
    """The parameters of elementwise tasks that copy their input, with this tile size."""
    return ElementwiseParams(COPY, tuple(tile))


def broadcast_access(
    sig: Signature, index: int, lo: Sequence[int], hi: Sequence[int], write: bool = False
) -> Access:
    """The access to a broadcast operand by a task that computes the box lo..hi of the output."""
    shape = sig.operands[index].shape
    cut = len(lo) - len(shape)
    tail_lo, tail_hi = tuple(lo)[cut:], tuple(hi)[cut:]
    return Access(
        index,
        tuple(0 if n == 1 else b for b, n in zip(tail_lo, shape, strict=True)),
        tuple(1 if n == 1 else min(e, n) for e, n in zip(tail_hi, shape, strict=True)),
        write,
    )


def broadcasts(sig: Signature, index: int, out: int) -> None:
    """Raises PlanError unless operand `index` broadcasts to operand `out`: it has no more
    dimensions, each of the same size or of size 1.
    """
    shape, target = sig.operands[index].shape, sig.operands[out].shape
    need(
        len(shape) <= len(target)
        and all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)),
        f"operand {index} of shape {list(shape)} does not broadcast to {list(target)}",
    )


def tile_box(
    shape: Sequence[int], coord: Sequence[int], tile: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first index of the tile at `coord`, and the index after its last, in each dimension."""
    sizes = fold(shape)
    hi = [min(c + s, n) for c, s, n in zip(coord, tile, sizes, strict=True)]
    return unfold(shape, coord, hi)


class ElementwiseParams(Params, frozen=True):
    expr: list[Any]
    tile: Tile


class Elementwise(TaskKind):
    name = "elementwise"
    claimable = True
    params = ElementwiseParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ElementwiseParams)
        need(len(sig.operands) > 0, "the output operand is missing")
        out = len(sig.operands) - 1
        shape, tile = sig.operands[out].shape, params.tile
        expression.check(params.expr, [o.dtype for o in sig.operands[:out]], len(shape))
        for index in range(out):
            broadcasts(sig, index, out)
        covers(tile, shape)
        each = sig.operands[out].per_item
        need(
            tile[3] == shape[-1] or tile[3] % each == 0,
            f"tile {list(tile)} must be a multiple of the {each} elements in a byte",
        )

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[-1].shape), sig.read(ElementwiseParams).tile)

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any]:
        return claim_tile(sig)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands) - 1))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        lo, hi = tile_box(sig.operands[out].shape, coord, sig.read(ElementwiseParams).tile)
        return [broadcast_access(sig, i, lo, hi, i == out) for i in range(out + 1)]

    def apart(self, sig: Signature, machine: Machine) -> int:
        params = sig.read(ElementwiseParams)
        if not machine.cooperative or any(o.per_item > 1 for o in sig.operands):
            return 0
        vectors = BoxWriter(sig, params.expr, params.tile, {}).vectors()
        # A thread computes the same elements in consecutive tasks only if both tasks use the same
        # vector size. If alignment is checked at run time, they may use different sizes.
        return vectors.size if all(sig.operands[i].aligned for i in vectors.whole) else 0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ElementwiseParams)
        return text.function(name, write_box(sig, params.expr, params.tile, machine))

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        if not machine.cooperative or any(o.per_item > 1 for o in sig.operands):
            return ""
        params = sig.read(ElementwiseParams)
        writer = BoxWriter(sig, params.expr, params.tile, {})
        choices = writer.choices()
        if not choices or not all(writer.rounds(p, machine, whole=True) for p in choices):
            return ""
        constants = claim_constants(self, sig, tasks, records)
        out = len(sig.operands) - 1
        body = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
        structs = ""
        for number, vectors in enumerate(choices):
            tile = f"{name}_held{number}"
            held, load, finish = writer.ahead(vectors, machine)
            finish += writer.left(vectors).replace("t.coord", "h.coord")
            load = f"    const int first = ark_tid();\n{load}"
            structs += f"struct {tile} {{\n{held}}};\n"
            body += (
                f"  if (ark_aligned({text.addresses(sig, sorted(vectors.whole))})) {{\n"
                f"  ark_claimed_ahead<{tile}, {constants}>(c, t, [&]({tile}& h, const ArkTask& t) "
                f"{{\n{load}  }}, [&]({tile}& h) {{\n{finish}  }});\n  return;\n  }}\n"
            )
        each = f"[&](const ArkTask& t) {{\n{writer.flat(Vectors(), machine)}  }}"
        return structs + text.function(name, f"{body}  ark_claimed<{constants}>(c, t, {each});\n")

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ElementwiseParams)
        out = len(sig.operands) - 1
        declare = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
        writer = BoxWriter(sig, params.expr, params.tile, {})
        vectors = writer.vectors()
        writer.keeps = writer.rounds(vectors, machine, whole=True)
        ctype, keeps = sig.operands[out].ctype, writer.keeps
        kept = f"  ArkPack<{ctype}, {vectors.size}> kept[{keeps}] = {{}};\n"
        body = declare + writer.flat(vectors, machine)
        return text.run(name, body, kept if writer.keeps else "")


def claim_tile(sig: Signature, times: int = 1) -> Mapping[str, Any]:
    """The op's parameters with tiles of about `times` CLAIM_BYTES. The present tiles are kept if
    the new ones would be larger in a dimension.
    """
    out, before = sig.operands[-1], sig.read(TiledParams).tile
    tile = tile_of(out.shape, times * CLAIM_BYTES // out.itemsize)
    smaller = all(t <= n for t, n in zip(tile, before, strict=True))
    return {**sig.params, "tile": tuple(tile) if smaller else tuple(before)}


register(Elementwise())
