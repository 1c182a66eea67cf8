"""Matrix products on warpgroups (wgmma), in the variant `matrix`: tiles of 128 rows and 64 to 256
columns, bf16 and fp16, any transposes, batches, ragged edges.

The loading half copies boxes of both operands through tensor maps, swizzled so that wgmma reads
them without bank conflicts; what lies outside of an operand arrives as zeros, and is not written.
Called by ark_cuda.tasks.matmul.
"""

from __future__ import annotations

from ark.codegen.dialect import BoxMap
from ark.machine import Machine
from ark.plan.kind import OperandType, Signature
from ark.tasks import expression, text
from ark.tasks.matmul import dims, each_tile, finish, outputs, place_names

ROWS, DEPTH, WIDTHS = 128, 64, (64, 128, 256)
# Four stages, a slab of 16 by 64 results a warp, and room to begin at a multiple of 1024.
SCRATCH = 4 * 49152 + 8 * 2048 + 1024
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
        and (out.dtype == left.dtype or not plain)
        and rows == ROWS
        and columns in WIDTHS
        and all(_mappable(o) for o in ((left, right, out) if plain else (left, right)))
        and not any(o.packet for o in sig.operands)
    )


def _mappable(operand: OperandType) -> bool:
    """A tensor map wants at most four dimensions, and rows that begin at multiples of 16 bytes."""
    return len(operand.shape) <= 4 and all(
        s * operand.itemsize % 16 == 0 for s in operand.strides[:-1]
    )


