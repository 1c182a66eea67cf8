"""Causal grouped-query attention over a key/value cache, in one task per (row, kv head, split).

`attention` params: heads, kv_heads, head_dim, splits, scale. operands: q (m, heads * head_dim),
key cache and value cache (kv_heads, context, head_dim), position (1,), output, [fresh (1, 2 *
kv_heads * head_dim)]. Row r attends to positions 0 .. position + r. With `fresh` there is one row,
its own key and value are taken from there, and only the past from the caches. coord: row, kv head,
split. With one split the output is (m, heads * head_dim); with more it is a partial (m, heads,
splits, head_dim + 2): the unnormalised sum, then maximum and denominator, and `attention_merge`
joins the splits (flash-decoding, Dao et al. 2023). `attention_merge` params: heads, head_dim,
splits. operands: partial, output. coord: row, head. The positions are walked in chunks with a
running maximum (online softmax, Milakov and Gimelshein 2018), so shared memory does not grow with
the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Heads,
    Params,
    Pieces,
    Places,
    count,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.rotary import system

CHUNK = 256
FRESH = 5  # the operand with this iteration's keys and values


class AttentionParams(Params, frozen=True):
    heads: Heads
    kv_heads: Heads
    head_dim: Heads
    splits: Pieces
    scale: float


class Attention(TaskKind):
    name = "attention"
    params = AttentionParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, FRESH, FRESH + 1)
        p = sig.params
        heads, kv_heads, width, splits = p["heads"], p["kv_heads"], p["head_dim"], p["splits"]
        need(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} evenly")
        rows, columns = matrix(sig, 0)
        need(columns == heads * width, f"{columns} columns are not {heads} heads of {width}")
        cache = typed(sig, 1)
        need(len(cache.shape) == 3, f"the cache has shape {list(cache.shape)}")
        context = cache.shape[1]
        for index in (1, 2):
            shaped(sig, index, (kv_heads, context, width), cache.dtype, dense=True)
        shaped(sig, 3, (1,), "int32")
        need(
            heads * splits * (width + 2) <= INT_MAX and context + rows <= INT_MAX, "it is too large"
        )
        if splits == 1:
            shaped(sig, 4, (rows, columns))
        else:
            shaped(sig, 4, (rows, heads, splits, width + 2), "fp32")
        if len(sig.operands) > FRESH:
            need(rows == 1, f"{rows} rows cannot have one fresh key")
            shaped(sig, FRESH, (1, 2 * kv_heads * width))

    def places(self, sig: Signature) -> Places:
        p, rows = sig.params, sig.operands[0].shape[0]
        return Places((range(rows), range(p["kv_heads"]), range(p["splits"])))

    def wide(self, sig: Signature) -> frozenset[int]:
        row = sig.params["head_dim"] * sig.operands[1].itemsize
        return frozenset({1, 2} if row % 16 == 0 else ())

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        p = sig.params
        row, head, split = coord[:3]
        group = p["heads"] // p["kv_heads"]
        width = p["head_dim"]
        context = sig.operands[1].shape[1]
        q0, q1 = head * group * width, (head + 1) * group * width
        cache = ((head, 0, 0), (head + 1, context, width))
        if p["splits"] == 1:
            out = Access(4, (row, q0), (row + 1, q1), write=True)
        else:
            lo = (row, head * group, split, 0)
            out = Access(4, lo, (row + 1, (head + 1) * group, split + 1, width + 2), write=True)
        fresh = len(sig.operands) > FRESH
        found = [
            Access(0, (row, q0), (row + 1, q1)),
            Access(1, *cache, append_only=fresh),
            Access(2, *cache, append_only=fresh),
            whole(3, sig.operands[3]),
            out,
        ]
        if fresh:
            for first in (head, p["kv_heads"] + head):
                found.append(Access(FRESH, (0, first * width), (1, (first + 1) * width)))
        return found

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 4, FRESH})

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        p = sig.params
        context = sig.operands[1].shape[1]
        share = context * p["head_dim"] / p["splits"]
        return 4.0 * share * p["heads"] / p["kv_heads"], 2.0 * share * sig.operands[1].itemsize

    def scratch(self, sig: Signature, machine: Machine) -> int:
        p = sig.params
        group = p["heads"] // p["kv_heads"]
        return 4 * ((group + 1) * p["head_dim"] * 2 + group * (CHUNK + 3))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p = sig.params
        group = p["heads"] // p["kv_heads"]
        width = p["head_dim"]
        context = sig.operands[1].shape[1]
        splits = p["splits"]
        q_at = text.offset(sig, 0, ["0", "0", "row", f"head * {group * width} + e"])
        if splits == 1:
            at = text.offset(sig, 4, ["0", "0", "row", f"head * {group * width} + e"])
            finish = (
                f"  for (int e = ark_tid(); e < {group * width}; e += ARK_THREADS) "
                f"ark_publish(c, po, {at}, o[e] / den[e / {width}], {system(sig, 4)});\n"
            )
        else:
            at = text.offset(
                sig, 4, ["row", f"(head * {group} + e / {width + 2})", "split", f"e % {width + 2}"]
            )
            finish = (
                f"  for (int e = ark_tid(); e < {group * (width + 2)}; e += ARK_THREADS) {{\n"
                f"    const int g = e / {width + 2}, d = e % {width + 2};\n"
                f"    const float v = d < {width} ? o[g * {width} + d] : d == {width} ? top[g] "
                ": den[g];\n"
                f"    ark_publish(c, po, {at}, v, {system(sig, 4)});\n  }}\n"
            )
        body = (
            text.operand(sig, 0, "pq")
            + text.operand(sig, 1, "pk")
            + text.operand(sig, 2, "pv")
            + text.operand(sig, 3, "pp")
            + text.operand(sig, 4, "po", const=False)
            + f"""  constexpr int G = {group}, D = {width}, CHUNK = {CHUNK};
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
  float* q = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* o = q + G * D;
  float* own = o + G * D;
  float* s = own + 2 * D;
  float* top = s + G * CHUNK;
  float* den = top + G;
  float* keep = den + G;
  const int count = pp[0] + row + 1 < {context} ? pp[0] + row + 1 : {context};
  const int begin = static_cast<int>(static_cast<ark_i64>(count) * split / {splits});
  const int end = static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / {splits});
  const auto* keys = pk + static_cast<ark_i64>(head) * {context} * D;
  const auto* values = pv + static_cast<ark_i64>(head) * {context} * D;
  for (int e = ark_tid(); e < G * D; e += ARK_THREADS) {{
    q[e] = ark_load(c, pq, {q_at}, {system(sig, 0)}) * {text.literal(p["scale"])};
    o[e] = 0.0f;
  }}
  for (int g = ark_tid(); g < G; g += ARK_THREADS) {{ top[g] = -1e30f; den[g] = 0.0f; }}
{self._own(sig)}  ark_sync();
  for (int first = begin; first < end; first += CHUNK) {{
    const int many = end - first < CHUNK ? end - first : CHUNK;
    const int past = first + many > newest ? newest - first : many;
    for (int e = ark_warp(); e < many; e += ARK_WARPS) {{
      for (int g = 0; g < G; ++g) {{
        const float v = ark_warp_sum(
            e < past ? ark_row_dot(keys + static_cast<ark_i64>(first + e) * D, q + g * D, D)
                     : ark_row_dot(own, q + g * D, D));
        if (ark_lane() == 0) s[g * CHUNK + e] = v;
      }}
    }}
    ark_sync();
    for (int g = ark_warp(); g < G; g += ARK_WARPS) {{
      float m = top[g];
      for (int e = ark_lane(); e < many; e += ARK_LANES) {{
        const float v = s[g * CHUNK + e];
        m = v > m ? v : m;
      }}
      m = ark_warp_max(m);
      float sum = 0.0f;
      for (int e = ark_lane(); e < many; e += ARK_LANES) {{
        const float v = ark_exp(s[g * CHUNK + e] - m);
        s[g * CHUNK + e] = v;
        sum += v;
      }}
      sum = ark_warp_sum(sum);
      if (ark_lane() == 0) {{
        keep[g] = ark_exp(top[g] - m);
        den[g] = den[g] * keep[g] + sum;
        top[g] = m;
      }}
    }}
    ark_sync();
{self._values(machine)}    ark_sync();
  }}
