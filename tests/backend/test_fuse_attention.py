"""Attention written as product, softmax and product, in the ways in which front ends write it.
Plans for matrix units replace it by one op. A CPU that executes such a plan by generic bodies gives
torch's results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import bf16, fp16
from ark.lower.pipeline import plan as make_plan
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_attention import fuse_attention
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.attend import (
    BATCH,
    COLUMNS,
    FORMS,
    HEADS,
    ROWS,
    WIDTH,
    Form,
    apart,
    attention,
    by_columns,
    by_torch,
    lower_left,
)
from tests.projection import with_matrix
from tests.slow import slow


def planned(forms: list[Form], machine: Machine, dtype: Any) -> Plan:
    """Returns a verified plan for matrix units. It contains the attention of each form (a way to
    write it), on tensors x0, x1, ... with results out0, out1, ...
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        for i, form in enumerate(forms):
            attended = attention(form, ark.tensor(form.shape, dtype, name=f"x{i}"))
            ark.copy(attended, ark.tensor(attended.shape(), dtype, name=f"out{i}"))
    plan = make_plan(model.graph, with_matrix(machine), {"variant": "matrix"})
    verify([plan])
    return plan


@pytest.mark.parametrize("name", FORMS)
def test_each_attention_form_becomes_one_op_that_reads_in_place(name: str) -> None:
    form = FORMS[name]
    kinds = [op.kind for op in planned([form], registry.machine("cpu"), bf16).ops]
    assert kinds.count("attention_tiles") == 1
    assert kinds.count("transpose") == form.copies
    assert not {"matmul", "row_norm"} & set(kinds)


@pytest.mark.parametrize("dtype", [bf16, pytest.param(fp16, marks=slow)], ids=lambda d: d.name)
def test_all_forms_give_torchs_results(dtype: Any) -> None:
    backend, _ = registry.choose("cpu")
    rng = np.random.default_rng(5)
    forms = list(FORMS.values())
    with contextlib.closing(backend.open(0)) as device:
        plan = planned(forms, device.machine, dtype)
        with Executor(plan, backend, device) as executor:
            given = [rng.standard_normal(form.shape).astype(dtype.numpy) for form in forms]
            for i, array in enumerate(given):
                (buffer,) = (b.name for b in plan.buffers if b.name.startswith(f"x{i}."))
                executor.write(buffer, array)
            executor.start(1).wait(60)
            for i, (name, form) in enumerate(FORMS.items()):
                got = executor.read(f"out{i}").astype(np.float64)
                bound = {"bf16": 2**-6, "fp16": 2**-9}[dtype.name]
                right = by_torch(form, given[i]).reshape(got.shape)
                np.testing.assert_allclose(got, right, rtol=bound, atol=bound, err_msg=name)


def upper(x: Any) -> Any:
    """Returns a mask that allows each row the keys from the row's own index on. A causal mask
    allows the keys up to that index, so the planner must not take this mask for a causal one.
    """
    rows, columns = (ark.iota((ROWS, ROWS), d, ark.int32) for d in (0, 1))
    return ark.less_equal(rows, columns)


def scored(x: Any) -> list[Any]:
    q, k, v = by_columns(x)
    return [ark.mul(ark.matmul(q, k, transpose_other=True), 0.2), v]


def another_mask(x: Any) -> Any:
    scores, v = scored(x)
    return ark.matmul(ark.softmax(ark.where(upper(x), scores, float("-inf"))), v)


def causal_mask(x: Any) -> Any:
    scores, v = scored(x)
    return ark.matmul(ark.softmax(ark.where(lower_left("where"), scores, float("-inf"))), v)


def given_mask(x: Any) -> Any:
    scores, v = scored(x)
    return ark.matmul(ark.softmax(ark.add(scores, ark.tensor((ROWS, ROWS), bf16))), v)


def weights_read(x: Any) -> Any:
    scores, v = scored(x)
    weights = ark.softmax(scores)
    ark.copy(ark.reduce_sum(weights, 2), ark.tensor((BATCH, HEADS, 1, ROWS), bf16))
    return ark.matmul(weights, v)


