"""Writes the C++ constants of a loop kernel: properties of the machine and the plan that device
code uses. Called by ark.backend.codegen.writer.
"""

from __future__ import annotations

from ark.backend.codegen import layout
from ark.errors import UnsupportedError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Plan


def constants(
    machine: Machine,
    phases: int,
    scratch: int | None,
    streamed: int = 0,
    grows: bool = False,
    pages: bool = False,
    cuts: bool = False,
    runs: bool = False,
    signals: int = 1,
) -> str:
    """The source of the constants that preludes and device code use.

    scratch: bytes of shared memory besides the ring buffer of operands; None for a loop that is
    shared by kernels with different sizes. streamed: bytes that the operand stream copies in an
    iteration of the last phase. The operand stream copies operands to the ring's stages ahead of
    the tasks.

    grows: True if the stream copies rows whose number grows with each iteration (a KV cache).
    pages: True if such rows are in pages. cuts: True if a stage can contain parts of several rows.
    runs: True if a stage can contain whole rows.

    signals: the number of words of a counter that peers signal (signal_words).

    Among the constants is STAGE_NS: the nanoseconds in which the machine's memory can fill one
    stage on every processor.
    """
    values = {
        "LANES": machine.lanes,
        "WARPS": machine.warps,
        "BLOCK_WARPS": machine.variant.warps,
        "PHASES": phases,
        "SCRATCH_BYTES": scratch,
        "LOOP_BYTES": layout.LOOP_BYTES,
        "RING_BYTES": machine.ring_bytes,
        "STAGE_BYTES": machine.stage_bytes,
        "STAGE_NS": round(machine.stage_bytes * machine.processors / machine.bandwidth_gbps),
        "IN_FLIGHT": machine.in_flight,
        "STREAM_MIB": streamed >> 20,
        "STREAM_GROWS": int(grows),
        "STREAM_PAGES": int(pages),
        "STREAM_CUTS": int(cuts),
        "STREAM_RUNS": int(runs),
        "SIGNAL_WORDS": signals,
    }
    known = [(name, value) for name, value in values.items() if value is not None]
    return "".join(f"constexpr int ARK_{name} = {value};\n" for name, value in known)


def plan_constants(machine: Machine, plan: Plan, scratch: int, run: range) -> str:
    """The C++ source of the constants of the kernel that runs the phases `run` of a plan."""
    tasks = [[t for listed in plan.phases[i].processors for t in listed] for i in run]
    fetches = [fetch for phase in tasks for task in phase for fetch in task.fetches]
    return constants(
        machine,
        len(plan.phases),
        scratch,
        sum(task.streamed for task in tasks[-1]),
        grows(plan, run),
        any(f.growth and f.growth.pages for f in fetches),
        any(f.parts > 1 for f in fetches),
        any(f.parts == 1 and not f.growth for f in fetches),
        signal_words(plan, machine),
    )


def grows(plan: Plan, run: range) -> bool:
    """True if a task of the phases `run` fetches rows whose number grows with each iteration."""
    tasks = (t for i in run for listed in plan.phases[i].processors for t in listed)
    return any(fetch.growth for task in tasks for fetch in task.fetches)


def signal_words(plan: Plan, machine: Machine) -> int:
    """The number of words of a counter that peers signal: one per rank if they signal by stores,
    otherwise 1.
    Raises UnsupportedError if a counter has too few words or ranks on other hosts take part.
    """
    if plan.world_size == 1 or not machine.has(Capability.PEER_STORES):
        return 1
    room = machine.line_bytes // 4
    if plan.meta.get("hosts") or plan.world_size > room:
        raise UnsupportedError(
            f"the links between this machine's devices do not support atomic additions, so ranks "
            f"signal by stores, which supports at most {room} ranks on one host; the plan has "
            f"{plan.world_size}{' on several hosts' if plan.meta.get('hosts') else ''}"
        )
    return plan.world_size
