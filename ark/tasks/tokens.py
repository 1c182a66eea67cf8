"""The token loop: embedding look-up, sampling, and advancing the position, all on the device.

`embedding` params: columns (per task), rows, dynamic. operands: ids, table, output, and with
dynamic the position, to which row numbers are relative. coord: first row, first column.
`sample` params: tiles. operands: logits (1, vocab), settings, position, candidates. coord: tile.
Each tile finds its best logit; with a temperature, its best of logit / temperature + Gumbel noise,
whose maximum is a sample of the softmax (Gumbel 1954). The noise is a hash of seed, position and
token, so any backend draws the same.
`choose` joins the tiles (or, for top-k, finds the k-th largest logit by bisection over the ordered
bits and looks again), appends the token, tells the host, moves the position on and ends the loop
at a stop token. operands: logits, settings, position, candidates, tokens, output (host), stops.
`advance` moves the position on by a chunk of the prompt. operands: settings, position.

settings (int32): temperature (float bits), top_k, seed, last position of the prompt, limit of
positions, number of stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
    Rows,
    Size,
    Splits,
    box,
    count,
    fits,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.rotary import system

SETTINGS = ("temperature", "top_k", "seed", "last", "limit", "stops")

SAMPLING = """
#ifndef ARK_SAMPLING
#define ARK_SAMPLING
// A mixing of 64 bits (splitmix64, Steele, Lea and Flood 2014).
ARK_DEVICE ark_u64 ark_mix(ark_u64 z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// What a token competes with: its logit, or the logit over the temperature plus Gumbel noise.
ARK_DEVICE float ark_score(float logit, float temperature, ark_u32 seed, ark_u32 position,
                           ark_u32 token) {
  if (temperature <= 0.0f) return logit;
  const ark_u64 place = (static_cast<ark_u64>(position) << 32) | token;
  const ark_u64 bits = ark_mix(ark_mix(seed) ^ place);
  // 23 bits and a half are exact in fp32: u never rounds to 1, of which the noise is infinite.
  const float u = (static_cast<float>(static_cast<ark_u32>(bits >> 41)) + 0.5f) * 1.1920929e-7f;
  return logit / temperature - ark_log(-ark_log(u));
}
ARK_DEVICE ark_u32 ark_ordered(float v) {
  const ark_u32 bits = ark_float_bits(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
// The best of the block: higher score wins, then the lower token. red: 2 * ARK_WARPS words.
ARK_DEVICE void ark_best(float& score, ark_u32& token, float* red) {
  for (int mask = ARK_LANES / 2; mask > 0; mask /= 2) {
    const float s = ark_shfl_xor(score, mask);
    const ark_u32 i = ark_shfl_xor(token, mask);
    if (s > score || (s == score && i < token)) { score = s; token = i; }
  }
  if (ARK_WARPS == 1) return;
  ark_u32* ids = reinterpret_cast<ark_u32*>(red + ARK_WARPS);
  if (ark_lane() == 0) { red[ark_warp()] = score; ids[ark_warp()] = token; }
  ark_sync();
  for (int w = 0; w < ARK_WARPS; ++w) {
    if (red[w] > score || (red[w] == score && ids[w] < token)) { score = red[w]; token = ids[w]; }
  }
  ark_sync();
}
#endif
"""


def sample_check(sig: Signature, first: int, rows: int, stages: int) -> None:
    """What a product with the epilogue `sample` adds to its signature."""
    tiles = int(sig.params.get("tiles") or 0)
    need(rows == 1 and 0 < tiles <= stages, f"{stages} stages have {tiles} tasks")
    shaped(sig, first, (len(SETTINGS),), "int32", dense=True)
    shaped(sig, first + 1, (1,), "int32")
    shaped(sig, first + 2, (tiles, 2), "fp32", dense=True)


def sample_tile(sig: Signature, weight: int, row: int) -> int:
    """Which of the product's tasks begins at that row: its stages are cut into equal parts."""
    stages = -(-sig.operands[weight].shape[0] // sig.params["rows"])
    return int(-(-(row // sig.params["rows"]) * sig.params["tiles"] // stages))


def sample_operands(sig: Signature, first: int) -> str:
    """Declares what a product's epilogue needs to find its task's best logit; operand `first` is
    the settings.
    """
    return (
        text.operand(sig, first, "psettings")
        + text.operand(sig, first + 1, "pposition")
        + text.operand(sig, first + 2, "pbest", const=False)
        + """  const float temperature = ark_bits_float(static_cast<ark_u32>(psettings[0]));
  const ark_u32 seed = static_cast<ark_u32>(psettings[2]);
  const ark_u32 place = static_cast<ark_u32>(pposition[0]);
"""
        + f"""  constexpr ark_i64 STAGES = {-(-sig.operands[1].shape[0] // sig.params["rows"])};
  const ark_i64 tile = (t.coord[0] / {sig.params["rows"]} * static_cast<ark_i64>(
                        {sig.params["tiles"]}) + STAGES - 1) / STAGES;
"""
        + """  float best = -ark_inf();
  ark_u32 token = static_cast<ark_u32>(t.coord[0]);
"""
    )


def sample_best(logit: str, row: str) -> str:
    """Keeps this thread's best; rows come in order."""
    return (
        f"        const float score = ark_score({logit}, temperature, seed, place, "
        f"static_cast<ark_u32>({row}));\n"
        f"        if (score > best) {{ best = score; token = static_cast<ark_u32>({row}); }}\n"
    )


def sample_finish(red: str) -> str:
    """The block's best, as the task's candidate; red: 2 * ARK_WARPS words nobody else uses."""
    return (
        f"  ark_best(best, token, {red});\n"
        "  if (ark_tid() == 0) {\n    pbest[2 * tile] = best;\n"
        "    pbest[2 * tile + 1] = ark_bits_float(token);\n  }\n"
    )


class EmbeddingParams(Params, frozen=True):
    rows: Rows
    columns: Size
    dynamic: bool


class Embedding(TaskKind):
    name = "embedding"
    params = EmbeddingParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        dynamic = sig.params["dynamic"]
        count(sig, 4 if dynamic else 3)
        ids = typed(sig, 0, "int32").shape
        (_, width), (rows, columns) = matrix(sig, 1), matrix(sig, 2)
        need(len(ids) == 1 and (dynamic or ids[0] >= rows), f"ids of shape {list(ids)} do not fit")
        need(width == columns, f"rows of {width} are not rows of {columns}")
        fits((sig.params["rows"], sig.params["columns"]), (rows, columns))
        if dynamic:
            shaped(sig, 3, (1,), "int32")

    def places(self, sig: Signature) -> Places:
        return box(sig.operands[2].shape, (sig.params["rows"], sig.params["columns"]))

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({2})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        rows, width = sig.operands[2].shape
        r1 = min(coord[0] + sig.params["rows"], rows)
        c1 = min(coord[1] + sig.params["columns"], width)
        found = [
            whole(0, sig.operands[0]),
            Access(1, (0, coord[1]), (sig.operands[1].shape[0], c1)),
            Access(2, (coord[0], coord[1]), (r1, c1), write=True),
        ]
        if sig.params["dynamic"]:
            found.append(whole(3, sig.operands[3]))
        return found

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        moved = sig.params["rows"] * sig.params["columns"] * sig.operands[1].itemsize * 2.0
        return 0.0, moved

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows, width = sig.operands[2].shape
        vocabulary = sig.operands[1].shape[0]
        ids = sig.operands[0].shape[0]
        start = "0"
        body = text.operand(sig, 0, "pi") + text.operand(sig, 1, "pw")
        body += text.operand(sig, 2, "po", const=False)
        if sig.params["dynamic"]:
            body += text.operand(sig, 3, "pp")
            start = "pp[0]"
        at = text.offset(sig, 1, ["0", "0", "id", "w"])
        out = text.offset(sig, 2, ["0", "0", "r", "w"])
        r, w = sig.params["rows"], sig.params["columns"]
        body += (
            f"  const int start = {start};\n"
            f"  for (int r = t.coord[0]; r < t.coord[0] + {r} && r < {rows}; ++r) {{\n"
            f"    int id = start >= 0 && start + r < {ids} ? pi[start + r] : 0;\n"
            f"    if (id < 0 || id >= {vocabulary}) {{\n"
            "      if (ark_tid() == 0) "
            f"ark_fail(c, 5u, 0u, {vocabulary}u, static_cast<ark_u32>(id));\n"
            "      id = 0;\n    }\n"
            f"    for (int w = t.coord[1] + ark_tid(); w < t.coord[1] + {w} && w < {width}; "
            f"w += ARK_THREADS) ark_publish(c, po, {out}, ark_get(pw, {at}), {system(sig, 2)});\n"
            "  }\n"
        )
        return text.function(name, body)


class TilesParams(Params, frozen=True):
    tiles: Splits


def _check_sampling(sig: Signature) -> None:
    """The operands that sample and choose share."""
    rows, vocabulary = matrix(sig, 0)
    tiles = sig.params["tiles"]
    need(rows == 1 and vocabulary + tiles <= INT_MAX, f"there are {rows} rows of logits")
    need(tiles <= vocabulary, f"{vocabulary} logits are not {tiles} tiles")
    shaped(sig, 1, (len(SETTINGS),), "int32", dense=True)
    shaped(sig, 2, (1,), "int32")
    shaped(sig, 3, (tiles, 2), "fp32", dense=True)


class Sample(TaskKind):
    name = "sample"
    params = TilesParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        _check_sampling(sig)

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.params["tiles"]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        lo, hi = _tile(sig, coord[0])
        return [
            Access(0, (0, lo), (1, hi)),
            whole(1, sig.operands[1]),
            whole(2, sig.operands[2]),
            Access(3, (coord[0], 0), (coord[0] + 1, 2), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        vocabulary = sig.operands[0].shape[1]
        tiles = sig.params["tiles"]
        body = (
            text.operand(sig, 0, "pl")
            + text.operand(sig, 1, "ps")
            + text.operand(sig, 2, "pp")
            + text.operand(sig, 3, "po", const=False)
            + f"""  const float temperature = ark_bits_float(static_cast<ark_u32>(ps[0]));
  const int tile = t.coord[0];
  const int lo = static_cast<int>(static_cast<ark_i64>({vocabulary}) * tile / {tiles});
  const int hi = static_cast<int>(static_cast<ark_i64>({vocabulary}) * (tile + 1) / {tiles});
  float best = -ark_inf();
  ark_u32 token = static_cast<ark_u32>(lo);
  for (int i = lo + ark_tid(); i < hi; i += ARK_THREADS) {{
    const float v = ark_score(ark_get(pl, i), temperature, static_cast<ark_u32>(ps[2]),
                              static_cast<ark_u32>(pp[0]), static_cast<ark_u32>(i));
    if (v > best) {{ best = v; token = static_cast<ark_u32>(i); }}
  }}
  ark_best(best, token, reinterpret_cast<float*>(ARK_SCRATCH(c)));
  if (ark_tid() == 0) {{ po[2 * tile] = best; po[2 * tile + 1] = ark_bits_float(token); }}
"""
        )
        return SAMPLING + text.function(name, body)


class Choose(TaskKind):
    name = "choose"
    params = TilesParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 7)
        _check_sampling(sig)
        context, stops = (typed(sig, index, "int32").shape for index in (4, 6))
        need(len(context) == len(stops) == 1, "tokens and stops have one dimension")
        shaped(sig, 5, context, "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        written = (2, 4, 5)
        return [whole(i, sig.operands[i]) for i in range(7)] + [
            whole(i, sig.operands[i], write=True) for i in written
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 8.0 * sig.params["tiles"]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        vocabulary = sig.operands[0].shape[1]
        tiles = sig.params["tiles"]
        context, room = sig.operands[4].shape[0], sig.operands[6].shape[0]
        body = "".join(text.operand(sig, i, f"p{i}", const=i not in (2, 4, 5)) for i in range(7))
        body += f"""  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  // All that does not depend on the token is asked for at once: everybody waits for this task.
  const float temperature = ark_bits_float(static_cast<ark_u32>(p1[0]));
  const int top_k = p1[1], limit = p1[4], position = p2[0];
  const int stops = p1[5] < {room} ? p1[5] : {room};
  const int i = ark_tid();
  float best = i < {tiles} ? p3[2 * i] : -ark_inf();
  ark_u32 token = i < {tiles} ? ark_float_bits(p3[2 * i + 1]) : 0u;
  const ark_i32 stop = i < stops ? p6[i] : -1;
  if (top_k > 0 && top_k < {vocabulary} && temperature > 0.0f) {{
    // The largest bound that at least top_k logits reach.
    ark_u32 bound = 0u;
    best = -ark_inf();
    for (int bit = 31; bit >= 0; --bit) {{
      const ark_u32 trial = bound | (1u << bit);
      float many = 0.0f;
      for (int i = ark_tid(); i < {vocabulary}; i += ARK_THREADS)
        many += ark_ordered(ark_get(p0, i)) >= trial ? 1.0f : 0.0f;
      if (ark_block_sum(many, red) >= static_cast<float>(top_k)) bound = trial;
    }}
    for (int i = ark_tid(); i < {vocabulary}; i += ARK_THREADS) {{
      if (ark_ordered(ark_get(p0, i)) < bound) continue;
      const float v = ark_score(ark_get(p0, i), temperature, static_cast<ark_u32>(p1[2]),
                                static_cast<ark_u32>(position), static_cast<ark_u32>(i));
      if (v > best) {{ best = v; token = static_cast<ark_u32>(i); }}
    }}
  }} else {{
    for (int i = ark_tid() + ARK_THREADS; i < {tiles}; i += ARK_THREADS) {{
      if (p3[2 * i] > best) {{ best = p3[2 * i]; token = ark_float_bits(p3[2 * i + 1]); }}
    }}
  }}
  ark_best(best, token, red);
  bool found = i < stops && stop == static_cast<ark_i32>(token);
  for (int k = i + ARK_THREADS; k < stops; k += ARK_THREADS) {{
    found = found || p6[k] == static_cast<ark_i32>(token);
  }}
  const bool stopped = !ark_all(!found);
  if (ark_tid() == 0 && position >= 0 && position < {context}) {{
    if (best == -ark_inf()) ark_fail(c, 6u, 0u, 0u, 0u);
    const int next = position + 1;
    p2[0] = next;
    const bool full = next + 1 >= limit || next + 1 >= {context};
    if (stopped || full) ark_control(ARK_PARAMS(c))->limit = c.iteration + 1u;
    if (next < {context}) {{
      p4[next] = static_cast<ark_i32>(token);
      ark_post_host(reinterpret_cast<ark_u32*>(p5) + next, token);
    }}
  }}
"""
        return SAMPLING + text.function(name, body)


class AdvanceParams(Params, frozen=True):
    rows: Rows


class Advance(TaskKind):
    name = "advance"
    params = AdvanceParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        shaped(sig, 0, (len(SETTINGS),), "int32", dense=True)
        shaped(sig, 1, (1,), "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return [
            whole(0, sig.operands[0]),
            whole(1, sig.operands[1]),
            whole(1, sig.operands[1], write=True),
        ]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        body = (
            text.operand(sig, 0, "ps")
            + text.operand(sig, 1, "pp", const=False)
            + "  if (ark_tid() != 0) return;\n"
            f"  const int next = pp[0] + {sig.params['rows']};\n"
            "  pp[0] = next < ps[3] ? next : ps[3];\n"
        )
        return text.function(name, body)


def _tile(sig: Signature, tile: int) -> tuple[int, int]:
    vocabulary, tiles = sig.operands[0].shape[1], sig.params["tiles"]
    return vocabulary * tile // tiles, vocabulary * (tile + 1) // tiles


for _kind in (Embedding(), Sample(), Choose(), Advance()):
    register(_kind)
