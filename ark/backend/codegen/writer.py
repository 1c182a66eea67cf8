"""Writes the source text of a loop kernel from a plan, a machine and a dialect. The same input
always gives the same text.

Ops with equal signatures share one specialised function. The dialect writes some of these bodies;
the task kinds of ark.tasks write all others. Called by ark.runtime.program and `ark emit`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ark.backend.codegen import device_text, layout
from ark.backend.codegen.bodies import Bodies, flows, kernel_ops
from ark.backend.codegen.body import BoxMap
from ark.backend.codegen.constants import constants, grows, plan_constants, signal_words
from ark.backend.codegen.dialect import Dialect, Source
from ark.backend.codegen.dispatch import dispatch, dispatch_load, dispatch_move, dispatch_run
from ark.backend.codegen.shared_memory import check_shared_memory
from ark.log import show, shows
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.signature import SHORT_PACKET, Signature
from ark.plan.types import Plan

# Headers of ark/backend/codegen/device that every kernel includes: WAITS before the text of its
# loop, ELEMENTS after it.
WAITS = ("wait.h", "task_slots.h", "iteration.h")
ELEMENTS = ("common.h", "math.h", "math16.h", "small_floats.h", "pack.h", "operand.h")
SHORT = ("short_packets.h",)  # included if operands are in short packets
_LOOP = device_text("loop.h")
# Kernels that share a loop's machine code need different amounts of shared memory. So the loop
# reads the amount from the variable ark_scratch_bytes, which each kernel defines.
_SCRATCH = "extern ARK_LINKED const int ark_scratch_bytes{};\n"
MAX_COMPILED_PARTS = 4  # largest Source.parts


@dataclass(frozen=True)
class Emitted:
    """The source of a loop kernel, and the data with which the runtime fills task records.

    opcode: the opcode of each op, by op id; -1 for ops of other kernels. scratch_bytes: bytes of
    shared memory besides the ring. bodies: the names of the functions by opcode, for traces and
    listings. maps: the box maps of each function's operands, by opcode.
    """

    source: Source
    opcode: tuple[int, ...]
    scratch_bytes: int
    bodies: tuple[str, ...]
    maps: tuple[tuple[BoxMap, ...], ...] = ()


def write(plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None) -> Emitted:
    """Writes the loop kernel that runs the given phases of `plan` (by default all) on `machine`, in
    `dialect`.

    Raises PlanError if the kernel needs more shared memory than a processor has.
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
    names, maps = tuple(bodies.names), tuple(bodies.maps)
    units = 0
    apart = bool(dialect.apart) and dialect.apart <= {op.kind for op in ops}
    if machine.variant.name == "block" and (0 < dialect.joint_bodies < len(names) or apart):
        # A kernel with a ring is compiled as one part, because several parts would each define the
        # ring's barriers.
        units = (
            1
            if machine.ring_bytes
            else min(MAX_COMPILED_PARTS, -(-len(names) // dialect.joint_bodies))
        )
    begin = [
        f"// ark loop kernel, dialect {dialect.name}\n",
        "#define ARK_REMOTE 1\n" if far else "",
        "#define ARK_BODIES_ENTER 1\n" if bodies.entering else "",
        f"#define ARK_FLOWS {layout.FLOW_TASKS}\n" if flow else "",
        "#define ARK_LOADS 1\n" if bodies.loads and dialect.loader else "",
        "#define ARK_MOVERS 1\n" if bodies.moves else "",
        "#define ARK_LIMIT_FALLS 1\n" if _ends(plan, (*headers, *bodies.texts)) else "",
    ]
    waits = [dialect.prelude, layout.declarations(), *map(device_text, WAITS)]
    # Bodies of attention name functions of growing fetches, also where no fetch of the plan grows.
    growth = grows(plan, phases) or any("ark_grown" in header for header in headers)
    stream = [dialect.ring, dialect.growth if growth else "", dialect.stream]
    shared = dialect.shares_loops and machine.variant.name == "block" and not machine.ring_bytes
    parts = [
        *begin,
        plan_constants(machine, plan, scratch, phases),
        *waits,
        _in_part(0, _LOOP) if units > 1 else "" if shared else _LOOP,
        *map(device_text, (*ELEMENTS, *(SHORT if _short(signatures) else ()))),
        *(stream if machine.ring_bytes else [device_text("stream_direct.h")]),
        dialect.roles if bodies.leads else "",
        dialect.loader(signatures, machine) if bodies.loads and dialect.loader else "",
        *dict.fromkeys(headers),
    ]
    loop = [
        dispatch(bodies, _seldom(plan, bodies.opcode, phases[-1]) if bodies.leads else ()),
        dispatch_run(bodies) if flow else "",
        dispatch_load(bodies) if bodies.loads else "",
        dispatch_move(bodies) if bodies.moves else "",
    ]
    alone = ""
    if shared:
        linked = [_linked(_LOOP), dialect.entry]
        loop = [_linked(loop[0]), _SCRATCH.format(f" = {scratch}"), _in_part(0, "\n".join(linked))]
        own = constants(machine, len(plan.phases), None, signals=signal_words(plan, machine))
        scratch_bytes = _SCRATCH.format("") + "#define ARK_SCRATCH_BYTES ark_scratch_bytes\n"
        alone = "\n".join([*filter(None, begin), own, *waits, scratch_bytes, *linked])
    else:
        loop.append(dialect.entry)
    texts = bodies.texts
    if units > 1:
        named = zip(bodies.names, bodies.texts, strict=True)
        texts = [_parted(text, name, code % units) for code, (name, text) in enumerate(named)]
        loop = [_in_part(0, "\n".join(part for part in loop if part))]
    text = "\n".join(part for part in (*parts, *texts, *loop) if part)
    if shows("codegen"):
        kinds_of = {code: op.kind for op in ops if (code := bodies.opcode[op.id]) >= 0}
        many = ", ".join(f"{k} {n}" for k, n in sorted(Counter(kinds_of.values()).items()))
        size = f"{len(text):,} characters"
        show("codegen", f"{machine.variant.name}, {dialect.name}: {size}; bodies: {many}")
    source = Source(text, parts=units, loop=alone)
    return Emitted(source, tuple(bodies.opcode), scratch, names, maps)


def _linked(text: str) -> str:
    """The text with external linkage for ark_dispatch, so that a loop which is compiled separately
    can call it.
    """
    return text.replace("ARK_DEVICE bool ark_dispatch(", "ARK_LINKED bool ark_dispatch(")


def _in_part(part: int, text: str, others: str = "") -> str:
    """C++ text for a source that is compiled in several parts: part number `part` compiles `text`,
    the other parts compile `others`.
    """
    other = f"#else\n{others}" if others else ""
    return f"#if !defined(ARK_PART) || ARK_PART == {part}\n{text}{other}#endif\n"


def _parted(text: str, name: str, part: int) -> str:
    """The text of the device function `name` that only part number `part` of a source defines.
    Other parts declare it.
    """
    if part == 0:
        return _in_part(0, text)
    defined = re.sub(rf"ARK_(BODY|DEVICE) (\w+ {name}\()", r"ARK_LINKED \2", text)
    (head,) = re.findall(rf"ARK_LINKED \w+ {name}\([^{{]*\)", defined)
    return _in_part(part, defined, f"{head};\n")


def _agreed(signatures: Sequence[Signature]) -> list[Signature]:
    """Makes signatures equal if they differ only in the alignment of operands, so that their ops
    share a function. In the result, an operand counts as aligned only if it is aligned in all of
    these signatures.
    """
    distinct = {sig.key: sig for sig in signatures}
    plain = {key: sig.with_aligned([False] * len(sig.operands)) for key, sig in distinct.items()}
    common: dict[tuple[object, ...], list[bool]] = {}
    for key, sig in distinct.items():
        aligned = common.setdefault(plain[key].key, [True] * len(sig.operands))
        aligned[:] = [a and o.aligned for a, o in zip(aligned, sig.operands, strict=True)]
    agreed = {key: same.with_aligned(common[same.key]) for key, same in plain.items()}
    return [agreed[sig.key] for sig in signatures]


def _short(signatures: Iterable[kinds.Signature]) -> bool:
    """True if an operand of a signature is stored in packets of 4 bytes."""
    return any(o.packet and o.itemsize == SHORT_PACKET for s in signatures for o in s.operands)


def _ends(plan: Plan, texts: Iterable[str]) -> bool:
    """True if a task of this kernel, or of one that runs before it, may end the loop early."""
    return len(plan.kernels) > 1 or any("ark_lower_limit" in text for text in texts)


def _seldom(plan: Plan, opcode: Sequence[int], last: int) -> set[int]:
    """The opcodes that no task of phase number `last` uses, such as those of a prompt phase in a
    kernel whose last phase is `decode`.
    """
    used = {opcode[t.op] for tasks in plan.phases[last].processors for t in tasks}
    return set(opcode) - used - {-1}
