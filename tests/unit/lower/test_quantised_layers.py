"""Linear layers with quantised weights: they are fused as those with 16-bit weights are. A layer
that does not stream its weights reads codes or dequantised values.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ark.backend import registry
from ark.errors import InvalidUsageError, PlanError
from ark.ir.dtype import RowType, bf16, by_name, fp16, fp32, int4, int8, row_type, uint4
from ark.ir.rows import row_bytes, row_parts, row_values
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.holding import quantised_config
from ark.models.plans import make_plans
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan

LAYER = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)


def decoder(machine: str, name: str | None, **fields: Any) -> list[Plan]:
    config = quantised_config(LAYER, name, "it")
    shape = Shape(config, bf16, 640, fields.pop("chunk", 0), **fields)
    return list(make_plans(shape, registry.machine(machine)))


def layers(plan: Plan) -> list[tuple[str, str, bool]]:
    """Returns the linear layers of a plan's last phase as (prologue, epilogue, True if the weights
    are codes).
    """
    last = {t.op for tasks in plan.phases[-1].processors for t in tasks}
    return [
        (op.params["prologue"], op.params["epilogue"], op.kind == "linear_rows")
        for op in plan.ops
        if op.id in last and op.kind in ("linear", "linear_rows")
    ]


@pytest.mark.parametrize("machine", ["h200", "mi300x", "cpu-2"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_layers_are_joined_as_those_of_16_bits(machine: str, name: str) -> None:
    (plain,), (plan,) = decoder(machine, None), decoder(machine, name)
    joined = [entry[:2] for entry in layers(plan)]
    assert joined == [entry[:2] for entry in layers(plain)]
    assert [entry[2] for entry in layers(plan)] == [True] * 4 + [False]
    assert plan.variant == plain.variant
    kinds = Counter(op.kind for op in plan.ops)
    assert not kinds["row_values"] and not kinds["quantized_linear"]


def test_token_reads_the_bytes_of_codes_and_scales() -> None:
    (plan,) = decoder("h200", "int4")
    streamed = sum(t.streamed for tasks in plan.phases[-1].processors for t in tasks)
    held = sum(b.nbytes for b in plan.buffers if b.name.endswith(".rows"))
    head = LAYER.vocab_size * LAYER.hidden_size * 2
    weights = LAYER.hidden_size * (3072 + 2048 + 3 * 8192)
    assert held == weights * (4 + 16 / 128) / 8
    assert streamed == held + head


@pytest.mark.parametrize("machine", ["h200", "cpu-2"])
def test_prompts_read_values_and_ranks_share_rows(machine: str) -> None:
    plans = decoder(machine, "int4", chunk=128, world_size=2)
    for plan in plans:
        kinds = Counter(op.kind for op in plan.ops)
        assert kinds["row_values"] and kinds["linear_rows"] == 4
        types = {t.dtype for t in plan.tensors if t.name.endswith(".rows")}
        assert types == {f"int4_k{k}_g128_bf16_as_bf16" for k in (2048, 1024, 4096)}


def test_rows_that_do_not_fit_the_ring_are_read_in_place() -> None:
    (plan,) = decoder("h200", "int4", batch=8)
    assert Counter(op.kind for op in plan.ops)["quantized_linear"] == 4


def test_slots_have_the_size_of_whole_rows() -> None:
    assert decoder("h200", None)[0].machine["variants"][0]["stage_bytes"] == 16384
    variant = decoder("h200", "int4")[0].machine["variants"][0]
    assert variant["stages"] * variant["stage_bytes"] == 24 * 8448
    wide = dataclasses.replace(LAYER, hidden_size=4096, intermediate_size=14336, head_dim=128)
    config = quantised_config(wide, "fp8", "it")
    (plan,) = make_plans(Shape(config, bf16, 640, 0), registry.machine("h200"))
    assert plan.variant == "roles" and plan.machine["variants"][0]["stage_bytes"] == 18432


@pytest.mark.parametrize("context", [256, 544, 4096])
def test_parts_of_attention_do_not_depend_on_the_size_of_slots(context: int) -> None:
    splits = set()
    for name in (None, "int4"):
        config = quantised_config(LAYER, name, "it") if name else LAYER
        (plan,) = make_plans(Shape(config, bf16, context, 0), registry.machine("h200"))
        splits |= {op.params["splits"] for op in plan.ops if op.kind == "attention"}
    assert splits == {min(context // 64, 132 // 8)}  # processors and key/value heads


def test_types_of_rows_have_names() -> None:
    dtype = row_type(int4, 4096, 128, bf16, False, bf16)
    assert dtype.name == "int4_k4096_g128_bf16_as_bf16" and by_name(dtype.name) == dtype
    assert (dtype.itemsize, dtype.nbytes(3 * 4096)) == (2048 + 64, 3 * 2112)
    zeros = row_type(uint4, 96, 24, fp16, True, fp32)
    assert by_name(zeros.name) == zeros and zeros.itemsize == 64
    for name in (
        "int4_k96_g36_bf16_as_bf16",
        "int4_k96_g7_bf16_as_bf16",
        "fp32_k8_g8_bf16_as_bf16",
    ):
        with pytest.raises(InvalidUsageError, match="cannot be stored"):
            by_name(name)


def test_plan_with_another_type_is_refused() -> None:
    (plan,) = decoder("cpu-2", "int8")
    text = to_json(plan)
    assert to_json(from_json(text)) == text
    for name in ("int8_k2048_g2047_fp32_as_bf16", "int9_k2048_g2048_fp32_as_bf16", "fp31"):
        with pytest.raises(PlanError, match="damaged"):
            from_json(text.replace("int8_k2048_g2048_fp32_as_bf16", name))


@pytest.mark.parametrize(
    "dtype",
    [
        row_type(int4, 96, 24, bf16, False, bf16),
        row_type(uint4, 64, 8, fp16, True, bf16),
        row_type(int8, 40, 40, fp32, False, fp32),
    ],
    ids=str,
)
def test_rows_hold_codes_and_scales(dtype: RowType) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 8, (5, dtype.columns)).astype(dtype.codes.numpy)
    scales, zeros = rng.uniform(0, 1, (2, 5, dtype.groups)).astype(dtype.scales.numpy)
    rows = row_bytes(dtype, codes, scales, zeros if dtype.zeros else None)
    assert rows.shape == (5, dtype.itemsize)
    parts = row_parts(dtype, rows)
    np.testing.assert_array_equal(parts[0], codes)
    np.testing.assert_array_equal(parts[1], scales)
    wide = [v.astype(np.float32).repeat(dtype.group, 1) for v in (scales, zeros)]
    values = codes.astype(np.float32) - (wide[1] if dtype.zeros else 0)
    np.testing.assert_allclose(row_values(dtype, rows), values * wide[0], rtol=1e-6)
