"""Products of input rows with the weights of chosen experts, in the variant `roles`. The experts
are known only when the task runs, so their weights do not pass through the ring of stages. Each
warp loads the weights of its next rows to registers while it multiplies the current ones.

Along serves quantised weights of which each 16 bytes of codes have a scale (MXFP4): a warp moves
along 16 rows, which matrix units multiply. OnUnits serves other weights whose values have 16 bits:
bf16, fp16, and quantised weights without zero points of which all codes in 16 bytes share a scale.
Ahead serves bf16 and fp16 if a task has one expert; whole rows are read faster than the columns
into which OnUnits cuts them. The vendor-independent body computes all other cases. Called through
the dialect.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ark.backend.codegen.body import Body
from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.expert_epilogue import MAX_SLOTS, constants, declared, weight_operands
from ark.tasks.experts import HEADERS, outputs_of_task, share_of
from ark.tasks.row_values import HEADER, bytes_of
from ark_cuda.tasks import inline

PIECE_BYTES = 16
LANE_PIECES = 4  # lanes that load neighbouring pieces of one row; a unit is their columns
MAX_UNITS = 3  # the most units that a warp multiplies in a step; registers hold them
TILE_ROWS = 16  # rows of weights that matrix units multiply at once
VALUES = ("bf16", "fp16")  # the types of values that matrix units multiply here
WARP_LANES = 32
NO_INPUT_WORDS = 16  # zeros that lanes of Along read in place of the input
UNIT_GAP_WORDS = 4  # after each of the two halves of a unit of Along's input
UNITS_TOGETHER = 2  # units whose weights a warp of Along loads together
# The most pieces of weights (16 bytes, 4 registers) that a lane of Ahead holds for a step along k.
# Beside them it holds as many for the next step, which are loaded meanwhile.
MAX_HELD_PIECES = 8


class _Cut(NamedTuple):
    """How warps divide a task. units: see MAX_UNITS. chunk: the number of outputs whose sums shared
    memory holds at once; 0 if there is no room for any.
    """

    units: int
    chunk: int


def _codes(sig: Signature) -> int:
    """The number of weights in a piece of 16 bytes; 0 if the body does not support the weights."""
    weight, columns = by_name(sig.operands[1].dtype), sig.operands[1].shape[2]
    if not isinstance(weight, RowType):
        codes = PIECE_BYTES // weight.itemsize if weight.name in VALUES else 0
        return codes if codes and columns % codes == 0 else 0
    codes = PIECE_BYTES * 8 // weight.codes.bits
    whole = columns % codes == 0 and weight.group % codes == 0
    # Scales of less than a unit's columns are multiplied with the codes, in the values' type.
    before = weight.group < columns and weight.group % (LANE_PIECES * codes) != 0
    fits = weight.values.name in VALUES and (not before or weight.scales == weight.values)
    return codes if whole and fits and not weight.zeros else 0


def _slots(sig: Signature) -> int:
    """The number of chosen experts whose products a task computes."""
    return max(1, constants(sig)[1])


def _bytes(sig: Signature, machine: Machine, cut: _Cut) -> int:
    """Bytes of shared memory: each warp's part of the input and its sums, the totals, and the
    numbers of the experts.
    """
    weights, total = constants(sig)
    inputs = cut.units * LANE_PIECES * _codes(sig)
    rows = _slots(sig) * cut.chunk
    floats = machine.warps * (inputs + weights * rows) + (rows if total else 0)
    return 4 * (floats + MAX_SLOTS)


def _cut(sig: Signature, machine: Machine) -> _Cut:
    """The cut in which a task of this signature takes the fewest steps."""
    outputs, slots = outputs_of_task(sig, machine), _slots(sig)
    whole = -(-outputs // TILE_ROWS) * TILE_ROWS
    best, least = _Cut(1, 0), (math.inf, math.inf)
    for units in range(1, MAX_UNITS + 1):
        chunks = range(whole, 0, -TILE_ROWS)
        room = machine.task_bytes
        chunk = next((n for n in chunks if _bytes(sig, machine, _Cut(units, n)) <= room), 0)
        if not chunk:
            break
        items = slots * -(-sig.operands[1].shape[2] // (units * LANE_PIECES * _codes(sig)))
        # A warp loads twice as much ahead with two units and more, so they are preferred.
        steps = -(-items // machine.warps) * units * -(-whole // chunk)
        if (steps, -units) < least:
            best, least = _Cut(units, chunk), (steps, -units)
    return best


def _each(sig: Signature) -> int:
    """The number of pieces of a row that a lane multiplies."""
    return -(-sig.operands[1].shape[2] // (_codes(sig) * WARP_LANES))


def _fits(sig: Signature, machine: Machine) -> bool:
    """True if one of the bodies here may serve the signature."""
    first, of = share_of(sig)
    given = sig.operands[0]
    return (
        inline.leads(machine)
        and machine.lanes == WARP_LANES
        and first == 0
        and of == sig.operands[1].shape[0]
        and all(sig.operands[i].aligned for i in weight_operands(sig))
        and _codes(sig) > 0
        and given.dtype == "fp32"
        and given.strides[-1] == 1
        and all(stride % 2 == 0 for stride in given.strides[:-1])
    )


class OnUnits(Body):
    """Multiplies an input row by chosen experts' weights on matrix units."""

    kind = "expert_linear"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _fits(sig, machine) and _cut(sig, machine).chunk > 0

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("float_pairs.h", "linear_codes.h", "code_pairs.h", "mma.h", "row_tiles.h")
        own = map(inline.header, ("experts_ahead.h", "experts_units.h"))
        return (HEADER, *map(inline.header, names), *HEADERS, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _bytes(sig, machine, _cut(sig, machine))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        weight, slots = sig.operands[1], len(sig.operands[0].shape) == 3
        weights, total = constants(sig)
        dtype, row = by_name(weight.dtype), weight.ctype
        value = dtype.values.storage if isinstance(dtype, RowType) else row
        if not isinstance(dtype, RowType):
            row = f"ArkFloatRow<{row}, {weight.shape[2]}>"
        sizes = (row, value, weight.shape[1], slots, share_of(sig)[1], weights, total)
        x, experts = (text.given(sig, i) for i in (0, 2))
        given = (bytes_of(sig, 1), bytes_of(sig, weight_operands(sig)[-1]))
        cut = _cut(sig, machine)
        call = text.called("ark_expert_units", (*sizes, *cut), (x, *given, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")


def _along(sig: Signature, machine: Machine) -> int:
    """The number of parts into which Along divides rows; 0 if it does not serve the signature."""
    weight = by_name(sig.operands[1].dtype)
    if not isinstance(weight, RowType) or not _fits(sig, machine):
        return 0
    # Lanes load two scales at once. An input of fp16 would need a factor.
    pairs = weight.group == _codes(sig) and weight.groups % 2 == 0
    if not pairs or weight.values.name != "bf16":
        return 0
    tiles = _outputs(sig, machine) // TILE_ROWS * constants(sig)[0]
    parts = min(machine.warps // tiles, _units(sig))
    return parts if parts and _along_bytes(sig, machine, parts) <= machine.task_bytes else 0


def _outputs(sig: Signature, machine: Machine) -> int:
    """The most outputs of a task, rounded up to whole tiles."""
    return -(-outputs_of_task(sig, machine) // TILE_ROWS) * TILE_ROWS


def _units(sig: Signature) -> int:
    """The number of units of a row."""
    return -(-sig.operands[1].shape[2] // (LANE_PIECES * _codes(sig)))


def _along_bytes(sig: Signature, machine: Machine, parts: int) -> int:
    """Bytes of shared memory: the input of a slot, the sums of each slot and part, the totals, the
    numbers of the experts, and zeros.
    """
    weights, total = constants(sig)
    unit = LANE_PIECES * _codes(sig) + 2 * UNIT_GAP_WORDS
    rows = _slots(sig) * _outputs(sig, machine)
    sums = rows * parts * weights + (rows if total else 0)
    return 4 * (_units(sig) * unit + sums + MAX_SLOTS + NO_INPUT_WORDS)


class Along(Body):
    """Multiplies an input row by chosen experts' weights on matrix units. Warps move along rows."""

    kind = "expert_linear"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _along(sig, machine) > 0

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (*OnUnits().headers(machine), inline.header("experts_along.h"))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _along_bytes(sig, machine, _along(sig, machine))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        weight, slots = sig.operands[1], len(sig.operands[0].shape) == 3
        dtype = by_name(weight.dtype)
        assert isinstance(dtype, RowType)
        weights, total = constants(sig)
        sizes = (weight.ctype, dtype.values.storage, weight.shape[1], slots, share_of(sig)[1])
        cut = (weights, total, _along(sig, machine), _outputs(sig, machine), UNITS_TOGETHER)
        x, experts = (text.given(sig, i) for i in (0, 2))
        given = (bytes_of(sig, 1), bytes_of(sig, weight_operands(sig)[-1]))
        call = text.called("ark_expert_along", (*sizes, *cut), (x, *given, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")


class Ahead(Body):
    """Multiplies an input row by an expert's weights, which a warp loads one step ahead."""

    kind = "expert_linear"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        plain = not isinstance(by_name(sig.operands[1].dtype), RowType)
        alone = plain and not constants(sig)[1]
        return alone and _fits(sig, machine) and self.scratch(sig, machine) <= machine.task_bytes

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (HEADER, *HEADERS, inline.header("experts_ahead.h"))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for an input row."""
        return 4 * _each(sig) * WARP_LANES * _codes(sig)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        weight, slots = sig.operands[1], len(sig.operands[0].shape) == 3
        weights = constants(sig)[0]
        outputs = 1 if weights > 1 else 2
        parts = -(-_each(sig) // (MAX_HELD_PIECES // (weights * outputs)))
        row = (weight.ctype, weight.shape[2], weight.shape[1])
        sizes = (*row, slots, share_of(sig)[1], weights, outputs, parts)
        x, experts = (text.given(sig, i) for i in (0, 2))
        given = (bytes_of(sig, 1), bytes_of(sig, weight_operands(sig)[-1]))
        call = text.called("ark_expert_ahead", sizes, (x, *given, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")
