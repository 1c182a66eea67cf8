"""Attention over the cache with keys and values on their way before the queries are there.

Serves the common kind's signature where a head's row is a whole number of 16-byte pieces, a power
of two of them. A row of the cache is read by a group of lanes, 16 bytes a lane; the first rows of
every warp are loaded before the task asks for its queries, because only the newest key and value
are this iteration's. Each warp keeps a running softmax of its rows (Milakov and Gimelshein 2018)
and the warps' parts are joined at the end (flash-decoding, Dao et al. 2023). Called by the writer
through the dialect.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention import FRESH
from ark.tasks.rotary import system
from ark.variant import COMMUNICATE
from ark_cuda.tasks.inline import inlined, packets

MAX_GROUP = 8  # query heads of a key/value head; their sums are held in registers


def _shape(sig: Signature) -> tuple[int, int]:
    """(query heads of a key/value head, elements of a head)."""
    p = sig.params
    return int(p["heads"]) // int(p["kv_heads"]), int(p["head_dim"])


def _bytes(sig: Signature, warps: int) -> int:
    group, width = _shape(sig)
    return 4 * ((group + 2) * width + warps * group * (width + 2))


def _warps(sig: Signature, machine: Machine) -> int:
    """Warps whose parts fit in shared memory; 0 if this body does not serve the signature."""
    group, width = _shape(sig)
    piece = 16 // sig.operands[1].itemsize
    lanes, rest = divmod(width, piece)
    if rest or lanes not in (1, 2, 4, 8, 16, 32) or group > MAX_GROUP:
        return 0
    if sig.operands[1].dtype not in ("fp32", "fp16", "bf16"):
        return 0
    warps = machine.warps
    while warps and _bytes(sig, warps) > machine.shared_bytes - machine.ring_bytes:
        warps //= 2
    return warps


def scratch(sig: Signature, machine: Machine) -> int:
    """Queries, the newest key and value, and the warps' parts, in bytes."""
    warps = _warps(sig, machine)
    return _bytes(sig, warps) if warps else 0


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    warps = _warps(sig, machine)
    if not warps:
        return None
    group, width = _shape(sig)
    context = sig.operands[1].shape[1]
    splits = sig.params["splits"]
    ctype = sig.operands[1].ctype
    fresh = len(sig.operands) > FRESH
    body = (
        text.operand(sig, 0, "pq")
        + text.operand(sig, 1, "pk")
        + text.operand(sig, 2, "pv")
        + text.operand(sig, 3, "pp")
        + text.operand(sig, 4, "po", const=False)
        + (text.operand(sig, FRESH, "pf") if fresh else "")
        + f"""  constexpr int G = {group}, D = {width}, W = {warps}, E = 16 / sizeof({ctype});
  constexpr int LANES = D / E, ROWS = 32 / LANES, STEP = ROWS * W;
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
  float* q = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* current = q + G * D;
  float* part = current + 2 * D;
  const int count = pp[0] + row + 1 < {context} ? pp[0] + row + 1 : {context};
  const int begin = static_cast<int>(static_cast<ark_i64>(count) * split / {splits});
  const int end = static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / {splits});
  const int newest = {"count - 1" if fresh else "count"};
  const int column = ark_lane() % LANES * E, mine = ark_warp() * ROWS + ark_lane() / LANES;
  const {ctype}* keys = pk + static_cast<ark_i64>(head) * {context} * D + column;
  const {ctype}* values = pv + static_cast<ark_i64>(head) * {context} * D + column;
  uint4 k = make_uint4(0u, 0u, 0u, 0u), v = k;
  const auto load = [&](int e) {{
    if (ark_warp() >= W || e >= end || e >= newest) return;
    k = *reinterpret_cast<const uint4*>(keys + static_cast<ark_i64>(e) * D);
    v = *reinterpret_cast<const uint4*>(values + static_cast<ark_i64>(e) * D);
  }};
{_inputs(sig, machine, fresh)}  ark_sync();
  float top[G], den[G], o[G][E];
#pragma unroll
  for (int g = 0; g < G; ++g) {{
    top[g] = -1e30f;
    den[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) o[g][i] = 0.0f;
  }}
  for (int e = begin + mine; ark_warp() < W && e - mine < end; e += STEP) {{
    float kf[E], vf[E];
    ark_unpack(kf, k, keys);
    ark_unpack(vf, v, values);
    if (e == newest) {{
#pragma unroll
      for (int i = 0; i < E; ++i) {{
        kf[i] = current[column + i];
        vf[i] = current[D + column + i];
      }}
    }}
    load(e + STEP);
#pragma unroll
    for (int g = 0; g < G; ++g) {{
      float s = 0.0f;
#pragma unroll
      for (int i = 0; i < E; ++i) s = fmaf(kf[i], q[g * D + column + i], s);
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) s += ark_shfl_xor(s, mask);
      if (e >= end) s = -1e30f;
      float m = fmaxf(top[g], s);
#pragma unroll
      for (int mask = LANES; mask < 32; mask *= 2) m = fmaxf(m, ark_shfl_xor(m, mask));
      const float keep = ark_exp(top[g] - m), p = e < end ? ark_exp(s - m) : 0.0f;
      top[g] = m;
      den[g] = fmaf(den[g], keep, p);
#pragma unroll
      for (int i = 0; i < E; ++i) o[g][i] = fmaf(o[g][i], keep, p * vf[i]);
    }}
  }}
  // A warp's rows share their maximum: their parts simply add up.
#pragma unroll
  for (int g = 0; g < G; ++g) {{
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {{
      den[g] += ark_shfl_xor(den[g], mask);
#pragma unroll
      for (int i = 0; i < E; ++i) o[g][i] += ark_shfl_xor(o[g][i], mask);
    }}
    float* to = part + (ark_warp() * G + g) * (D + 2);
    if (ark_warp() < W && ark_lane() < LANES) {{
#pragma unroll
      for (int i = 0; i < E; ++i) to[column + i] = o[g][i];
      if (ark_lane() == 0) {{
        to[D] = top[g];
        to[D + 1] = den[g];
      }}
    }}
  }}
  ark_sync();
  for (int i = ark_tid(); i < G * D; i += ARK_THREADS) {{
    const int g = i / D, d = i % D;
    const float* from = part + g * (D + 2);
    float m = -1e30f;
#pragma unroll
    for (int w = 0; w < W; ++w) m = fmaxf(m, from[w * G * (D + 2) + D]);
    float sum = 0.0f, all = 0.0f;
#pragma unroll
    for (int w = 0; w < W; ++w) {{
      const float share = ark_exp(from[w * G * (D + 2) + D] - m);
      sum = fmaf(share, from[w * G * (D + 2) + d], sum);
      all = fmaf(share, from[w * G * (D + 2) + D + 1], all);
    }}
{_finish(sig, splits, group)}  }}
"""
    )
    return packets() + inlined(_function(name, body, machine))