"""
            + finish
        )
        return text.function(name, body)

    def _own(self, sig: Signature) -> str:
        """Fetches this position's key and value where they come apart from the cache."""
        if len(sig.operands) <= FRESH:
            return "  const int newest = count;\n  (void)own;\n"
        width, kv_heads = sig.params["head_dim"], sig.params["kv_heads"]
        at = text.offset(
            sig, FRESH, ["0", "0", "0", f"(e < D ? head * D + e : ({kv_heads} + head - 1) * D + e)"]
        )
        return (
            text.operand(sig, FRESH, "pfresh") + "  const int newest = count - 1;\n"
            f"  if (end == count) for (int e = ark_tid(); e < {2 * width}; e += ARK_THREADS) "
            f"own[e] = ark_load(c, pfresh, {at}, {system(sig, FRESH)});\n"
        )

    def _values(self, machine: Machine) -> str:
        """Adds the chunk's weighted values; a lone thread walks rows, many split the columns."""
        if machine.has("single_thread"):
            return """    for (int g = 0; g < G; ++g) {
      for (int d = 0; d < D; ++d) o[g * D + d] *= keep[g];
      for (int e = 0; e < past; ++e) for (int d = 0; d < D; ++d)
        o[g * D + d] += s[g * CHUNK + e] * ark_get(values, static_cast<ark_i64>(first + e) * D + d);
      if (past < many) for (int d = 0; d < D; ++d) o[g * D + d] += s[g * CHUNK + past] * own[D + d];
    }
"""
        return """    for (int e = ark_tid(); e < G * D; e += ARK_THREADS) {
      const int g = e / D, d = e % D;
      float sum = o[e] * keep[g];
      for (int j = 0; j < past; ++j)
        sum += s[g * CHUNK + j] * ark_get(values, static_cast<ark_i64>(first + j) * D + d);
      if (past < many) sum += s[g * CHUNK + past] * own[D + d];
      o[e] = sum;
    }
"""


