"""The loop-kernel writer: plan + machine + dialect -> one source text, the same bytes each time.

Equal ops share one specialised function. A dialect may write some bodies itself; everything else
comes from ark.tasks. Called by ark.runtime.program and `ark emit`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ark.codegen import device_text, layout
from ark.codegen.dialect import BoxMap, Dialect, Source
from ark.errors import PlanError, UnsupportedError
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.signature import SHORT_PACKET, Signature
from ark.plan.types import Plan, PlanOp
from ark.variant import COMMUNICATE, LOAD, MOVE

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


def constants(
    machine: Machine,
    phases: int,
    scratch: int,
    streamed: int = 0,
    grows: bool = False,
    cuts: bool = False,
    signals: int = 1,
) -> str:
    """What preludes and device code know of machine and kernel; scratch, streamed: in bytes.

    grows, cuts: does the stream load rows that grow in number, or parts of several rows at once?
    signals: words of a counter that peers signal (signal_words). STAGE_NS: in so many nanoseconds
    the memory gives each processor a stage, as the machine's model has it.
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
        "STREAM_CUTS": int(cuts),
        "SIGNAL_WORDS": signals,
    }
    return "".join(f"constexpr int ARK_{name} = {value};\n" for name, value in values.items())


def _constants(machine: Machine, plan: Plan, scratch: int, run: range) -> str:
    phases = len(plan.phases)
    lists = plan.phases[run[-1]].processors
    streamed = sum(task.streamed for tasks in lists for task in tasks)
    every = [
        fetch
        for i in run
        for tasks in plan.phases[i].processors
        for task in tasks
        for fetch in task.fetches
    ]
    grows, cuts = any(f.growth for f in every), any(f.parts > 1 for f in every)
    signals = signal_words(plan, machine)
    return constants(machine, phases, scratch, streamed, grows, cuts, signals)


def _ops(plan: Plan, phases: range | None) -> list[PlanOp]:
    """The ops of these phases; all, if no phases are given or the kernel runs all of them."""
    if phases is None or len(phases) == len(plan.phases):
        return list(plan.ops)
    lists = (tasks for i in phases for tasks in plan.phases[i].processors)
    used = {task.op for tasks in lists for task in tasks}
    return [op for op in plan.ops if op.id in used]


def scratch_bytes(
    plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None
) -> int:
    """Shared memory that the loop and the largest task of the phases need, 16-byte rounded."""
    signatures = [kinds.signature(plan, op) for op in _ops(plan, phases)]
    needs = [256, *(_scratch(sig, machine, dialect) for sig in signatures)]
    if _flows(signatures, machine, dialect):
        needs.append(layout.FLOW_TASKS * layout.dtype("ArkTask").itemsize)
    return layout.LOOP_BYTES + (max(needs) + 15) // 16 * 16


def _scratch(sig: kinds.Signature, machine: Machine, dialect: Dialect) -> int:
    """The same for the tasks of one signature, without the loop's."""
    special = dialect.scratch.get(sig.kind)
    common = kinds.get(sig.kind).scratch(sig, machine)
    return max(common, special(sig, machine)) if special else common


def _flows(signatures: Sequence[Signature], machine: Machine, dialect: Dialect) -> bool:
    """May warps go from task to task of the kernel without meeting? Where bodies that allow it are
    most ops': what the loop keeps for them makes others spill.
    """
    if machine.variant.name != "block" or machine.has("single_thread"):
        return False
    bodies = {sig.key: sig for sig in signatures}
    if any(
        s.kind in dialect.enters and dialect.enters[s.kind](s, machine) for s in bodies.values()
    ):
        return False
    able = {key: kinds.get(sig.kind).apart(sig, machine) > 0 for key, sig in bodies.items()}
    return 2 * sum(able[sig.key] for sig in signatures) > len(signatures)


def check_shared_memory(
    plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None
) -> int:
    """What scratch_bytes gives; PlanError if a processor has not so much besides its ring."""
    needed = scratch_bytes(plan, machine, dialect, phases)
    room = machine.shared_bytes - machine.ring_bytes + layout.LOOP_BYTES
    if needed > room:
        raise PlanError(
            f"the plan is refused: its largest task and the loop need {needed} bytes of shared "
            f"memory, a processor of {machine.name} has {room}"
        )
    return needed


def signal_words(plan: Plan, machine: Machine) -> int:
    """Words of a counter that peers signal: one for each rank where they signal by stores, else 1.

    UnsupportedError where a counter has no room for so many, or ranks on other hosts take part.
    """
    if plan.world_size == 1 or not machine.has("peer_stores"):
        return 1
    room = machine.line_bytes // 4
    if plan.meta.get("hosts") or plan.world_size > room:
        raise UnsupportedError(
            f"the links between this machine's devices carry no read-modify-write, and ranks that "
            f"signal by stores must be {room} at most, all on one host; the plan has "
            f"{plan.world_size}{' on several hosts' if plan.meta.get('hosts') else ''}"
        )
    return plan.world_size


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