def poll(name: str, sig: Signature, machine: Machine) -> str | None:
    """In the variant `roles`: waits for the head's last query; None if `write` gives none."""
    if not _warps(sig, machine):
        return None
    group, width = _shape(sig)
    at = text.offset(sig, 0, ["0", "0", "t.coord[0]", f"((t.coord[1] + 1) * {group * width} - 1)"])
    return (
        f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n"
        + text.operand(sig, 0, "pq")
        + f"  ark_poll_packet(c, pq + ({at}), {system(sig, 0)});\n}}\n"
    )


def merge_poll(name: str, sig: Signature, machine: Machine) -> str:
    """In the variant `roles`: waits for one of the parts."""
    last = f"{sig.params['splits'] - 1}"
    at = text.offset(sig, 0, ["t.coord[0]", "t.coord[1]", last, "0"])
    return (
        f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n"
        + text.operand(sig, 0, "pp")
        + f"  ark_poll_packet(c, pp + ({at}), {system(sig, 0)});\n}}\n"
    )


def _function(name: str, body: str, machine: Machine) -> str:
    """The body's function; in the variant `roles` it says whether the processor goes on."""
    if not machine.variant.role(COMMUNICATE):
        return text.function(name, body)
    return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n{body}  return true;\n}}\n"


def _inputs(sig: Signature, machine: Machine, fresh: bool) -> str:
    """Queries, and the newest key and value, to shared memory."""
    group, width = _shape(sig)
    scale = text.literal(sig.params["scale"])
    scope = system(sig, 0)
    if not machine.variant.role(COMMUNICATE):
        q_at = text.offset(sig, 0, ["0", "0", "row", f"head * {group * width} + i"])
        loaded = f"ark_load_by_warp(c, pq, {q_at}, i < G * D, {scope})"
        return (
            "  load(begin + mine);\n"
            "  for (int first = 32 * ark_warp(); first < G * D; first += ARK_THREADS) {\n"
            "    const int i = first + ark_lane();\n"
            f"    const float value = {loaded};\n"
            f"    if (i < G * D) q[i] = value * {scale};\n  }}\n" + (_current(sig) if fresh else "")
        )
    # Queries first, then the new key, then its value: all asked for together.
    q_at = text.offset(sig, 0, ["0", "0", "row", f"head * {group * width} + i"])
    newer = ""
    if fresh:
        kv_heads = sig.params["kv_heads"]
        column = f"(i < D ? head * D + i : ({kv_heads} + head - 1) * D + i)"
        f_at = text.offset(sig, FRESH, ["0", "0", "0", column])
        newer = f"    i -= G * D;\n    if (end == count && i < 2 * D) return pf + ({f_at});\n"
    # Without a newest row of its own the iteration writes what the cache is read for.
    early, late = ("  load(begin + mine);\n", "") if fresh else ("", "  load(begin + mine);\n")
    return f"""{early}  if (!ark_enter(c)) return false;
{late}  constexpr int N = ((G + 2) * D / 2 + ARK_THREADS - 1) / ARK_THREADS;
  float loaded[2 * N];
  const auto at = [&](int n) -> decltype(pq) {{
    int i = 2 * (n * ARK_THREADS + ark_tid());
    if (i < G * D) return pq + ({q_at});
{newer}    return nullptr;
  }};
  ark_load_pairs<N>(c, pq, at, loaded, {scope});
#pragma unroll
  for (int n = 0; n < N; ++n) {{
    const int i = 2 * (n * ARK_THREADS + ark_tid());
    const float factor = i < G * D ? {scale} : 1.0f;
    if (i >= (G + 2) * D) continue;
    q[i] = loaded[2 * n] * factor;
    q[i + 1] = loaded[2 * n + 1] * factor;
  }}
"""


