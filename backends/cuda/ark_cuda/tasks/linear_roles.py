"""Linear layers of one or a few input rows, in the variant `roles`. The weights arrive in a ring of
stages. Each warp has its own stages and processes them without the other warps.

It supports the signatures that ark.tasks.linear.narrows accepts. The device code is in
linear_roles.h, and for several rows in linear_batch.h. Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body, BoxMap
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.plan.signature import SHORT_PACKET
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import (
    LinearParams,
    kept_stages,
    narrow_bytes,
    narrows,
    reads_from_memory,
    sums_bytes,
)
from ark_cuda.tasks import inline

BOX_ALIGNMENT_BYTES = 16
BOX_ROW_BYTES = 128  # contiguous bytes of a row in a box


def _input_bytes(sig: Signature) -> int:
    if _rows(sig) > 1 and reads_from_memory(sig):
        return 0
    held = narrow_bytes(_rows(sig), sig.operands[0].shape[1], sig.operands[1].itemsize)
    return -(-held // BOX_ALIGNMENT_BYTES) * BOX_ALIGNMENT_BYTES


def _rows(sig: Signature) -> int:
    """The number of rows of the input and of the output."""
    return sig.operands[2].shape[0]


def _task_rows(sig: Signature, machine: Machine) -> int:
    """The most rows of weights that a task has."""
    rows = sig.read(LinearParams).rows
    stages = -(-sig.operands[1].shape[0] // rows)
    return -(-stages // machine.processors) * rows


def boxed(sig: Signature) -> bool:
    """True if box copies (TMA) load the stages of weights. A stage then consists of 128-byte
    lines of as many rows as a matrix instruction has.
    """
    params, weight = sig.read(LinearParams), sig.operands[1]
    rest = weight.shape[1] * weight.itemsize % (params.split_k * BOX_ROW_BYTES)
    return _rows(sig) > 1 and params.split_k > 1 and params.rows in (8, 16) and not rest


class Roles(Body):
    """A linear layer in the variant `roles`, in which each stage of weights belongs to one warp."""

    kind = "linear"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("packets.h", "mma.h", "linear_units.h", "linear_roles.h")
        return tuple(map(inline.header, names))

    def texts(self, sig: Signature, machine: Machine) -> tuple[str, ...]:
        given = sig.operands[0]
        names = ["short_rows.h"] if given.packet and given.itemsize == SHORT_PACKET else []
        if _rows(sig) > 1:
            parts = ("tiles", "pair", "boxes", "gather", "batch")
            names += [f"linear_{part}.h" for part in parts]
        return tuple(map(inline.header, names))

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return narrows(sig, machine)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the input row, each warp's sum of squares and, if rows of
        weights are divided along k, the sums of the parts.
        """
        params = sig.read(LinearParams)
        splits, rows = params.split_k, _rows(sig)
        best = 8 * machine.warps * rows if params.epilogue == "sample" else 0
        if rows > 1:
            sums = sums_bytes(machine.warps, rows, params.rows, splits)
            return _input_bytes(sig) + sums + best
        parts = 4 * (splits + 1) * _task_rows(sig, machine) if splits > 1 else 0
        return _input_bytes(sig) + 4 * machine.warps + parts + best

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """The tensor map of the weights, with which the stream copies a stage at once. A box
        contains a part of each row, one 128-byte line after another. L2 loads only the lines of the
        box: promotion to larger units, with neighbouring lines, makes a token slower.
        """
        params = sig.read(LinearParams)
        if not boxed(sig):
            return ()
        weight, (rows, parts) = sig.operands[1], (params.rows, params.split_k)
        (high, k), deep = weight.shape, BOX_ROW_BYTES // weight.itemsize
        strides, box = (k * weight.itemsize, BOX_ROW_BYTES), (deep, rows, k // deep // parts)
        return (
            BoxMap(1, weight.dtype, (deep, high, k // deep), strides, box, fetched=BOX_ROW_BYTES),
        )

    def poll(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source by which the communicating warp waits for the task's input."""
        given, k = sig.operands[0].shape
        shares, last = (given, 0) if _rows(sig) == 1 else (1, given - 1)
        constants = (k, shares, last, machine.processors)
        return inline.poll(name, text.called("ark_linear_poll", constants, (text.given(sig, 0),)))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the function that the computing warps run."""
        k, params, rows = sig.operands[0].shape[1], sig.read(LinearParams), _rows(sig)
        sizes = (sig.operands[1].ctype, k, params.rows, params.split_k)
        operands = (text.given(sig, 0), prologue(sig), epilogue(sig))
        if rows == 1:
            given = sig.operands[0].shape[0]
            # With two ranks, the order in which the shares are added does not change the sum. So
            # both ranks begin with share 0. Their kernels are then equal, and one kernel is
            # compiled for both.
            shares = (given, params.first if given > 2 else 0)
            constants = (*sizes, _task_rows(sig, machine), _input_bytes(sig), *shares)
            return inline.inlined(
                name, text.called("ark_linear_roles", constants, operands), machine
            )
        several = (*sizes, kept_stages(machine.warps, params.split_k), int(boxed(sig)))
        if reads_from_memory(sig):
            apart = (operands[0], operands[2])
            call = text.called("ark_linear_apart", (*several, rows), apart)
        else:
            call = text.called("ark_linear_batch", (*several, _input_bytes(sig), rows), operands)
        return inline.inlined(name, call, machine)
