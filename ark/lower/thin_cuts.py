"""Chooses the tiles of a matrix product whose result has few rows or few columns. The time of such
a product is the time for reading the larger operand.

Each tile has all rows of a result with few rows (or all columns of a result with few columns). Its
size in the other dimension is chosen by predicted time: with fewer tiles there are fewer tasks to
wait for, with more tiles more processors read at the same time. Ops that run at the same time share
the processors, so an op that runs alone gets smaller tiles than one of twenty ops that run side by
side. Called by the lowering of matmul.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from msgspec import structs

from ark.ir.fold import fold
from ark.ir.values import Tensor
from ark.lower.cuts import Cut, signature
from ark.machine import Machine
from ark.plan.cost import MIN_FEW_ROWS, few_rate
from ark.plan.kind import Signature
from ark.tasks.matmul_form import dims
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_thin import VECTOR_COLUMNS, Thin, passes, thin

MAX_K_PARTS = 16  # most parts of k
MAX_BATCH_TASKS_PER_PROCESSOR = 4  # most tasks per processor for a batch of matrices


def is_thin(params: MatmulParams, tensors: Sequence[Tensor], machine: Machine) -> bool:
    """True for a product with so few rows or columns that `thin_cut` chooses its tiles. Arguments:
    see `thin_cut`.
    """
    return thin(signature(params, tensors), machine) is not None


def thin_cut(
    params: MatmulParams, tensors: Sequence[Tensor], machine: Machine, beside: int
) -> Cut | None:
    """The tile size and parts of k of a product with few rows or columns; None for any other
    product.

    tensors: both operands, the addends of the product, and the result. beside: the number of ops
    that run at the same time, including this one. k is cut into parts if there are fewer tiles than
    processors.
    """
    right, sig = tensors[1], signature(params, tensors)
    form = thin(sig, machine)
    if form is None:
        return None
    tile = min(_tiles(sig, form, machine, beside), key=lambda t: _us(sig, form, t, machine, beside))
    m, n, k = dims(sig)
    tasks = -(-m // tile[0]) * -(-n // tile[1])
    parts = 1
    if max(len(t.shape) for t in tensors) == 2:
        wide = tile[1 - form.few] * k * right.dtype.itemsize
        share = machine.processors // beside
        parts = max(1, min(share // tasks, wide // machine.costs.part_bytes, MAX_K_PARTS))
    return Cut(*tile, parts)


def _tiles(sig: Signature, form: Thin, machine: Machine, beside: int) -> list[tuple[int, int]]:
    """The candidate tiles, the smallest first. If k is contiguous in both operands, the long
    dimension of the result is divided into equal parts. The numbers of parts to try are the number
    of processors, half of it, a quarter and so on, and the number of processors that each of the
    concurrent ops gets if they are divided equally.
    """
    batch = _batch(sig)
    few, many = (dims(sig)[i] for i in (form.few, 1 - form.few))
    if form.along:
        most = machine.processors * (MAX_BATCH_TASKS_PER_PROCESSOR if batch > 1 else 1)
        counts = [-(-(most >> i) // batch) for i in range(most.bit_length())]
        counts.append(max(1, machine.processors // beside // batch))
        sizes = sorted({-(-many // min(count, many)) for count in counts})
    else:
        sizes = [VECTOR_COLUMNS]
    return [(few, size) if form.few == 0 else (size, few) for size in sizes]


def _us(sig: Signature, form: Thin, tile: tuple[int, int], machine: Machine, beside: int) -> float:
    """The predicted microseconds from the begin of the product until an op that waits for all of
    its tasks can begin.
    """
    costs, many = machine.costs, 1 - form.few
    m, n, k = dims(sig)
    sizes, read = (m, n), k * sig.operands[many].itemsize
    tasks = _batch(sig) * -(-sizes[many] // tile[many])
    active = min(machine.processors, tasks * beside)
    rate = min(costs.processor_rate, costs.cache_rate / active)
    if _batch(sig) * sizes[many] * read * beside > costs.cache_bytes:
        rate = machine.bandwidth_gbps * 1e3 / machine.processors
    exact = sig.operands[many].dtype == "fp32"
    fewer = sizes[form.few] >= MIN_FEW_ROWS
    operations = few_rate(machine, exact) if fewer else costs.scalar_rate
    work = max(tile[many] * read / rate, 2.0 * tile[0] * tile[1] * k / operations)
    params = structs.replace(sig.read(MatmulParams), tile=tile)
    tiled = dataclasses.replace(sig, params=params.to_plan())
    waits = costs.task_us + costs.pass_us * (passes(tiled, form, machine) - 1)
    rounds = -(-tasks * beside // machine.processors)
    signals = min(tasks, machine.processors)
    return rounds * (waits + work) + costs.signal_us + costs.each_signal_us * signals


def _batch(sig: Signature) -> int:
    return math.prod(fold(sig.operands[2].shape)[:2])
