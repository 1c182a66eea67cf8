"""Rotary embedding, and what a projection's result is turned or gated into in pairs.

They stand on their own where the product before them is no linear task; the linear kind uses the
same text in its epilogues. `rope_kv` params: heads, kv_heads, head_dim. operands: x (m, (heads + 2
kv_heads) * head_dim), output q (m, heads * head_dim), position, frequencies, key cache and value
cache (kv_heads, context, head_dim), [fresh (m, 2 * kv_heads * head_dim): the new keys and values
once more, for readers in the same iteration]. coord: first and last+1 column of x, for all rows,
because rows share the cache. `rotary_embedding` params: head_dim, interleaved (pairs are
neighbours, else the halves of a head). operands: x (m, heads * head_dim), output, position,
frequencies. coord: row, first and last+1 head. `swiglu` operands: x (m, 2 n) with gate and up as
neighbours, output (m, n). coord: row, first and last+1 column of x.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import INT_MAX, Heads, Params, Places, count, matrix, need, shaped
from ark.tasks import text


def system(sig: Signature, index: int) -> str:
    """The device ABI's system-scope flag of an operand."""
    return "true" if sig.operands[index].system else "false"


def has_fresh(sig: Signature, first: int) -> bool:
    """Are the new keys and values given once more, as the operand behind the caches?"""
    return len(sig.operands) > first + 4


