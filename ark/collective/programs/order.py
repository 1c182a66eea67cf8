"""Computes orders of a program's operations: a valid order of all operations, the step of each
operation, and the last writers of slots.

Used by the checker, the executor, the simulator and the dumps.
"""

from __future__ import annotations

from ark.collective.programs.types import CollectiveProgram, Kind, Operation, OpRef
from ark.errors import PlanError


def describe(program: CollectiveProgram, ref: OpRef) -> str:
    """Names one operation for a message: "rank 2 operation 5 (put in[0] -> r3 out[2])"."""
    return f"rank {ref.rank} operation {ref.position} ({show(program.op(ref))})"


def show(op: Operation) -> str:
    """One operation as text, without its dependencies."""
    verb = op.kind.value if op.reduce is None else f"{op.kind.value}.{op.reduce}"
    peer = "" if op.peer is None else f"r{op.peer} "
    divide = "" if op.divide == 1 else f" / {op.divide}"
    return f"{verb} {' '.join(map(str, op.srcs))} -> {peer}{op.dst}{divide}"


def in_order(program: CollectiveProgram) -> list[OpRef]:
    """Returns a valid order of all operations, in which every rank's operations are in the order of
    its list.

    Raises PlanError with the waiting operations if no rank can continue (a deadlock).
    """
    position = [0] * program.ranks
    order: list[OpRef] = []
    sleepers: dict[OpRef, list[int]] = {}
    ready = list(range(program.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        ops = program.operations[rank]
        while position[rank] < len(ops):
            op = ops[position[rank]]
            missing = next((d for d in op.deps if d.position >= position[d.rank]), None)
            if missing is not None:
                sleepers.setdefault(missing, []).append(rank)
                break
            done = OpRef(rank, position[rank])
            order.append(done)
            position[rank] += 1
            ready.extend(reversed(sleepers.pop(done, [])))
    stuck = [r for r in range(program.ranks) if position[r] < len(program.operations[r])]
    if stuck:
        raise PlanError(_deadlock(program, position, stuck[0]))
    return order


def _deadlock(program: CollectiveProgram, position: list[int], rank: int) -> str:
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        op = program.operations[rank][position[rank]]
        rank = next(d.rank for d in op.deps if d.position >= position[d.rank])
    cycle = chain[chain.index(rank) :]
    parts = []
    for r in cycle:
        here = OpRef(r, position[r])
        dep = next(d for d in program.op(here).deps if d.position >= position[d.rank])
        parts.append(
            f"{describe(program, here)} waits for rank {dep.rank} operation {dep.position}"
        )
    return (
        f"The program {program.name} deadlocks when every rank runs its list in order: "
        + "; ".join(parts[:4])
        + ". Reorder the lists or remove the circular dependency."
    )


def steps(program: CollectiveProgram) -> dict[OpRef, int]:
    """The step of every operation, which is the number of puts that must end one after another
    before it can start.
    """
    result: dict[OpRef, int] = {}
    for ref in in_order(program):
        result[ref] = max(
            (result[d] + (program.op(d).kind is Kind.PUT) for d in program.op(ref).deps), default=0
        )
    return result


def final_writers(program: CollectiveProgram) -> dict[tuple[int, int], OpRef]:
    """The operation that writes the final value of each slot of `out`, by (rank, slot)."""
    result: dict[tuple[int, int], OpRef] = {}
    for ref in in_order(program):
        op = program.op(ref)
        if op.dst.buffer == "out":
            for slot in op.dst.slots():
                result[op.writes_on(ref.rank), slot] = ref
    return result
