"""The functions that a loop kernel calls for its tasks: which ops share one, whether the dialect or
ark.tasks writes it, and its properties that the loop depends on.

Called by ark.codegen.writer, whose switches (ark.codegen.dispatch) choose among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.codegen.body import Body, BoxMap
from ark.codegen.dialect import Dialect
from ark.errors import PlanError
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE, LOAD, MOVE
from ark.plan import kind as kinds
from ark.plan.params import PartialParams
from ark.plan.signature import Signature
from ark.plan.types import Plan, PlanOp


def kernel_ops(plan: Plan, phases: range | None) -> list[PlanOp]:
    """The ops of these phases; all, if no phases are given or the kernel runs all of them."""
    if phases is None or len(phases) == len(plan.phases):
        return list(plan.ops)
    lists = (tasks for i in phases for tasks in plan.phases[i].processors)
    used = {task.op for tasks in lists for task in tasks}
    return [op for op in plan.ops if op.id in used]


def body_scratch(sig: Signature, machine: Machine, dialect: Dialect) -> int:
    """Shared memory that a task of this signature needs, in bytes."""
    own = dialect.body(sig, machine)
    common = kinds.get(sig.kind).scratch(sig, machine)
    return max(common, own.scratch(sig, machine)) if own else common


def flows(signatures: Sequence[Signature], machine: Machine, dialect: Dialect) -> bool:
    """True where warps may go from task to task of the kernel without a block barrier. Where bodies
    that allow it are most ops': what the loop keeps for them makes others spill.
    """
    if machine.variant.name != "block" or not machine.cooperative:
        return False
    bodies = {sig.key: sig for sig in signatures}
    if any(_enters(sig, machine, dialect) for sig in bodies.values()):
        return False
    able = {key: kinds.get(sig.kind).apart(sig, machine) > 0 for key, sig in bodies.items()}
    return 2 * sum(able[sig.key] for sig in signatures) > len(signatures)


def _enters(sig: Signature, machine: Machine, dialect: Dialect) -> bool:
    """True where the dialect's body for the variant `block` waits for its task itself."""
    own = dialect.body(sig, machine) if machine.variant.name == "block" else None
    return own is not None and own.enters


class _Moved(PartialParams, frozen=True):
    """What copies and sums say: whether warps that move do them."""

    moved: bool = False


class Bodies:
    """The functions of one kernel. An opcode is a function's number, by which a task names it.

    names, maps: each function's name and its box maps, by opcode. opcode: each op's, by op id; -1
    for ops of other kernels. texts: the functions' source. headers, dialect_headers: what all
    kinds' bodies, and the dialect's own, stand on, in order of first use. leads, loads, moves: True
    where warps poll for tasks ahead of the others, load for them, or have their own task list. The
    rest are sets of opcodes. polled: bodies for which the leading warp polls; all others are in
    block form. entering: bodies of the variant `block` that wait for their tasks themselves. runs:
    bodies that take several tasks one after the other. moved: bodies of the warps that move.
    halves: bodies with a loading half. spares: bodies that use no shared memory of the loading
    warps' stages.
    """

    def __init__(self, machine: Machine, dialect: Dialect, ops: int, flow: bool = False) -> None:
        """flow: the kernel's warps go through runs of tasks without meeting."""
        self._machine = machine
        self._flow = flow
        self._dialect = dialect
        self._seen: dict[tuple[object, ...], int] = {}  # opcodes by signature
        self._common: dict[str, int] = {}  # opcodes by text, of bodies that the dialect leaves
        self.leads = bool(machine.variant.role(COMMUNICATE))
        self.loads = bool(machine.variant.role(LOAD)) and not machine.ring_bytes
        self.moves = bool(machine.variant.role(MOVE)) and machine.cooperative
        self.names: list[str] = []
        self.maps: list[tuple[BoxMap, ...]] = []
        self.opcode = [-1] * ops
        self.texts: list[str] = []
        self.headers: dict[str, None] = {}
        self.dialect_headers: dict[str, None] = {}
        self.polled: set[int] = set()
        self.entering: set[int] = set()
        self.runs: set[int] = set()
        self.moved: set[int] = set()
        self.halves: set[int] = set()
        self.spares: set[int] = set()

    def add(self, op: PlanOp, sig: Signature) -> None:
        """Gives an op its function: one that it shares with ops before it, or a new one.

        PlanError where no body can be written.
        """
        code = self._seen.get(sig.key)
        if code is None:
            moved = self.moves and sig.read(_Moved).moved
            code = self._seen[sig.key] = self._moved(op, sig) if moved else self._body(op, sig)
        self.opcode[op.id] = code

    def _body(self, op: PlanOp, sig: Signature) -> int:
        """A function of the dialect's or, where it has none for the signature, of the kind's."""
        machine, dialect = self._machine, self._dialect
        name = self._next_name(op)
        own = dialect.body(sig, machine)
        kind = kinds.get(op.kind)
        runs = self._flow and not own and kind.apart(sig, machine) > 0
        write = kind.run_source if runs else kind.source
        common = "" if own else write(name, sig, machine)
        if common:
            unnamed = common.replace(name, "")
            if unnamed in self._common:  # another signature, but the same function
                return self._common[unnamed]
            self._common[unnamed] = len(self.names)
        code = self._append(op, name, own.maps(sig, machine) if own else ())
        self.headers.update(dict.fromkeys(kind.texts(sig)))
        if runs:
            self.runs.add(code)
        if own:
            self._own(code, own, sig)
        else:
            self.texts.append(common)
        loading = own.load(name, sig, machine) if own and self.loads else None
        if loading:
            self.halves.add(code)
            self.texts.append(loading)
        if body_scratch(sig, machine, dialect) <= dialect.unstaged:
            self.spares.add(code)
        return code

    def _own(self, code: int, own: Body, sig: Signature) -> None:
        """A body of the dialect's, which may poll or wait for its tasks itself."""
        machine, name = self._machine, self.names[code]
        self.dialect_headers.update(dict.fromkeys(own.headers(machine)))
        polling = own.poll(name, sig, machine) if self.leads else None
        if polling:
            self.polled.add(code)
            self.texts.append(polling)
        if _enters(sig, machine, self._dialect):
            self.entering.add(code)
        self.texts.append(own.source(name, sig, machine))

    def _moved(self, op: PlanOp, sig: Signature) -> int:
        """The function of an op whose tasks are all in lists of warps that move."""
        name = self._next_name(op)
        own = self._dialect.body(sig, self._machine, moves=True)
        if own is None:
            raise PlanError(f"op {op.name!r} is for warps that move, and they have no body for it")
        code = self._append(op, name, ())
        self.moved.add(code)
        self.texts.append(own.source(name, sig, self._machine))
        return code

    def _next_name(self, op: PlanOp) -> str:
        return f"task_{len(self.names)}_{op.kind}"

    def _append(self, op: PlanOp, name: str, maps: tuple[BoxMap, ...]) -> int:
        """The opcode of a function that is new."""
        self.names.append(name)
        self.maps.append(maps)
        self.headers.update(dict.fromkeys(kinds.get(op.kind).headers()))
        return len(self.names) - 1
