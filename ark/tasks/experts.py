"""Two task kinds for a mixture of experts. `topk` finds the k largest elements of a row, and
`expert_linear` multiplies rows by the weights of the chosen experts. Emitted by
ark.lower.ops.experts.

`topk` params: k, rows (of a task), least (the smallest are chosen), softmax (of the values),
row_softmax (the elements are those of the softmax of the row).

operands: input (rows, n), values (rows, k), indices (rows, k).

coord: first row.

`expert_linear` params: `first` and `of` (the weight contains consecutive experts of a total of
`of`, from number `first` on; `of` is 0 if it contains all). The products with the other experts are
zero. weights, tables, scores, expr, total, residual: the epilogue (ark.tasks.expert_epilogue).

operands: input (rows, k) or (rows, slots, k), weight (experts, n, k) dense, experts (rows, slots),
output (rows, slots, n), or with `total` (rows, n), then those of the epilogue.

coord: row, slot (0 with `total`: a task has all slots), first and last+1 output. The expert whose
weights a task reads is known only at run time, so weights are not streamed, and a task counts as
reading all of them. The weight may be of a RowType, which has a body of its own (expert_rows.h).
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.errors import PlanError
from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
    Rows,
    Size,
    count,
    fits,
    is_dense,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.expert_epilogue import (
    FIRST_EXTRA,
    ExpertLinearParams,
    check_epilogue,
    constants,
    declared,
    epilogue_accesses,
    residual_operand,
    weight_operands,
)
from ark.tasks.row_norm import no_packets, vector_elements
from ark.tasks.row_values import HEADER as ROWS_HEADER
from ark.tasks.row_values import bytes_of

MIN_BLOCK_ROW_ELEMENTS = 4096  # with few rows of at least this length, a block processes each row
MIN_SORTED_RESULTS = 5  # rows are sorted for at least this k; else the maximum is searched k times
MAX_PACKET_ROW, MAX_PACKET_RESULTS = 512, 32  # elements and k of a row that is read as packets
MAX_HELD_ELEMENTS = 8  # elements of a short row that a lane holds
MAX_SINGLE_THREAD_RESULTS = 64  # results that a single thread keeps at once
# Results of a task that are added up at once: ARK_EXPERT_TOTALS of experts.h.
MAX_TOTAL_RESULTS = 256
KEY_BYTES = 8  # bytes of an element's sort key
HEADERS = (text.header("sampling.h"), text.header("experts.h"))


class TopKParams(Params, frozen=True, kw_only=True):
    k: Size
    least: bool = False
    softmax: bool = False
    row_softmax: bool = False
    rows: Rows


def takes_softmax(n: int, k: int, machine: Machine) -> bool:
    """True if a task that chooses k of n elements can compute their softmax: a thread or a warp
    holds all of them.
    """
    if machine.threads == 1:
        return k <= MAX_SINGLE_THREAD_RESULTS
    return k <= machine.lanes and n <= MIN_BLOCK_ROW_ELEMENTS


def takes_row_softmax(n: int, k: int, machine: Machine) -> bool:
    """True if a task that chooses k of n elements can compute the softmax of all of them."""
    return takes_softmax(n, k, machine) and (
        machine.threads == 1 or n <= machine.lanes * MAX_HELD_ELEMENTS
    )


class TopK(TaskKind):
    name = "topk"
    params = TopKParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        rows, n = matrix(sig, 0)
        params = sig.read(TopKParams)
        k = params.k
        need(k <= n <= INT_MAX - 1024, f"cannot choose {k} of {n} elements")
        need(
            not ((params.softmax or params.row_softmax) and params.least),
            "softmax supports the largest elements only",
        )
        shaped(sig, 1, (rows, k))
        shaped(sig, 2, (rows, k), "int32")
        fits((params.rows,), (rows,))

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[0].shape[0], sig.read(TopKParams).rows),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, params = coord[0], sig.read(TopKParams)
        rows, n = sig.operands[0].shape
        end = min(row + params.rows, rows)
        return [
            Access(0, (row, 0), (end, n)),
            Access(1, (row, 0), (end, params.k), write=True),
            Access(2, (row, 0), (end, params.k), write=True),
        ]

    def packets(self, sig: Signature) -> frozenset[int]:
        # This method may be called before the signature is checked, so it may have no operands.
        shape = sig.operands[0].shape if sig.operands else ()
        params = sig.read(TopKParams)
        few = len(shape) == 2 and shape[0] == 1 and shape[1] <= MAX_PACKET_ROW
        return frozenset({0} if few and params.k <= MAX_PACKET_RESULTS and not params.least else ())

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return max(8 * machine.warps, KEY_BYTES * self._sorted(sig, machine)[0])

    def _each(self, sig: Signature, machine: Machine) -> bool:
        """True if each warp of a block finds the top k of other rows; False if all warps process
        the same row.
        """
        params = sig.read(TopKParams)
        few = params.rows >= machine.warps or sig.operands[0].shape[1] <= MIN_BLOCK_ROW_ELEMENTS
        return params.k <= machine.lanes and few

    def _sorted(self, sig: Signature, machine: Machine) -> tuple[int, int]:
        """For a block that sorts a row: the row length padded to a power of two, and the length (a
        power of two) of the runs that are sorted before they are merged. (0, 0) if the block does
        not sort.
        """
        n, k = sig.operands[0].shape[1], sig.read(TopKParams).k
        if not machine.cooperative or k < MIN_SORTED_RESULTS or self._each(sig, machine):
            return 0, 0
        all_of, run = (1 << (m - 1).bit_length() for m in (n, max(k, machine.lanes)))
        room = machine.task_bytes // 2
        return (max(all_of, run), run) if KEY_BYTES * max(all_of, run) <= room else (0, 0)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        no_packets(name, sig, machine)
        limit, n = sig.operands[0].shape
        params = sig.read(TopKParams)
        if params.softmax and not takes_softmax(n, params.k, machine):
            raise PlanError(
                f"{name} computes the softmax of the largest {params.k} of {n} elements, which the "
                f"code for {machine.arch} does not support; plan again for this machine"
            )
        if params.row_softmax and not takes_row_softmax(n, params.k, machine):
            raise PlanError(
                f"{name} computes the softmax of rows of {n} elements, which the code for "
                f"{machine.arch} does not support; plan again for this machine"
            )
        vector = vector_elements(sig.operands[:1], n) if sig.operands[0].strides[-1] == 1 else 1
        each = self._each(sig, machine)
        sizes = params.rows, limit, n, params.k, vector
        # Each warp has one row. With more rows, the rows' loads are overlapped instead.
        short = each and n <= machine.lanes * MAX_HELD_ELEMENTS and not params.least
        short = short and (params.rows <= machine.warps or params.row_softmax)
        softmax = 2 if params.row_softmax else int(params.softmax)
        constants = (*sizes, each, short, *self._sorted(sig, machine), params.least, softmax)
        operands = [text.given(sig, i, const=i == 0) for i in range(3)]
        return text.call(name, "ark_topk", constants, (*operands, text.addresses(sig, (0,))))


class ExpertLinear(TaskKind):
    name = "expert_linear"
    params = ExpertLinearParams

    packet_types = ("fp32",)
    headers = (*HEADERS, ROWS_HEADER, text.header("expert_rows.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        need(
            len(sig.operands) >= FIRST_EXTRA,
            f"got {len(sig.operands)} operands, expected at least {FIRST_EXTRA}",
        )
        rows, slots = matrix(sig, 2, "int32")
        for index in (
            1,
            *range(FIRST_EXTRA, FIRST_EXTRA + sig.read(ExpertLinearParams).weights - 1),
        ):
            need(index < len(sig.operands), "a weight is missing")
            weight = sig.operands[index] if _quantised(sig) else typed(sig, index)
            need(
                len(weight.shape) == 3 and is_dense(weight),
                f"the weights have shape {list(weight.shape)}, expected (experts, n, k), dense",
            )
        weight = sig.operands[1]
        held, _, k = weight.shape
        need(
            weight.per_item in (1, k),
            f"rows of {weight.dtype} have {weight.per_item} elements, expected {k}",
        )
        first, of = share_of(sig)
        need(first + held <= of, f"experts {first} to {first + held} exceed the total of {of}")
        shaped(sig, 0, (rows, k) if len(sig.operands[0].shape) == 2 else (rows, slots, k))
        check_epilogue(sig, rows, slots)

    def places(self, sig: Signature) -> Places:
        rows, slots = sig.operands[2].shape
        slots = 1 if sig.read(ExpertLinearParams).total else slots
        return Places((range(rows), range(slots), range(sig.operands[1].shape[1])), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        # This method may be called before the number of operands is checked.
        residual, each = residual_operand(sig), any(len(o.shape) == 3 for o in sig.operands[:1])
        return frozenset(
            {3} | ({0} if each else set()) | (set() if residual is None else {residual})
        )

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, slot, n0, n1 = coord[:4]
        slots = range(slot, slot + 1)
        if sig.read(ExpertLinearParams).total:
            slots = range(sig.operands[2].shape[1])
        shape, k = sig.operands[0].shape, sig.operands[1].shape[2]
        each = len(shape) == 3
        place, ends = (row, slots[0]) if each else (row,), (row + 1, slots[-1] + 1)
        return [
            Access(0, (*place, 0), (*ends[: len(place)], k)),
            Access(2, (row, slots[0]), (row + 1, slots[-1] + 1)),
            *epilogue_accesses(sig, row, slots, n0, n1),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        totals = MAX_TOTAL_RESULTS if sig.read(ExpertLinearParams).total else 0
        return 4 * (sig.operands[1].shape[2] + totals)

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        weights, slots = constants(sig)
        many = float((coord[3] - coord[2]) * sig.operands[1].shape[2]) * weights * max(1, slots)
        weight = sig.operands[1]
        return 2.0 * many, many / weight.per_item * weight.itemsize

    def wide(self, sig: Signature) -> frozenset[int]:
        return frozenset(weight_operands(sig) if _quantised(sig) else ())

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        if _quantised(sig):
            return self._rows_source(name, sig)
        slots = len(sig.operands[0].shape) == 3
        sizes = (*sig.operands[1].shape, slots, *share_of(sig), *constants(sig))
        x, first, experts = (text.given(sig, i) for i in range(3))
        second = text.given(sig, weight_operands(sig)[-1])
        call = text.called("ark_expert_linear", sizes, (x, first, second, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")

    def _rows_source(self, name: str, sig: Signature) -> str:
        weight, slots = sig.operands[1], len(sig.operands[0].shape) == 3
        sizes = (weight.ctype, *weight.shape[:2], slots, *share_of(sig), *constants(sig))
        x, experts = (text.given(sig, i) for i in (0, 2))
        weights = (bytes_of(sig, 1), bytes_of(sig, weight_operands(sig)[-1]))
        call = text.called("ark_expert_rows", sizes, (x, *weights, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")


def _quantised(sig: Signature) -> bool:
    """True if the weight is quantised (a RowType)."""
    return isinstance(by_name(sig.operands[1].dtype), RowType)


def share_of(sig: Signature) -> tuple[int, int]:
    """The number of the first expert in this rank's weight, and the total number of experts."""
    params = sig.read(ExpertLinearParams)
    return params.first, params.of or sig.operands[1].shape[0]


def task_parts(shares: int, outputs: int, machine: Machine) -> int:
    """The number of tasks among which the outputs of each share are divided. Either each processor
    has a task, or a few have none, if the tasks would otherwise need one more turn. shares: the
    number of (row, slot) pairs, or of rows if a task has all slots. outputs: those of a share.
    """
    most, fewest = -(-machine.processors // shares), max(1, machine.processors // shares)

    def longest(parts: int) -> int:
        return -(-shares * parts // machine.processors) * -(-outputs // parts)

    return min((most, fewest), key=longest)


def outputs_of_task(sig: Signature, machine: Machine) -> int:
    """The most outputs of a task of `expert_linear`, as ark.lower.ops.experts divides them."""
    rows, slots = sig.operands[2].shape
    shares = rows * (1 if sig.read(ExpertLinearParams).total else slots)
    outputs = sig.operands[1].shape[1]
    return -(-outputs // task_parts(shares, outputs, machine))


register(TopK())
register(ExpertLinear())
