"""Linear layers on the operand stream: y = epilogue(prologue(x) w^T) with w of shape (n, k).

The weights never wait: they come through the stream in stages of whole rows, and each stage is one
warp's. The input is gathered once per task into shared memory (from plain memory or packets), with
an optional rmsnorm on the way. Rows of w that belong together (the two halves of a rotary pair, a
gate and its up row) are neighbours, so that the epilogue has both at hand.

A row wider than a stage comes in pieces, for a backend's body that keeps x in registers.

params: rows (of w per stage), pieces (stages of one row, then rows is 1), prologue (none, rmsnorm),
eps, epilogue (store, add, swiglu, rope_kv), and for rope_kv heads, kv_heads, head_dim. operands:
x (m, k), w (n, k), output, [norm weight], then add: residual; rope_kv: position, frequencies, key
cache, value cache (kv_heads, context, head_dim), [fresh (m, 2 * kv_heads * head_dim): the new keys
and values once more, for readers in the same iteration]. coord: first and last+1 row of w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ark.errors import PlanError
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    Epsilon,
    Heads,
    Params,
    Pieces,
    Places,
    count,
    is_dense,
    matrix,
    need,
    shaped,
)
from ark.plan.types import Fetch
from ark.tasks import text
from ark.tasks.rotary import (
    has_fresh,
    rotary_accesses,
    rotary_angle,
    rotary_check,
    rotary_operands,
    rotary_store,
    rotated_columns,
    system,
)

StageRows = Annotated[int, msgspec.Meta(ge=1, le=64)]
MAX_SUMS = 4096  # of a task, held by a lane: rows of x times rows of a stage


class LinearParams(Params, frozen=True):
    rows: StageRows
    pieces: Pieces
    prologue: Literal["none", "rmsnorm"]
    epilogue: Literal["store", "add", "swiglu", "rope_kv"]
    eps: Epsilon = 0.0
    heads: Heads | None = None
    kv_heads: Heads | None = None
    head_dim: Heads | None = None


class Linear(TaskKind):
    name = "linear"
    params = LinearParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p, first = sig.params, self._first_extra(sig)
        extra = {"store": (0,), "add": (1,), "swiglu": (0,), "rope_kv": (4, 5)}[p["epilogue"]]
        count(sig, *(first + n for n in extra))
        (m, k), (n, inner) = matrix(sig, 0), matrix(sig, 1)
        need(k == inner, f"rows of {k} are multiplied by weights of {inner}")
        need(is_dense(sig.operands[1]), "the weights are strided, expected dense")
        need(m * p["rows"] <= MAX_SUMS, f"{m} rows by {p['rows']} rows are too many for a task")
        need(p["pieces"] == 1 or (p["rows"] == 1 and k % p["pieces"] == 0), "pieces do not fit")
        paired = p["epilogue"] in ("swiglu", "rope_kv")
        need(not paired or p["rows"] % 2 == n % 2 == 0, "pairs are torn apart")
        if first == 4:
            need("eps" in p, "it has no eps")
            shaped(sig, 3, (k,), dense=True)
        if p["epilogue"] == "rope_kv":
            rotary_check(sig, 2, first, (m, n))
        else:
            shaped(sig, 2, (m, n // 2 if p["epilogue"] == "swiglu" else n))
        if p["epilogue"] == "add":
            shaped(sig, first, (m, n))

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[1].shape[0], sig.params["rows"]),), span=True)

    def in_place(self, sig: Signature) -> frozenset[int]:
        added = sig.params["epilogue"] == "add"
        return frozenset({self._first_extra(sig)} if added else ())

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        n0, n1 = coord[:2]
        m, k = sig.operands[0].shape
        found = [
            Access(0, (0, 0), (m, k)),
            Access(1, (n0, 0), (n1, k)),
        ]
        next_operand = 3
        if sig.params["prologue"] == "rmsnorm":
            found.append(whole(3, sig.operands[3]))
            next_operand = 4
        epilogue = sig.params["epilogue"]
        if epilogue == "swiglu":
            found.append(Access(2, (0, n0 // 2), (m, n1 // 2), write=True))
        elif epilogue == "rope_kv":
            found += rotary_accesses(sig, 2, next_operand, n0, n1)
        else:
            found.append(Access(2, (0, n0), (m, n1), write=True))
            if epilogue == "add":
                found.append(Access(next_operand, (0, n0), (m, n1)))
        return found

    def packets(self, sig: Signature) -> frozenset[int]:
        found = {0, 2}
        first = self._first_extra(sig)
        if sig.params["epilogue"] == "add":
            found.add(first)
        if sig.params["epilogue"] == "rope_kv" and has_fresh(sig, first):
            found.add(first + 4)
        return frozenset(found)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        m, k = sig.operands[0].shape
        return 4 * machine.warps + (4 * m * k if sig.params["pieces"] == 1 else 0)

    def stream(self, sig: Signature, coord: Sequence[int]) -> tuple[Fetch, ...]:
        n0, n1 = coord[:2]
        row = sig.operands[1].shape[1] * sig.operands[1].itemsize
        stage = sig.params["rows"] * row // sig.params["pieces"]
        return (Fetch(1, n0 * row, (n1 - n0) * row, stage),)

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        m, k = sig.operands[0].shape
        rows = coord[1] - coord[0]
        return 2.0 * m * k * rows, float(rows * k * sig.operands[1].itemsize)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        if sig.params["pieces"] > 1:
            raise PlanError(
                f"{name} takes rows of {sig.operands[1].shape[1]} weights in {sig.params['pieces']}"
                f" pieces, but the code generator of {machine.arch} has no body for that; expected "
                "a machine model with row_slice 0"
            )
        m, k = sig.operands[0].shape
        norm = sig.params["prologue"] == "rmsnorm"
        row = text.offset(sig, 0, ["0", "0", "m", "0"])
        bring = (
            f"ark_load_row<{'true' if norm else 'false'}>(c, px + ({row}), "
            f"{sig.operands[0].strides[-1]}, K, xs + m * K, {system(sig, 0)})"
        )
        body = (
            text.operand(sig, 0, "px")
            + text.operand(sig, 2, "po", const=False)
            + f"  constexpr int M = {m}, K = {k}, R = {sig.params['rows']};\n"
            "  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));\n"
        )
        if norm:
            # The weights of the norm are there before the input is; its scale waits for the end.
            body += (
                text.operand(sig, 3, "pn") + "  float scale[M];\n"
                "  for (int k = ark_tid(); k < K; k += ARK_THREADS) {\n"
                "    const float v = ark_get(pn, k);\n"
                "    for (int m = 0; m < M; ++m) xs[m * K + k] = v;\n  }\n"
                f"  for (int m = 0; m < M; ++m) scale[m] = {bring};\n"
                "  for (int m = 0; m < M; ++m) scale[m] = ark_rsqrt(ark_block_sum(scale[m], "
                f"xs + M * K) / K + {text.literal(sig.params['eps'])});\n"
            )
        else:
            body += f"  for (int m = 0; m < M; ++m) {bring};\n"
        weight = sig.operands[1].ctype
        before, after = self._epilogue(sig)
        ragged = (
            "      if (rows < R) {\n        for (int r = 0; r < R; ++r) if (r < rows) "
            "ark_dots<1>(w + r * K, K, xs + m * K, K, acc[m] + r);\n        continue;\n      }\n"
        )
        body += (
            "  ark_sync();\n" + self._epilogue_operands(sig) + "  ark_u32 stage = t.fetch_begin;\n"
            "  for (int n = t.coord[0]; n < t.coord[1]; n += R, ++stage) {\n"
            "    if (!ark_stage_mine(c, stage)) continue;\n"
            "    const int rows = t.coord[1] - n < R ? t.coord[1] - n : R;\n"
            + before
            + f"    const {weight}* w = reinterpret_cast<const {weight}*>(ark_stage(c, stage));\n"
            "    float acc[M][R];\n"
            "    for (int m = 0; m < M; ++m) {\n"
            + (ragged if sig.operands[1].shape[0] % sig.params["rows"] else "")
            + "      ark_dots<R>(w, K, xs + m * K, K, acc[m]);\n    }\n"
            "    ark_stage_done(c, stage);\n"
            "    if (ark_lane() != 0) continue;\n"
            "    for (int m = 0; m < M; ++m) {\n"
            + ("      for (int r = 0; r < R; ++r) acc[m][r] *= scale[m];\n" if norm else "")
            + after
            + "    }\n  }\n"
        )
        return text.function(name, body)

    def _first_extra(self, sig: Signature) -> int:
        return 4 if sig.params["prologue"] == "rmsnorm" else 3

    def _epilogue_operands(self, sig: Signature) -> str:
        first = self._first_extra(sig)
        if sig.params["epilogue"] == "add":
            return text.operand(sig, first, "pr")
        if sig.params["epilogue"] == "rope_kv":
            return rotary_operands(sig, first)
        return ""

    def _epilogue(self, sig: Signature) -> tuple[str, str]:
        """What a lane prepares while its stage is on the way, and what it does with the sums."""
        out = system(sig, 2)
        epilogue = sig.params["epilogue"]
        if epilogue == "rope_kv":
            return self._rope_kv_source(sig)
        if epilogue == "swiglu":
            at = text.offset(sig, 2, ["0", "0", "m", "(n + r) / 2"])
            return "", (
                "      for (int r = 0; r < R; r += 2) if (r < rows) {\n"
                "        const float g = acc[m][r];\n"
                f"        ark_publish(c, po, {at}, "
                f"g / (1.0f + ark_exp(-g)) * acc[m][r + 1], {out});\n"
                "      }\n"
            )
        at = text.offset(sig, 2, ["0", "0", "m", "(n + r)"])
        each = "      for (int r = 0; r < R; ++r) if (r < rows) "
        if epilogue == "store":
            return "", f"{each}ark_publish(c, po, {at}, acc[m][r], {out});\n"
        first = self._first_extra(sig)
        residual = text.offset(sig, first, ["0", "0", "m", "(n + r)"])
        before = (
            "    float rest[M][R] = {};\n    if (ark_lane() == 0) for (int m = 0; m < M; ++m) {\n"
            f"{each}rest[m][r] = ark_load(c, pr, {residual}, {system(sig, first)});\n    }}\n"
        )
        return before, f"{each}ark_publish(c, po, {at}, acc[m][r] + rest[m][r], {out});\n"

    def _rope_kv_source(self, sig: Signature) -> tuple[str, str]:
        rotated = rotated_columns(sig)
        before = (
            "    float sine[M][R / 2] = {}, cosine[M][R / 2] = {};\n"
            "    if (ark_lane() == 0) for (int m = 0; m < M; ++m)\n"
            "    for (int r = 0; r < R; r += 2) {\n      const int row = n + r;\n"
            f"      if (r >= rows || row >= {rotated}) continue;\n"
            f"      const float angle = {rotary_angle(sig)};\n"
            "      sine[m][r / 2] = ark_sin(angle);\n"
            "      cosine[m][r / 2] = ark_cos(angle);\n    }\n"
        )
        return before, (
            "      for (int r = 0; r < R; r += 2) if (r < rows) {\n"
            "        const int row = n + r;\n"
            "        float a = acc[m][r], b = acc[m][r + 1];\n"
            f"        if (row < {rotated}) ark_rotate(a, b, sine[m][r / 2], cosine[m][r / 2]);\n"
            + rotary_store(sig, 2, self._first_extra(sig))
            + "      }\n"
        )


register(Linear())
