"""Softmax and norms whose rows are copied to shared memory ahead, by asynchronous copies.

This body is used in two cases. First, if a processor has many rows of 4-byte elements: rows arrive
while earlier rows are summed, so memory is never idle. Second, if rows of any type are too long for
row_norm.h, which keeps two rows in registers: here only the current row is in registers, and the
next row arrives in shared memory. In all other cases the common body (ark/tasks/row_norm.py) is
used. Its registers hold the current rows and those in flight, which is as fast.
"""

from __future__ import annotations

import math

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.row_norm import (
    MAX_REGISTER_ELEMENTS,
    RowNormParams,
    folds,
    operands,
    row_constants,
    row_op,
    vector_elements,
)
from ark_cuda.tasks import inline

STAGE_BYTES = 128 << 10  # of rows in shared memory; the L1 cache gets the rest
MIN_ROWS_AHEAD, MAX_ROWS_AHEAD = 2, 8  # rows in shared memory per team
# The most elements of a row per thread if the op has no weights, which need registers too.
MAX_HELD_ELEMENTS = 2 * MAX_REGISTER_ELEMENTS
# Elements of a row per thread; row_norm.h takes several shorter rows at once.
MIN_HELD_ELEMENTS = 16
# Bytes of an element; rows of smaller ones are as fast or faster in registers.
MIN_CLAIMED_ITEMSIZE = 4
BARRIER_BYTES = 1024  # bytes


def _shape(sig: Signature, machine: Machine) -> tuple[int, int, int, int] | None:
    """How rows are copied: elements of a vector, vectors per thread, warps that share a row, rows
    that are loaded ahead. None if rows do not arrive by copies.
    """
    able = machine.variant.name == "block" and machine.has(Capability.ROW_COPIES)
    first, out = sig.operands[0], sig.operands[-1]
    columns, vector = out.shape[-1], vector_elements((first, out), out.shape[-1])
    strides = (s for n, s in zip(first.shape[:-1], first.strides[:-1], strict=True) if n > 1)
    whole = all(s * first.itemsize % 16 == 0 for s in (columns, *strides))
    long = columns > MAX_REGISTER_ELEMENTS * machine.lanes * machine.warps
    moved = (long or first.itemsize >= MIN_CLAIMED_ITEMSIZE) and vector * first.itemsize >= 16
    if not (able and whole and moved and first.aligned and out.aligned):
        return None
    warps = machine.warps
    room = machine.task_bytes - folds(machine) - BARRIER_BYTES
    for team in (t for t in (1, 2, 4, 8, 16) if warps % t == 0):
        each = math.ceil(columns / (vector * machine.lanes * team))
        most = MAX_HELD_ELEMENTS if long and len(sig.operands) == 2 else MAX_REGISTER_ELEMENTS
        if each * vector > most:
            continue
        teams = warps // team
        ahead = min(MAX_ROWS_AHEAD, min(room, STAGE_BYTES) // (teams * columns * first.itemsize))
        enough = (
            ahead >= (1 if long else MIN_ROWS_AHEAD)
            and sig.read(RowNormParams).rows >= MIN_ROWS_AHEAD * teams
        )
        return (
            (vector, each, team, ahead) if enough and each * vector >= MIN_HELD_ELEMENTS else None
        )
    return None


class RowStream(Body):
    """Softmax and norms whose next rows arrive by bulk copies while the current row is computed."""

    kind = "row_norm"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _shape(sig, machine) is not None

    def scratch(self, sig: Signature, machine: Machine) -> int:
        shape = _shape(sig, machine)
        assert shape is not None
        row = sig.operands[0].itemsize * sig.operands[0].shape[-1]
        _, _, team, ahead = shape
        return folds(machine) + BARRIER_BYTES + machine.warps // team * ahead * row

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = _shape(sig, machine)
        assert shape is not None
        op, definition = row_op(name, sig)
        constants = (
            op,
            *row_constants(sig),
            folds(machine),
            BARRIER_BYTES,
        )
        return definition + text.call(name, "ark_row_stream", (*constants, *shape), operands(sig))

    def headers(self, machine: Machine) -> tuple[str, ...]:
        common = (text.header("folds.h"), text.header("row_norm.h"))
        return (*common, inline.header("bulk_copies.h"), inline.header("row_stream.h"))
