"""Tasks that depend on many ops wait for one counter, which the tasks of all these ops signal."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from ark.backend import registry
from ark.ir.dtype import by_name
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.plans import plans
from ark.plan.types import Plan, Task
from tests.unit.plan.oracle import faults
from tests.unit.plan.shapes import CONFIG, machine


def of_ops(plan: Plan, name: str) -> list[Task]:
    """The tasks of the ops whose name ends with `name`."""
    chosen = {op.id for op in plan.ops if op.name.endswith(name)}
    return [t for listed in plan.phases[0].processors for t in listed if t.op in chosen]


@pytest.mark.parametrize(("sequences", "waits"), [(4, 4), (8, 1), (11, 1)])
def test_product_behind_attention_of_many_sequences_waits_once(sequences: int, waits: int) -> None:
    """Each sequence's attention is an op of its own, of one task for each of two heads."""
    shape = Shape(CONFIG, by_name("fp32"), 64, 0, 0, 1, batch=sequences)
    plan = plans(shape, machine(32), {})[0]
    products, heads = of_ops(plan, "attention.output"), of_ops(plan, "attention.attention")
    assert {len(t.waits) for t in products} == {waits}
    assert {len(t.signals) for t in heads} == {1}
    steps = Counter(plan.counters[c].step for t in products for c, _ in t.waits)
    assert set(steps) == {2 * sequences if waits == 1 else 2}
    assert faults(plan, 0) == []


def test_parts_of_a_product_wait_for_all_heads() -> None:
    """The product behind attention is divided along k, so that a part reads half of the heads. Both
    parts wait for all of them. Otherwise each task would have other waits, because its result
    reuses memory that some of the heads have read.
    """
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    shape = Shape(config, by_name("bf16"), 521, 0, 0, 1, batch=16)
    plan = plans(shape, registry.machine("h200"), {})[0]
    products, heads = of_ops(plan, "attention.output"), of_ops(plan, "attention.attention")
    assert len(products) == len(heads) == 128
    assert {t.waits for t in products} == {
        ((counter, 128),) for t in heads for counter in t.signals
    }
