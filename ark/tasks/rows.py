"""Row-wise tiles: softmax, layernorm, rmsnorm over the last dimension, and reductions over any.

`rownorm` params: function, eps, rows (rows of dimension 2 per task). operands: input, [weight],
output. coord: first index of dimensions 0 to 2; each row is the work of the whole block.
`reduce` params: function, axis (of 4), tile (4 sizes of the output, 1 along the axis). operands:
input, output. coord: the tile's first index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    FLOAT_NAMES,
    Dim,
    Epsilon,
    Params,
    Places,
    Rows,
    Tile,
    box,
    count,
    fits,
    need,
    shaped,
    typed,
)
from ark.tasks import text

# Per row: statistics over v = the row's elements, then the expression for one element `v` at `k`.
_PASSES = {
    "softmax": (
        """    float m = -ark_inf();
    for (int k = ark_tid(); k < K; k += ARK_THREADS) { const float v = ROW(k); m = v > m ? v : m; }
    m = ark_block_max(m, red);
    float s = 0.0f;
    for (int k = ark_tid(); k < K; k += ARK_THREADS) s += ark_exp(ROW(k) - m);
    s = 1.0f / ark_block_sum(s, red);
""",
        "ark_exp(ROW(k) - m) * s",
    ),
    "layernorm": (
        """    float m = 0.0f;
    for (int k = ark_tid(); k < K; k += ARK_THREADS) m += ROW(k);
    m = ark_block_sum(m, red) / K;
    float s = 0.0f;
    for (int k = ark_tid(); k < K; k += ARK_THREADS) { const float v = ROW(k) - m; s += v * v; }
    s = ark_rsqrt(ark_block_sum(s, red) / K + EPS);
""",
        "(ROW(k) - m) * s",
    ),
    "rmsnorm": (
        """    float s = 0.0f;
    for (int k = ark_tid(); k < K; k += ARK_THREADS) { const float v = ROW(k); s += v * v; }
    s = ark_rsqrt(ark_block_sum(s, red) / K + EPS);