def rotary_check(sig: Signature, out: int, first: int, shape: tuple[int, int]) -> None:
    """Raises PlanError unless a projection of this shape can be turned and stored.

    out: the queries' operand; first: the position's, before frequencies, caches and perhaps fresh.
    """
    p, (rows, columns) = sig.params, shape
    need(all(p.get(k) for k in ("heads", "kv_heads", "head_dim")), "it has no heads")
    width, queries = p["head_dim"], p["heads"] * p["head_dim"]
    keys = p["kv_heads"] * width
    need(width % 2 == 0, f"a head of {width} columns has no pairs")
    need(columns == queries + 2 * keys, f"{columns} columns are not {queries} + 2 * {keys}")
    shaped(sig, out, (rows, queries))
    shaped(sig, first, (1,), "int32")
    shaped(sig, first + 1, (width // 2,), "fp32", dense=True)
    cache = sig.operands[first + 2]
    need(len(cache.shape) == 3, "the cache has not 3 dimensions")
    for index in (first + 2, first + 3):
        shaped(sig, index, (p["kv_heads"], cache.shape[1], width), dense=True)
    need(cache.dtype == sig.operands[first + 3].dtype, "the caches are of two types")
    if has_fresh(sig, first):
        shaped(sig, first + 4, (rows, 2 * keys))


def rotary_accesses(sig: Signature, out: int, first: int, n0: int, n1: int) -> list[Access]:
    """What columns n0 to n1 of a projection touch; operand `first` is the position."""
    p = sig.params
    rows = sig.operands[out].shape[0]
    width = p["head_dim"]
    queries, keys = p["heads"] * width, p["kv_heads"] * width
    found = [whole(first, sig.operands[first]), whole(first + 1, sig.operands[first + 1])]
    if n0 < queries:
        found.append(Access(out, (0, n0), (rows, min(n1, queries)), write=True))
    if has_fresh(sig, first) and n1 > queries:
        lo, hi = max(n0, queries) - queries, n1 - queries
        found.append(Access(first + 4, (0, lo), (rows, hi), write=True))
    context = sig.operands[first + 2].shape[1]
    for cache, base in ((first + 2, queries), (first + 3, queries + keys)):
        for head in range(p["kv_heads"]):
            lo = max(n0, base + head * width)
            hi = min(n1, base + (head + 1) * width)
            if lo < hi:
                at = base + head * width
                box = ((head, 0, lo - at), (head + 1, context, hi - at))
                found.append(Access(cache, *box, write=True, append_only=True))
    return found


def rotary_operands(sig: Signature, first: int) -> str:
    """Declares what `rotary_store` uses besides `po`."""
    return (
        text.operand(sig, first, "pp")
        + text.operand(sig, first + 1, "pf")
        + text.operand(sig, first + 2, "pk", const=False)
        + text.operand(sig, first + 3, "pv", const=False)
        + (text.operand(sig, first + 4, "pfresh", const=False) if has_fresh(sig, first) else "")
        + "  const int position = pp[0];\n"
    )


def rotated_columns(sig: Signature) -> int:
    """Columns of the projection that are turned: queries and keys."""
    p = sig.params
    return int((p["heads"] + p["kv_heads"]) * p["head_dim"])


def rotary_angle(sig: Signature) -> str:
    """The angle by which the pair of row `m` at column `row` is turned."""
    return f"static_cast<float>(position + m) * pf[row % {sig.params['head_dim']} / 2]"


def rotary_store(sig: Signature, out: int, first: int) -> str:
    """Stores the turned pair `a`, `b` of row `m` at column `row` where it belongs."""
    p = sig.params
    width = p["head_dim"]
    queries, keys = p["heads"] * width, p["kv_heads"] * width
    context = sig.operands[first + 2].shape[1]
    at = text.offset(sig, out, ["0", "0", "m", "row"])
    next_at = text.offset(sig, out, ["0", "0", "m", "(row + 1)"])
    scope = system(sig, out)
    fresh = ""
    if has_fresh(sig, first):
        for step, value in ((0, "a"), (1, "b")):
            place = text.offset(sig, first + 4, ["0", "0", "m", f"(row + {step - queries})"])
            fresh += (
                f"          ark_publish(c, pfresh, {place}, {value}, {system(sig, first + 4)});\n"
            )
    return (
        f"        if (row < {queries}) {{\n"
        f"          ark_publish(c, po, {at}, a, {scope});\n"
        f"          ark_publish(c, po, {next_at}, b, {scope});\n"
        f"        }} else if (position >= 0 && position + m < {context}) {{\n{fresh}"
        f"          const bool key = row < {queries + keys};\n"
        f"          const int i = row - (key ? {queries} : {queries + keys});\n"
        f"          const ark_i64 at = (static_cast<ark_i64>(i / {width}) * {context} + position "
        f"+ m) * {width} + i % {width};\n"
        "          ark_put(key ? pk : pv, at, a);\n"
        "          ark_put(key ? pk : pv, at + 1, b);\n"
        "        }\n"
    )


class RopeKvParams(Params, frozen=True):
    heads: Heads
    kv_heads: Heads
    head_dim: Heads


class RopeKv(TaskKind):
    name = "rope_kv"
    params = RopeKvParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 6, 7)
        rows, columns = matrix(sig, 0)
        need(rows * columns <= INT_MAX, "the projection is too large for a task")
        rotary_check(sig, 1, 2, (rows, columns))

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[0].shape[1], 2),), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1, 6})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        n0, n1 = coord[:2]
        rows = sig.operands[0].shape[0]
        return [Access(0, (0, n0), (rows, n1)), *rotary_accesses(sig, 1, 2, n0, n1)]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = float(sig.operands[0].shape[0] * (coord[1] - coord[0]))
        return 8.0 * elements, 8.0 * elements

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows = sig.operands[0].shape[0]
        at = text.offset(sig, 0, ["0", "0", "m", "row"])
        next_at = text.offset(sig, 0, ["0", "0", "m", "(row + 1)"])
        scope = system(sig, 0)
        body = (
            text.operand(sig, 0, "px")
            + text.operand(sig, 1, "po", const=False)
            + rotary_operands(sig, 2)
            + "  const int pairs = (t.coord[1] - t.coord[0]) / 2;\n"
            f"  for (int e = ark_tid(); e < pairs * {rows}; e += ARK_THREADS) {{\n"
            "        const int m = e / pairs, row = t.coord[0] + e % pairs * 2;\n"
            f"        float a = ark_load(c, px, {at}, {scope});\n"
            f"        float b = ark_load(c, px, {next_at}, {scope});\n"
            f"        const float angle = {rotary_angle(sig)};\n"
            f"        if (row < {rotated_columns(sig)}) "
            "ark_rotate(a, b, ark_sin(angle), ark_cos(angle));\n"
            + rotary_store(sig, 1, 2)
            + "  }\n"
        )
        return text.function(name, body)


