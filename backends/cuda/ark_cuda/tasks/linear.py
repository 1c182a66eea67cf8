"""Linear layers of one input row through the ring, by all warps of a block together.

Serves decoding: one row, on a machine with a ring, where the row splits evenly over the threads.
The input comes straight into registers, slice by slice, and the epilogue has a thread per output;
linear.h has the device side. Everything else is the common body's. Called by the writer through the
dialect.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import narrows
from ark.tasks.rotary import (
    rope,
    system,
)
from ark.tasks.tokens import SAMPLING, sample_best, sample_finish, sample_operands
from ark_cuda.tasks import linear_roles
from ark_cuda.tasks.inline import inlined

MAX_ROWS = 256  # rows whose sums wait in shared memory for an epilogue


def _vector(sig: Signature, machine: Machine) -> int:
    """Elements of the input that a thread loads at once; 0 if this body does not serve."""
    rows, k = sig.operands[0].shape
    share, rest = divmod(k, machine.lanes * machine.warps)
    weight = sig.operands[1]
    if not machine.ring_bytes or rows != 1 or rest or not 0 < share <= machine.row_slice:
        return 0
    if weight.dtype not in ("fp32", "fp16", "bf16") or sig.params["rows"] not in (1, 2, 4, 8):
        return 0
    share //= sig.params["split_k"]
    return next((e for e in (8, 4, 2) if share % e == 0 and e * weight.itemsize <= 16), 0)


def _pitch(sig: Signature, machine: Machine) -> int:
    """Rows between two epilogues, a multiple of a stage's."""
    rows = sig.params["rows"]
    stages = -(-sig.operands[1].shape[0] // rows)
    return min(-(-stages // machine.processors) * rows, MAX_ROWS)


def in_roles(sig: Signature, machine: Machine) -> bool:
    """Does the body of the variant `roles` take it?"""
    return narrows(sig, machine)


def poll(name: str, sig: Signature, machine: Machine) -> str | None:
    """In the variant `roles`: what opens the task; None where its body does not serve."""
    return linear_roles.poll(name, sig, machine) if in_roles(sig, machine) else None


def scratch(sig: Signature, machine: Machine) -> int:
    """The slices' sums of rows, and of squares, in bytes."""
    if in_roles(sig, machine):
        return linear_roles.scratch(sig, machine)
    if not _vector(sig, machine):
        return 0
    best = 8 * machine.warps if sig.params["epilogue"] == "sample" else 0
    return 4 * machine.warps * (_pitch(sig, machine) + 1) + best


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    if in_roles(sig, machine):
        return linear_roles.write(name, sig, machine)
    vector = _vector(sig, machine)
    if not vector:
        return None
    k = sig.operands[0].shape[1]
    norm = sig.params["prologue"] == "rmsnorm"
    stride = sig.operands[0].strides[-1]
    ctype = sig.operands[1].ctype
    first = 4 if norm else 3
    operands, ahead, epilogue = _epilogue(sig, first)
    body = (
        text.operand(sig, 0, "px")
        + text.operand(sig, 2, "po", const=False)
        + (text.operand(sig, 3, "pn") if norm else "")
        + f"""  constexpr int K = {k}, R = {sig.params["rows"]}, PITCH = {_pitch(sig, machine)};
  constexpr int P = {sig.params["split_k"]}, V = K / P / ARK_THREADS, E = {vector}, m = 0;
  float* part = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* squares = part + ARK_WARPS * PITCH;
  const int slice = ark_warp() * (K / P / ARK_WARPS);
  float x[P][V];
{operands}{ahead}"""
    )
    load = (
        "#pragma unroll\n  for (int p = 0; p < P; ++p) {\n"
        f"    ark_slice<V, E>(c, px + (p * (K / P) + slice) * {stride}, {stride}, x[p], "
        f"{system(sig, 0)});\n  }}\n"
    )
    if norm:
        body += f"""  float factor[P][V];
#pragma unroll
  for (int i = 0; i < P * V; ++i) {{
    factor[i / V][i % V] = ark_get(pn, i / V * (K / P) + slice + ark_slice_at<E>(i % V));
  }}
{load}  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < P * V; ++i) {{
    square = fmaf(x[i / V][i % V], x[i / V][i % V], square);
    x[i / V][i % V] *= factor[i / V][i % V];
  }}
  square = ark_warp_sum(square);
  if (ark_lane() == 0) squares[ark_warp()] = square;
"""
    else:
        body += load
    scale = (
        f"ark_rsqrt(ark_slices(squares, 1) / K + {text.literal(sig.params['eps'])})"
        if norm
        else "1.0f"
    )
    body += f"""  ark_u32 stage = t.fetch_begin;
  for (int begin = t.coord[0]; begin < t.coord[1]; begin += PITCH) {{
    const int end = begin + PITCH < t.coord[1] ? begin + PITCH : t.coord[1];
    if (begin != t.coord[0]) ark_sync();
    for (int n = begin; n < end; n += R) {{
      float sum[R] = {{}};
#pragma unroll
      for (int p = 0; p < P; ++p, ++stage) {{
        const {ctype}* w = reinterpret_cast<const {ctype}*>(ark_stage(c, stage));
        ark_slice_dots<R, K / P, V, E>(w + slice, x[p], sum);
        ark_stage_shared_done(c, stage);
      }}
      ark_slice_sums(sum, part + ark_warp() * PITCH + n - begin);
    }}
    ark_sync();
    const float scale = {scale};
{epilogue}  }}
"""
    if sig.params["epilogue"] == "sample":
        body += sample_finish("squares + ARK_WARPS")
        return SAMPLING + inlined(text.function(name, body))
    return inlined(text.function(name, body))


def _epilogue(sig: Signature, first: int) -> tuple[str, str, str]:
    """Operands, what is prepared for the first rows, and what a thread does with its row."""
    kind, scope = sig.params["epilogue"], system(sig, 2)
    row = "(begin + i)"
    if kind == "rope_kv":
        return f"  const auto rope = {rope(sig, 2, first)};\n", "", _rotary(sig, first)
    if kind == "swiglu":
        at = text.offset(sig, 2, ["0", "0", "m", "(begin + i) / 2"])
        return (
            "",
            "",
            (
                "    for (int i = 2 * ark_tid(); i < end - begin; i += 2 * ARK_THREADS) {\n"
                "      const float g = scale * ark_slices(part + i, PITCH);\n"
                "      const float u = scale * ark_slices(part + i + 1, PITCH);\n"
                f"      ark_publish(c, po, {at}, g / (1.0f + ark_exp(-g)) * u, {scope});\n    }}\n"
            ),
        )
    at = text.offset(sig, 2, ["0", "0", "m", row])
    loop = "    for (int i = ark_tid(); i < end - begin; i += ARK_THREADS) {\n"
    value = "scale * ark_slices(part + i, PITCH)"
    if kind == "store":
        return "", "", f"{loop}      ark_publish(c, po, {at}, {value}, {scope});\n    }}\n"
    if kind == "sample":
        made = (
            f"      const float logit = {value};\n      ark_publish(c, po, {at}, logit, {scope});\n"
        )
        best = sample_best("logit", "begin + i")
        return sample_operands(sig, first), "", f"{loop}{made}{best}    }}\n"
    # The residual is older than the input: a thread has its first row's before it waits.
    at_residual = text.offset(sig, first, ["0", "0", "m", row])
    ahead = text.offset(sig, first, ["0", "0", "m", "(t.coord[0] + ark_tid())"])
    loaded = f"ark_load(c, pr, {at_residual}, {system(sig, first)})"
    return (
        text.operand(sig, first, "pr"),
        "  float residual = 0.0f;\n"
        "  if (ark_tid() < t.coord[1] - t.coord[0] && ark_tid() < PITCH)\n"
        f"    residual = ark_load(c, pr, {ahead}, {system(sig, first)});\n",
        f"{loop}      const bool early = begin == t.coord[0] && i < ARK_THREADS;\n"
        f"      const float more = early ? residual : {loaded};\n"
        f"      ark_publish(c, po, {at}, {value} + more, {scope});\n    }}\n",
    )


def _rotary(sig: Signature, first: int) -> str:
    return (
        "    for (int i = 2 * ark_tid(); i < end - begin; i += 2 * ARK_THREADS) {\n"
        "      const int row = begin + i;\n"
        "      float a = scale * ark_slices(part + i, PITCH);\n"
        "      float b = scale * ark_slices(part + i + 1, PITCH);\n"
        "      if (row < decltype(rope)::ROTATED) {\n"
        "        const float angle = ark_rope_angle(rope, m, row);\n"
        "        ark_rotate(a, b, ark_sin(angle), ark_cos(angle));\n      }\n"
        "      ark_rope_store(c, rope, m, row, a, b);\n    }\n"
    )
