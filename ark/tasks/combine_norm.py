"""The task kind `combine_norm`, which adds rows over ranks and normalises them in one task: an
all-reduce of a layer's result, the residual, and the rmsnorm before the next layer. Emitted by
ark.lower.ops.communication.direct and ark.lower.ops.parts.

params: element, order (as in `combine`), columns (of a row), eps.

operands: shares..., weight, sum, normed. All but the weight have one dimension and hold the same
rows. Shares and sum are as in `combine`, and a row is a multiple of 16 bytes. The sum is rounded to
its type before it is normalised (y = x / sqrt(mean(x^2) + eps) * weight), as in the task of
rmsnorm.

coord: the first element of the task's rows and the element after their last. combine_norm.h has the
device code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register, whole
from ark.plan.params import Epsilon, Params, Places, Size, is_dense, need, typed
from ark.tasks import text
from ark.tasks.combine import (
    ACCESS_BYTES,
    ELEMENTS,
    PACKETS_PER_ACCESS,
    RECEIVE,
    Place,
    ordered,
    turned,
    words,
)

MAX_REGISTER_ELEMENTS = 32  # elements of a row that a thread keeps in registers
MOST_ROWS, MOST_CHUNKS = 4, 24
NORMED = ("fp32", "fp16", "bf16")
WARP_SUM_BYTES = 128  # bytes of shared memory for a warp's sums


class CombineNormParams(Params, frozen=True):
    element: Literal[NORMED]  # type: ignore[valid-type]
    columns: Size
    eps: Epsilon
    order: tuple[Place, ...] = ()


class CombineNorm(TaskKind):
    name = "combine_norm"
    params = CombineNormParams
    packet_types = (RECEIVE,)
    headers = text.headers("combine.h", "folds.h", "row_norm.h", "combine_norm.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(CombineNormParams)
        need(len(sig.operands) >= 4, f"got {len(sig.operands)} operands, expected 4 or more")
        order, columns = params.order, params.columns
        *shares, weight, total, normed = sig.operands
        need(
            sorted(order) == list(range(len(order))) and len(order) <= len(shares),
            f"order {list(order)} is not a permutation of the first {len(order)} shares",
        )
        for index in range(len(shares), len(sig.operands)):
            typed(sig, index)
            need(
                not sig.operands[index].packet,
                f"operand {index} holds packets, expected plain memory",
            )
        need(
            weight.shape == (columns,) and is_dense(weight),
            f"the weight has shape {list(weight.shape)}, expected [{columns}], dense",
        )
        need(
            columns * self._size(sig) % ACCESS_BYTES == 0 and total.shape[0] % columns == 0,
            f"the sum has {total.shape[0]} elements; expected whole rows of {columns} elements, "
            f"and rows of a multiple of {ACCESS_BYTES} bytes",
        )
        need(
            (total.dtype, len(total.shape), is_dense(total)) == (params.element, 1, True),
            f"the sum is {total.dtype}{list(total.shape)}, expected one dense dimension of "
            f"{params.element}",
        )
        need(
            normed.shape == total.shape and is_dense(normed),
            f"the normed rows have shape {list(normed.shape)}, expected {list(total.shape)}, dense",
        )
        for index, share in enumerate(shares):
            dtype, shape = total.dtype, total.shape
            if share.packet:
                dtype, shape = RECEIVE, (words(total.shape[0] * self._size(sig)),)
            need(
                (share.dtype, share.shape) == (dtype, shape) and is_dense(share),
                f"share {index} is {share.dtype}{list(share.shape)}, expected {dtype}{list(shape)}",
            )

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        given = CombineNormParams.from_plan(params)
        return replace(given, order=turned(given.order, by)).to_plan()

    def _size(self, sig: Signature) -> int:
        return by_name(sig.read(CombineNormParams).element).itemsize

    def places(self, sig: Signature) -> Places:
        columns = sig.read(CombineNormParams).columns
        return Places((range(0, sig.operands[-1].shape[0], columns),), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        shares = range(len(sig.operands) - 3)
        return frozenset(i for i in shares if sig.operands[i].dtype == RECEIVE)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands) - 3))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        begin, end = coord
        size, shares = self._size(sig), len(sig.operands) - 3
        accesses = [whole(shares, sig.operands[shares])]
        for index, operand in enumerate(sig.operands):
            if index == shares:
                continue
            lo, hi = begin, end
            if operand.packet:
                lo, hi = (
                    begin * size // ACCESS_BYTES * PACKETS_PER_ACCESS,
                    end * size // ACCESS_BYTES * PACKETS_PER_ACCESS,
                )
            accesses.append(Access(index, (lo,), (hi,), write=index > shares))
        return accesses

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return WARP_SUM_BYTES * machine.warps

    def _held(self, sig: Signature, machine: Machine) -> int:
        """The number of 16-byte pieces of a row that a thread keeps in registers; 0 if they are too
        many for that.
        """
        chunks = sig.read(CombineNormParams).columns * self._size(sig) // ACCESS_BYTES
        each = -(-chunks // (machine.lanes * machine.warps))
        return each if each * ACCESS_BYTES // self._size(sig) <= MAX_REGISTER_ELEMENTS else 0

    def _rows(self, sig: Signature, machine: Machine) -> int:
        """The number of rows whose loads are in flight at the same time. 0 unless all shares are in
        plain, cacheable memory of this rank.
        """
        shares, held = sig.operands[:-3], self._held(sig, machine)
        apart = any(o.packet or o.system for o in shares)
        if not machine.cooperative or not held or apart:
            return 0
        there = sig.operands[-1].shape[0] // sig.read(CombineNormParams).columns
        return min(MOST_ROWS, MOST_CHUNKS // (held * len(shares)), there)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(CombineNormParams)
        count = len(sig.operands) - 3
        order = ordered(params.order)
        storage = ELEMENTS[params.element].storage

        def share(index: int) -> str:
            operand: OperandType = sig.operands[index]
            kind = f"const {'ark_u64' if operand.packet else storage}"
            scope = "true" if operand.system else "false"
            return f"ArkShare<{kind}, {scope}>{{ARK_POINTER({kind}, {text.address(sig, index)})}}"

        plain = [i for i, o in enumerate(sig.operands) if not o.packet]
        aligned = f"ark_aligned({text.addresses(sig, plain)})"
        held, rows = self._held(sig, machine), self._rows(sig, machine)
        columns = params.columns
        results = (
            text.pointer(sig, count + 1, const=False),
            text.pointer(sig, count + 2, const=False),
        )
        rest = (
            *results,
            text.pointer(sig, count),
            text.literal(params.eps),
            *(share(i) for i in (*order, *range(len(order), count))),
        )
        usual = text.called("ark_combine_norm", (storage, columns, held), (aligned, *rest))
        body = f"  {usual};\n"
        if rows:
            call = text.called("ark_combine_norm_plain", (storage, columns, held, rows), rest)
            body = f"  if ({aligned}) {{\n    {call};\n    return;\n  }}\n{body}"
        return f"ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


register(CombineNorm())
