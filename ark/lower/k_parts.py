"""Chooses the tiles of a matrix product, and the number of parts of the summed dimension k, on
machines with the capability `k_parts`. Matrix units of such machines are used in every kernel
variant. The candidates are large tiles, narrower tiles if there are few tiles, and several parts of
k (split-k) if processors would still be idle. The candidate with the shortest predicted time is
chosen; ark.machine.costs.UnitCosts has the rates (docs/matmul.md, "The cut").

Called by the lowering of matmul and by `ark tune`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ark.errors import PlanError
from ark.lower.cuts import Cut, fastest, key
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import UnitCosts
from ark.machine.tiles import UnitTiles
from ark.tasks.matmul_form import K_PART_ALIGNMENT_BYTES, MIN_UNIT_TILE_ROWS, UNIT_PARTS, filled


def serves(dtypes: Sequence[str], shape: Sequence[int], machine: Machine) -> bool:
    """True if this module chooses the cut of a product: the machine has the capability `k_parts`,
    and its matrix units support the product. dtypes: the types of both operands. shape: batch,
    batch, rows and columns of the result.
    """
    return (
        machine.has(Capability.K_PARTS)
        and tuple(dtypes) in UNIT_PARTS
        and shape[2] >= MIN_UNIT_TILE_ROWS
    )


def candidates(
    shape: Sequence[int], depth: int, dtypes: Sequence[str], machine: Machine, parts: bool
) -> list[Cut]:
    """The cuts for which kernels exist, for a product of this shape (batch, batch, rows, columns).

    depth: elements of k. dtypes: of both operands. parts: True if k may be divided.
    """
    batch, m, n = shape[0] * shape[1], shape[2], shape[3]
    given = _tiles(machine)

    def tiles(high: int, wide: int) -> int:
        return batch * -(-m // high) * -(-n // wide)

    cuts: dict[Cut, None] = {}
    if UNIT_PARTS[dtypes[0], dtypes[1]] == 1:
        sizes = ((min(h, m), min(w, n), h, w) for h, w, _ in machine.large_tiles)
        able = (s for s in sizes if filled(s[0], s[2]) and filled(s[1], s[3]))
        cuts = dict.fromkeys(Cut(*s[:2]) for s in able)
    high, wide = min(machine.tile[0], m), min(machine.tile[1], n)
    cuts[Cut(high, wide)] = None
    while wide > given.least_columns and tiles(high, wide) < machine.processors:
        wide = -(-wide // (2 * given.block)) * given.block
        cuts[Cut(high, wide)] = None
    lines = -(-depth * itemsize(dtypes) // K_PART_ALIGNMENT_BYTES)
    for cut in list(cuts):
        if parts and batch == 1 and tiles(cut.rows, cut.columns) < machine.processors:
            counts = (p for p in given.parts if (p - 1) * -(-lines // p) < lines)
            cuts.update(dict.fromkeys(Cut(cut.rows, cut.columns, p) for p in counts))
    return list(cuts)


def itemsize(dtypes: Sequence[str]) -> int:
    """Bytes of an element of the left operand."""
    return 4 if dtypes[0] == "fp32" else 2


def predicted_us(
    cut: Cut, shape: Sequence[int], depth: int, dtypes: Sequence[str], machine: Machine
) -> float:
    """The approximate microseconds of a product with this cut, for comparing cuts."""
    batch, m, n = shape[0] * shape[1], shape[2], shape[3]
    products, size, costs = UNIT_PARTS[dtypes[0], dtypes[1]], itemsize(dtypes), _costs(machine)
    high, wide, share, least = _loop(cut, products, machine)
    rate = machine.tflops * 1e6 / machine.processors * share  # operations per microsecond
    line = max(least, 2.0 * high * wide * (K_PART_ALIGNMENT_BYTES // size) * products / rate)
    lines = math.ceil(math.ceil(depth * size / K_PART_ALIGNMENT_BYTES) / cut.parts)
    tiles = batch * -(-m // cut.rows) * -(-n // cut.columns) * cut.parts
    fold = 0.0
    if cut.parts > 1:
        fold = _fold_us(8.0 * cut.parts * m * n, costs, machine)
    memory_us = (
        depth * batch * (size * m + 2 * n) / (machine.bandwidth_gbps * 1e3 * costs.read_share)
    )
    rounds = -(-tiles // machine.processors)
    return max(rounds * lines * line, memory_us) + rounds * costs.begin_us + fold


def stays_whole(shape: Sequence[int], depth: int, dtypes: Sequence[str], machine: Machine) -> bool:
    """True if a product whose sums over k are not divided is predicted to be as fast as one with
    several parts of k. Then the product itself can apply an epilogue to pairs of columns; with
    several parts, this takes a further pass over the sums. Arguments: see `candidates`.
    """

    def time(cut: Cut) -> float:
        return predicted_us(cut, shape, depth, dtypes, machine)

    able = candidates(shape, depth, dtypes, machine, True)
    behind = _fold_us(8.0 * math.prod(shape), _costs(machine), machine)
    whole = min(time(cut) for cut in able if cut.parts == 1)
    return whole <= min(time(cut) for cut in able) + behind


def _costs(machine: Machine) -> UnitCosts:
    """The machine's costs of matrix units. Raises PlanError if it has none, although it has the
    capability `k_parts`.
    """
    if machine.costs.units is None:
        raise PlanError(f"machine {machine.name!r} has k_parts, but no costs of matrix units")
    return machine.costs.units


def _tiles(machine: Machine) -> UnitTiles:
    """The machine's tiles of matrix units. Raises PlanError if it has none, although it has the
    capability `k_parts`.
    """
    if machine.unit_tiles is None:
        raise PlanError(f"machine {machine.name!r} has k_parts, but no tiles of matrix units")
    return machine.unit_tiles


def _fold_us(moved: float, costs: UnitCosts, machine: Machine) -> float:
    """The microseconds for storing the partial sums of all parts of k, loading them and adding
    them. moved: the bytes that are stored and loaded in total.
    """
    return costs.fold_us + moved / (machine.bandwidth_gbps * 1e3 * costs.fold_share)


def _loop(cut: Cut, products: int, machine: Machine) -> tuple[int, int, float, float]:
    """Properties of the inner loop for this cut: the rows and columns that it multiplies (at least
    those of the tile), its fraction of the peak rate, and the shortest time of one step along k, in
    microseconds.
    """
    costs = _costs(machine)
    for high, wide, share in machine.large_tiles if products == 1 else ():
        if filled(cut.rows, high) and filled(cut.columns, wide):
            return high, wide, share, costs.line_us
    block = _tiles(machine).block
    blocks = -(-cut.rows // block) * block, -(-cut.columns // block) * block
    return *blocks, costs.small_share, costs.small_line_us


def choose(
    shape: Sequence[int],
    depth: int,
    dtypes: Sequence[str],
    machine: Machine,
    parts: bool,
    measured: Mapping[str, Sequence[int]],
) -> Cut:
    """The cut of a product: the measured one if there is one, otherwise the one with the shortest
    predicted time. measured: the fastest measured cuts, by `ark.lower.cuts.key`.
    """
    able = candidates(shape, depth, dtypes, machine, parts)
    known = measured.get(key(shape, depth, itemsize(dtypes)))
    if known is not None and Cut(*known) in able:
        return Cut(*known)

    def predicted(cut: Cut) -> float:
        return predicted_us(cut, shape, depth, dtypes, machine)

    return fastest(able, predicted, shape, depth)
