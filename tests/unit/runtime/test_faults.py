"""The texts of errors about waits that did not end."""

from __future__ import annotations

from ark.backend import registry
from ark.runtime.faults import _producers
from tests.cases import channels
from tests.cases.collectives import build


def test_producers_of_all_counters_are_named() -> None:
    """Also those of a counter that an op without tensors signals: the end of an iteration."""
    plans = build(2, channels.put_odd, registry.machine("mi300x"))
    kinds = {op.kind for plan in plans for op in plan.ops if not op.operands}
    assert kinds == {"iteration_end"}
    for plan in plans:
        for counter in range(len(plan.counters)):
            assert _producers(plan, counter, {})