def maps(sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
    """The tensor maps of a and b, whose addresses follow the operands' in a record."""
    if not serves(sig, machine):
        return ()
    columns = sig.params["tile"][1]
    a_rows = 64 if sig.params["transpose_a"] else ROWS
    b_rows = columns if sig.params["transpose_b"] else 64
    flat = _flat(sig)
    return tuple(_map(sig.operands[i], i, rows, flat) for i, rows in ((0, a_rows), (1, b_rows)))


def _flat(sig: Signature) -> bool:
    """Is there but one matrix?"""
    shape = text.pad4(sig.operands[2].shape, 1)
    return shape[0] == shape[1] == 1


def _map(operand: OperandType, index: int, rows: int, flat: bool) -> BoxMap:
    shape, strides = text.pad4(operand.shape, 1), text.pad4(operand.strides, 0)
    sizes = tuple(reversed(shape))
    steps = tuple(s * operand.itemsize or 16 for s in reversed(strides[:3]))
    if flat:
        return BoxMap(index, operand.dtype, sizes[:2], steps[:1], (64, rows))
    return BoxMap(index, operand.dtype, sizes, steps, (64, rows, 1, 1))


def multiply(columns: int, kind: str, transposes: tuple[int, int]) -> str:
    """One instruction: 64 rows, `columns` columns, 16 deep."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""#ifndef ARK_WGMMA_{columns}_{kind}_{transposes[0]}{transposes[1]}
#define ARK_WGMMA_{columns}_{kind}_{transposes[0]}{transposes[1]}
ARK_DEVICE void ark_wgmma_{kind}_{transposes[0]}{transposes[1]}(float (&d)[{count}], ark_u64 a,
                                                               ark_u64 b, int add) {{
  asm volatile(
      "{{\\n .reg .pred p;\\n setp.ne.b32 p, %{count + 2}, 0;\\n"
      " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}}, "
      "%{count}, %{count + 1}, p, 1, 1, {transposes[0]}, {transposes[1]};\\n}}"
      : {results}
      : "l"(a), "l"(b), "r"(add));
}}
#endif
"""


def write(name: str, sig: Signature, machine: Machine) -> str:
    """The computing half."""
    columns = sig.params["tile"][1]
    _, _, k = dims(sig)
    kind = KINDS[sig.operands[0].dtype]
    across = (int(sig.params["transpose_a"]), int(not sig.params["transpose_b"]))
    # Where k is the inner dimension, 16 of it are 32 bytes of a row; else 16 rows of 128 bytes.
    a_step, b_step = (128 if t else 2 for t in across)
    a_lead, b_lead = (512 if t else 1 for t in across)
    # Cleared although the first product overwrites them: what is read before it is written would
    # be alive in all other bodies of the loop too.
    body = f"""  float d[{columns // 2}] = {{}};
  for (ark_u32 k = 0u; k < {-(-k // DEPTH)}u; ++k, ++used) {{
    ark_matrix_filled(c, used);
    const char* stage = ark_matrix_stage(c, used);
    const ark_u64 a = ark_matrix_operand(stage + group * 8192, {a_lead});
    const ark_u64 b = ark_matrix_operand(stage + {ROWS * 128}, {b_lead});
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      ark_wgmma_{kind}_{across[0]}{across[1]}(d, a + {a_step} * i, b + {b_step} * i, k + i > 0u);
    }}
    asm volatile(
        "wgmma.commit_group.sync.aligned;\\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (first) ark_barrier_arrive(&ark_matrix.empty[used % ARK_MATRIX_STAGES], 1u);
  }}
{_give(sig)}"""
    # Inlined: the compiler would wait for each instruction of a function that is called.
    return (
        multiply(columns, kind, across)
        + f"""ARK_DEVICE void {name}(ArkCtx& c, const ArkTask& t) {{
  const int group = ark_warp() / 4, first = ark_tid() % 128 == 0;
  ark_u32 used = ark_matrix.used[group];
{outputs(sig)}{each_tile(sig, body, meet=False)}\
  if (first) ark_matrix.used[group] = used;
}}
"""
    )


def _give(sig: Signature) -> str:
    """Stores a tile's sums, or what the expression makes of them."""
    m, n, _ = dims(sig)
    columns, out = sig.params["tile"][1], sig.operands[2]
    start = text.offset(sig, 2, place_names(sig, "m0", "n0"))
    if sig.params.get("gated"):
        return _give_gated(sig)
    if sig.params.get("expr") is None:
        return (
            f"  ark_matrix_give<{out.ctype}, {columns}>(\n"
            f"      c, d, po + {start}, {out.strides[-2]}, {m} - m0, {n} - n0);\n"
        )
    single = "const int row = m0 + at_row, column = n0 + at_column + j;\n" + finish(
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
        "  const auto eight = [&](int at_row, int at_column, const float* v, int left) {\n"
        f"{body}  }};\n"
        f"  ark_matrix_each<{columns}>(c, d, {m} - m0, {n} - n0, eight);\n"
    )


def _give_gated(sig: Signature) -> str:
    """Stores what neighbouring columns, gates and what they let pass, make."""
    m, n, _ = dims(sig)
    columns, out = sig.params["tile"][1], sig.operands[2]
    aligned = "ark_aligned(reinterpret_cast<ark_u64>(po))" if out.strides[-2] % 8 == 0 else "false"
    return f"""  const auto eight = [&](int at_row, int at_column, const float* v, int left) {{
      {out.ctype}* to = po + static_cast<ark_i64>(m0 + at_row) * {out.strides[-2]};
      to += (n0 + at_column) / 2;
      ArkPack<{out.ctype}, 4> made;
#pragma unroll
      for (int j = 0; j < 4; ++j) ark_put(made.v, j, ark_swiglu(v[2 * j], v[2 * j + 1]));
      if (left == 8 && {aligned}) {{
        ark_store_pack<4>(to, made);
      }} else {{
        for (int j = 0; 2 * j < left; ++j) to[j] = made.v[j];
      }}
  }};
  ark_matrix_each<{columns}>(c, d, {m} - m0, {n} - n0, eight);
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
    lines = ["const int row = m0 + at_row, column = n0 + at_column;"]
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
    columns = sig.params["tile"][1]
    _, _, k = dims(sig)
    flat = _flat(sig)

    def boxes(index: int, high: int, outer: bool, at: str) -> str:
        """outer: k counts rows of the map, and boxes of 64 stand side by side."""
        shape = text.pad4(sig.operands[index].shape, 1)
        batch = "" if flat else "".join(f", {'0' if shape[d] == 1 else f'i{d}'}" for d in (1, 0))
        map_at, place = f"map{index}", ("m0", "n0")[index]
        if not outer:
            return f"    ark_box_load({at}, {map_at}, k, {place}{batch}, full);\n"
        return "".join(
            f"    ark_box_load({at} + {8192 * i}, {map_at}, {place} + {64 * i}, k{batch}, full);\n"
            for i in range(high // 64)
        )

    body = (
        f"  for (int k = 0; k < {k}; k += {DEPTH}) {{\n"
        "    const ark_u32 n = load.issued;\n"
        "    if (!ark_matrix_free(n)) {\n      load.stopped = true;\n      return;\n    }\n"
        "    ark_u64* full = &ark_matrix.full[n % ARK_MATRIX_STAGES];\n"
        "    char* stage = ark_matrix_stage(c, n);\n"
        f"    ark_matrix_expect(full, {(ROWS + columns) * DEPTH * 2}u);\n"
        + boxes(0, ROWS, bool(sig.params["transpose_a"]), "stage")
        + boxes(1, columns, not sig.params["transpose_b"], f"stage + {ROWS * 128}")
        + "    load.issued = n + 1u;\n  }\n"
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
