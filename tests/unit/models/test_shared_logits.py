"""Ranks that each compute the logits of a part of the vocabulary: each rank finds the best token of
its part and sends it to every rank. If a task's record cannot hold the indices of all ranks, the
logits are gathered first.
"""

from __future__ import annotations

import dataclasses

from ark.backend import registry
from ark.ir.dtype import bf16
from ark.models.build import Shape
from ark.models.plans import make_plans
from ark.plan.types import Plan
from tests.unit.plan.shapes import CONFIG


def tail(world: int) -> tuple[Plan, list[str]]:
    """Returns a rank's plan, and the kinds of its ops from the layer that computes logits on."""
    config = dataclasses.replace(CONFIG, num_attention_heads=8, num_key_value_heads=8)
    machine = dataclasses.replace(registry.machine("cpu-2"), processors=2)
    result = make_plans(Shape(config, bf16, 64, 0, 0, world), machine)[1]
    kinds = [op.kind for op in result.ops]
    return result, kinds[len(kinds) - 1 - kinds[::-1].index("linear") :]


def test_share_is_given_by_who_makes_it() -> None:
    result, kinds = tail(2)
    assert kinds == ["linear", "choose"]
    choose = result.ops[-1]
    (task,) = (t for tasks in result.phases[-1].processors for t in tasks if t.op == choose.id)
    peer_counters = [result.counters[c] for c, _ in task.waits if result.counters[c].system]
    assert [(c.rank, c.step) for c in peer_counters] == [
        (1, 2)
    ]  # the peer's tasks signal a counter of this rank


def test_record_has_room_for_few_peers() -> None:
    assert "combine" in tail(4)[1]
