"""The source that stores the sums of products in the variant `matrix`, with all kinds of epilogues.
Called by ark_cuda.tasks.products.
"""

from __future__ import annotations

from ark.plan.kind import Signature
from ark.tasks import matmul_form, text
from ark.tasks import matmul_vectors as vectors
from ark.tasks.matmul_form import dims, place_names, rotates
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.rotary import rope
from ark_cuda.tasks import pairs


def store(sig: Signature, wide: int, form: pairs.Store | None) -> str:
    """The source that stores a tile's sums or the epilogue's results for them. wide: columns that a
    warpgroup stores. form: how results are stored in pairs; None if they are not. Separate code
    handles operands that are not aligned.
    """
    if form is None:
        return _plain(sig, wide)
    if not form.aligned:
        return form.stored
    return f"  if ({form.aligned}) {{\n{form.stored}  }} else {{\n{_plain(sig, wide)}  }}\n"


def _plain(sig: Signature, wide: int) -> str:
    """The source that stores a tile's sums, or the epilogue's results for them, without pairs."""
    params = sig.read(MatmulParams)
    m, n, _ = dims(sig)
    if params.gated:
        return _gated(sig, wide)
    if rotates(sig):
        angles = rope(sig, 2, matmul_form.POSITION_OPERAND)
        return (
            f"  ark_matrix_store_rope<{wide}>(\n      c, d, {angles}, m0, left0, top, {m} - m0);\n"
        )
    out = sig.operands[2]
    start = text.offset(sig, 2, place_names(sig, "m0", "left0"))
    if params.expr is None and out.dtype in ("fp32", "int32"):
        return (
            f"  ark_matrix_store_whole<{wide}>(\n"
            f"      d, po + {start}, {out.strides[-2]}, top, {m} - m0, {n} - left0);\n"
        )
    if params.expr is None:
        return (
            f"  ark_matrix_store<{out.ctype}, {wide}>(\n"
            f"      c, d, po + {start}, {out.strides[-2]}, top, {m} - m0, {n} - left0);\n"
        )
    residual = vectors.residual(sig)
    if residual is not None:
        return (
            f"  const auto ahead = {vectors.ahead(sig, residual, 'm0', 'left0')};\n"
            f"  const auto eight = {vectors.several(sig, 'm0', 'left0', residual)};\n"
            f"  ark_matrix_each_residual<{wide}>(\n"
            f"      c, d, top, {m} - m0, {n} - left0, ahead, eight);\n"
        )
    return (
        f"  const auto eight = {vectors.several(sig, 'm0', 'left0')};\n"
        f"  ark_matrix_each<{wide}>(c, d, top, {m} - m0, {n} - left0, eight);\n"
    )


def _gated(sig: Signature, wide: int) -> str:
    """The source that stores gated results. The tile's columns are gates and gated values in turn,
    and each two adjacent columns give one result.
    """
    m, n, _ = dims(sig)
    pitch = sig.operands[2].strides[-2]
    return (
        f"  ark_matrix_store_gated<{wide // 2}>(\n"
        f"      c, d, po + static_cast<ark_i64>(m0) * {pitch} + left0 / 2, {pitch}, top, "
        f"{m} - m0, ({n} - left0) / 2);\n"
    )
