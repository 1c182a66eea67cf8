"""Matrix products on warpgroups (wgmma), in the variant `matrix`: bf16 and fp16, any transposes,
batches, ragged edges, parts of k.

Tiles of 128 rows, of which each warpgroup has half, or of 64, of which each has half the columns.
The loading half copies boxes of both operands through tensor maps, swizzled so that wgmma reads
them without bank conflicts; what lies outside of an operand arrives as zeros, and is not written.
Called by ark_cuda.tasks.matmul.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

from ark.codegen.dialect import BoxMap
from ark.machine import Machine
from ark.plan.kind import OperandType, Signature
from ark.tasks import expression, text
from ark.tasks.matmul import dims, each_tile, finish, k_range, outputs, place_names

HEIGHTS, WIDTHS = (64, 128), (64, 128, 256)
LINE = 128  # bytes of k in a stage, of each row
ROOM = 4 * 49152  # bytes of all stages; ARK_MATRIX_ROOM
MOST_STAGES = 16
# The stages, a slab of 16 by 64 results a warp, and room to begin at a multiple of 1024.
SCRATCH = ROOM + 8 * 2048 + 1024
KINDS = {"bf16": "bf16", "fp16": "f16"}


def serves(sig: Signature, machine: Machine) -> bool:
    """Does this body compute the signature's tiles?"""
    rows, columns = sig.params["tile"]
    left, right, out = sig.operands[:3]
    plain = sig.params.get("expr") is None and not sig.params.get("gated")
    return (
        machine.has("wgmma")
        and machine.variant.name == "matrix"
        and left.dtype == right.dtype
        and left.dtype in KINDS
        and (out.dtype in (left.dtype, "fp32") or not plain)
        and (rows in HEIGHTS or rows == dims(sig)[0] < HEIGHTS[-1])
        and columns in WIDTHS
        # Half of 64 columns is less than a swizzled box of columns.
        and (_height(sig) + columns > 128 or bool(sig.params["transpose_b"]))
        and all(_mappable(o) for o in ((left, right, out) if plain else (left, right)))
        and not any(o.packet for o in sig.operands)
    )