""",
        "ROW(k) * s * WEIGHT(k)",
    ),
}


class RowNormParams(Params, frozen=True):
    function: Literal["softmax", "layernorm", "rmsnorm"]
    rows: Rows
    eps: Epsilon = 0.0


class RowNorm(TaskKind):
    name = "rownorm"
    params = RowNormParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        weighted = sig.params["function"] == "rmsnorm"
        count(sig, 3 if weighted else 2)
        shape = typed(sig, 0).shape
        shaped(sig, len(sig.operands) - 1, shape)
        if weighted:
            shaped(sig, 1, shape[-1:], dense=True)
        fits((sig.params["rows"],), text.pad4(shape, 1)[2:3])

    def places(self, sig: Signature) -> Places:
        shape = text.pad4(sig.operands[-1].shape, 1)
        return box((*shape[:3], 1), (1, 1, sig.params["rows"], 1))

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset({0})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        shape = text.pad4(sig.operands[out].shape, 1)
        lo = (*coord[:3], 0)
        hi = (coord[0] + 1, coord[1] + 1, min(coord[2] + sig.params["rows"], shape[2]), shape[3])
        rank = len(sig.operands[out].shape)
        box = (lo[4 - rank :], hi[4 - rank :])
        found = [Access(0, *box), Access(out, *box, write=True)]
        if out == 2:
            found.append(whole(1, sig.operands[1]))
        return found

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 4 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        out = len(sig.operands) - 1
        shape = text.pad4(sig.operands[out].shape, 1)
        passes, value = _PASSES[sig.params["function"]]
        names = ["i0", "i1", "i2", "k"]
        body = text.operand(sig, 0, "p0") + text.operand(sig, out, "po", const=False)
        if out == 2:
            body += text.operand(sig, 1, "pw")
            value = value.replace("WEIGHT(k)", "ark_get(pw, k)")
        where = text.offset(sig, 0, names)
        row = f"ark_get(p0, {where})"
        store = f"ark_put(po, {text.offset(sig, out, names)}, {value});"
        loop = (
            f"    for (int k = ark_tid(); k < K; k += ARK_THREADS) {store}\n    ark_sync();\n  }}\n"
        )
        rows = sig.params["rows"]
        body += (
            "  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));\n"
            f"  constexpr int K = {shape[3]};\n"
            "  const int i0 = t.coord[0], i1 = t.coord[1];\n  (void)i0; (void)i1; (void)red;\n"
            f"  for (int i2 = t.coord[2]; i2 < t.coord[2] + {rows} && i2 < {shape[2]}; ++i2) {{\n"
            + passes
            + loop
        )
        body = body.replace("ROW(k)", row).replace("EPS", text.literal(sig.params.get("eps", 0.0)))
        return text.function(name, body)


# Start, step and result for floating point; for integers the start and step alone differ.
_REDUCE = {
    "sum": ("0.0f", "s += v;", "s"),
    "mean": ("0.0f", "s += v;", "s / {n}"),
    "max": ("-ark_inf()", "s = v > s ? v : s;", "s"),
}
_INTEGER_START = {"sum": "0", "max": "(-2147483647 - 1)"}


class ReduceParams(Params, frozen=True):
    function: Literal["sum", "mean", "max"]
    axis: Dim
    tile: Tile


class Reduce(TaskKind):
    name = "reduce"
    params = ReduceParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        mean = sig.params["function"] == "mean"
        source = typed(sig, 0, *FLOAT_NAMES, *(() if mean else ("int32",)))
        axis = sig.params["axis"] - 4 + len(source.shape)
        need(axis >= 0, f"the axis {sig.params['axis']} is none of {list(source.shape)}")
        shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
        shaped(sig, 1, shape, *(("int32",) if source.dtype == "int32" else FLOAT_NAMES))
        fits(sig.params["tile"], text.pad4(shape, 1))

    def places(self, sig: Signature) -> Places:
        return box(text.pad4(sig.operands[1].shape, 1), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape = text.pad4(sig.operands[0].shape, 1)
        axis = sig.params["axis"]
        tile = sig.params["tile"]
        hi = [
            min(b + s, 1 if d == axis else n)
            for d, (b, s, n) in enumerate(zip(coord, tile, shape, strict=True))
        ]
        lo_in = [0 if d == axis else b for d, b in enumerate(coord)]
        hi_in = [shape[d] if d == axis else e for d, e in enumerate(hi)]
        rank = len(sig.operands[0].shape)
        cut = 4 - rank
        return [
            Access(0, tuple(lo_in[cut:]), tuple(hi_in[cut:])),
            Access(1, tuple(coord[cut:]), tuple(hi[cut:]), write=True),
        ]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = list(text.pad4(sig.operands[0].shape, 1))
        axis = sig.params["axis"]
        count = shape[axis]
        start, step, value = _REDUCE[sig.params["function"]]
        compute = "float"
        if sig.operands[0].dtype in text.INTEGERS:
            compute, start = "ark_i32", _INTEGER_START[sig.params["function"]]
            step = step.replace("s += v", "s = static_cast<ark_i32>(static_cast<ark_u32>(s) + v)")
        names = [f"i{d}" for d in range(4)]
        inner = list(names)
        inner[axis] = "k"
        body = (
            f"    {compute} s = {start};\n"
            f"    for (int k = 0; k < {count}; ++k) {{\n"
            f"      const {compute} v = {text.load(sig, 0, 'p0', text.offset(sig, 0, inner))};\n"
            f"      {step}\n    }}\n"
            f"    {text.store(sig, 1, 'po', text.offset(sig, 1, names), value.format(n=count))}\n"
        )
        out_shape = [1 if d == axis else n for d, n in enumerate(shape)]
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "po", const=False)
        loop = text.box_loop(out_shape, sig.params["tile"], body, machine)
        return text.function(name, declare + loop)


register(RowNorm())
register(Reduce())
