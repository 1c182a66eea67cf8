"""Linear layers of one input row in the variant `roles`: a stage of weights is one warp's.

Serves what ark.tasks.linear.narrows says; linear_roles.h has the device side. Called by
ark_cuda.tasks.linear.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import outputs
from ark.tasks.rotary import (
    rope,
    system,
)
from ark.tasks.tokens import SAMPLING, sample_best, sample_finish, sample_operands

ALIGN = 16


def _input_bytes(sig: Signature) -> int:
    return -(-sig.operands[0].shape[1] * sig.operands[1].itemsize // ALIGN) * ALIGN


def _task_rows(sig: Signature, machine: Machine) -> int:
    """Most rows that a task has."""
    rows = sig.params["rows"]
    stages = -(-sig.operands[1].shape[0] // rows)
    return -(-stages // machine.processors) * rows


def scratch(sig: Signature, machine: Machine) -> int:
    """The input row, the warps' squares, and the parts' sums where rows are cut along k, in
    bytes."""
    splits = sig.params["split_k"]
    parts = 4 * (splits + 1) * _task_rows(sig, machine) if splits > 1 else 0
    best = 8 * machine.warps if sig.params["epilogue"] == "sample" else 0
    return _input_bytes(sig) + 4 * machine.warps + parts + best


def poll(name: str, sig: Signature, machine: Machine) -> str:
    """Waits for the packet that a processor far from this one is expected to publish last; of
    shares for that of the first and of the last rank, one of which is a peer's.
    """
    shares, k = sig.operands[0].shape
    p = machine.processors
    body = (
        text.operand(sig, 0, "px")
        + f"  const int far = (static_cast<int>(c.processor) + {p // 2}) % {p};\n"
        f"  const auto* last = px + (static_cast<ark_i64>(far + 1) * {k} + {p - 1}) / {p} - 1;\n"
    )
    for share in sorted({0, shares - 1}):
        body += f"  ark_poll_packet(c, last + {share * k}, {system(sig, 0)});\n"
    return f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


def write(name: str, sig: Signature, machine: Machine) -> str:
    """The computing warps' part."""
    k, splits = sig.operands[0].shape[1], sig.params["split_k"]
    rows = sig.params["rows"]
    norm = sig.params["prologue"] == "rmsnorm"
    ctype = sig.operands[1].ctype
    operands, prepared, prepare, epilogue = _epilogue(sig, 4 if norm else 3)
    body = (
        text.operand(sig, 0, "px")
        + text.operand(sig, 2, "po", const=False)
        + (text.operand(sig, 3, "pn") if norm else "")
        + f"""  constexpr int K = {k}, R = {rows}, P = {splits}, STEP = 32 / R, m = 0;
  {ctype}* xs = reinterpret_cast<{ctype}*>(ARK_SCRATCH(c));
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c) + {_input_bytes(sig)});
{operands}  const int end = t.coord[1], lead = ark_lane() % STEP == 0 ? 1 : 0;
  const int first = static_cast<int>((static_cast<ark_u32>(ark_warp()) + ARK_WARPS -
                    (c.stage_base + t.fetch_begin) % ARK_WARPS) % ARK_WARPS);
  const auto row_of = [&](int j) {{ return t.coord[0] + j / P * R + ark_lane() / STEP; }};
{prepared}  const auto prepare = [&](int row) {{
    if (!lead || row >= end) return;
{prepare}  }};
  prepare(row_of(first));
  float factor[{"2 * ARK_ROW_PAIRS<K>" if norm else "1"}];
"""
        + ("  ark_row_factors<K>(pn, factor);\n" if norm else "")
        + (_clear_parts(sig, machine) if splits > 1 else "")
        + "  if (!ark_enter(c)) return false;\n"
        + ("  clear();\n" if splits > 1 else "")
        + f"  {'float square = ' if norm else ''}ark_row<K, {sig.operands[0].shape[0]}, "
        f"{'true' if norm else 'false'}>"
        f"(c, px, factor, xs, {system(sig, 0)});\n"
    )
    if norm:
        body += (
            "  square = ark_warp_sum(square);\n"
            "  if (ark_lane() == 0) squares[ark_warp()] = square;\n"
        )
    body += "  ark_gathered();\n"
    if norm:
        body += (
            "  float all = 0.0f;\n#pragma unroll\n"
            "  for (int w = 0; w < ARK_WARPS; ++w) all += squares[w];\n"
            f"  const float scale = ark_rsqrt(all / K + {text.literal(sig.params['eps'])});\n"
        )
    else:
        body += "  constexpr float scale = 1.0f;\n"
    body += f"""  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  for (int j = first; j < stages; j += ARK_WARPS) {{
    const int row = row_of(j);
    if (j != first) prepare(row);
    const {ctype}* w = reinterpret_cast<const {ctype}*>(ark_stage(c, t.fetch_begin + j));
    float sum[R];
    ark_stage_dots<R, K / P>(w, xs + j % P * (K / P), sum);
    ark_stage_done(c, t.fetch_begin + j);
    float total = ark_fold<R>(sum);
"""
    if splits > 1:
        body += "    if (!ark_row_total<P>(total, j / P, j % P, parts, counts, total)) continue;\n"
    body += f"    total *= scale;\n{epilogue}  }}\n"
    before = ""
    if sig.params["epilogue"] == "sample":
        before = SAMPLING
        parts = splits > 1 and (splits + 1) * _task_rows(sig, machine)
        body += sample_finish(f"squares + ARK_WARPS + {int(parts)}")
    body += "  return true;\n"
    return f"{before}ARK_DEVICE bool {name}(ArkCtx& c, const ArkTask& t) {{\n{body}}}\n"


