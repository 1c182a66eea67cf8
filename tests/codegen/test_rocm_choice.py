"""The choice of a token from candidates that travel as packets, by bodies that read these before
their task has waited for its counters.
"""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.lower.ranks import plan_ranks
from ark.plan.serialize import machine_of
from tests.unit.plan.shapes import decoder_graphs


@pytest.mark.parametrize(("name", "early"), [("mi300x", True), ("h100", False)])
def test_candidates_are_packets_if_the_choice_begins_early(name: str, early: bool) -> None:
    """The op that chooses a token reads candidates as packets from the layer that computes logits,
    if its body begins before its waits. It also waits for the layer's counter.
    """
    target = registry.machine(name)
    (plan,) = plan_ranks(decoder_graphs(1), target)
    (choice,) = [op for op in plan.ops if op.kind == "choose"]
    tensors = {t.id: t for t in plan.tensors}
    arena = plan.buffers[tensors[choice.operands[3]].buffer].arena
    assert (arena == "packet") == early
    source = write(plan, machine_of(plan), registry.get(target.backend).dialect(target.arch))
    assert ("return ark_choose_early<" in source.source.text) == early
    (waits,) = [t.waits for tasks in plan.phases[-1].processors for t in tasks if t.op == choice.id]
    assert waits
