"""How a plan in ARK's own layout (ark.api.task_schema) becomes one of ark's plans.

ARK writes what is computed as TaskInfos (ops with tensors, arguments and a configuration) and where
as ProcessorGroups. The ops are added to a new graph through ark's public ops, which check shapes
and types; ranges of processors, tiles, numbers of tasks and granularities become hints; ark's
planner then places the counters, and its verifier checks the result. Tensors of the current model
keep their memory where the plan's ops are the model's. Called by ark.api.planner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ark import ops
from ark.api.config import check_config, hints_of
from ark.api.task_schema import OpEntry, TaskEntry, TaskPlan, TensorEntry
from ark.errors import BaseError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir import dtype as dtypes
from ark.ir import values as ir
from ark.ir.export import op_entry
from ark.ir.graph import Node
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify


class _Arguments:
    """An op's arguments by any of the names that they have."""

    def __init__(self, op: OpEntry) -> None:
        self._op = op

    def __call__(self, kind: Any, *names: str) -> Any:
        for name in names:
            if name in self._op.args:
                (value,) = self._op.args[name].values()
                try:
                    return msgspec.convert(value, kind, strict=True)
                except msgspec.ValidationError as error:
                    raise PlanError(f"op {self._op.name!r}: {name} is wrong: {error}") from error
        raise PlanError(f"op {self._op.name!r} of type {self._op.type} has no argument {names[0]}")

    def has(self, *names: str) -> bool:
        return any(name in self._op.args for name in names)


Call = Callable[[Sequence[Tensor], Any, _Arguments, str], Tensor]
_SCALAR = ("Factor", "scalar")


def _op(name: str) -> Any:
    return getattr(ops, name)


def _plain(name: str) -> Call:
    return lambda reads, out, args, label: _op(name)(*reads, output=out, name=label)


def _binary(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: _Arguments, label: str) -> Tensor:
        given = [*reads, args(float, *_SCALAR)] if args.has(*_SCALAR) else reads
        return _op(name)(*given, output=out, name=label)  # type: ignore[no-any-return]

    return call


def _reduction(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: _Arguments, label: str) -> Tensor:
        axis, keep = args(int, "Axis", "axis"), args(bool, "KeepDim", "keepdims")
        return _op(name)(*reads, axis, keep, output=out, name=label)  # type: ignore[no-any-return]

    return call


def _matmul(reads: Sequence[Tensor], out: Any, args: _Arguments, label: str) -> Tensor:
    left = args(bool, "TransposeInput", "transpose_a")
    right = args(bool, "TransposeOther", "transpose_b")
    return _op("matmul")(*reads, out, left, right, name=label)  # type: ignore[no-any-return]


def _normed(name: str) -> Call:
    def call(reads: Sequence[Tensor], out: Any, args: _Arguments, label: str) -> Tensor:
        eps = args(float, "Eps", "eps")
        return _op(name)(*reads, eps, output=out, name=label)  # type: ignore[no-any-return]

    return call


_BINARY, _REDUCTIONS = ("add", "sub", "mul", "div"), ("reduce_sum", "reduce_max", "reduce_mean")
_PLAIN = (
    *("copy", "exp", "sqrt", "rsqrt", "relu", "gelu", "sigmoid", "silu", "swiglu", "softmax"),
    *("rope", "embedding", "argmax"),
)


