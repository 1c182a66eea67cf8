"""The epilogue of the task kind `expert_linear` (a linear layer with the weights of chosen
experts): the operations on the sums of its products before they are stored. This module has its
operands and its C++ text.

The epilogue's value is an expression, `expr` (ark.tasks.expression). Its inputs are the sums (one
for each weight), then an element of each table (such as a bias per expert), then an element of each
operand of scores. A row has one slot for each of its chosen experts. With `total`, the values of a
row's slots are added up in order, and then a residual is added. The epilogue's operands follow the
output: the second weight, tables (experts, n), scores (rows, slots, 1), the residual (rows, n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ark.errors import PlanError
from ark.plan.kind import Access, Signature
from ark.plan.params import Params, count, need, shaped, typed
from ark.tasks import expression, text

FIRST_EXTRA = 4  # the index of the first operand after the output
MAX_SLOTS = 8  # the most slots of a row whose results a task adds up

Some = Annotated[int, msgspec.Meta(ge=0, le=4)]


class ExpertLinearParams(Params, frozen=True):
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    of: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    weights: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    tables: Some = 0
    scores: Some = 0
    expr: list[Any] | None = None
    total: bool = False
    residual: bool = False


def weight_operands(sig: Signature) -> tuple[int, ...]:
    """The indices of the weight operands."""
    return (1, FIRST_EXTRA)[: sig.read(ExpertLinearParams).weights]


def table_operands(sig: Signature) -> range:
    """The operand indices of the tables (experts, n), which have a row for each expert, such as
    biases.
    """
    params = sig.read(ExpertLinearParams)
    first = FIRST_EXTRA + params.weights - 1
    return range(first, first + params.tables)


def score_operands(sig: Signature) -> range:
    """The operand indices of the scores, by which experts' results are multiplied."""
    first = table_operands(sig).stop
    return range(first, first + sig.read(ExpertLinearParams).scores)


def residual_operand(sig: Signature) -> int | None:
    """The index of the residual operand, which is added to the total; None if there is none."""
    return score_operands(sig).stop if sig.read(ExpertLinearParams).residual else None


def check_epilogue(sig: Signature, rows: int, slots: int) -> None:
    """Raises PlanError unless the output and the epilogue's operands have the shapes and types that
    the parameters require.
    """
    params = sig.read(ExpertLinearParams)
    experts, n, k = sig.operands[1].shape
    count(sig, score_operands(sig).stop + params.residual)
    for index in weight_operands(sig)[1:]:
        second = sig.operands[index]
        need(
            second.shape == (experts, n, k) and second.dtype == sig.operands[1].dtype,
            "both weights must have the same shape and type",
        )
    for index in table_operands(sig):
        shaped(sig, index, (experts, n))
    for index in score_operands(sig):
        shaped(sig, index, (rows, slots, 1))
    shaped(sig, 3, (rows, n) if params.total else (rows, slots, n))
    residual = residual_operand(sig)
    if residual is not None:
        shaped(sig, residual, (rows, n))
    need(params.total or not params.residual, "a residual needs the parameter `total`")
    plain = params.expr is None and params.weights == 1 and not params.tables and not params.scores
    need(params.expr is not None or plain, "an epilogue needs an expression")
    need(
        params.of == 0 or (plain and not params.total),
        "an epilogue needs a weight with all experts, but this one has only some",
    )
    need(not params.total or slots <= MAX_SLOTS, f"{slots} experts per row exceed {MAX_SLOTS}")
    if params.expr is not None:
        kinds = ["fp32"] * params.weights
        kinds += [typed(sig, i).dtype for i in (*table_operands(sig), *score_operands(sig))]
        if expression.check(params.expr, kinds) != "float" or expression.places(params.expr):
            raise PlanError(
                "the epilogue must be a floating-point expression without element indices"
            )


def epilogue_accesses(sig: Signature, row: int, slots: range, n0: int, n1: int) -> list[Access]:
    """The accesses of a task to the output and to the epilogue's operands. slots: the slots (chosen
    experts of the row) that the task computes. n0, n1: its first output, and its last output + 1.
    """
    total = sig.read(ExpertLinearParams).total
    experts, _, k = sig.operands[1].shape
    place, ends = ((row,), (row + 1,)) if total else ((row, slots[0]), (row + 1, slots[-1] + 1))
    accesses = [Access(3, (*place, n0), (*ends, n1), write=True)]
    accesses += [Access(i, (0, n0, 0), (experts, n1, k)) for i in weight_operands(sig)]
    accesses += [Access(i, (0, n0), (experts, n1)) for i in table_operands(sig)]
    for index in score_operands(sig):
        accesses.append(Access(index, (row, slots[0], 0), (row + 1, slots[-1] + 1, 1)))
    residual = residual_operand(sig)
    if residual is not None:
        accesses.append(Access(residual, (row, n0), (row + 1, n1)))
    return accesses


def declared(sig: Signature) -> str:
    """C++ statements that declare `finish`, the epilogue's functions (ArkExpertFinish of
    experts.h).
    """
    params = sig.read(ExpertLinearParams)
    tables, scores = table_operands(sig), score_operands(sig)
    loads = [f"ark_load(c, {text.given(sig, i)}, 0, 0, expert, n)" for i in tables]
    loads += [f"ark_load(c, {text.given(sig, i)}, 0, row, slot, 0)" for i in scores]
    lines, value = _value(params, len(loads))
    ahead = "".join(f"    to[{i}] = {load};\n" for i, load in enumerate(loads))
    residual, output = residual_operand(sig), text.given(sig, 3, const=False)
    left = "0.0f"
    if residual is not None:
        left = f"ark_load(c, {text.given(sig, residual)}, 0, 0, row, n)"
    place = "0, 0, row, n" if params.total else "0, row, slot, n"
    extra = max(1, len(loads))
    return (
        "  const auto ahead = [&](int row, int slot, int expert, int n, "
        f"float (&to)[{extra}]) {{\n"
        f"    (void)row, (void)slot, (void)expert, (void)n, (void)to;\n{ahead}  }};\n"
        f"  const auto term = [&](const float (&sum)[{params.weights}], "
        f"const float (&with)[{extra}]) {{\n    (void)with;\n"
        + "".join(f"    {line}\n" for line in lines)
        + f"    return {value};\n  }};\n"
        f"  const auto left = [&](int row, int n) {{\n    (void)row, (void)n;\n"
        f"    return {left};\n  }};\n"
        "  const auto store = [&](int row, int slot, int n, float v) {\n"
        f"    (void)slot;\n    ark_publish(c, {output}, {place}, v);\n  }};\n"
        f"  const auto finish = ark_expert_finish<{extra}>(ahead, term, left, store);\n"
    )


def _value(params: ExpertLinearParams, loads: int) -> tuple[Sequence[str], str]:
    """C++ statements, and the text of the epilogue's value. The statements may use the variables
    `sum` (the sums) and `with` (the loaded numbers).
    """
    if params.expr is None:
        return (), "sum[0]"
    leaves = [(f"sum[{w}]", "float") for w in range(params.weights)]
    leaves += [(f"with[{i}]", "float") for i in range(loads)]
    writer = expression.Writer(leaves, text.literal)
    value, _ = writer.write(params.expr)
    return writer.statements, value


def constants(sig: Signature) -> tuple[int, int]:
    """The template constants WEIGHTS (the number of weights) and TOTAL (the number of slots of a
    row that a task adds up, or 0).
    """
    params = sig.read(ExpertLinearParams)
    return params.weights, sig.operands[2].shape[1] if params.total else 0