def queries_change(x: Any) -> Any:
    """A way to write attention that must not be fused: the queries are overwritten between the
    scores and the product with the values.
    """
    q, k, v = apart(ark.tensor((3, BATCH, HEADS, ROWS, WIDTH), bf16, name="y"))
    weights = ark.softmax(ark.matmul(q, k, transpose_other=True))
    changed = ark.copy(ark.mul(q, 0.5), q)
    return ark.add(ark.matmul(weights, v), changed)


def weakly_masked(x: Any) -> Any:
    """A way to write attention that must not be fused as masked: masked scores become about -65
    after scaling, so their weights are not 0.
    """
    scores, v = scored(x)
    masked = ark.where(lower_left("where"), scores, -6.5e4)
    return ark.matmul(ark.softmax(ark.mul(masked, 1e-3)), v)


def scaled_after(x: Any) -> Any:
    scores, v = scored(x)
    masked = ark.where(lower_left("where"), scores, float("-inf"))
    return ark.matmul(ark.softmax(ark.mul(masked, 1e-3)), v)


def negated_twice(x: Any) -> Any:
    """A way to write attention that must not be fused as masked: the mask's -inf becomes inf,
    because scores are negated afterwards.
    """
    scores, v = scored(x)
    masked = ark.where(lower_left("where"), ark.mul(scores, -1.0), float("-inf"))
    return ark.matmul(ark.softmax(ark.mul(masked, -1.0)), v)


def scaled_sum(x: Any) -> Any:
    """A way to write attention in which the scale also multiplies the mask."""
    scores, v = scored(x)
    return ark.matmul(ark.softmax(ark.mul(ark.add(scores, ark.tensor((ROWS, ROWS), bf16)), 0.5)), v)


def mask_changes(x: Any) -> Any:
    """A way to write attention that must not be fused: the mask is overwritten between the scores
    and the product with the values.
    """
    scores, v = scored(x)
    mask = ark.tensor((ROWS, ROWS), bf16)
    weights = ark.softmax(ark.add(scores, mask))
    return ark.matmul(weights, ark.add(v, ark.copy(ark.mul(mask, 0.5), mask)[:1, :1]))


def two_masks(x: Any) -> Any:
    scores, v = scored(x)
    for _ in range(2):
        scores = ark.add(scores, ark.tensor((ROWS, ROWS), bf16))
    return ark.matmul(ark.softmax(scores), v)


def few_rows(x: Any) -> Any:
    q, k, v = (part[:, :, :100] for part in by_columns(x))
    return ark.matmul(ark.softmax(ark.matmul(q, k, transpose_other=True)), v)


@pytest.mark.parametrize(
    ("build", "joined"),
    [
        (causal_mask, 1),
        (another_mask, 1),
        (given_mask, 1),
        (scaled_sum, 0),
        (mask_changes, 0),
        (two_masks, 1),
        (weights_read, 0),
        (queries_change, 0),
        (few_rows, 0),
        (weakly_masked, 1),
        (scaled_after, 1),
        (negated_twice, 0),
    ],
)
def test_other_functions_are_not_fused(build: Callable[[Any], Any], joined: int) -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        output = build(ark.tensor(COLUMNS, bf16, name="x"))
        ark.copy(output, ark.tensor(output.shape(), bf16, name="out"))
    nodes = fuse_attention(model.graph, Context(registry.machine("cpu-2"))).nodes
    kinds = [node.type for node in nodes]
    assert kinds.count("attention") == joined
    assert kinds.count("matmul") == 2 - 2 * joined


@pytest.mark.parametrize(
    ("machine", "joined"),
    [
        *((name, True) for name in ("h100", "a100", "b200", "rtx5090")),
        *((name, True) for name in ("mi300x", "mi355x", "rx7900xtx")),
        ("mi250x", False),
    ],
)
def test_attention_is_not_fused_without_matrix_units(machine: str, joined: bool) -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((2, 256, 3, 4, 64), bf16)
        q, k, v = (
            ark.reshape(ark.transpose(x, [2, 0, 3, 1, 4])[i : i + 1], [2, 4, 256, 64])
            for i in range(3)
        )
        weights = ark.softmax(ark.matmul(q, k, transpose_other=True))
        ark.copy(ark.matmul(weights, v), ark.tensor((2, 4, 256, 64), bf16))
    kinds = [op.kind for op in make_plan(model.graph, registry.machine(machine)).ops]
    assert ("attention_tiles" in kinds) == joined
