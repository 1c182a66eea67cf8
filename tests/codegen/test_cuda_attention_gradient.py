"""CUDA's gradients of attention on matrix units: in thread blocks that the host simulates
(tests/block_on_host.py), and compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp16
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests import kept
from tests.block_on_host import Block
from tests.cases.attention_gradients import (
    GRADIENTS,
    Case,
    expected,
    graph,
    operands,
    single,
    values,
    with_logarithms,
)
from tests.slow import slow

pytest.importorskip("ark_cuda")

from ark_cuda import backend, machines

H200 = machines.MODELS["h200"]
BOUND = {"bf16": 2**-7, "fp16": 2**-10}


def of_few_warps() -> Machine:
    """Returns a machine whose only variant has as many computing warps and as much free shared
    memory as `matrix`, but no loading thread, which the host does not simulate.
    """
    first = H200.variants[0]
    compute = dataclasses.replace(first.roles[0], warps=8)
    variant = dataclasses.replace(first, roles=(compute, first.roles[1]), stages=1)
    return dataclasses.replace(H200, variants=(variant,)).with_processors(2)


def planned(case: Case, dtype: DataType) -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        single(case, dtype)
        if not case.mask:
            with_logarithms(case, dtype)
    plan = make_plan(model.graph, of_few_warps())
    verify([plan])
    return plan


@pytest.mark.parametrize(
    ("case", "dtype", "late", "downwards"),
    [
        (Case(1, 2, 260, 260, 64, causal=True), bf16, True, False),
        (Case(2, 1, 197, 197, 128), bf16, False, True),
        (Case(1, 2, 133, 140, 24, mask="bias"), fp16, True, True),
        pytest.param(Case(2, 2, 140, 200, 32, True, "keys"), fp16, False, False, marks=slow),
        pytest.param(Case(1, 2, 200, 140, 96, causal=True), bf16, True, False, marks=slow),
        pytest.param(Case(1, 1, 300, 40, 8), bf16, True, True, marks=slow),
    ],
)
def test_blocks_on_the_host_give_torchs_gradients(
    case: Case, dtype: DataType, late: bool, downwards: bool, tmp_path: Path
) -> None:
    plan = planned(case, dtype)
    block = Block(plan, tmp_path)
    given = values(case, dtype)
    right_of, inputs = expected(case, given), operands(case, given)
    bound = BOUND[dtype.name]
    for op in plan.ops:
        names = GRADIENTS[1:] if op.params.get("keys") else GRADIENTS[:1]
        if op.kind == "attention_tiles":
            names = ("result", "logarithms")
        read = len(inputs) if op.kind == "attention_gradient" else 3
        for i, array in enumerate(inputs[:read]):
            target = block.operand(op, i)
            target[...] = array.astype(target.dtype)
        block.run(op, late, downwards)
        for i, name in enumerate(names):
            got, right = block.operand(op, read + i).astype(np.float64), right_of[name]
            scale = max(1.0, float(np.abs(right).max()))
            np.testing.assert_allclose(got, right, rtol=0, atol=bound * scale, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 12, 512, 512, 64, causal=True),
        Case(2, 8, 512, 512, 128),
        pytest.param(Case(8, 12, 197, 197, 64, mask="bias"), marks=slow),
        pytest.param(Case(2, 8, 512, 512, 96, causal=True), marks=slow),
        pytest.param(Case(8, 12, 128, 128, 64, mask="keys"), marks=slow),
    ],
    ids=lambda case: case.name,
)
def test_sums_and_scores_stay_in_registers(case: Case) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = make_plan(graph(case, bf16), H200)
    machine = machine_of(plan)
    assert machine.variant.name == "matrix"
    emitted = write(plan, machine, backend.dialect(machine.arch))
    assert emitted.source.text.count("  ark_gradient_units<") == 2
    target = Target(machine.arch, machine.threads)
    log = kept.binary(backend, emitted.source, target).log.splitlines()
    spills = [
        b for a, b in itertools.pairwise(log) if "_attention_gradient" in a and " spill " in b
    ]
    assert [line.split(" bytes spill stores")[0].rpartition(" ")[2] for line in spills] == ["0"] * 2
