"""Attention of many rows on the matrix units MFMA and WMMA. It supports bf16, fp16, and fp32
queries over bf16 caches (a float is the exact sum of three bf16), heads of up to 256 elements
(multiples of 8), and any mask. attention_units.h, attention_staging.h and attention_walk.h have the
device code. Called by the source writer through the dialect.
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
from ark.tasks.attention_tiles import AttentionTilesParams, given, shape, where_aligned
from ark.tasks.matmul_form import UNIT_PARTS
from ark_rocm.tasks.headers import read

KEYS = (64, 32)  # keys of a group at once
_LANE_REGISTERS = 256  # registers of a lane where a SIMD has two waves
_LONG = "gfx950"  # with fp32 queries, in three parts, its code has 8 registers less
_OTHER_REGISTERS = 53  # registers for other values than sums, queries, scores and loads
_PIECE_BYTES = 16  # bytes: 8 elements
_MAX_OFFSET_BYTES = 1 << 32  # bytes from a head's first key to its last: offsets are 32-bit


@dataclass(frozen=True)
class Layout:
    """How the waves of a block compute a tile; these are the template arguments of
    ArkAttentionUnits.

    slabs: the number of waves with different queries. groups: the number of waves with the same
    queries, which divide each block's keys. keys: keys of a group in shared memory at a time. held:
    True if queries stay in registers. ahead: True if the next block's scores are computed while the
    current block's scores are converted to exponentials. buffers: the number of blocks in shared
    memory; with two a round of the loop has one barrier. width: elements of a head. parts: bf16
    parts of a query and of an exponential. unit: rows and columns of the matrix unit's block.
    lanes, warps: of the machine.
    """

    width: int
    slabs: int
    groups: int
    keys: int
    held: bool
    ahead: bool
    buffers: int
    parts: int
    unit: int
    lanes: int
    warps: int

    @property
    def least(self) -> bool:
        """True if the layout uses none of the options that need more registers."""
        return self.keys == KEYS[-1] and not (self.held or self.ahead or self.groups > 1)

    @property
    def nbytes(self) -> int:
        """Shared memory in bytes, for keys and values of a block. At the end the same memory holds
        the groups' sums.
        """
        every, pieces, fours = self.groups * self.keys, 2 * -(-self.width // 16), self.width // 4
        main = pieces * (every + 1) + every // 8 * 4 * (fours + (2 - fours) % 8)
        lane = 4 * (self.unit**2 // self.lanes + 2)
        main *= self.buffers
        return max(main * _PIECE_BYTES, self.slabs * self.lanes * lane if self.groups > 1 else 0)

    @property
    def registers(self) -> int:
        """The approximate number of registers of a lane."""
        threads, every = self.lanes * self.warps, self.groups * self.keys
        steps = -(-self.width // 16)
        sums = -(-self.width // self.unit) * self.unit**2 // self.lanes
        operand = (4 if self.unit == 32 else 8) * self.parts  # registers for 16 elements along k
        scores = self.keys * self.unit // self.lanes * (2 if self.ahead else 1)
        under_way = -(-every * 2 * steps // threads) * 4
        under_way += -(-every * 2 * -(-self.width // 32) // threads) * 8
        held = operand * (steps + 1 if self.held else 4)
        # Addresses, and combining groups.
        more = 8 * (self.width % 64 > 0) + 4 * self.buffers * (self.groups > 1)
        if self.parts > 1:  # fewer operands are read at once, and addresses are computed again
            more -= 12 if self.width == 64 else 24 if self.held and self.width % 64 else 28
        return (
            sums + held + scores + self.keys // 16 * operand + under_way + more + _OTHER_REGISTERS
        )


def layout_of(sig: Signature, machine: Machine) -> Layout | None:
    """The layout that keeps most waves busy. None if no layout supports the signature; the
    vendor-independent body then computes it.
    """
    params = sig.read(AttentionTilesParams)
    width, rows = params.head_dim, params.rows
    query, key, value, out = (o.dtype for o in sig.operands[:4])
    unit = 32 if machine.has(Capability.MFMA) else 16
    able = (
        machine.has(Capability.ATTENTION_UNITS)
        and machine.variant.name == "block"
        and (query, key) in UNIT_PARTS
        and (query, key) == (out, value)
        and (unit == 32 or query != "fp32" or width <= 128)
        and width % 8 == 0
        and width <= 256
        and not params.logarithms
        and rows <= unit * machine.warps
        and params.scale > 0.0
        and not any(o.packet for o in sig.operands)
        and all(s % 8 == 0 for o in sig.operands[:4] for s in o.strides[:-1])
        and all(
            o.shape[-2] * o.strides[-2] * o.itemsize <= _MAX_OFFSET_BYTES for o in sig.operands[1:3]
        )
    )
    if not able:
        return None
    layouts = _layouts(width, UNIT_PARTS[query, key], -(-rows // unit), unit, machine)
    room = machine.task_bytes
    limit = _LANE_REGISTERS - 8 * (query == "fp32" and machine.arch == _LONG)
    fits = (x for x in layouts if x.nbytes <= room and (x.least or x.registers <= limit))
    return max(fits, key=_worth, default=None)


def _layouts(width: int, parts: int, slabs: int, unit: int, machine: Machine) -> Iterator[Layout]:
    groups, flags = range(1, machine.warps // slabs + 1), (True, False)
    block = (parts, unit, machine.lanes, machine.warps)
    for some, keys, held, ahead in itertools.product(groups, KEYS, flags, flags):
        for buffers in (2, 1) if ahead and parts == 1 and machine.lanes == 64 else (1,):
            yield Layout(width, slabs, some, keys, held, ahead, buffers, *block)


def _worth(layout: Layout) -> tuple[int, ...]:
    """The sort key of layouts, by priority: more busy waves, fewer reads of shared memory, fewer
    waits.
    """
    return (layout.groups, layout.held, layout.ahead, layout.keys, layout.buffers)


class Units(Body):
    """Attention of tiles of queries on matrix units."""

    kind = "attention_tiles"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return layout_of(sig, machine) is not None

    def scratch(self, sig: Signature, machine: Machine) -> int:
        layout = layout_of(sig, machine)
        assert layout is not None
        return layout.nbytes

    def headers(self, machine: Machine) -> tuple[str, ...]:
        units = ("matrix.h", *("matrix_large.h",) * machine.has(Capability.MFMA))
        names = (*units, *(f"attention_{name}.h" for name in ("units", "staging", "walk")))
        own = read(*names)
        return (*map(text.header, ("tiles.h", "pages.h", "attention_tiles.h")), *own)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The emitted source calls the vendor-independent body at run time if the operands are not
        aligned.
        """
        layout = layout_of(sig, machine)
        assert layout is not None
        flags = (str(flag).lower() for flag in (layout.held, layout.ahead))
        sizes = (layout.width, layout.slabs, layout.groups, layout.keys)
        types = (sig.operands[i].ctype for i in (1, 0))
        words = (*types, *map(str, sizes), *flags, str(layout.buffers))
        units = f"ArkAttentionUnits<{', '.join(words)}>"
        call = text.called("ark_attention_units", (units, shape(sig)), given(sig))
        return where_aligned(name, sig, machine, call)
