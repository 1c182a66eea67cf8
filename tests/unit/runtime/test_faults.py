"""The texts of errors about waits that did not end."""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.ir.dtype import int32
from ark.runtime.faults import _producers
from tests.cases import channels
from tests.cases.collectives import build


def test_producers_of_all_counters_are_named() -> None:
    """Also those of a counter that an op without tensors signals: the end of an iteration."""

    def body(rank: int) -> None:
        numbers, inbox = channels.counting(4103), ark.comm.symmetric([4103], int32)
        if rank == 0:
            channel = ark.comm.channel(1, engine="dma")
            channel.put(numbers, inbox)
            channel.flush()
        else:
            ark.mul(numbers, 0, output=inbox)

    plans = build(2, body, registry.machine("mi300x"))
    kinds = {op.kind for plan in plans for op in plan.ops if not op.operands}
    assert kinds == {"iteration_end"}
    for plan in plans:
        for counter in range(len(plan.counters)):
            assert _producers(plan, counter, {})
