"""Counts the instructions of a kernel's busiest loop, and the share of its issue slots that go to
matrix units.

A slot is the time in which a SIMD executes a vector instruction of a wave: four cycles on CDNA (64
lanes on 16 units), one cycle on RDNA (32 lanes on 32 units). A matrix instruction of CDNA takes as
many slots as it has passes (AMD's instruction set documents), one of RDNA 3 takes 32 cycles. A
transcendental instruction runs at a quarter of the rate. Every other instruction takes one slot.
The share is the fraction of the peak rate that the matrix units would reach if each SIMD had one
wave, which never waited. On CDNA, where matrix units and vector units work at the same time,
several waves can reach more. Called by the ROCm backend for `ark bench ops --isa`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ark.backend.protocol import LoopFigures
from ark.errors import InvalidUsageError

from .listing import Function, Instruction, parse
from .loops import innermost_loops

_SHAPE = re.compile(r"_(\d+)x(\d+)x\d+")
_WMMA_SLOTS = 32  # 16x16x16 on RDNA 3
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_TRANSCENDENTAL_SLOTS = 4
_KINDS = (
    ("matrix", ("v_mfma", "v_smfmac", "v_wmma")),
    ("shared memory", ("ds_",)),
    ("memory", ("global_", "buffer_", "flat_", "scratch_")),
    ("wait", ("s_waitcnt", "s_nop", "s_sleep")),
    ("barrier", ("s_barrier",)),
    ("branch", ("s_cbranch", "s_branch")),
    ("scalar", ("s_",)),
    ("vector", ("v_",)),
)


def _kind(inst: Instruction) -> str:
    return next((k for k, starts in _KINDS if inst.mnemonic.startswith(starts)), "other")


def slots(mnemonic: str, arch: str) -> int:
    """The number of issue slots for which an instruction keeps its unit busy."""
    if mnemonic.startswith("v_wmma"):
        return _WMMA_SLOTS
    if _TRANSCENDENTAL.match(mnemonic):
        return _TRANSCENDENTAL_SLOTS
    shape = _SHAPE.search(mnemonic)
    if shape is None or not mnemonic.startswith(("v_mfma", "v_smfmac")):
        return 1
    size = int(shape[1])
    if size == 4:
        return 2
    if mnemonic.endswith("f64"):
        return 16 if arch == "gfx950" else 8
    single = mnemonic.endswith("f32") and not mnemonic.endswith("xf32")
    blocks = re.search(r"_\d+b_", mnemonic) is not None
    double = arch == "gfx90a" or single or blocks
    return (8 if size == 32 else 4) * (2 if double else 1)


def _loops(functions: Iterable[Function]) -> list[list[Instruction]]:
    return [
        [inst for k in sorted(loop) for inst in f.blocks[k].instructions if not inst.is_marker]
        for f in functions
        for loop in innermost_loops(f.blocks)
    ]


def matrix_loop(assembly: str, arch: str, kernel: str) -> LoopFigures:
    """Counts the instructions of the innermost loop that keeps the matrix units busy longest. If
    several loops do so equally long, the one with the fewest instructions is used.

    Args:
        assembly: the output of ``clang -S`` with optimisation.
        arch: its target.
        kernel: the name of the function.

    Raises:
        InvalidUsageError: none of the kernel's loops has matrix instructions.
    """
    listing = parse(assembly)
    functions = [f for f in listing.functions if f.name == kernel]

    def busy(loop: list[Instruction]) -> int:
        return sum(slots(i.mnemonic, arch) for i in loop if _kind(i) == "matrix")

    busiest = max(_loops(functions), key=lambda loop: (busy(loop), -len(loop)), default=[])
    if not busiest or busy(busiest) == 0:
        raise InvalidUsageError(f"no loop of {kernel} has matrix instructions on {arch}")
    used = listing.resources[kernel]
    return LoopFigures(
        instructions=dict(Counter(_kind(i) for i in busiest)),
        matrix_share=busy(busiest) / sum(slots(i.mnemonic, arch) for i in busiest),
        registers=used.vgprs,
        spills=used.vgpr_spills,
        scratch_bytes=used.scratch,
    )