class AttentionMergeParams(Params, frozen=True):
    heads: Heads
    head_dim: Heads
    splits: Pieces


class AttentionMerge(TaskKind):
    name = "attention_merge"
    params = AttentionMergeParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        heads, width, splits = (sig.params[k] for k in ("heads", "head_dim", "splits"))
        rows, _ = matrix(sig, 1)
        shaped(sig, 0, (rows, heads, splits, width + 2), "fp32")
        shaped(sig, 1, (rows, heads * width))
        need(splits * (width + 2) <= INT_MAX, "it is too large")

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.operands[1].shape[0]), range(sig.params["heads"])))

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, head = coord[:2]
        width, splits = sig.params["head_dim"], sig.params["splits"]
        return [
            Access(0, (row, head, 0, 0), (row + 1, head + 1, splits, width + 2)),
            Access(1, (row, head * width), (row + 1, (head + 1) * width), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 4 * sig.params["splits"] * (sig.params["head_dim"] + 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        width, splits = sig.params["head_dim"], sig.params["splits"]
        at = text.offset(sig, 0, ["row", "head", f"e / {width + 2}", f"e % {width + 2}"])
        out = text.offset(sig, 1, ["0", "0", "row", f"head * {width} + d"])
        body = (
            text.operand(sig, 0, "pp")
            + text.operand(sig, 1, "po", const=False)
            + f"""  constexpr int D = {width}, S = {splits};
  const int row = t.coord[0], head = t.coord[1];
  float* part = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int e = ark_tid(); e < S * (D + 2); e += ARK_THREADS)
    part[e] = ark_load(c, pp, {at}, {system(sig, 0)});
  ark_sync();
  float m = -1e30f;
  for (int i = 0; i < S; ++i) m = part[i * (D + 2) + D] > m ? part[i * (D + 2) + D] : m;
  for (int d = ark_tid(); d < D; d += ARK_THREADS) {{
    float sum = 0.0f, den = 0.0f;
    for (int i = 0; i < S; ++i) {{
      const float keep = ark_exp(part[i * (D + 2) + D] - m);
      sum += keep * part[i * (D + 2) + d];
      den += keep * part[i * (D + 2) + D + 1];
    }}
    ark_publish(c, po, {out}, sum / den, {system(sig, 1)});
  }}
"""
        )
        return text.function(name, body)


register(Attention())
register(AttentionMerge())