def write(plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None) -> Emitted:
    """Emits the loop kernel of `plan` for `machine` in `dialect`.

    phases: those that it runs, by default all. PlanError if it asks for more shared memory than a
    processor has.
    """
    phases = phases or range(len(plan.phases))
    opcode = [-1] * len(plan.ops)
    bodies: list[str] = []
    texts: list[str] = []
    headers: dict[str, None] = {}  # in order of first use
    dialect_headers: dict[str, None] = {}  # of bodies that the dialect writes
    polls: set[int] = set()  # bodies that are no block form
    entering: set[int] = set()  # bodies in block form that wait for their tasks themselves
    leads = bool(machine.variant.role(COMMUNICATE))
    loads = bool(machine.variant.role(LOAD)) and not machine.ring_bytes
    moves = bool(machine.variant.role(MOVE)) and not machine.has("single_thread")
    moved: set[int] = set()  # bodies of warps that move
    halves: set[int] = set()  # bodies with a loading half
    spares: set[int] = set()  # bodies that use no shared memory of stages
    maps: list[tuple[BoxMap, ...]] = []
    seen: dict[tuple[object, ...], int] = {}
    written: dict[str, int] = {}  # by text, of bodies that are the same for all vendors
    ops = _ops(plan, phases)
    signatures = _agreed([kinds.signature(plan, op) for op in ops])
    for op, sig in zip(ops, signatures, strict=True):
        code = seen.get(sig.key)
        if code is None:
            code = len(bodies)
            name = f"task_{code}_{op.kind}"
            if moves and sig.params.get("moved"):
                opcode[op.id] = seen[sig.key] = code
                bodies.append(name)
                moved.add(code)
                maps.append(())
                headers.update(dict.fromkeys(kinds.get(op.kind).headers()))
                texts.append(_moved(name, op, sig, machine, dialect))
                continue
            special = dialect.bodies.get(op.kind)
            text = special(name, sig, machine) if special else None
            common = "" if text else kinds.get(op.kind).source(name, sig, machine)
            unnamed = common.replace(name, "")
            if unnamed in written:  # another signature, but the same function
                opcode[op.id] = seen.setdefault(sig.key, written[unnamed])
                continue
            seen[sig.key] = code
            if common:
                written[unnamed] = code
            bodies.append(name)
            headers.update(dict.fromkeys(kinds.get(op.kind).headers()))
            if text and op.kind in dialect.headers:
                dialect_headers.update(dict.fromkeys(dialect.headers[op.kind](machine)))
            poll = dialect.polls.get(op.kind) if leads and text else None
            polling = poll(name, sig, machine) if poll else None
            if polling:
                polls.add(code)
                texts.append(polling)
            enters = dialect.enters.get(op.kind) if machine.variant.name == "block" else None
            if text and enters and enters(sig, machine):
                entering.add(code)
            texts.append(text or common)
            half = dialect.loads[op.kind] if loads and op.kind in dialect.loads else None
            loading = half(name, sig, machine) if half else None
            if loading:
                halves.add(code)
                texts.append(loading)
            if _scratch(sig, machine, dialect) <= dialect.unstaged:
                spares.add(code)
            rule = dialect.maps.get(op.kind)
            maps.append(rule(sig, machine) if rule else ())
        opcode[op.id] = code
    scratch = check_shared_memory(plan, machine, dialect, phases)
    stream = dialect.stream if machine.ring_bytes else device_text("stream_direct.h")
    roles = dialect.roles if leads else ""
    far = bool(plan.meta.get("hosts"))
    if far:
        headers.setdefault(device_text("proxy.h"))
    parts = [
        f"// ark loop kernel, dialect {dialect.name}\n",
        "#define ARK_REMOTE 1\n" if far else "",
        "#define ARK_BODIES_ENTER 1\n" if entering else "",
        f"#define ARK_FLOWS {layout.FLOW_TASKS}\n" if _flows(signatures, machine, dialect) else "",
        "#define ARK_MOVERS 1\n" if moves else "",
        "#define ARK_LIMIT_FALLS 1\n" if _ends(plan, (*headers, *texts)) else "",
        _constants(machine, plan, scratch, phases),
        dialect.prelude,
        layout.declarations(),
        *map(device_text, (*DEVICE, *(SHORT if leads or _short(signatures) else ()))),
        stream,
        roles,
        dialect.loader(signatures, machine) if loads and dialect.loader else "",
        *dict.fromkeys((*dialect_headers, *headers)),
        *texts,
        _dispatch(
            bodies,
            polls if leads else None,
            entering,
            "  ark_task_begins(c);\n" if loads else "",
            _seldom(plan, opcode, phases[-1]) if leads else (),
            moved,
        ),
        _dispatch_load(bodies, halves, spares) if loads else "",
        _dispatch_move(bodies, moved) if moves else "",
        dialect.entry,
    ]
    text = "\n".join(part for part in parts if part)
    return Emitted(Source(text), tuple(opcode), scratch, tuple(bodies), tuple(maps))


