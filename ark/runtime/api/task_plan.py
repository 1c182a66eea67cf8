"""Converts a plan in the file layout of ARK (microsoft/ark; see ark.runtime.api.task_schema) to a
plan of ark.

In this layout, TaskInfos describe the computation (ops with tensors, arguments and a
configuration), and ProcessorGroups describe where it runs. The ops are added to a new graph through
ark's public ops, which check shapes and types. Ranges of processors, tiles, numbers of tasks and
granularities become hints. Then ark's planner adds the synchronisation by counters, and its
verifier checks the result. Tensors of the current model keep their memory if the plan's ops are the
model's. Messages between ranks are compared by ark.runtime.api.task_messages. Called by
ark.runtime.api.plan; ark.runtime.api.task_graph adds the ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ark.errors import BaseError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir import values as ir
from ark.ir.export import op_entry
from ark.ir.graph import Node
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.api import task_messages
from ark.runtime.api.config import check_config
from ark.runtime.api.task_graph import Place, TaskGraph
from ark.runtime.api.task_schema import OpEntry, TaskEntry, TaskPlan, TensorEntry
from ark.runtime.run import Ranks


def build(
    plan: TaskPlan,
    model: Model,
    machine: Machine,
    members: Callable[[int], Ranks] | None = None,
) -> Plan:
    """The plan of ark for a machine; for a single rank it is verified.

    model: the model whose tensors keep their memory. members: a function that returns the
    connection to the other ranks, given the number of ranks. It is called if there are several
    ranks, to compare their plans. Raises PlanError or UnsupportedError, which names the op, if the
    plan contains mistakes or ops that ark cannot run, and PlanError if the plans of other ranks do
    not match.
    """
    ranks = members(plan.world_size) if members and plan.world_size > 1 else None
    try:
        inner, messages = _build(plan, model, machine)
    except BaseError as error:
        if ranks is not None:  # so that the other ranks do not wait
            with contextlib.suppress(PlanError):
                task_messages.tell(plan, (), error, ranks)
        raise
    if ranks is not None:
        task_messages.tell(plan, messages, None, ranks)
    if plan.world_size == 1:
        verify([inner])
    return inner


def _build(
    plan: TaskPlan, model: Model, machine: Machine
) -> tuple[Plan, list[task_messages.Message]]:
    """The plan, and the messages that it sends and receives, in order."""
    _check_architecture(plan, machine)
    for task in plan.task_infos:
        for op in task.ops:
            check_config(op.config, f"the configuration of op {op.name!r}")
    order = _order(plan)
    fresh = Model(plan.rank, plan.world_size)
    task_graph = TaskGraph(fresh, plan, _shared(plan, model))
    with use_model(fresh):
        for place in order:
            for op in place.task.ops:
                if op.works:
                    task_graph.add(op, place)
    external = {b.id for b in task_graph.buffers.values() if b.name in task_graph.held}
    return make_plan(fresh.graph, machine, {"external": sorted(external)}), task_graph.messages


def _check_architecture(plan: TaskPlan, machine: Machine) -> None:
    """Raises PlanError unless the machine fits the plan. The architecture is ANY, or the name of a
    backend and after _ a part of its architecture's name.
    """
    family, _, model = plan.architecture.lower().partition("_")
    if family != "any" and not (family == machine.backend and model in machine.arch):
        raise PlanError(
            f"the plan is for {plan.architecture}, but it is to run on {machine.name} "
            f"({machine.backend} {machine.arch}); plan again for this device"
        )
    if plan.num_processors > machine.processors:
        raise PlanError(
            f"the plan needs {plan.num_processors} processors, but {machine.name} has "
            f"{machine.processors}; plan again for this device"
        )


def _order(plan: TaskPlan) -> list[Place]:
    """Where the tasks of each TaskInfo (the description of an op in the plan) run, in the order in
    which the TaskInfos run. Raises PlanError unless each task of each TaskInfo runs exactly once.
    """
    tasks = {task.id: task for task in plan.task_infos}
    if len(tasks) < len(plan.task_infos):
        raise PlanError("two task infos have one Id; give each its own")
    spans: dict[int, list[tuple[int, int]]] = {}
    places: dict[int, Place] = {}
    for number, group in enumerate(plan.processor_groups):
        for resources in group.resource_groups:
            begin, end = _span(resources.processor_range, "ProcessorRange", plan.num_processors)
            for tasks_of in resources.task_groups:
                task = tasks.get(tasks_of.task_id)
                if task is None:
                    raise PlanError(
                        f"a task group runs task {tasks_of.task_id}, which does not exist"
                    )
                before = places.get(task.id)
                if before is not None:  # its tasks are divided among several groups
                    begin, end = min(begin, before.processors[0]), max(end, before.processors[1])
                places[task.id] = Place(task, (begin, end), tasks_of.granularity, number)
                spans.setdefault(task.id, []).append(_span(tasks_of.task_range, "TaskRange", None))
    for task in plan.task_infos:
        _check_whole(task, sorted(spans.get(task.id, [])))
    return list(places.values())


def _span(value: Sequence[int], role: str, most: int | None) -> tuple[int, int]:
    begin, end = value[:2]
    if len(value) == 3 and value[2] != 1:
        raise UnsupportedError(f"a {role} is {value}; steps other than 1 are not supported")
    if begin >= end or (most is not None and end > most):
        limit = "" if most is None else f" within the plan's {most} processors"
        raise PlanError(f"a {role} is {list(value)}; it must be [begin, end], begin < end{limit}")
    return begin, end


def _check_whole(task: TaskEntry, spans: Sequence[tuple[int, int]]) -> None:
    asked = {op.config["NumTasks"] for op in task.ops if "NumTasks" in op.config}
    real = any(op.works for op in task.ops)
    ends = [0, *(end for _, end in spans)]
    gaps = any(begin != end for (begin, _), end in zip(spans, ends, strict=False))
    if real and (gaps or not spans or (asked and asked != {ends[-1]})):
        raise PlanError(
            f"task {task.id} ({', '.join(op.name for op in task.ops)}) has "
            f"{'/'.join(map(str, sorted(asked, key=str))) or 'some'} tasks, and the processor "
            f"groups run the task ranges {[list(s) for s in spans]}; they must run each task once"
        )


def _shared(plan: TaskPlan, model: Model) -> dict[int, ir.Buffer]:
    """Finds the buffers of the plan that are memory of the user's model. Returns the model's buffer
    for each of them, by its number in the plan.

    If the model's ops are the plan's ops, in the order of the TaskInfos, the operands of
    corresponding ops are matched. Otherwise a tensor of the plan is matched with a tensor of the
    model that has the same number and layout.
    """
    nodes = [n for n in model.graph.nodes if not n.virtual]
    ops = [op for t in plan.task_infos for op in t.ops if op.works]
    if len(nodes) == len(ops):
        shared: dict[int, ir.Buffer] = {}
        pairs = zip(ops, nodes, strict=True)
        if all(_same_op(op, node, shared, plan.rank) for op, node in pairs):
            return shared
    numbered = {t.id: t for t in model.graph.tensors}
    shared = {}
    for op in ops:
        for entry in (*op.read_tensors, *op.write_tensors, *op.result_tensors):
            tensor = numbered.get(entry.id)
            far = task_messages.is_far(entry.buffer, plan.rank)
            if tensor is not None and not far and _same_layout(entry, tensor):
                shared.setdefault(entry.buffer.id, tensor.buffer)
    return shared


def _same_op(op: OpEntry, node: Node, shared: dict[int, ir.Buffer], rank: int) -> bool:
    """True if the model's node computes this op of the plan, on the same buffers. shared: the pairs
    of buffers that are known so far to be the same.
    """
    type_of_node = str(op_entry(node)["Type"])
    names = (type_of_node, f"Scalar{type_of_node}", f"{type_of_node}Packet")
    if op.type not in names and {op.type, type_of_node} != {"ScalarAssign", "Constant"}:
        return False
    reads = [t for t in op.read_tensors if not task_messages.is_far(t.buffer, rank)]
    # The receive buffers of packets are not operands of the node in ark's graph, so only the
    # operands before them are compared.
    reads = reads[: {"RecvPacket": 0, task_messages.FUSED: 1}.get(op.type, len(reads))]
    pairs = [*zip(reads, node.inputs, strict=False)]
    pairs += zip(op.result_tensors, node.outputs, strict=False)
    return len(reads) == len(node.inputs) and all(
        _same_layout(entry, tensor)
        and shared.setdefault(entry.buffer.id, tensor.buffer) is tensor.buffer
        for entry, tensor in pairs
    )


def _same_layout(entry: TensorEntry, tensor: ir.Tensor) -> bool:
    return entry.data_type.lower() == tensor.dtype.name and (
        entry.shape,
        entry.strides,
        entry.offsets,
    ) == (list(tensor.shape), list(tensor.extents), list(tensor.offsets))
