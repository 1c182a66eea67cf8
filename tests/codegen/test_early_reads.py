"""Only operands that a task kind declares as `early` may be read by a body before its task has
waited for its counters.

The verifier relies on `TaskKind.early`. Here the bodies that begin early run as far as they get
without waiting (tests/cuda_on_host.py), and every memory access is recorded.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ark_cuda import backend

from ark.ir.dtype import by_name
from ark.models.build import Shape
from ark.models.plans import make_plans
from ark.plan import kind as kinds
from ark.plan.types import Plan
from tests import cuda_on_host
from tests.cases.accesses import masks
from tests.slow import slow
from tests.touch import READ, Bench
from tests.unit.plan.shapes import CONFIG

CACHE_POSITION = 40  # of 64: the caches have old rows, and space for a new one


def decoders(
    dtype: str, chunk: int, ranks: int, width: int, batch: int = 1, **options: object
) -> list[Plan]:
    """Returns the plans of a small decoder on an H100 with few processors, one for each rank.

    chunk: rows of its prompts. width: elements of a head; from 32 on, caches come through the
    operand stream. batch: sequences.
    """
    machine = dataclasses.replace(backend.machine("h100"), processors=4)
    config = dataclasses.replace(CONFIG, head_dim=width)
    shape = Shape(config, by_name(dtype), 64, chunk, 0, ranks, batch=batch)
    return list(make_plans(shape, machine, {"variant": "roles", **options}))


def early_reads(plan: Plan) -> dict[int, set[int]]:
    """Returns, by op, the operands that some thread of some task reads before it waits."""
    bench = Bench(plan, 0, cuda_on_host.dialect(plan), cuda_on_host.on_host)
    for op in plan.ops:
        for index, tensor in enumerate(op.operands):
            if plan.tensors[tensor].name.startswith("position"):
                bench.operand(op.id, index)[:] = CACHE_POSITION
    operands: dict[int, set[int]] = {op.id: set() for op in plan.ops}
    for number, task in enumerate(bench.tasks):
        touched = bench.run(number)
        op = plan.ops[task.op]
        sig = kinds.signature(plan, op)
        for access in kinds.get(op.kind).accesses(sig, task.coord):
            if access.write:
                continue
            ((buffer, _), mask) = next(iter(masks(plan, op.id, [access]).items()))
            if np.any(mask & ((touched.marks[buffer] & READ) != 0)):
                operands[op.id].add(access.operand)
    return operands


@pytest.mark.parametrize(
    ("dtype", "chunk", "ranks", "width", "options"),
    [
        ("bf16", 4, 1, 16, {}),
        pytest.param("fp32", 0, 1, 16, {"packets": False}, marks=slow),
        ("fp16", 0, 2, 32, {}),
        ("bf16", 0, 1, 32, {"batch": 3}),
    ],
)
def test_early_reads_of_bodies_equal_their_declarations(dtype, chunk, ranks, width, options):
    plan = decoders(dtype, chunk, ranks, width, **options)[-1]
    assert plan.variant == "roles"
    streamed = {op.params.get("streamed", 0) > 0 for op in plan.ops if op.kind == "attention"}
    assert (True in streamed) == (width >= 32)
    reads = early_reads(plan)
    begun = set()
    for op in plan.ops:
        sig = kinds.signature(plan, op)
        declared = kinds.get(op.kind).early(sig)
        assert reads[op.id] <= declared, f"{op.name} reads {sorted(reads[op.id])} early"
        if reads[op.id]:
            begun.add((op.kind, sig.params.get("epilogue")))
            assert reads[op.id] == declared, f"{op.name} reads only {sorted(reads[op.id])} early"
    assert begun >= {("linear", "rope_kv"), ("linear", "swiglu"), ("attention", None)}
