"""The litmus test of a flush on the sending rank (a wait until copies have read their source).
After the flush, the source of a put is overwritten, and the peer must have the old contents, with
every engine. A plan in which the flush does not wait for the copies is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.errors import PlanError
from ark.ir.dtype import int32
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.verify import verify
from tests.cases import channels
from tests.cases.collectives import build, devices
from tests.slow import slow
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import replace_task

INBOX_ELEMENTS = channels.INBOX_ELEMENTS
ENGINES = [("cpu", "threads"), ("cpu", "bulk"), ("cpu", "dma")]
ENGINES += [("rocm", "dma"), ("cuda", "threads")]
ALIKE = [("rocm", "threads"), ("rocm", "bulk")]


def body_of(engine: str) -> channels.Body:
    """Rank 0 puts, flushes and then overwrites the source of the put. One processor overwrites the
    source, while tasks on all processors copy it. Rank 0 signals rank 1 after the flush.
    """

    def body(rank: int) -> None:
        x, inbox = channels.counting(), ark.comm.symmetric([INBOX_ELEMENTS], int32)
        channel = ark.comm.channel(1 - rank, engine=engine)
        if rank == 0:
            source = ark.add(x, 0, output=ark.tensor([INBOX_ELEMENTS], int32, name="source"))
            channel.put(source, inbox)
            (source,) = channel.flush(source)
            channel.signal(relaxed=True)
            with ark.PlannerContext(processor_range=[0, 1]):
                ark.mul(ark.tensor([INBOX_ELEMENTS], int32), -7, output=source, name="again")
        else:
            channels.add_up(*channel.wait(inbox))

    return body


def able(machine: Machine, engine: str) -> Machine:
    """Returns the machine model, for the engine `bulk` on a CPU with the capability that this
    engine requires. On a CPU its tasks run the vendor-independent body.
    """
    if engine != "bulk" or machine.backend != "cpu":
        return machine
    return machine.with_capabilities(Capability.PEER_BULK)


@pytest.mark.parametrize(
    ("name", "engine"), [*ENGINES, *(pytest.param(*e, marks=slow) for e in ALIKE)], ids=str
)
def test_source_of_a_put_may_be_overwritten_after_a_flush(name: str, engine: str) -> None:
    with devices(name, 2) as (opened, machine):
        plans = build(2, body_of(engine), able(machine, engine))
        verify(plans)
        kinds = {"threads": "combine", "bulk": "bulk", "dma": "transfer"}
        assert kinds[engine] in {op.kind for op in plans[0].ops}
        iterations = 3 if name == "rocm" else channels.SUITE_ITERATIONS
        got = channels.run(plans, name, opened, iterations)
        np.testing.assert_array_equal(got, channels.wanted(INBOX_ELEMENTS, iterations))


def test_flush_that_does_not_wait_is_refused() -> None:
    """A plan is refused if its flush does not wait for the copies on another processor, because
    nothing then orders the next write after them.
    """
    plans = build(2, body_of("threads"))
    (flush,) = [o.id for o in plans[0].ops if o.name.startswith("flush")]
    ((place, task),) = [actual for actual in tasks(plans[0]).items() if actual[1].op == flush]
    assert task.waits
    broken = replace_task(plans[0], place, waits=())
    with pytest.raises(PlanError, match=r"'again'.*nothing makes the second wait"):
        verify([broken, plans[1]])
