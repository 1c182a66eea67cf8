"""Prints plans as text for people: a summary, a list of ops, or all tasks with their waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ark.plan.types import Phase, Plan, Task


def dump(plan: Plan, tasks: bool = False) -> str:
    """The plan as text. It lists every op and, if `tasks` is True, the tasks of every processor."""
    lines = [*_head(plan)]
    for phase in plan.phases:
        lines += _phase(plan, phase)
        if tasks:
            lines += _tasks(plan, phase)
    return "\n".join(lines) + "\n"


def summary(plan: Plan) -> str:
    """The plan's machine and memory, and for each phase the number of ops and tasks by kind."""
    lines = [*_head(plan)]
    for phase in plan.phases:
        lines += _kinds(plan, phase)
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    machine = plan.machine
    yield f"plan of rank {plan.rank} of {plan.world_size}"
    yield (
        f"machine {machine['name']} ({machine['arch']}): {machine['processors']} processors, "
        f"{machine['shared_bytes']} bytes of shared memory"
    )
    for place, variant in enumerate(machine["variants"]):
        roles = ", ".join(f"{r['warps']} {r['name']}" for r in variant["roles"])
        names = ", ".join(p.name for p in plan.phases if p.variant == place)
        yield (
            f"variant {variant['name']} of {names}: warps of {machine['lanes']} lanes: {roles}; "
            f"ring of {variant['stages']} x {variant['stage_bytes']} bytes, "
            f"{variant['in_flight']} in flight"
        )
    yield "memory"
    for arena, nbytes in sorted(plan.arenas.items()):
        count = sum(b.arena == arena and b.rank == plan.rank for b in plan.buffers)
        if nbytes:
            yield f"  {arena:<11}{nbytes:>15,} bytes in {count} buffers"


def _by_op(phase: Phase) -> dict[int, list[Task]]:
    by_op: dict[int, list[Task]] = defaultdict(list)
    for own in phase.processors:
        for task in own:
            by_op[task.op].append(task)
    return by_op


def _total(phase: Phase, by_op: dict[int, list[Task]]) -> str:
    total = sum(len(t) for t in by_op.values())
    waits = sum(len(t.waits) for listed in by_op.values() for t in listed)
    streamed = sum(t.streamed for listed in by_op.values() for t in listed)
    return f"phase {phase.name}: {total} tasks, {waits} waits, {streamed:,} bytes streamed"


def _kinds(plan: Plan, phase: Phase) -> Iterator[str]:
    by_op = _by_op(phase)
    yield _total(phase, by_op)
    yield "  kind               ops   tasks  bytes streamed"
    by_kind: dict[str, list[list[Task]]] = defaultdict(list)
    for op, listed in by_op.items():
        by_kind[plan.ops[op].kind].append(listed)
    for kind, ops in sorted(by_kind.items()):
        tasks = sum(map(len, ops))
        streamed = sum(t.streamed for listed in ops for t in listed)
        yield f"  {kind:<16} {len(ops):>5} {tasks:>7} {streamed:>15,}"


def _phase(plan: Plan, phase: Phase) -> Iterator[str]:
    by_op = _by_op(phase)
    yield _total(phase, by_op)
    yield "  op    tasks  waits  kind             name -> results, from operands"
    for op_id, listed in sorted(by_op.items()):
        op = plan.ops[op_id]
        names = ", ".join(_tensor(plan, t) for t in op.operands)
        many = Counter(len(t.waits) for t in listed)
        shown = "/".join(str(n) for n in sorted(many))
        yield f"  {op_id:<5} {len(listed):>5}  {shown:>5}  {op.kind:<16} {op.name}: {names}"


def _tensor(plan: Plan, tensor_id: int) -> str:
    tensor = plan.tensors[tensor_id]
    buffer = plan.buffers[tensor.buffer]
    place = buffer.arena if buffer.rank == plan.rank else f"rank {buffer.rank}"
    form = " packets" if tensor.packet else ""
    shape = "x".join(str(n) for n in tensor.shape)
    return f"{tensor.name}[{shape} {tensor.dtype}{form} @{place}]"


def _tasks(plan: Plan, phase: Phase) -> Iterator[str]:
    for processor, own in enumerate(phase.processors):
        yield f"  processor {processor}"
        for task in own:
            waits = " ".join(f"{plan.counters[c].name}>={t}" for c, t in task.waits)
            signals = " ".join(
                plan.counters[c].name
                + (f"@{plan.counters[c].rank}" if plan.counters[c].rank != plan.rank else "")
                for c in task.signals
            )
            parts = [f"    {plan.ops[task.op].name} {list(task.coord)}"]
            parts += [f"wait {waits}"] if waits else []
            parts += [f"fetch {task.streamed:,}"] if task.streamed else []
            parts += [f"fetch up to {f.nbytes:,}" for f in task.fetches if f.growth]
            parts += [f"signal {signals}"] if signals else []
            yield "; ".join(parts)