def _clear_parts(sig: Signature, machine: Machine) -> str:
    rows = _task_rows(sig, machine)
    return f"""  float* parts = squares + ARK_WARPS;
  ark_u32* counts = reinterpret_cast<ark_u32*>(parts + {rows} * P);
  const auto clear = [&] {{
    for (int i = ark_tid(); i < {rows}; i += ARK_THREADS) counts[i] = 0u;
  }};
"""


def _epilogue(sig: Signature, first: int) -> tuple[str, str, str, str]:
    """Operands, what a lane holds for its row, how it gets that early, what becomes of the sum."""
    kind, scope = sig.params["epilogue"], system(sig, 2)
    peers = outputs(sig)[1:]
    theirs = "".join(text.operand(sig, i, f"peer{i}", const=False) for i in peers)
    mine = "    if (lead && row < end) {\n"
    pair = (
        "    const float other = ark_shfl_xor(total, STEP);\n"
        "    if (lead && (ark_lane() / STEP & 1) == 0 && row < end) {\n"
    )
    if kind == "rope_kv":
        return (
            f"  const auto rope = {rope(sig, 2, first)};\n",
            "  float sine = 0.0f, cosine = 1.0f;\n",
            "    if (row >= decltype(rope)::ROTATED) return;\n"
            "    const float angle = ark_rope_angle(rope, m, row);\n"
            "    sine = ark_sin(angle), cosine = ark_cos(angle);\n",
            f"{pair}      float a = total, b = other;\n"
            "      if (row < decltype(rope)::ROTATED) ark_rotate(a, b, sine, cosine);\n"
            "      ark_rope_store(c, rope, m, row, a, b);\n    }\n",
        )
    if kind == "swiglu":
        at = text.offset(sig, 2, ["0", "0", "m", "row / 2"])
        value = "total / (1.0f + ark_exp(-total)) * other"
        return "", "", "", f"{pair}      ark_publish(c, po, {at}, {value}, {scope});\n    }}\n"
    at = text.offset(sig, 2, ["0", "0", "m", "row"])
    published = "".join(  # what has the longer way first
        f"      ark_publish(c, {to}, {at}, total, {system(sig, i)});\n"
        for i, to in (*((i, f"peer{i}") for i in peers), (2, "po"))
    )
    if kind == "store":
        return theirs, "", "", f"{mine}{published}    }}\n"
    if kind == "sample":
        best = sample_best("total", "row")
        return sample_operands(sig, first), "", "", f"{mine}{published}{best}    }}\n"
    # The residual is older than the input.
    parts = []
    for share in range(sig.operands[first].shape[0]):
        at_residual = text.offset(sig, first, ["0", "0", f"{share}", "row"])
        parts.append(f"ark_load(c, pr, {at_residual}, {system(sig, first)})")
    return (
        text.operand(sig, first, "pr") + theirs,
        "  float residual = 0.0f;\n",
        f"    residual = {' + '.join(parts)};\n",
        f"{mine}      total += residual;\n{published}    }}\n",
    )
