"""The task kind `linear` for layers of few input rows: y = epilogue(prologue(x) w^T) with w of
shape (n, k). Emitted by ark.lower.ops.linear_algebra.

The weights are prefetched through a ring in shared memory, in stages of whole rows; each stage is
processed by one warp. Each task copies the input into shared memory once, from plain memory or
packets, and may normalise it (rmsnorm). Rows of w that belong together (the two elements of a
rotary pair, a gate row and its up row) are neighbours, so that the epilogue has both sums at once.

A row wider than a stage is split along k (split-k), if a backend's device function adds the sums of
the parts. For matrix units several rows are split together.

params: rows (of w per stage), split_k (the number of stages that hold the parts of these rows),
prologue (none, rmsnorm), eps, bias, epilogue (ark.ir.epilogues); for rope_kv heads, kv_heads,
head_dim; for sample: tiles (the number of tasks), share, shares. The logits are divided among
`shares` ranks, and the layer computes part number `share` of them.

operands: x (m, k), w (n, k), output, [norm weight], [bias (n,)], then for add: residual; for
sample: settings, position, candidates (tasks, 2), as in ark.tasks.tokens, then for each peer a
further output and further candidates; for rope_kv: position, frequencies, key and value cache
(kv_heads, context, head_dim), [the page table, if the caches are in pages (ark.tasks.rotary)],
[fresh (m, 2 * kv_heads * head_dim): a copy of the new keys and values, for readers in the same
iteration].

coord: the task's first row of w and the row after its last.

Between ranks (ark.lower.rewrite.inline_all_reduce) x and the residual may be given as shares of the
ranks, which this task adds up when it reads them. Such an operand has m rows per share, one share
after the other. With the epilogues `store` and `add`, a further output for each peer may follow all
other operands. params for shares: ranks, and first (the index of rank 0's share in the operand).
Shares are added in the order of ranks: rank 0's share first, then the following ones, cyclically.
Only rank 0 (where first is 0) adds the residual to its sums; the other ranks only wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ark.errors import PlanError
from ark.ir.dtype import by_name
from ark.ir.epilogues import EPILOGUES
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    Places,
    count,
    is_dense,
    matrix,
    need,
    shaped,
)
from ark.plan.types import MAX_PIECES, Fetch
from ark.tasks import text
from ark.tasks.linear_form import (
    LinearParams,
    bias_operand,
    candidates,
    first_extra,
    multiplied,
    narrow_bytes,
    narrows,
    outputs,
    reads_from_memory,
    row_nbytes,
    runs_on_units,
)
from ark.tasks.rotary import (
    fresh_operand,
    has_fresh,
    page_texts,
    rope,
    rotary_accesses,
    rotary_check,
)
from ark.tasks.tokens import SETTINGS, sample_check, sample_tile

_EPILOGUE_HEADERS = {  # headers that only some epilogues need
    "rope_kv": ("rotary.h", "linear_rope.h"),
    "sample": ("sampling.h", "linear_sample.h"),
}
MAX_SUMS = 4096  # most rows of x times rows of a stage, which are the sums of a lane


class Linear(TaskKind):
    name = "linear"
    streams = True
    params = LinearParams
    packet_types = ("fp32", "fp16", "bf16")
    common_headers = text.headers("linear.h")
    headers = text.headers("linear_epilogue.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p, first = sig.read(LinearParams), first_extra(sig)
        form = EPILOGUES[p.epilogue]
        extra = form.extra
        need(
            len(sig.operands) >= first + extra[0],
            f"got {len(sig.operands)} operands, expected at least {first + extra[0]}",
        )
        (rows, k), (n, inner), m = matrix(sig, 0), self.weight(sig), matrix(sig, 2)[0]
        need(rows % m == 0, f"{rows} input rows are not divisible by {m} output rows")
        ranks, share = p.ranks, p.first
        need(share < ranks, f"the first share is that of rank {share}, but there are {ranks} ranks")
        need(
            ranks == 1 or rows // m in (1, ranks),
            f"the input has {rows} rows, expected {m} or {m * ranks}",
        )
        if p.epilogue == "sample":
            more = len(sig.operands) - first - extra[0]
            need(
                more % 2 == 0,
                f"{more} operands are memory of peers; expected logits and candidates for each",
            )
        elif not form.spread:
            count(sig, *(first + n for n in extra))
        for peer in outputs(sig)[1:]:
            shaped(sig, peer, (m, n))
        need(k == inner, f"input rows have {k} elements, weight rows {inner}")
        need(m * p.rows <= MAX_SUMS, f"{m} * {p.rows} sums of a stage are more than {MAX_SUMS}")
        need(k % p.split_k == 0, f"k={k} is not divisible by split_k={p.split_k}")
        need(
            p.split_k == 1 or p.rows <= MAX_PIECES,
            f"a stage has {p.rows} rows of weights, expected at most {MAX_PIECES}",
        )
        need(
            not form.paired or p.rows % 2 == n % 2 == 0,
            f"the rows of a stage and those of all weights must be even, got {p.rows} and {n}",
        )
        if p.prologue == "rmsnorm":
            need(p.eps is not None, "rmsnorm needs eps")
            shaped(sig, 3, (k,), dense=True)
        bias = bias_operand(sig)
        if bias is not None:
            shaped(sig, bias, (n,), dense=True)
        if p.epilogue == "rope_kv":
            rotary_check(sig, 2, first, (m, n))
        else:
            shaped(sig, 2, (m, n // 2 if form.gated else n))
        if p.epilogue == "add":
            added = matrix(sig, first)[0]
            need(added % m == 0, f"{added} rows of the residual are not a multiple of {m}")
            fits = ranks == 1 or added // m in (1, ranks)
            need(fits, f"the residual has {added} rows, expected {m} or {m * ranks}")
            shaped(sig, first, (added, n))
        if p.epilogue == "sample":
            for place in candidates(sig):
                sample_check(sig, first, place, m, -(-n // p.rows))
            need(
                p.share < p.shares,
                f"share {p.share} of the logits is out of range; there are {p.shares} shares",
            )

    def weight(self, sig: Signature) -> tuple[int, int]:
        """Returns (n, k) of the weights. Raises PlanError unless they are dense and of two
        dimensions.
        """
        need(is_dense(sig.operands[1]), "the weights are strided, expected dense")
        return matrix(sig, 1)

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[1].shape[0], sig.read(LinearParams).rows),), span=True)

    def in_place(self, sig: Signature) -> frozenset[int]:
        added = sig.read(LinearParams).epilogue == "add"
        return frozenset({first_extra(sig)} if added else ())

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        given = LinearParams.from_plan(params)
        first, share = (given.first - by) % given.ranks, (given.share + by) % given.shares
        return replace(given, first=first, share=share).to_plan()

    def own(self, sig: Signature) -> tuple[int, ...]:
        params = sig.read(LinearParams)
        token = params.share * sig.operands[1].shape[0]
        return params.first, token

    def wide(self, sig: Signature) -> frozenset[int]:
        params = sig.read(LinearParams)
        cut = params.rows > 1 and params.split_k > 1
        return frozenset({1} if cut else ()) | frozenset({0} if reads_from_memory(sig) else ())

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(LinearParams)
        n0, n1 = coord[:2]
        m, k = sig.operands[2].shape[0], sig.operands[0].shape[1]
        accesses = [
            *_shares(sig, 0, 0, k),
            Access(1, (n0, 0), (n1, k)),
        ]
        next_operand = 3
        if params.prologue == "rmsnorm":
            accesses.append(whole(3, sig.operands[3]))
            next_operand = 4
        if params.bias:
            accesses.append(Access(next_operand, (n0,), (n1,)))
            next_operand += 1
        epilogue = params.epilogue
        if EPILOGUES[epilogue].gated:
            accesses.append(Access(2, (0, n0 // 2), (m, n1 // 2), write=True))
        elif epilogue == "rope_kv":
            accesses += rotary_accesses(sig, 2, next_operand, n0, n1)
        else:
            accesses += [Access(i, (0, n0), (m, n1), write=True) for i in outputs(sig)]
            if epilogue == "add":
                accesses += _shares(sig, next_operand, n0, n1)
            if epilogue == "sample":
                accesses += [whole(i, sig.operands[i]) for i in (next_operand, next_operand + 1)]
                tile, tiles = sample_tile(sig, 1, n0), params.tiles
                own = range(tile, m * tiles, tiles)
                for place in candidates(sig):
                    accesses += [Access(place, (i, 0), (i + 1, 2), write=True) for i in own]
        return accesses

    def packets(self, sig: Signature) -> frozenset[int]:
        params = sig.read(LinearParams)
        need(len(sig.operands) > 2, "a linear layer needs an input, weights and an output")
        x, weight = sig.operands[:2]
        row = x.shape[0] == 1 and x.dtype == multiplied(weight) and params.prologue == "none"
        able = {0, *outputs(sig)} - (set() if row or x.dtype == "fp32" else {0})
        first = first_extra(sig)
        if params.epilogue == "add":
            able.add(first)
        if params.epilogue == "rope_kv" and has_fresh(sig, first):
            able.add(fresh_operand(sig, first))
        if params.epilogue == "sample":
            able.update(candidates(sig))
        return frozenset(able)

    def early(self, sig: Signature) -> frozenset[int]:
        params = sig.read(LinearParams)
        first, epilogue = first_extra(sig), params.epilogue
        operands = set(range(3, first))  # the norm's weight and the bias
        if epilogue != "add" or sig.operands[first].packet:
            operands.update(first + n for n in EPILOGUES[epilogue].early)
        return frozenset(operands)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        params = sig.read(LinearParams)
        m, k = sig.operands[2].shape[0], sig.operands[0].shape[1]
        best = 8 * machine.warps * m if params.epilogue == "sample" else 0
        if runs_on_units(sig, machine):
            return 4 * machine.warps
        if narrows(sig, machine):
            size = by_name(multiplied(sig.operands[1])).itemsize
            held = 0 if reads_from_memory(sig) else narrow_bytes(m, k, size)
            return 4 * machine.warps * m + held + best
        return 4 * machine.warps + (4 * m * k if params.split_k == 1 else 0) + best

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        params = sig.read(LinearParams)
        n0, n1 = coord[:2]
        row = row_nbytes(sig.operands[1])
        stage = params.rows * row // params.split_k
        cut = params.rows > 1 and params.split_k > 1
        form = (None, params.rows, params.split_k) if cut else ()
        return (Fetch(1, n0 * row, (n1 - n0) * row, stage, *form),)

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        m, k = sig.operands[2].shape[0], sig.operands[0].shape[1]
        rows = coord[1] - coord[0]
        return 2.0 * m * k * rows, float(rows * row_nbytes(sig.operands[1]))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(LinearParams)
        if params.split_k > 1:
            raise PlanError(
                f"{name} splits rows of {sig.operands[1].shape[1]} weights along k into "
                f"{params.split_k} parts, which the code for {machine.arch} does not support; "
                "expected a plan for a machine model whose row_slice is 0"
            )
        check_batch(name, sig, machine)
        m, k = sig.operands[2].shape[0], sig.operands[0].shape[1]
        weight, rows = sig.operands[1], params.rows
        constants = (weight.ctype, m, k, rows, weight.shape[0] % rows != 0)
        operands = (summed(sig, 0), prologue(sig), epilogue(sig))
        return text.call(name, "ark_linear", constants, operands)

    def texts(self, sig: Signature) -> tuple[str, ...]:
        kind = sig.read(LinearParams).epilogue
        own = ("gates.h",) if EPILOGUES[kind].gated else _EPILOGUE_HEADERS.get(kind, ())
        pages = page_texts(sig, first_extra(sig)) if kind == "rope_kv" else ()
        return (*map(text.header, own), *pages)


def check_batch(name: str, sig: Signature, machine: Machine) -> None:
    """Raises PlanError for a task that only some vendors' device functions support, if this vendor
    has none for it.
    """
    m = sig.operands[2].shape[0]
    if m > 1 and sig.read(LinearParams).epilogue == "sample":
        raise PlanError(
            f"{name} samples tokens of {m} sequences, but {machine.arch} has no device function "
            "that does so; plan again for this machine"
        )


def prologue(sig: Signature) -> str:
    """The C++ text of the layer's prologue, the operation that is applied to its input (see
    linear_epilogue.h).
    """
    params = sig.read(LinearParams)
    if params.prologue == "none":
        return "ArkPlain{}"
    return f"ark_rms_normed({text.given(sig, 3)}, {text.literal(params.eps or 0.0)})"


def epilogue(sig: Signature) -> str:
    """The C++ text of the layer's epilogue, the operation that is applied to its sums (see
    linear_epilogue.h).
    """
    bias = bias_operand(sig)
    end = _epilogue(sig)
    return end if bias is None else f"ark_biased_sums({end}, {text.given(sig, bias)})"


def _epilogue(sig: Signature) -> str:
    """The C++ text of the epilogue object, the operation on the layer's sums. The sums already
    include the biases.
    """
    params = sig.read(LinearParams)
    kind, first, out = params.epilogue, first_extra(sig), text.given(sig, 2, const=False)
    for peer in outputs(sig)[1:]:  # peers first: their stores take longer
        out = f"ark_both({text.given(sig, peer, const=False)}, {out})"
    if kind == "rope_kv":
        return f"ark_rope_sums({rope(sig, 2, first)})"
    if kind == "add":
        residual = summed(sig, first)
        if params.ranks > 1:
            residual = f"ark_awaited({residual}, ark_own<0>(t) == 0)"
        return f"ark_add_sums({out}, {residual})"
    if kind == "sample":
        rows, n = params.rows, sig.operands[1].shape[0]
        constants = f"{rows}, {params.tiles}, {-(-n // rows)}"
        given = (text.given(sig, first), text.given(sig, first + 1))
        own, *others = candidates(sig)
        best = text.given(sig, own, const=False)
        for peer in others:
            best = f"ark_both({text.given(sig, peer, const=False)}, {best})"
        operands = ", ".join((out, *given, best))
        m = sig.operands[2].shape[0]
        if m > 1:
            return f"ark_sample_rows<{m}, {len(SETTINGS)}, {constants}>({operands})"
        constants += f", {'true' if params.shares > 1 else 'false'}"
        return f"ark_sample_sums<{constants}>(t, {operands})"
    return f"ark_{kind}_sums({out})"


def _shares(sig: Signature, index: int, lo: int, hi: int) -> list[Access]:
    """The accesses to columns lo to hi of an operand that has one share (partial result) of each
    rank. There is one access per share, because each share is written by another rank.
    """
    m = sig.operands[2].shape[0]
    rows = range(0, sig.operands[index].shape[0], m)
    return [Access(index, (row, lo), (row + m, hi)) for row in rows]


def summed(sig: Signature, index: int) -> str:
    """The C++ text of operand `index` as an argument of the device function. If the operand
    consists of ranks' shares (partial results), it is the text of an object that adds the shares
    when it is read.
    """
    rows, given = sig.operands[2].shape[0], text.given(sig, index)
    if index >= len(sig.operands) or sig.operands[index].shape[0] == rows:
        return given
    shares = sig.operands[index].shape[0] // rows
    first = "ark_own<0>(t)" if shares > 2 else 0  # a sum of two has the same bits in either order
    return f"ark_summed<{shares}, {rows}>({given}, {first})"


register(Linear())
