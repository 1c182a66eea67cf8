"""The loop-kernel writer: plan + machine + dialect -> one source text, the same bytes each time.

Equal ops share one specialised function. A dialect may write some bodies itself; everything else
comes from ark.tasks. Called by ark.runtime.program and `ark emit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ark.codegen import device_text, layout
from ark.codegen.bodies import Bodies, flows, kernel_ops
from ark.codegen.constants import plan_constants
from ark.codegen.dialect import BoxMap, Dialect, Source
from ark.codegen.dispatch import dispatch, dispatch_load, dispatch_move, dispatch_run
from ark.codegen.shared_memory import check_shared_memory
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.signature import SHORT_PACKET, Signature
from ark.plan.types import Plan

# What every kernel has of ark/codegen/device, in order.
DEVICE = (
    *("wait.h", "task_slots.h", "iteration.h", "loop.h"),
    *("common.h", "math.h", "small_floats.h", "pack.h", "operand.h"),
)
SHORT = ("short_packets.h",)  # where they are, or a loop is ready for them


@dataclass(frozen=True)
class Emitted:
    """The source, and what the runtime needs to fill task records.

    opcode: the task kind number of each op, by op id; -1 for ops of other kernels. scratch_bytes:
    shared memory besides the ring. bodies: function names by opcode, for traces and listings. maps:
    box maps by opcode.
    """

    source: Source
    opcode: tuple[int, ...]
    scratch_bytes: int
    bodies: tuple[str, ...]
    maps: tuple[tuple[BoxMap, ...], ...] = ()


def write(plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None) -> Emitted:
    """Emits the loop kernel of `plan` for `machine` in `dialect`.

    phases: those that it runs, by default all. PlanError if it asks for more shared memory than a
    processor has.
    """
    phases = phases or range(len(plan.phases))
    ops = kernel_ops(plan, phases)
    signatures = _agreed([kinds.signature(plan, op) for op in ops])
    flow = flows(signatures, machine, dialect)
    bodies = Bodies(machine, dialect, len(plan.ops), flow)
    for op, sig in zip(ops, signatures, strict=True):
        bodies.add(op, sig)
    headers = [*bodies.dialect_headers, *bodies.headers]
    if far := bool(plan.meta.get("hosts")):
        headers.append(device_text("proxy.h"))
    scratch = check_shared_memory(plan, machine, dialect, phases)
    short = bodies.leads or _short(signatures)
    parts = [
        f"// ark loop kernel, dialect {dialect.name}\n",
        "#define ARK_REMOTE 1\n" if far else "",
        "#define ARK_BODIES_ENTER 1\n" if bodies.entering else "",
        f"#define ARK_FLOWS {layout.FLOW_TASKS}\n" if flow else "",
        "#define ARK_MOVERS 1\n" if bodies.moves else "",
        "#define ARK_LIMIT_FALLS 1\n" if _ends(plan, (*headers, *bodies.texts)) else "",
        plan_constants(machine, plan, scratch, phases),
        dialect.prelude,
        layout.declarations(),
        *map(device_text, (*DEVICE, *(SHORT if short else ()))),
        dialect.stream if machine.ring_bytes else device_text("stream_direct.h"),
        dialect.roles if bodies.leads else "",
        dialect.loader(signatures, machine) if bodies.loads and dialect.loader else "",
        *dict.fromkeys(headers),
        *bodies.texts,
        dispatch(bodies, _seldom(plan, bodies.opcode, phases[-1]) if bodies.leads else ()),
        dispatch_run(bodies) if flow else "",
        dispatch_load(bodies) if bodies.loads else "",
        dispatch_move(bodies) if bodies.moves else "",
        dialect.entry,
    ]
    text = "\n".join(part for part in parts if part)
    names, maps = tuple(bodies.names), tuple(bodies.maps)
    separate = machine.variant.name == "block" and 0 < dialect.together < len(names)
    source = Source(text, separate=separate)
    return Emitted(source, tuple(bodies.opcode), scratch, names, maps)


def _agreed(signatures: Sequence[Signature]) -> list[Signature]:
    """The signatures, an operand aligned where it is in all that are else the same: these keep one
    function.
    """
    distinct = {sig.key: sig for sig in signatures}
    plain = {key: sig.with_aligned([False] * len(sig.operands)) for key, sig in distinct.items()}
    common: dict[tuple[object, ...], list[bool]] = {}
    for key, sig in distinct.items():
        found = common.setdefault(plain[key].key, [True] * len(sig.operands))
        found[:] = [a and o.aligned for a, o in zip(found, sig.operands, strict=True)]
    made = {key: same.with_aligned(common[same.key]) for key, same in plain.items()}
    return [made[sig.key] for sig in signatures]


def _short(signatures: Iterable[kinds.Signature]) -> bool:
    """Are there packets of 4 bytes?"""
    return any(o.packet and o.itemsize == SHORT_PACKET for s in signatures for o in s.operands)


def _ends(plan: Plan, texts: Iterable[str]) -> bool:
    """May a task end the loop? Another kernel's of the plan may have, before this one began."""
    return len(plan.kernels) > 1 or any("ark_lower_limit" in text for text in texts)


def _seldom(plan: Plan, opcode: Sequence[int], last: int) -> set[int]:
    """Bodies that no task of the kernel's last phase runs: a prompt's, beside a decoder's."""
    used = {opcode[t.op] for tasks in plan.phases[last].processors for t in tasks}
    return set(opcode) - used - {-1}
