"""Costs of a machine: what the planner and the cost model count with.

Each vendor's machines.py has one value per machine, beside where its figures come from. Nothing
above this module holds a figure of a machine. Called by ark.lower, ark.plan.cost and the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.ranges import Name, Rate


@dataclass(frozen=True)
class Costs:
    """Times in microseconds, rates in bytes or operations a microsecond.

    source: what the figures were measured on, or how they were estimated.

    signal_us: one task signals a counter and another one, which waits for it, goes on.
    each_signal_us: each further task that signals the same counter.
    task_us: one task by itself: its record is fetched, its first loads arrive, its results are
    stored. pass_us: each further round of loads of a task that waits for them before the next.

    processor_rate: bytes that one processor loads from the last cache while the others do not.
    cache_rate: bytes that all processors together load from it. cache_bytes: what it keeps from
    one iteration to the next. scalar_rate: multiplications and additions of fp32 of one processor
    outside of matrix units.
    """

    source: Name = "a common server core, estimated"
    signal_us: Rate = 1.0
    each_signal_us: Rate = 0.01
    task_us: Rate = 0.3
    pass_us: Rate = 0.1
    processor_rate: Rate = 12e3
    cache_rate: Rate = 12e3
    cache_bytes: Rate = 1e6
    scalar_rate: Rate = 20e3


ESTIMATED = Costs()