class SwiGlu(TaskKind):
    name = "swiglu"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        rows, columns = matrix(sig, 0)
        need(columns % 2 == 0, f"{columns} columns are no pairs")
        shaped(sig, 1, (rows, columns // 2))

    def places(self, sig: Signature) -> Places:
        rows, columns = sig.operands[0].shape
        return Places((range(rows), range(0, columns, 2)), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, n0, n1 = coord[:3]
        return [
            Access(0, (row, n0), (row + 1, n1)),
            Access(1, (row, n0 // 2), (row + 1, n1 // 2), write=True),
        ]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        gate_at = text.offset(sig, 0, ["0", "0", "m", "2 * n"])
        up_at = text.offset(sig, 0, ["0", "0", "m", "(2 * n + 1)"])
        at = text.offset(sig, 1, ["0", "0", "m", "n"])
        scope = system(sig, 0)
        body = (
            text.operand(sig, 0, "px")
            + text.operand(sig, 1, "po", const=False)
            + "  const int m = t.coord[0];\n  (void)m;\n"
            "  for (int n = t.coord[1] / 2 + ark_tid(); n < t.coord[2] / 2; n += ARK_THREADS) {\n"
            f"    const float g = ark_load(c, px, {gate_at}, {scope});\n"
            f"    const float u = ark_load(c, px, {up_at}, {scope});\n"
            f"    ark_publish(c, po, {at}, g / (1.0f + ark_exp(-g)) * u, {system(sig, 1)});\n  }}\n"
        )
        return text.function(name, body)


class RotaryEmbeddingParams(Params, frozen=True):
    head_dim: Heads
    interleaved: bool


class RotaryEmbedding(TaskKind):
    name = "rotary_embedding"
    params = RotaryEmbeddingParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 4)
        width = sig.params["head_dim"]
        rows, columns = matrix(sig, 0)
        need(width % 2 == columns % width == 0, f"{columns} columns are no heads of {width}")
        shaped(sig, 1, (rows, columns))
        shaped(sig, 2, (1,), "int32")
        shaped(sig, 3, (width // 2,), "fp32", dense=True)

    def places(self, sig: Signature) -> Places:
        rows, columns = sig.operands[0].shape
        return Places((range(rows), range(columns // sig.params["head_dim"])), span=True)

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        row, first, last = coord[:3]
        width = sig.params["head_dim"]
        box = ((row, first * width), (row + 1, last * width))
        found = [Access(0, *box), Access(1, *box, write=True)]
        return [*found, whole(2, sig.operands[2]), whole(3, sig.operands[3])]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        width = sig.params["head_dim"]
        first, step = ("2 * i", 1) if sig.params["interleaved"] else ("i", width // 2)
        places = [["0", "0", "row", at] for at in ("n", f"(n + {step})")]
        a_at, b_at = (text.offset(sig, 0, place) for place in places)
        a_out, b_out = (text.offset(sig, 1, place) for place in places)
        scope = system(sig, 0)
        body = (
            text.operand(sig, 0, "px")
            + text.operand(sig, 1, "po", const=False)
            + text.operand(sig, 2, "pp")
            + text.operand(sig, 3, "pf")
            + f"""  const int row = t.coord[0], pairs = (t.coord[2] - t.coord[1]) * {width // 2};
  (void)row;
  for (int e = ark_tid(); e < pairs; e += ARK_THREADS) {{
    const int i = e % {width // 2};
    const int n = (t.coord[1] + e / {width // 2}) * {width} + {first};
    float a = ark_load(c, px, {a_at}, {scope});
    float b = ark_load(c, px, {b_at}, {scope});
    const float angle = static_cast<float>(pp[0] + row) * pf[i];
    ark_rotate(a, b, ark_sin(angle), ark_cos(angle));
    ark_publish(c, po, {a_out}, a, {system(sig, 1)});
    ark_publish(c, po, {b_out}, b, {system(sig, 1)});
  }}
"""
        )
        return text.function(name, body)


register(RopeKv())
register(RotaryEmbedding())
register(SwiGlu())