def _type(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


CALLS: dict[str, Call] = {
    **{_type(name): _plain(name) for name in _PLAIN},
    **{_type(name): _binary(name) for name in _BINARY},
    **{f"Scalar{_type(name)}": _binary(name) for name in _BINARY},
    **{_type(name): _reduction(name) for name in _REDUCTIONS},
    **{_type(name): _normed(name) for name in ("layernorm", "rmsnorm")},
    "Matmul": _matmul,
    "Transpose": lambda reads, out, args, label: _op("transpose")(
        *reads, args(list[int], "Permutation", "perm"), output=out, name=label
    ),
    "Cast": lambda reads, out, args, label: _op("cast")(*reads, out.ir.dtype, out, name=label),
    "ScalarAssign": lambda reads, out, args, label: _op("copy")(
        args(float, "Val", *_SCALAR), out, name=label
    ),
    "Constant": lambda reads, out, args, label: _op("copy")(
        args(float, "Val", *_SCALAR), out, name=label
    ),
}


def build(plan: TaskPlan, model: Model, machine: Machine) -> Plan:
    """ark's plan of it for a machine, verified where one rank runs alone.

    model: whose tensors keep their memory. Raises PlanError or UnsupportedError, naming the op, for
    what the plan says wrongly or ark cannot run.
    """
    _check_architecture(plan, machine)
    for task in plan.task_infos:
        for op in task.ops:
            check_config(op.config, f"the configuration of op {op.name!r}")
    order = _order(plan)
    shared = _shared(plan, model)
    fresh = Model(plan.rank, plan.world_size)
    made = _Graph(fresh, plan, shared)
    with use_model(fresh):
        for place in order:
            for op in place.task.ops:
                if not op.is_virtual and op.type != "Noop":
                    made.add(op, place)
    external = {b.id for b in made.buffers.values() if b.name in made.held}
    inner = make_plan(fresh.graph, machine, {"external": sorted(external)})
    if plan.world_size == 1:
        verify([inner])
    return inner


def _check_architecture(plan: TaskPlan, machine: Machine) -> None:
    """ANY fits; else the word before _ is a backend's name, the one behind part of its arch's."""
    family, _, model = plan.architecture.lower().partition("_")
    if family != "any" and not (family == machine.backend and model in machine.arch):
        raise PlanError(
            f"the plan is for {plan.architecture}, but it is to run on {machine.name} "
            f"({machine.backend} {machine.arch}); make it again for this device"
        )
    if plan.num_processors > machine.processors:
        raise PlanError(
            f"the plan needs {plan.num_processors} processors, but {machine.name} has "
            f"{machine.processors}; make it again for this device"
        )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a task info's tasks run. context: the number of their processor group."""

    task: TaskEntry
    processors: tuple[int, int]
    granularity: int
    context: int


def _order(plan: TaskPlan) -> list[_Place]:
    """Task infos as they are run; PlanError where one does not run whole, and once."""
    tasks = {task.id: task for task in plan.task_infos}
    if len(tasks) < len(plan.task_infos):
        raise PlanError("two task infos have one Id; give each its own")
    spans: dict[int, list[tuple[int, int]]] = {}
    found: dict[int, _Place] = {}
    for number, group in enumerate(plan.processor_groups):
        for resources in group.resource_groups:
            begin, end = _span(resources.processor_range, "ProcessorRange", plan.num_processors)
            for tasks_of in resources.task_groups:
                task = tasks.get(tasks_of.task_id)
                if task is None:
                    raise PlanError(f"a task group runs task {tasks_of.task_id}, which is no task")
                before = found.get(task.id)
                if before is not None:  # its tasks are shared out over several groups
                    begin, end = min(begin, before.processors[0]), max(end, before.processors[1])
                found[task.id] = _Place(task, (begin, end), tasks_of.granularity, number)
                spans.setdefault(task.id, []).append(_span(tasks_of.task_range, "TaskRange", None))
    for task in plan.task_infos:
        _check_whole(task, sorted(spans.get(task.id, [])))
    return list(found.values())


def _span(value: Sequence[int], what: str, most: int | None) -> tuple[int, int]:
    begin, end = value[:2]
    if len(value) == 3 and value[2] != 1:
        raise UnsupportedError(f"a {what} is {value}; steps other than 1 are not built")
    if begin >= end or (most is not None and end > most):
        limit = "" if most is None else f" within the plan's {most} processors"
        raise PlanError(f"a {what} is {list(value)}; it must be [begin, end], begin < end{limit}")
    return begin, end


def _check_whole(task: TaskEntry, spans: Sequence[tuple[int, int]]) -> None:
    asked = {op.config["NumTasks"] for op in task.ops if "NumTasks" in op.config}
    real = any(not op.is_virtual and op.type != "Noop" for op in task.ops)
    ends = [0, *(end for _, end in spans)]
    gaps = any(begin != end for (begin, _), end in zip(spans, ends, strict=False))
    if real and (gaps or not spans or (asked and asked != {ends[-1]})):
        raise PlanError(
            f"task {task.id} ({', '.join(op.name for op in task.ops)}) has "
            f"{'/'.join(map(str, sorted(asked, key=str))) or 'some'} tasks, and the groups run "
            f"{[list(s) for s in spans]}; they must run each once"
        )


def _shared(plan: TaskPlan, model: Model) -> dict[int, ir.Buffer]:
    """By buffer of the plan, the model's buffer of that memory.

    The model's tensors are the plan's where its ops are, in the order of the task infos; else those
    are that have the plan's numbers.
    """
    nodes = [n for n in model.graph.nodes if not n.virtual]
    ops = [op for t in plan.task_infos for op in t.ops if not op.is_virtual and op.type != "Noop"]
    if len(nodes) == len(ops):
        found: dict[int, ir.Buffer] = {}
        if all(_same_op(op, node, found) for op, node in zip(ops, nodes, strict=True)):
            return found
    numbered = {t.id: t for t in model.graph.tensors}
    found = {}
    for op in ops:
        for entry in (*op.read_tensors, *op.write_tensors, *op.result_tensors):
            tensor = numbered.get(entry.id)
            if tensor is not None and _alike(entry, tensor):
                found.setdefault(entry.buffer.id, tensor.buffer)
    return found


def _same_op(op: OpEntry, node: Node, found: dict[int, ir.Buffer]) -> bool:
    """Is the node this op, on buffers that agree with those found so far?"""
    type_of_node = str(op_entry(node)["Type"])
    names = (type_of_node, f"Scalar{type_of_node}")
    if op.type not in names and {op.type, type_of_node} != {"ScalarAssign", "Constant"}:
        return False
    pairs = [*zip(op.read_tensors, node.inputs, strict=False)]
    pairs += zip(op.result_tensors, node.outputs, strict=False)
    return len(op.read_tensors) == len(node.inputs) and all(
        _alike(entry, tensor) and found.setdefault(entry.buffer.id, tensor.buffer) is tensor.buffer
        for entry, tensor in pairs
    )


def _alike(entry: TensorEntry, tensor: ir.Tensor) -> bool:
    return entry.data_type.lower() == tensor.dtype.name and (
        entry.shape,
        entry.strides,
        entry.offsets,
    ) == (list(tensor.shape), list(tensor.extents), list(tensor.offsets))


class _Graph:
    """Adds a plan's ops to a new model. buffers: by the plan's number. held: names of buffers that
    the user's model has.
    """

    def __init__(self, model: Model, plan: TaskPlan, shared: Mapping[int, ir.Buffer]) -> None:
        self._model = model
        self._shared = shared
        self._written: set[int] = set()
        self.buffers: dict[int, ir.Buffer] = {}
        self.held = {b.name for b in shared.values()}
        sizes: dict[int, int] = {}
        for task in plan.task_infos:
            for op in task.ops:
                for entry in (*op.read_tensors, *op.write_tensors, *op.result_tensors):
                    _check_layout(op, entry)
                    nbytes = math.prod(entry.strides) * _dtype(entry).itemsize
                    sizes[entry.buffer.id] = max(sizes.get(entry.buffer.id, 0), nbytes)
        for number, nbytes in sizes.items():
            theirs = shared.get(number)
            name = theirs.name if theirs else f"buffer {number}"
            self.buffers[number] = model.graph.buffer("activation", nbytes, name=name)

    def _tensor(self, entry: TensorEntry) -> Tensor:
        buffer = self.buffers[entry.buffer.id]
        made = self._model.graph.tensor(
            entry.shape,
            _dtype(entry),
            buffer=buffer,
            extents=entry.strides,
            offsets=entry.offsets,
            padded=entry.padded_shape,
            name=buffer.name,
        )
        return Tensor(made, self._model)

    def add(self, op: OpEntry, place: _Place) -> None:
        """One op, where its task info runs."""
        call = CALLS.get(op.type)
        if call is None:
            raise UnsupportedError(
                f"op {op.name!r} is of type {op.type}, which ark does not run from a plan in ARK's "
                f"layout; it runs {', '.join(sorted(CALLS))}"
            )
        for entry in op.read_tensors:
            number = entry.buffer.id
            if number not in self._written and number not in self._shared:
                raise PlanError(
                    f"op {op.name!r} reads tensor {entry.id}, which no op before it writes and the "
                    "current model does not have; build the model that the plan was made from, "
                    "then launch"
                )
        graph = self._model.graph
        graph.hints = hints_of({**op.config, "Granularity": place.granularity})
        graph.processors, graph.context = place.processors, place.context
        reads = [self._tensor(entry) for entry in op.read_tensors]
        outputs = [self._tensor(entry) for entry in op.write_tensors]
        if len(outputs) != 1:
            raise PlanError(f"op {op.name!r} writes {len(outputs)} tensors; it must write one")
        try:
            call(reads, outputs[0], _Arguments(op), op.name)
        except TypeError as error:  # too many or too few operands
            raise PlanError(f"op {op.name!r}: {op.type} is not of {len(reads)} tensors") from error
        except PlanError:
            raise
        except BaseError as error:
            raise PlanError(f"op {op.name!r}: {error}") from error
        self._written.add(op.write_tensors[0].buffer.id)


def _check_layout(op: OpEntry, entry: TensorEntry) -> None:
    sizes = (entry.shape, entry.strides, entry.offsets, entry.padded_shape)
    try:
        ir.check_layout(*(tuple(dims) for dims in sizes))
        _dtype(entry)
    except BaseError as error:
        raise PlanError(f"tensor {entry.id} of op {op.name!r}: {error}") from error


def _dtype(entry: TensorEntry) -> dtypes.DataType:
    return dtypes.by_name(entry.data_type.lower())
