"""Tiles of a mixture of experts: topk of a row, and products with the weights of a chosen expert.

`topk` params: k. operands: input (rows, n), values (rows, k), indices (rows, k). coord: row.
`expert_linear` operands: input (rows, k) or (rows, slots, k), weight (experts, n, k) dense, experts
(rows, slots), output (rows, slots, n). coord: row, slot, first and last+1 output. Which expert's
weights a task reads is known only when it runs, so they are no stream and count as all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
    Splits,
    count,
    is_dense,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.tokens import SAMPLING


class TopKParams(Params, frozen=True):
    k: Splits


class TopK(TaskKind):
    name = "topk"
    params = TopKParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        rows, n = matrix(sig, 0)
        k = sig.params["k"]
        need(k <= n <= INT_MAX - 1024, f"{k} of {n} elements cannot be chosen")
        shaped(sig, 1, (rows, k))
        shaped(sig, 2, (rows, k), "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.operands[0].shape[0]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, k = coord[0], sig.params["k"]
        return [
            Access(0, (row, 0), (row + 1, sig.operands[0].shape[1])),
            Access(1, (row, 0), (row + 1, k), write=True),
            Access(2, (row, 0), (row + 1, k), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """Each round takes the best of what comes behind the one before."""
        n = sig.operands[0].shape[1]
        source = text.offset(sig, 0, ["0", "0", "t.coord[0]", "i"])
        value = text.offset(sig, 1, ["0", "0", "t.coord[0]", "j"])
        index = text.offset(sig, 2, ["0", "0", "t.coord[0]", "j"])
        body = (
            text.operand(sig, 0, "px")
            + text.operand(sig, 1, "pv", const=False)
            + text.operand(sig, 2, "pi", const=False)
            + f"""  float last = ark_inf();
  ark_u32 before = 0u;
  for (int j = 0; j < {sig.params["k"]}; ++j) {{
    float best = -ark_inf();
    ark_u32 at = 0xffffffffu;
    for (int i = ark_tid(); i < {n}; i += ARK_THREADS) {{
      const float v = ark_get(px, {source});
      const ark_u32 place = static_cast<ark_u32>(i);
      if (j > 0 && (v > last || (v == last && place <= before))) continue;
      if (v > best || (v == best && place < at)) {{ best = v; at = place; }}
    }}
    ark_best(best, at, reinterpret_cast<float*>(ARK_SCRATCH(c)));
    if (ark_tid() == 0) {{
      ark_put(pv, {value}, best);
      pi[{index}] = static_cast<ark_i32>(at);
    }}
    last = best;
    before = at;
  }}
"""
        )
        return SAMPLING + text.function(name, body)


class ExpertLinear(TaskKind):
    name = "expert_linear"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        rows, slots = matrix(sig, 2, "int32")
        weight = typed(sig, 1)
        need(
            len(weight.shape) == 3 and is_dense(weight),
            f"the weights have shape {list(weight.shape)}, expected (experts, n, k), dense",
        )
        _, n, k = weight.shape
        shaped(sig, 0, (rows, k) if len(sig.operands[0].shape) == 2 else (rows, slots, k))
        shaped(sig, 3, (rows, slots, n))

    def places(self, sig: Signature) -> Places:
        return Places(tuple(range(n) for n in sig.operands[3].shape), span=True)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, slot, n0, n1 = coord[:4]
        shape = sig.operands[0].shape
        place = (row, slot) if len(shape) == 3 else (row,)
        ends = tuple(i + 1 for i in place)
        experts, _, k = sig.operands[1].shape
        return [
            Access(0, (*place, 0), (*ends, k)),
            Access(1, (0, n0, 0), (experts, n1, k)),
            Access(2, (row, slot), (row + 1, slot + 1)),
            Access(3, (row, slot, n0), (row + 1, slot + 1, n1), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 4 * sig.operands[1].shape[2]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        many = float((coord[3] - coord[2]) * sig.operands[1].shape[2])
        return 2.0 * many, many * sig.operands[1].itemsize

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        experts, n, k = sig.operands[1].shape
        slots = len(sig.operands[0].shape) == 3
        row = ["0", "row", "slot", "i"] if slots else ["0", "0", "row", "i"]
        chosen = text.offset(sig, 2, ["0", "0", "row", "slot"])
        out = text.offset(sig, 3, ["0", "row", "slot", "i"])
        body = (
            "".join(text.operand(sig, i, f"p{i}", const=i != 3) for i in range(4))
            + f"""  constexpr int N = {n}, K = {k};
  const int row = t.coord[0], slot = t.coord[1];
  (void)slot;
  float* x = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int i = ark_tid(); i < K; i += ARK_THREADS) x[i] = ark_get(p0, {text.offset(sig, 0, row)});
  int expert = p2[{chosen}];
  if (expert < 0 || expert >= {experts}) {{
    if (ark_tid() == 0) ark_fail(c, 5u, 0u, {experts}u, static_cast<ark_u32>(expert));
    expert = 0;
  }}
  const auto* w = p1 + static_cast<ark_i64>(expert) * N * K;
  ark_sync();
  for (int i = t.coord[2] + ark_warp(); i < t.coord[3]; i += ARK_WARPS) {{
    const float v = ark_warp_sum(ark_row_dot(w + static_cast<ark_i64>(i) * K, x, K));
    if (ark_lane() == 0) ark_put(p3, {out}, v);
  }}
"""
        )
        return text.function(name, body)


register(TopK())
register(ExpertLinear())
