"""Attention of many rows on mma.sync, in any variant whose shared memory holds a tile. It supports
bf16 and fp16, heads of up to 256 elements (multiples of 8), and any mask. attention_units.h,
attention_sums.h, attention_walk.h and attention_ahead.h have the device code. Called through the
dialect.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention_tiles import (
    AttentionTilesParams,
    context_of,
    given,
    logarithms,
    number_of_tiles,
    shape,
    where_aligned,
)
from ark_cuda.tasks import inline

TYPES = ("bf16", "fp16")
SLAB_ROWS = 16  # rows of queries that a warp multiplies at once
SHARED_ROW_BYTES = 128  # bytes: a row in shared memory is padded to a multiple of it
OTHER_REGISTERS = 32  # registers of a thread for other values than sums and scores
MIN_BLOCK_KEYS = 48  # keys of a block; with fewer, shared memory is read too often
TEAMS, KEYS, SLOTS = (1, 2, 4), (64, 48, 32), (4, 3, 2)
_MULTIPROCESSOR_REGISTERS = 65536  # registers of a multiprocessor
STRIP_BYTES = 64  # bytes of an ArkAttentionStrip; with several crews, each has two of them
_MAX_NAMED_BARRIERS = 14  # barriers of a block beside those of the loop


@dataclass(frozen=True)
class Layout:
    """How the warps of a block compute tiles; these are the template arguments of
    ArkAttentionUnits.

    slabs: the number of slabs of a tile; a slab is 16 rows of queries. team: warps per slab.
    groups: the number of groups of warps, which take blocks of keys round-robin. keys: keys per
    block. slots: how many blocks of keys or values a group has in shared memory. held: True if
    queries stay in registers. width: elements of a head. crews: the number of tiles that the block
    computes at once.
    """

    width: int
    slabs: int
    team: int
    groups: int
    keys: int
    slots: int
    held: bool
    crews: int = 1

    @property
    def warps(self) -> int:
        """The number of warps that compute."""
        return self.slabs * self.team * self.groups * self.crews

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory for queries, slots, the data that the warps of a team share, and
        the description of the current tile. After the last key the same memory holds the warps'
        sums.
        """
        steps = -(-self.width // SLAB_ROWS)
        own = -(-steps // self.team)
        pitch = -(-steps // 4) * SHARED_ROW_BYTES
        rows = SLAB_ROWS * self.slabs + self.groups * self.slots * self.keys
        shared = self.keys * 32 + self.team * 64 if self.team > 1 else 0
        main = rows * pitch + self.slabs * self.groups * shared
        part = max(own * 1024 + 512, -(-own // 4) * SHARED_ROW_BYTES * SLAB_ROWS)
        size = max(main, max(1, self.groups // 2) * self.slabs * self.team * part)
        size += STRIP_BYTES if self.crews == 1 else 2 * STRIP_BYTES
        line = SHARED_ROW_BYTES
        return size if self.crews == 1 else self.crews * (-(-size // line) * line)

    def registers(self) -> int:
        """The approximate number of registers of a thread."""
        steps = -(-self.width // SLAB_ROWS)
        sums, scores = 8 * -(-steps // self.team), self.keys // (2 * self.team)
        return sums + scores + (4 * steps if self.held else 0) + OTHER_REGISTERS


def layout_of(sig: Signature, machine: Machine) -> Layout | None:
    """The layout that keeps most warps busy. None if no layout supports the signature; the
    vendor-independent body then computes it.
    """
    params = sig.read(AttentionTilesParams)
    width, kinds = params.head_dim, {o.dtype for o in sig.operands[:4]}
    able = (
        machine.has(Capability.MMA_SYNC)
        and not inline.leads(machine)
        and len(kinds) == 1
        and kinds <= set(TYPES)
        and width % 8 == 0
        and width <= 256
        and params.scale > 0.0
        and not any(o.packet for o in sig.operands)
        and all(s % 8 == 0 for o in sig.operands[:4] for s in o.strides[:-1])
    )
    if not able:
        return None
    rows = params.rows
    room = machine.task_bytes
    registers = _registers(machine)
    context = context_of(sig)
    turns = -(-number_of_tiles(sig) // params.tasks) if params.tasks else 1
    alone = params.paged or params.logarithms
    crews = min(turns, machine.warps) if context <= max(KEYS) and not alone else 1
    layouts = _layouts(width, -(-rows // SLAB_ROWS), machine.warps, crews)
    fits = (x for x in layouts if x.nbytes <= room and x.registers() <= registers)
    return max(fits, key=lambda x: _worth(x, rows, context, turns), default=None)


def _layouts(width: int, most: int, warps: int, crews: int) -> Iterator[Layout]:
    """All layouts with at most `most` slabs, `warps` warps and `crews` crews. width: elements of
    a head.
    """
    for team, slabs, crew in itertools.product(TEAMS, range(1, most + 1), range(1, crews + 1)):
        for groups in range(1, warps // (team * slabs * crew) + 1):
            barriers = crew * groups * (1 + slabs if team > 1 else 1)
            if barriers > _MAX_NAMED_BARRIERS or min(crew, groups) > 1:
                continue
            for keys, slots, held in itertools.product(KEYS, SLOTS, (True, False)):
                if keys % (team * SLAB_ROWS) == 0:
                    yield Layout(width, slabs, team, groups, keys, slots, held, crew)


def _worth(layout: Layout, rows: int, context: int, turns: int) -> tuple[float, ...]:
    """The sort key of layouts; greater is better. It compares in this order:

    - If all keys of a tile are one block, nothing hides the latency of its loads: the fewer tiles
      a crew computes one after another, the better.
    - The number of busy warps. It is the number of warps, times the fraction of slab rows that
      have a query, times the fraction of rounds in which a crew has a tile. If one block of keys
      for each group is more than the context, also times the used share of these keys.
    - Fewer reads of shared memory, then fewer waits.

    rows: query rows of a tile. context: the number of keys. turns: the number of a task's tiles.
    """
    own = -(-turns // layout.crews)
    chain = own * -(-rows // (SLAB_ROWS * layout.slabs)) if context <= max(KEYS) else 0
    high = SLAB_ROWS * layout.slabs
    share = rows / (-(-rows // high) * high)
    seen = min(1.0, context / (layout.groups * max(KEYS)))
    return (
        -chain,
        layout.warps * share * seen * turns / (own * layout.crews),
        layout.slabs,
        min(layout.keys, MIN_BLOCK_KEYS),
        -layout.team,
        layout.keys,
        layout.slots,
        layout.held,
    )


def _registers(machine: Machine) -> int:
    """The most registers that a thread may have in a function that the loop calls. Registers are
    allocated to groups of four warps.
    """
    return min(255, _MULTIPROCESSOR_REGISTERS // (32 * -(-machine.variant.warps // 4) * 4) // 8 * 8)


class TileBody(Body):
    """The base class of the bodies that compute tiles of queries."""

    kind = "attention_tiles"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        own = ("softmax", "units", "sums", "walk", "ahead")
        names = ("mma.h", "async_copies.h", *(f"attention_{name}.h" for name in own))
        common = (*map(text.header, ("pages.h", "attention_tiles.h")), *map(inline.header, names))
        if not machine.has(Capability.MMA_SYNC):
            common = ()
        if not machine.has(Capability.WGMMA) or machine.variant.name != "matrix":
            return common
        groups = (inline.header("wgmma.h"), inline.header("attention_tiles.h"))
        return (text.header("rotary.h"), text.header("tiles.h"), *common, *groups)


class Units(TileBody):
    """Attention of tiles of queries on mma.sync."""

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return layout_of(sig, machine) is not None

    def scratch(self, sig: Signature, machine: Machine) -> int:
        layout = layout_of(sig, machine)
        assert layout is not None
        return layout.nbytes

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the body. If operands turn out not to be aligned when the kernel runs, it
        calls the vendor-independent body.
        """
        layout = layout_of(sig, machine)
        assert layout is not None
        sizes = (layout.slabs, layout.team, layout.groups, layout.keys, layout.slots)
        held = str(layout.held).lower()
        words = (sig.operands[0].ctype, layout.width, *sizes, held, layout.crews)
        units = f"ArkAttentionUnits<{', '.join(map(str, words))}>"
        scale, cap, *operands = (*given(sig), *logarithms(sig))
        late = (f"[](const ArkTask& t) {{ (void)t; return {operand}; }}" for operand in operands)
        call = text.called("ark_attention_units", (units, shape(sig)), (scale, cap, *late))
        return where_aligned(name, sig, machine, call)