def loader(signatures: Sequence[Signature], machine: Machine) -> str:
    """The ring's shape for a plan's products, and the loading thread's code."""
    stage = max((_stage(s) for s in signatures if _matmul_here(s, machine)), default=ROOM // 4)
    if any(s.kind == "attention_tiles" for s in signatures):
        stage = ROOM // 4  # beside its queries four stages fit
    stages = min(MOST_STAGES, ROOM // stage)
    files = resources.files("ark_cuda")
    return (
        f"{files.joinpath('barriers.h').read_text()}"
        f"constexpr ark_u32 ARK_MATRIX_STAGES = {stages}u;\n"
        f"constexpr ark_u32 ARK_MATRIX_STAGE = {stage}u;\n"
        f"{files.joinpath('matrix.h').read_text()}"
    )


def _matmul_here(sig: Signature, machine: Machine) -> bool:
    return sig.kind == "matmul" and serves(sig, machine)


def _height(sig: Signature) -> int:
    """Rows that the instructions for a tile have: its own, or more if there are no others."""
    return next(h for h in HEIGHTS if h >= sig.params["tile"][0])


def _high(sig: Signature) -> int:
    """Rows of a that a stage brings: of a tile, or all there are if they are fewer."""
    rows = _height(sig)
    return rows if sig.params["transpose_a"] else min(rows, -(-dims(sig)[0] // 8) * 8)


def _stage(sig: Signature) -> int:
    """Bytes of a stage."""
    return LINE * (_high(sig) + int(sig.params["tile"][1]))


def _wide(sig: Signature) -> int:
    """Columns of a tile that one warpgroup has."""
    columns: int = sig.params["tile"][1]
    return columns if _height(sig) == 128 else columns // 2


def _mappable(operand: OperandType) -> bool:
    """A tensor map wants at most four dimensions, and rows that begin at multiples of 16 bytes."""
    return len(operand.shape) <= 4 and all(
        s * operand.itemsize % 16 == 0 for s in operand.strides[:-1]
    )


def maps(sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
    """The tensor maps of a and b, whose addresses follow the operands' in a record."""
    if not serves(sig, machine):
        return ()
    deep = LINE // sig.operands[0].itemsize
    a_rows = deep if sig.params["transpose_a"] else _high(sig)
    b_rows = sig.params["tile"][1] if sig.params["transpose_b"] else deep
    flat = _flat(sig)
    return tuple(_map(sig.operands[i], i, rows, flat) for i, rows in ((0, a_rows), (1, b_rows)))


def _flat(sig: Signature) -> bool:
    """Have both operands but one matrix?"""
    shapes = (text.pad4(o.shape, 1) for o in sig.operands[:2])
    return all(shape[0] == shape[1] == 1 for shape in shapes)


def _map(operand: OperandType, index: int, rows: int, flat: bool) -> BoxMap:
    shape, strides = text.pad4(operand.shape, 1), text.pad4(operand.strides, 0)
    sizes = tuple(reversed(shape))
    steps = tuple(s * operand.itemsize or 16 for s in reversed(strides[:3]))
    if flat:
        return BoxMap(index, operand.dtype, sizes[:2], steps[:1], (LINE // operand.itemsize, rows))
    return BoxMap(index, operand.dtype, sizes, steps, (LINE // operand.itemsize, rows, 1, 1))


def multiply(columns: int, kind: str, transposes: tuple[int, int]) -> str:
    """One instruction: 64 rows, `columns` columns, 32 bytes deep."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"{columns}_{kind}_{transposes[0]}{transposes[1]}"
    return f"""#ifndef ARK_WGMMA_{name}
#define ARK_WGMMA_{name}
ARK_DEVICE void ark_wgmma_{name}(float (&d)[{count}], ark_u32 a, ark_u32 b, ark_u32 add) {{
  asm volatile(
      "{{\\n .reg .pred p;\\n .reg .b64 x, y;\\n setp.ne.b32 p, %{count + 2}, 0;\\n"
      " mov.b64 x, {{%{count}, " ARK_MATRIX_ROWS "}};\\n"
      " mov.b64 y, {{%{count + 1}, " ARK_MATRIX_ROWS "}};\\n"
      " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}}, "
      "x, y, p, 1, 1, {transposes[0]}, {transposes[1]};\\n}}"
      : {results}
      : "r"(a), "r"(b), "r"(add));
}}
#endif
"""


def write(name: str, sig: Signature, machine: Machine) -> str:
    """The computing half."""
    rows, wide = _height(sig), _wide(sig)
    kind = KINDS[sig.operands[0].dtype]
    across = (int(sig.params["transpose_a"]), int(not sig.params["transpose_b"]))
    # Where k is the inner dimension, 16 of it are 32 bytes of a row; else 16 rows of 128 bytes.
    a_step, b_step = (128 if t else 2 for t in across)
    a_lead, b_lead = (512 if t else 1 for t in across)
    # A warpgroup's half of the rows of a, or of the columns of b: these are rows, or boxes.
    a_half = "group * 8192" if rows == 128 else "0"
    b_half = "0" if rows == 128 else f"group * {wide * LINE}"
    call = f"ark_wgmma_{wide}_{kind}_{across[0]}{across[1]}"
    wait = '    asm volatile("wgmma.wait_group.sync.aligned {};" ::: "memory");\n'
    release = "    if (first) ark_matrix_release({});\n"
    if _overlaps(sig):
        # The products of one stage are under way while the next one is waited for.
        each = f"    if (k > 0u) {{\n{wait.format(1)}{release.format('before')}    }}\n"
        each += "    before = empty + 8u * at.slot;\n"
        last = wait.format(0) + release.format("before")
    else:
        each, last = wait.format(0) + release.format("empty + 8u * at.slot"), ""
    # Cleared although the first product overwrites them: what is read before it is written would
    # be alive in all other bodies of the loop too.
    body = f"""  float d[{wide // 2}] = {{}};
  const ark_u32 steps = {_steps(sig)};
  {"ark_u32 before = 0u;" if last else ""}
  for (ark_u32 k = 0u; k < steps; ++k) {{
    ark_matrix_filled(c, full + 8u * at.slot, at.parity);
    const ark_u32 a = left + at.slot * (ARK_MATRIX_STAGE >> 4);
    const ark_u32 b = right + at.slot * (ARK_MATRIX_STAGE >> 4);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    {call}(d, a, b, k);
    {call}(d, a + {a_step}, b + {b_step}, 1u);
    {call}(d, a + {2 * a_step}, b + {2 * b_step}, 1u);
    {call}(d, a + {3 * a_step}, b + {3 * b_step}, 1u);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
{each}    ark_matrix_next(at);
  }}
{last}#pragma unroll
  for (int i = 0; i < {wide // 2}; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
{_store(sig)}"""
    # Inlined: the compiler would wait for each instruction of a function that is called.
    return (
        multiply(wide, kind, across)
        + f"""ARK_DEVICE void {name}(ArkCtx& c, const ArkTask& t) {{
  const int group = ark_warp() / 4, first = ark_tid() % 128 == 0;
  ark_u32 full = ark_shared_address(ark_matrix.full);
  ark_u32 empty = ark_shared_address(ark_matrix.empty);
  asm volatile("" : "+r"(full), "+r"(empty));  // kept in registers: not found again at each step
  const ark_u32 stages = ark_shared_address(ark_matrix_stage(c, 0u));
  const ark_u32 left = ark_matrix_operand(stages + {a_half}, {a_lead}u);
  const ark_u32 right = ark_matrix_operand(stages + {_high(sig) * LINE} + {b_half}, {b_lead}u);
  ArkMatrixSlot at = ark_matrix_place_of(group);
{outputs(sig)}{each_tile(sig, body, meet=False)}\
  if (first) ark_matrix_keep_place(group, at);
}}
"""
    )


# Both operands' bytes up to which stages overlap. On an H100 4096^3 is 2.5% faster so, and 8192^3,
# whose operands come from memory and want all stages, 8% slower.
OVERLAP_BYTES = 128 << 20


def _overlaps(sig: Signature) -> bool:
    a, b = (math.prod(o.shape) * o.itemsize for o in sig.operands[:2])
    return a + b <= OVERLAP_BYTES


def _steps(sig: Signature) -> str:
    """Stages that a tile takes."""
    k0, k1 = k_range(sig)
    deep = LINE // sig.operands[0].itemsize
    if k0 == "0":
        return f"{-(-int(k1) // deep)}u"
    return f"static_cast<ark_u32>(({k1} - {k0} + {deep - 1}) / {deep})"


def _store(sig: Signature) -> str:
    """Stores a tile's sums, or what the expression makes of them."""
    m, n, _ = dims(sig)
    if sig.params.get("gated"):
        return _store_gated(sig)
    wide, out = _wide(sig), sig.operands[2]
    place = _corner(sig)
    start = text.offset(sig, 2, place_names(sig, "m0", "left0"))
    if sig.params.get("expr") is None and out.dtype == "fp32":
        return (
            f"{place}  ark_matrix_store_whole<{wide}>(\n"
            f"      d, po + {start}, {out.strides[-2]}, top, {m} - m0, {n} - left0);\n"
        )
    if sig.params.get("expr") is None:
        return (
            f"{place}  ark_matrix_store<{out.ctype}, {wide}>(\n"
            f"      c, d, po + {start}, {out.strides[-2]}, top, {m} - m0, {n} - left0);\n"
        )
    single = "const int row = m0 + at_row, column = left0 + at_column + j;\n" + finish(
        sig, "v[j]", "row", "column"
    )
    body = (
        f"#pragma unroll\n      for (int j = 0; j < 8; ++j) {{\n"
        f"      if (j >= left) break;\n      {single}      }}\n"
    )
    packed = _packed(sig)
    if packed is not None:
        addresses = " | ".join(text.address(sig, i) for i in packed)
        body = (
            f"    if (left == 8 && ark_aligned({addresses})) {{\n{_eight(sig, packed)}"
            f"    }} else {{\n{body}    }}\n"
        )
    return (
        f"{place}  const auto eight = [&](int at_row, int at_column, const float* v, int left) {{\n"
        f"{body}  }};\n"
        f"  ark_matrix_each<{wide}>(c, d, top, {m} - m0, {n} - left0, eight);\n"
    )


def _corner(sig: Signature) -> str:
    """A warp's first row of the tile, and a warpgroup's first column."""
    rows = _height(sig)
    return (
        f"  const int top = 16 * (ark_warp() % {rows // 16});\n"
        f"  const int left0 = n0 + {'0' if rows == 128 else f'group * {_wide(sig)}'};\n"
    )


def _store_gated(sig: Signature) -> str:
    """Stores what neighbouring columns, gates and what they let pass, make."""
    m, n, _ = dims(sig)
    out = sig.operands[2]
    aligned = "ark_aligned(reinterpret_cast<ark_u64>(po))" if out.strides[-2] % 8 == 0 else "false"
    return f"""{_corner(sig)}\
  const auto eight = [&](int at_row, int at_column, const float* v, int left) {{
      {out.ctype}* to = po + static_cast<ark_i64>(m0 + at_row) * {out.strides[-2]};
      to += (left0 + at_column) / 2;
      ArkPack<{out.ctype}, 4> made;
#pragma unroll
      for (int j = 0; j < 4; ++j) ark_put(made.v, j, ark_swiglu(v[2 * j], v[2 * j + 1]));
      if (left == 8 && {aligned}) {{
        ark_store_pack<4>(to, made);
      }} else {{
        for (int j = 0; 2 * j < left; ++j) to[j] = made.v[j];
      }}
  }};
  ark_matrix_each<{_wide(sig)}>(c, d, top, {m} - m0, {n} - left0, eight);
"""


def _packed(sig: Signature) -> list[int] | None:
    """The output and the operands behind it that have eight elements side by side; None where such
    eight do not always lie at multiples of 16 bytes.
    """
    found = []
    for i in range(2, len(sig.operands)):
        shape, strides = text.pad4(sig.operands[i].shape, 1), text.pad4(sig.operands[i].strides, 0)
        if shape[3] == 1:
            continue
        if any(n > 1 and s % 8 for n, s in zip(shape[:3], strides[:3], strict=True)):
            return None
        found.append(i)
    return found


def _eight(sig: Signature, packed: list[int]) -> str:
    """Statements that compute and store eight neighbouring results."""
    names = place_names(sig, "row", "column")
    lines = ["const int row = m0 + at_row, column = left0 + at_column;"]
    leaves = [("v[j]", "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, names)
        width = 8 if i in packed else 1
        lines.append(f"const auto e{i} = ark_load_pack<{width}>(p{i} + {at});")
        loaded = text.load(sig, i, f"e{i}.v", "j" if width > 1 else "0")
        leaves.append((loaded, text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    value, _ = writer.write(sig.params["expr"])
    lines += [
        f"ArkPack<{sig.operands[2].ctype}, 8> made;",
        "#pragma unroll",
        "for (int j = 0; j < 8; ++j) {",
        *writer.statements,
        text.store(sig, 2, "made.v", "j", value),
        "}",
        f"ark_store_pack<8>(po + {text.offset(sig, 2, names)}, made);",
    ]
    return "".join(f"{'' if line[0] == '#' else '      '}{line}\n" for line in lines)


def load(name: str, sig: Signature, machine: Machine) -> str | None:
    """The loading half, run by one thread."""
    if not serves(sig, machine):
        return None
    columns, high = sig.params["tile"][1], _high(sig)
    deep = LINE // sig.operands[0].itemsize
    k0, k1 = k_range(sig)
    flat = _flat(sig)

    def boxes(index: int, rows: int, outer: bool, at: str) -> str:
        """outer: k counts rows of the map, and boxes of 64 stand side by side."""
        shape = text.pad4(sig.operands[index].shape, 1)
        batch = "" if flat else "".join(f", {'0' if shape[d] == 1 else f'i{d}'}" for d in (1, 0))
        map_at, place = f"map{index}", ("m0", "n0")[index]
        if not outer:
            return f"    ark_box_load({at}, {map_at}, k, {place}{batch}, full);\n"
        return "".join(
            f"    ark_box_load({at} + {LINE * deep * i}, {map_at}, {place} + {deep * i}, k{batch}, "
            "full);\n"
            for i in range(rows // deep)
        )

    body = (
        f"  const int end = {k1};\n"
        f"  for (int k = {k0}; k < end; k += {deep}) {{\n"
        "    if (!ark_matrix_free(load)) {\n      load.stopped = true;\n      return;\n    }\n"
        "    ark_u64* full = &ark_matrix.full[load.at.slot];\n"
        "    char* stage = ark_matrix_stage(c, load.at.slot);\n"
        f"    ark_matrix_expect(full, {_stage(sig)}u);\n"
        + boxes(0, high, bool(sig.params["transpose_a"]), "stage")
        + boxes(1, columns, not sig.params["transpose_b"], f"stage + {high * LINE}")
        + "    ark_matrix_issued(load);\n  }\n"
    )
    first = len(sig.operands)
    body = (
        f"  const ark_u64 map0 = t.operand[{first}], map1 = t.operand[{first + 1}];\n"
        + each_tile(sig, body, meet=False)
    )
    return (
        f"ARK_DEVICE void {name}_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {{\n"
        f"{body}}}\n"
    )
