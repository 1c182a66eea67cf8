"""The task kind `claimed`, which runs a large op of another kind with dynamic scheduling: its tiles
are not assigned to processors by the plan, but claimed at run time with an atomic counter
(claimed.h). Emitted by ark.lower.claims.

params: kind and params of the op whose tiles are claimed, tasks (the number of tasks that share the
tiles).

operands: those of the op.

coord: the tile with which a task begins. Each further tile goes to the task that claims it first.
So each task may access all of the op's memory, and no tile belongs to two tasks. A tile's result
depends only on the tile's index, so it has the same bits on every processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ark.backend.codegen import layout
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.boxes import Templates
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import Params, Places, Size, need
from ark.tasks import text

MAX_TILES = 1 << 16
RECORD = layout.dtype("ArkTask").itemsize


class ClaimedParams(Params, frozen=True):
    kind: str
    params: dict[str, Any]
    tasks: Size


def tiles_of(sig: Signature) -> tuple[TaskKind, Signature]:
    """The kind and the signature of the op whose tiles are claimed."""
    params = sig.read(ClaimedParams)
    return kinds.get(params.kind), Signature(params.kind, params.params, sig.operands)


def claim_constants(kind: TaskKind, inner: Signature, tasks: int, records: int) -> str:
    """The template constants of ArkClaims (claimed.h). inner: the signature of the op whose tiles
    are claimed. tasks: the number of tasks that share them. records: the offset in shared memory,
    in bytes, of the area for claiming.
    """
    ranges = kind.places(inner).ranges
    sizes = (*map(len, ranges), *(r.step for r in ranges))
    places = f"ArkPlaces<{', '.join(map(str, sizes))}>"
    return f"{places}, {tasks}, {len(inner.operands)}, {records}"


class Claimed(TaskKind):
    name = "claimed"
    params = ClaimedParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        kind, inner = tiles_of(sig)
        need(
            kind.claimable,
            f"kind {kind.name!r} does not support claimed tiles, which processors take at run time",
        )
        kind.check(inner)
        need(
            len(sig.operands) < layout.RECORD_OPERANDS,
            f"a task record has no room for {len(sig.operands)} operands and a counter",
        )
        need(not any(o.packet for o in sig.operands), "claimed tiles do not support packets")
        tiles, tasks = self.claims(sig), sig.read(ClaimedParams).tasks
        need(
            tasks <= tiles,
            f"got {tasks} tasks for {tiles} tiles; expected at most one task per tile",
        )
        need(
            tiles <= MAX_TILES, f"the tasks claim {tiles} tiles; at most {MAX_TILES} are supported"
        )
        for boxes in Templates().boxes(inner, tuple(_all(kind.places(inner)))):
            alone = boxes.disjoint and len(boxes.tasks) == len(boxes.lo)
            need(not boxes.append_only, "claimed tiles do not support appending")
            need(not boxes.write or alone, "two claimed tiles write the same bytes")
            need(not boxes.write or boxes.fills_bounds, "the claimed tiles do not cover the result")

    def places(self, sig: Signature) -> Places:
        kind, inner = tiles_of(sig)
        return replace(kind.places(inner), first=sig.read(ClaimedParams).tasks)

    def claims(self, sig: Signature) -> int:
        kind, inner = tiles_of(sig)
        return kind.places(inner).count

    def in_place(self, sig: Signature) -> frozenset[int]:
        kind, inner = tiles_of(sig)
        return kind.in_place(inner)

    def wide(self, sig: Signature) -> frozenset[int]:
        kind, inner = tiles_of(sig)
        return kind.wide(inner)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        kind, inner = tiles_of(sig)
        ways = {(a.operand, a.write) for a in kind.accesses(inner, coord)}
        accesses = (whole(i, sig.operands[i], write) for i, write in sorted(ways))
        return [replace(access, claimed=True) for access in accesses]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        kind, inner = tiles_of(sig)
        share = self.claims(sig) / sig.read(ClaimedParams).tasks
        flops, moved = kind.cost(inner, coord)
        return share * flops, share * moved

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _before(sig, machine) + 2 * RECORD

    def texts(self, sig: Signature) -> tuple[str, ...]:
        kind, inner = tiles_of(sig)
        claims = (text.header("claimed.h"), *kind.claiming_headers)
        return (*kind.headers, *kind.texts(inner), *claims)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        kind, inner = tiles_of(sig)
        tile = f"{name}_tile"
        tasks, records = sig.read(ClaimedParams).tasks, _before(sig, machine)
        own = kind.claiming_source(name, inner, machine, tasks, records)
        if own:
            return own
        body = kind.source(tile, inner, machine)
        inlined = body.replace(f"ARK_BODY void {tile}(", f"ARK_DEVICE void {tile}(")
        constants = (claim_constants(kind, inner, tasks, records),)
        each = f"[&](const ArkTask& t) {{ {tile}(c, t); }}"
        return inlined + text.call(name, "ark_claimed", constants, (each,))


def _before(sig: Signature, machine: Machine) -> int:
    """The offset in shared memory at which the records of claimed tasks are stored. They follow the
    bytes that the device function of the tiles needs.
    """
    kind, inner = tiles_of(sig)
    return -(-kind.scratch(inner, machine) // 8) * 8


def _all(places: Places) -> list[tuple[int, ...]]:
    plain = not places.span and len(places.ranges) == 4
    need(plain, "claimed tiles must have exactly four coordinates")
    return list(itertools.product(*places.ranges))


register(Claimed())
