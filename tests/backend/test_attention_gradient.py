"""The gradients of attention, which lowering computes by one op for machines with matrix units. A
CPU that executes such plans by generic bodies gives torch's gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import ark
from ark.backend import registry
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.lower.registry import get
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.attention_gradients import (
    GRADIENTS,
    INPUTS,
    Case,
    expected,
    graph,
    operands,
    single,
    values,
)
from tests.projection import with_matrix
from tests.slow import slow

BOUND = {"bf16": 2**-6, "fp16": 2**-9}
CASES = (
    Case(2, 2, 130, 130, 24, causal=True),
    Case(2, 2, 197, 197, 16, by_rows=False),
    Case(2, 2, 150, 170, 40, mask="keys"),
    Case(1, 2, 133, 140, 24, mask="bias"),
    Case(2, 2, 140, 200, 32, causal=True, mask="keys"),
    Case(1, 2, 200, 140, 128, causal=True),
)


def planned(one: Graph, machine: Machine) -> Plan:
    plan = make_plan(one, with_matrix(machine), {"variant": "matrix"})
    verify([plan])
    return plan


def kinds(one: Graph) -> list[str]:
    return [op.kind for op in planned(one, registry.machine("cpu")).ops]


def check(cases: list[Case], dtype: DataType, seed: int, single_op: bool = True) -> None:
    backend, _ = registry.choose("cpu")
    with contextlib.closing(backend.open(0)) as device:
        for case in cases:
            plan = planned(graph(case, dtype), device.machine)
            used = [op.kind for op in plan.ops if op.kind == "attention_gradient"]
            assert len(used) == (2 if single_op else 0), case.name
            inputs = values(case, dtype, seed)
            with Executor(plan, backend, device) as executor:
                for name, tensor in inputs.items():
                    wide = tensor.float().numpy().astype(dtype.numpy)
                    one = wide if name in INPUTS else tensor.numpy()
                    (buffer,) = (b.name for b in plan.buffers if b.name.startswith(f"{name}."))
                    executor.write(buffer, one)
                executor.start(1).wait(60)
                right_of = expected(case, inputs)
                for name in ("result", *GRADIENTS):
                    got, right = executor.read(name).astype(np.float64), right_of[name]
                    bound = BOUND[dtype.name] * max(1.0, float(np.abs(right).max()))
                    diff = np.abs(got.reshape(right.shape) - right).max()
                    assert diff <= bound, f"{case.name}, {name}: {diff} above {bound}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_become_one_op_for_each_side_that_gives_torchs_results(case: Case) -> None:
    check([case], bf16, 0)


@slow
def test_gradients_of_the_other_type_are_torchs_too() -> None:
    check(list(CASES), fp16, 1)


@settings(max_examples=3, deadline=None)
@drawn(
    st.builds(
        Case,
        st.integers(1, 2),
        st.integers(2, 3),
        st.integers(128, 190),
        st.integers(2, 200),
        st.sampled_from([8, 16, 24, 40]),
        st.booleans(),
        st.sampled_from(["", "keys", "bias"]),
    ),
    st.integers(0, 99),
)
def test_random_sizes_and_masks_give_torchs_results(case: Case, seed: int) -> None:
    check([case], fp16, seed)


def test_queries_keys_and_gradients_are_read_and_written_in_place() -> None:
    assert kinds(graph(Case(2, 2, 130, 130, 24, causal=True), bf16)) == [
        *("attention_tiles", "reduce"),
        *("attention_gradient",) * 2,
        *("elementwise",) * 4,  # copies to the tensors that the test reads
    ]


def test_gradients_of_one_projection_are_written_side_by_side() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor([2, 130, 3 * 48], bf16, name="x")
        parts = [x[:, :, i * 48 : (i + 1) * 48] for i in range(3)]
        q, k, v = (ark.transpose(ark.reshape(p, [2, 130, 2, 24]), [0, 2, 1, 3]) for p in parts)
        scores = ark.mul(ark.matmul(q, k, transpose_other=True, dtype=fp32), 0.2)
        result = ark.matmul(ark.cast(ark.softmax(scores), bf16), v)
        back = ark.tensor([2, 2, 130, 24], bf16)
        gradients = ark.grad(result, [q, k, v], back)
        rows = [ark.reshape(ark.transpose(g, [0, 2, 1, 3]), [2, 130, 48]) for g in gradients]
        joined = ark.concat(rows, 2)
        ark.matmul(joined, ark.tensor([144, 160], bf16), output=ark.tensor([2, 130, 160], bf16))
    used = kinds(model.graph)
    assert used.count("attention_gradient") == 2
    assert "elementwise" not in used


def _another_mask() -> None:
    """A program that must not become one op: its gradient has another mask than its scores."""
    q, k, v, given = (ark.tensor([2, 2, 130, 24], bf16) for _ in range(4))
    first, second = (ark.tensor([1, 1, 130, 130], ark.bool) for _ in range(2))
    scores = ark.matmul(q, k, transpose_other=True, dtype=fp32)
    masked = ark.where(first, scores, float("-inf"))
    weights = ark.softmax(masked)
    rounded = ark.cast(weights, bf16)
    ark.matmul(rounded, v)
    back = ark.cast(ark.matmul(given, v, transpose_other=True), fp32)
    slope = ark.where(second, ark.grad(weights, masked, back), 0.0)
    sloped = ark.cast(slope, bf16)
    ark.matmul(rounded, given, transpose_input=True)
    ark.matmul(sloped, k)
    ark.matmul(sloped, q, transpose_input=True)


def _weights_kept() -> None:
    """A program that must not become one op: another op reads the attention weights."""
    q, k, v, given = (ark.tensor([2, 2, 130, 24], bf16) for _ in range(4))
    weights = ark.softmax(ark.matmul(q, k, transpose_other=True, dtype=fp32))
    ark.grad(ark.matmul(ark.cast(weights, bf16), v), [q, k, v], given)
    ark.reduce_sum(weights, 2)


def _bias_trained() -> None:
    """A program that must not become one op: the gradient of a bias is the gradient of the scores,
    which must therefore be stored.
    """
    q, k, v, given = (ark.tensor([2, 2, 130, 24], bf16) for _ in range(4))
    bias = ark.tensor([1, 1, 130, 130], fp32)
    scores = ark.add(ark.matmul(q, k, transpose_other=True, dtype=fp32), bias)
    result = ark.matmul(ark.cast(ark.softmax(scores), bf16), v)
    ark.grad(result, [q, k, v, bias], given)


@pytest.mark.parametrize("program", [_another_mask, _weights_kept, _bias_trained])
def test_other_programs_keep_their_ops(program: Any) -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        program()
    assert not {"attention_tiles", "attention_gradient"} & set(kinds(model.graph))


def test_machines_without_a_fast_body_keep_the_single_ops() -> None:
    for name in ("mi300x", "a100"):
        plan = make_plan(graph(Case(8, 8, 512, 512, 64), bf16), registry.machine(name))
        assert "attention_gradient" not in {op.kind for op in plan.ops}


@pytest.mark.parametrize("case", CASES[2:5], ids=lambda case: case.name)
def test_definition_gives_torchs_gradients(case: Case) -> None:
    given = values(case, bf16)
    model = ark.Model(0, 1)
    with ark.use_model(model):
        single(case, bf16)
    (node,) = (n for n in model.graph.nodes if n.type == "attention_gradient")
    reference = get(node.type).reference
    assert reference is not None
    got = reference(operands(case, given), node.attrs)
    for one, name in zip(got, GRADIENTS, strict=True):
        np.testing.assert_allclose(one, expected(case, given)[name], rtol=1e-9, atol=1e-9)