def _dispatch_move(bodies: Sequence[str], moved: set[int]) -> str:
    """The switch over what warps that move run."""
    lines = "".join(f"    case {i}u: {bodies[i]}_move(t); return;\n" for i in sorted(moved))
    return (
        "ARK_DEVICE void ark_dispatch_move(const ArkTask& t) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )


def _moved(name: str, op: PlanOp, sig: Signature, machine: Machine, dialect: Dialect) -> str:
    """The body of an op whose tasks are all in lists of warps that move."""
    write_body = dialect.moves.get(op.kind)
    text = write_body(name, sig, machine) if write_body else None
    if not text:
        raise PlanError(f"op {op.name!r} is for warps that move, and they have no body for it")
    return text


def _short(signatures: Iterable[kinds.Signature]) -> bool:
    """Are there packets of 4 bytes?"""
    return any(o.packet and o.itemsize == SHORT_PACKET for s in signatures for o in s.operands)


def _ends(plan: Plan, texts: Iterable[str]) -> bool:
    """May a task end the loop? Another kernel's of the plan may have, before this one began."""
    return len(plan.kernels) > 1 or any("ark_lower_limit" in text for text in texts)


def _any_of(codes: Collection[int]) -> str:
    return " || ".join(f"kind == {i}u" for i in sorted(codes)) or "false"


def _dispatch_load(bodies: Sequence[str], halves: set[int], spares: set[int]) -> str:
    """Which kinds have loading halves, which others use none of their stages, and the switch."""
    found = sorted(halves)
    lines = "".join(f"    case {i}u: {bodies[i]}_load(c, t, load); return;\n" for i in found)
    return (
        f"ARK_DEVICE bool ark_loads(ark_u32 kind) {{ return {_any_of(halves)}; }}\n"
        f"ARK_DEVICE bool ark_spares_stages(ark_u32 kind) {{ return {_any_of(spares)}; }}\n"
        "ARK_DEVICE void ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {\n"
        f"  switch (t.kind) {{\n{lines}    default: return;\n  }}\n}}\n"
    )


def _seldom(plan: Plan, opcode: Sequence[int], last: int) -> set[int]:
    """Bodies that no task of the kernel's last phase runs: a prompt's, beside a decoder's."""
    used = {opcode[t.op] for tasks in plan.phases[last].processors for t in tasks}
    return set(opcode) - used - {-1}


def _dispatch(
    bodies: Sequence[str],
    polls: set[int] | None,
    entering: set[int],
    first: str = "",
    seldom: Collection[int] = (),
    moved: Collection[int] = (),
) -> str:
    """The switches over kinds. polls: with the variant `roles`, bodies that the
    lead warp polls for and that enter by themselves. entering: the same in the variant `block`.
    first: what happens before any body. seldom: bodies behind a call of their own, so that what
    they need is not kept in registers, or spilled, where others run. moved: bodies that computing
    warps do not run.
    """
    lines: dict[bool, list[str]] = {False: [], True: []}
    polling = []
    for i, name in enumerate(bodies):
        if i in moved:
            continue
        if polls is None and not entering:
            run = f"{name}(c, t); return true;"
        elif i in entering:
            run = f"return {name}(c, t);"
        elif polls is not None and i in polls:
            run = f"return {name}(c, t);"
            polling.append(f"    case {i}u: {name}_poll(c, t); break;")
        else:
            run = f"if (!ark_enter(c)) return false; {name}(c, t); return true;"
        lines[i in seldom].append(f"    case {i}u: {run}\n")
    enter = "" if polls is None and not entering else "      if (!ark_enter(c)) return false;\n"
    unknown = f"{enter}      ark_fail(c, 5u, 0u, {len(bodies)}u, t.kind);\n      return true;\n"
    made = ""
    if lines[True]:
        made += _switch("ARK_BODY bool ark_dispatch_seldom", "", lines[True], unknown)
        unknown = "      return ark_dispatch_seldom(c, t);\n"
    made += _switch("ARK_DEVICE bool ark_dispatch", first, lines[False], unknown)
    if polls is not None:
        made += (
            "ARK_DEVICE void ark_dispatch_poll(ArkCtx& c, const ArkTask& t) {\n"
            "  switch (t.kind) {\n" + "\n".join(polling) + "\n    default: break;\n  }\n}\n"
        )
    return made


def _switch(function: str, first: str, lines: Sequence[str], unknown: str) -> str:
    return (
        f"{function}(ArkCtx& c, const ArkTask& t) {{\n{first}  switch (t.kind) {{\n"
        f"{''.join(lines)}    default:\n{unknown}  }}\n}}\n"
    )
