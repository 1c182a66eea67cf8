"""Collects the device functions of a loop kernel. A loop kernel is the persistent kernel that runs
a plan: each thread block executes a list of tasks, and a task (a tile of an op) calls a device
function, its body. This module decides which ops share a body. It also decides which source a body
comes from: the vendor's dialect, or the task kind (ark.tasks), whose bodies do not depend on the
vendor. Called by ark.backend.codegen.writer. ark.backend.codegen.dispatch writes the switch
statements that call the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.backend.codegen.body import Body, BoxMap
from ark.backend.codegen.dialect import Dialect
from ark.errors import PlanError
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE, LOAD, MOVE
from ark.plan import kind as kinds
from ark.plan.params import PartialParams
from ark.plan.signature import Signature
from ark.plan.types import Plan, PlanOp


def kernel_ops(plan: Plan, phases: range | None) -> list[PlanOp]:
    """The ops of a plan whose tasks are in these phases; all ops if `phases` is None."""
    if phases is None or len(phases) == len(plan.phases):
        return list(plan.ops)
    lists = (tasks for i in phases for tasks in plan.phases[i].processors)
    used = {task.op for tasks in lists for task in tasks}
    return [op for op in plan.ops if op.id in used]


def body_scratch(sig: Signature, machine: Machine, dialect: Dialect) -> int:
    """Bytes of shared memory that a task of this signature needs in the given dialect."""
    own = dialect.body(sig, machine)
    common = kinds.get(sig.kind).scratch(sig, machine)
    return max(common, own.scratch(sig, machine)) if own else common


def flows(signatures: Sequence[Signature], machine: Machine, dialect: Dialect) -> bool:
    """Decides whether the warps of a kernel run consecutive tasks without a block barrier between
    them (ark.runtime.flows). This needs ops that support it. The loop then also keeps more state,
    which causes register spills in the functions of all other ops. Therefore the result is True
    only if more than half of the ops support it.
    """
    if machine.variant.name != "block" or not machine.cooperative:
        return False
    bodies = {sig.key: sig for sig in signatures}
    if any(_enters(sig, machine, dialect) for sig in bodies.values()):
        return False
    able = {key: kinds.get(sig.kind).apart(sig, machine) > 0 for key, sig in bodies.items()}
    return 2 * sum(able[sig.key] for sig in signatures) > len(signatures)


def _enters(sig: Signature, machine: Machine, dialect: Dialect) -> bool:
    """True if the vendor's device function waits for the dependencies of its task. Otherwise the
    loop waits before it calls the function. Always False outside of the kernel variant `block`.
    """
    own = dialect.body(sig, machine) if machine.variant.name == "block" else None
    return own is not None and own.enters


class _Moved(PartialParams, frozen=True):
    """Parameters of the task kinds that copy or sum data between ranks. moved: True if moving
    warps, which only move data, execute the tasks instead of computing warps.
    """

    moved: bool = False


class Bodies:
    """The device functions of one kernel. Functions are numbered; a function's number, its opcode,
    is stored in the record of each task that calls it.

    names: the name of each function, by opcode. maps: the box maps (BoxMap) of each function's
    operands, by opcode. opcode: the opcode of each op, by op id; -1 for ops of other kernels.
    texts: the source of the functions. headers, dialect_headers: the headers that the functions
    need, from ark.tasks and from the dialect, in order of first use.

    leads: True if the kernel has a communicating warp, here called leading warp: it polls for the
    inputs of tasks before the computing warps reach these tasks. loads, moves: True if the kernel
    has loading warps or moving warps.

    The other attributes contain opcodes of functions with a property. polled: functions with extra
    code for the leading warp, which polls for the task's input. entering: functions that wait for
    their task's dependencies themselves. runs: functions that execute several consecutive tasks in
    one call. moved: functions that moving warps run. halves: functions whose loads are in a
    separate function, which loading warps call; each opcode is mapped to the index of the first
    operand that has a box map. spares: functions that do not write to the shared-memory buffers
    (stages) of the loading warps.
    """

    def __init__(self, machine: Machine, dialect: Dialect, ops: int, flow: bool = False) -> None:
        """ops: the number of the plan's ops. flow: the result of `flows`."""
        self._machine = machine
        self._flow = flow
        self._dialect = dialect
        self._seen: dict[tuple[object, ...], int] = {}  # opcodes by signature key
        self._common: dict[str, int] = {}  # opcodes of common functions by their text
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
        self.halves: dict[int, int] = {}
        self.spares: set[int] = set()

    def add(self, op: PlanOp, sig: Signature) -> None:
        """Assigns a device function to an op: that of an earlier op with an equal signature, or a
        new one. Raises PlanError if no function supports the op.
        """
        code = self._seen.get(sig.key)
        if code is None:
            moved = self.moves and sig.read(_Moved).moved
            code = self._seen[sig.key] = self._moved(op, sig) if moved else self._body(op, sig)
        self.opcode[op.id] = code

    def _body(self, op: PlanOp, sig: Signature) -> int:
        """Adds the function for this signature and returns its opcode. It is the vendor's function
        or, if the vendor has none, the common function of the task kind.
        """
        machine, dialect = self._machine, self._dialect
        name = self._next_name(op)
        own = dialect.body(sig, machine)
        kind = kinds.get(op.kind)
        runs = self._flow and not own and kind.apart(sig, machine) > 0
        write = kind.run_source if runs else kind.source
        common = "" if own else write(name, sig, machine)
        if common:
            unnamed = common.replace(name, "")
            if unnamed in self._common:  # another signature with the same function
                return self._common[unnamed]
            self._common[unnamed] = len(self.names)
        code = self._append(op, name, own.maps(sig, machine) if own else ())
        self.headers.update(dict.fromkeys(kind.texts(sig)))
        if runs:
            self.runs.add(code)
        if own:
            self._own(code, own, sig)
        else:
            self.headers.update(dict.fromkeys(kind.common_headers))
            self.texts.append(common)
        loading = own.load(name, sig, machine) if own and self.loads else None
        if loading:
            self.halves[code] = len(sig.operands)
            self.texts.append(loading)
        if body_scratch(sig, machine, dialect) <= dialect.unstaged:
            self.spares.add(code)
        return code

    def _own(self, code: int, own: Body, sig: Signature) -> None:
        """Adds the source of a vendor's function. Records its properties, for example whether it
        has extra code for the leading warp and whether it waits for its task's dependencies itself.
        """
        machine, name = self._machine, self.names[code]
        needed = (*own.headers(machine), *own.texts(sig, machine))
        self.dialect_headers.update(dict.fromkeys(needed))
        polling = own.poll(name, sig, machine) if self.leads else None
        if polling:
            self.polled.add(code)
            self.texts.append(polling)
        if _enters(sig, machine, self._dialect):
            self.entering.add(code)
        self.texts.append(own.source(name, sig, machine))

    def _moved(self, op: PlanOp, sig: Signature) -> int:
        """Adds the function for an op that moving warps execute and returns its opcode. Raises
        PlanError if the vendor has no such function.
        """
        name = self._next_name(op)
        own = self._dialect.body(sig, self._machine, moves=True)
        if own is None:
            raise PlanError(
                f"op {op.name!r} is assigned to moving warps, for which the backend has no "
                f"function of kind {op.kind!r}"
            )
        code = self._append(op, name, ())
        self.moved.add(code)
        self.texts.append(own.source(name, sig, self._machine))
        return code

    def _next_name(self, op: PlanOp) -> str:
        return f"task_{len(self.names)}_{op.kind}"

    def _append(self, op: PlanOp, name: str, maps: tuple[BoxMap, ...]) -> int:
        """Adds a new function and returns its opcode."""
        self.names.append(name)
        self.maps.append(maps)
        self.headers.update(dict.fromkeys(kinds.get(op.kind).headers))
        return len(self.names) - 1