def merge(name: str, sig: Signature, machine: Machine) -> str | None:
    """Joins the splits as the common kind does, with packets loaded by whole warps."""
    width, splits = sig.params["head_dim"], sig.params["splits"]
    out = text.offset(sig, 1, ["0", "0", "row", "head * D + d"])
    body = (
        text.operand(sig, 0, "pp")
        + text.operand(sig, 1, "po", const=False)
        + f"""  constexpr int D = {width}, S = {splits}, N = S * (D + 2);
  const int row = t.coord[0], head = t.coord[1];
  float* part = reinterpret_cast<float*>(ARK_SCRATCH(c));
{_parts(sig, machine)}  ark_sync();
  for (int d = ark_tid(); d < D; d += ARK_THREADS) {{
    float m = -1e30f, sum = 0.0f, den = 0.0f;
    for (int s = 0; s < S; ++s) m = fmaxf(m, part[s * (D + 2) + D]);
    for (int s = 0; s < S; ++s) {{
      const float share = ark_exp(part[s * (D + 2) + D] - m);
      sum = fmaf(share, part[s * (D + 2) + d], sum);
      den = fmaf(share, part[s * (D + 2) + D + 1], den);
    }}
    ark_publish(c, po, {out}, sum / den, {system(sig, 1)});
  }}
"""
    )
    return packets() + inlined(_function(name, body, machine))


def _parts(sig: Signature, machine: Machine) -> str:
    """A head's parts to shared memory."""
    at = text.offset(sig, 0, ["row", "head", "i / (D + 2)", "i % (D + 2)"])
    scope = system(sig, 0)
    if not machine.variant.role(COMMUNICATE):
        return f"""  for (int first = 32 * ark_warp(); first < N; first += ARK_THREADS) {{
    const int i = first + ark_lane();
    const float value = ark_load_by_warp(c, pp, {at}, i < N, {scope});
    if (i < N) part[i] = value;
  }}
"""
    return f"""  if (!ark_enter(c)) return false;
  constexpr int ALL = (N / 2 + ARK_THREADS - 1) / ARK_THREADS, B = ALL < 8 ? ALL : 8;
#pragma unroll
  for (int first = 0; first < ALL; first += B) {{
    float loaded[2 * B];
    const auto place = [&](int n) {{ return 2 * ((first + n) * ARK_THREADS + ark_tid()); }};
    const auto at = [&](int n) -> decltype(pp) {{
      const int i = place(n);
      return i < N ? pp + ({at}) : nullptr;
    }};
    ark_load_pairs<B>(c, pp, at, loaded, {scope});
#pragma unroll
    for (int n = 0; n < B; ++n) {{
      if (place(n) >= N) continue;
      part[place(n)] = loaded[2 * n];
      part[place(n) + 1] = loaded[2 * n + 1];
    }}
  }}
"""


def _current(sig: Signature) -> str:
    """The newest key and value, asked for by the warps that ask for no query."""
    kv_heads = sig.params["kv_heads"]
    column = f"(i < D ? head * D + i : ({kv_heads} + head - 1) * D + i)"
    at = text.offset(sig, FRESH, ["0", "0", "0", column])
    return (
        "  if (end == count)\n  for (int first = 32 * (ARK_WARPS - 1 - ark_warp()); first < 2 * D; "
        "first += ARK_THREADS) {\n    const int i = first + ark_lane();\n"
        f"    const ark_i64 at = {at};\n"
        f"    const float value = ark_load_by_warp(c, pf, at, i < 2 * D, {system(sig, FRESH)});\n"
        "    if (i < 2 * D) current[i] = value;\n  }\n"
    )


def _finish(sig: Signature, splits: int, group: int) -> str:
    scope = system(sig, 4)
    if splits == 1:
        at = text.offset(sig, 4, ["0", "0", "row", "head * G * D + i"])
        return f"    ark_publish(c, po, {at}, sum / all, {scope});\n"
    stores = []
    for where, value in (("d", "sum"), ("D", "m"), ("(D + 1)", "all")):
        at = text.offset(sig, 4, ["row", f"(head * {group} + g)", "split", where])
        stores.append(f"ark_publish(c, po, {at}, {value}, {scope});")
    return f"    {stores[0]}\n    if (d == 0) {{\n      {stores[1]}\n      {stores[2]}\n    }}\n"
