"""Adds the ops of a plan in ARK's own layout (ark.runtime.api.task_schema) to a new model, one by
one.

It checks what the plan says of an op, its tensors and their memory. Called by
ark.runtime.api.task_plan, which determines where each op runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ark import ops
from ark.errors import BaseError, PlanError, UnsupportedError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor
from ark.ir import dtype as dtypes
from ark.ir import values as ir
from ark.runtime.api import task_messages
from ark.runtime.api.config import hints_of
from ark.runtime.api.task_ops import CALLS, Arguments
from ark.runtime.api.task_schema import OpEntry, TaskEntry, TaskPlan, TensorEntry


@dataclass(frozen=True)
class Place:
    """Where the tasks of an op of ARK's layout (a TaskInfo) run: the range of processors, and in
    `context` the number of the processor group.
    """

    task: TaskEntry
    processors: tuple[int, int]
    granularity: int
    context: int


class TaskGraph:
    """Adds a plan's ops to a new model.

    buffers: the model's buffer for each buffer of the plan on this rank, by its number in the plan.
        held: the names of the buffers of the user's model. messages: the messages that the ops
        added so far send and receive.
    """

    def __init__(self, model: Model, plan: TaskPlan, shared: Mapping[int, ir.Buffer]) -> None:
        self._model = model
        self._plan = plan
        self._shared = shared
        self._written: set[int] = set()
        self.buffers: dict[int, ir.Buffer] = {}
        self.held = {b.name for b in shared.values()}
        self.messages: list[task_messages.Message] = []
        self._fused = 0  # number of fused all-reduces so far
        sizes: dict[int, int] = {}
        owners: dict[int, int] = {}
        for task in plan.task_infos:
            for op in task.ops:
                for entry in (*op.read_tensors, *op.write_tensors, *op.result_tensors):
                    _check_layout(op, entry)
                    _check_owner(op, entry, plan, owners)
                    if task_messages.is_far(entry.buffer, plan.rank):
                        continue
                    nbytes = math.prod(entry.strides) * _dtype(entry).itemsize
                    sizes[entry.buffer.id] = max(sizes.get(entry.buffer.id, 0), nbytes)
        for number, nbytes in sizes.items():
            theirs = shared.get(number)
            name = theirs.name if theirs else f"buffer {number}"
            self.buffers[number] = model.graph.buffer("activation", nbytes, name=name)

    def _tensor(self, entry: TensorEntry) -> Tensor:
        buffer = self.buffers[entry.buffer.id]
        tensor = self._model.graph.tensor(
            entry.shape,
            _dtype(entry),
            buffer=buffer,
            extents=entry.strides,
            offsets=entry.offsets,
            padded=entry.padded_shape,
            name=buffer.name,
        )
        return Tensor(tensor, self._model)

    def add(self, op: OpEntry, place: Place) -> None:
        """Adds an op to the model. place: the processors on which its tasks run."""
        graph = self._model.graph
        graph.processors, graph.context = place.processors, place.context
        granularity = {"Granularity": place.granularity}
        if op.type in task_messages.TYPES:  # without hints, so that both ranks use equal tiles
            graph.hints = hints_of(granularity)
            self._pass_on(op)
        else:
            graph.hints = hints_of({**op.config, **granularity})
            self._compute(op)

    def _pass_on(self, op: OpEntry) -> None:
        """Adds a Send or a Recv to the model, or an op that consists of several of them."""
        messages = task_messages.messages(op, self._plan, self._fused)
        self.messages += messages
        if op.type == task_messages.FUSED:
            self._fused += 1
            self._all_reduce(op, messages)
            return
        own = op.read_tensors[0] if op.type.startswith("Send") else op.write_tensors[0]
        if op.type.startswith("RecvReduceSend"):
            self._reduce(op, messages)
        elif messages[0].sends:
            self._check_known(op, own)
            ops.send(self._tensor(own), messages[0].peer, messages[0].tag, name=op.name)
        else:
            ops.recv(self._tensor(own), messages[0].peer, messages[0].tag, op.name)
            self._written.add(own.buffer.id)

    def _all_reduce(self, op: OpEntry, messages: Sequence[task_messages.Message]) -> None:
        """Adds an all-reduce to the model: this rank's share is sent to all ranks, and the shares
        of all ranks are summed.

        The shares are added in rank order, so that the sum has the same bits on all ranks.
        """
        source, target = op.read_tensors[0], op.write_tensors[0]
        self._check_known(op, source)
        shares = {self._plan.rank: self._tensor(source)}
        for message in messages:
            if message.sends:
                ops.send(shares[self._plan.rank], message.peer, message.tag, name=op.name)
        for message in messages:
            if not message.sends:
                received = Tensor(
                    self._model.graph.tensor(source.shape, _dtype(source)), self._model
                )
                shares[message.peer] = ops.recv(received, message.peer, message.tag, op.name)
        *first, last = (shares[rank] for rank in sorted(shares))
        total = functools.reduce(functools.partial(ops.add, name=op.name), first) if first else None
        self._written.add(target.buffer.id)
        if total is None:
            ops.copy(last, self._tensor(target), name=op.name)
        else:
            ops.add(total, last, output=self._tensor(target), name=op.name)

    def _reduce(self, op: OpEntry, messages: Sequence[task_messages.Message]) -> None:
        """Adds ops that sum this rank's tensor and the received ones, and send the sum to all
        peers.
        """
        source, target = op.read_tensors[0], op.write_tensors[0]
        self._check_known(op, source)
        total = self._tensor(source)
        received = [m for m in messages if not m.sends]
        for number, message in enumerate(received, 1):
            incoming = Tensor(self._model.graph.tensor(target.shape, _dtype(target)), self._model)
            ops.recv(incoming, message.peer, message.tag, op.name)
            output = self._tensor(target) if number == len(received) else None
            total = ops.add(total, incoming, output=output, name=op.name)
        self._written.add(target.buffer.id)
        for message in messages[len(received) :]:
            ops.send(total, message.peer, message.tag, name=op.name)

    def _check_known(self, op: OpEntry, entry: TensorEntry) -> None:
        number = entry.buffer.id
        if number not in self._written and number not in self._shared:
            raise PlanError(
                f"op {op.name!r} reads tensor {entry.id}, which no op before it writes and the "
                "current model does not have; build the model that the plan was made from, "
                "then launch"
            )

    def _compute(self, op: OpEntry) -> None:
        call = CALLS.get(op.type)
        if call is None:
            raise UnsupportedError(
                f"op {op.name!r} is of type {op.type}, which ark does not run from a plan in ARK's "
                f"layout; it runs {', '.join(sorted((*CALLS, *task_messages.TYPES)))}"
            )
        for entry in (*op.read_tensors, *op.write_tensors):
            if task_messages.is_far(entry.buffer, self._plan.rank):
                raise PlanError(
                    f"op {op.name!r} of type {op.type} uses tensor {entry.id} on rank "
                    f"{entry.buffer.rank}; on rank {self._plan.rank} only Send and Recv name "
                    "memory of other ranks"
                )
        for entry in op.read_tensors:
            self._check_known(op, entry)
        reads = [self._tensor(entry) for entry in op.read_tensors]
        outputs = [self._tensor(entry) for entry in op.write_tensors]
        if len(outputs) != 1:
            raise PlanError(f"op {op.name!r} writes {len(outputs)} tensors; it must write one")
        try:
            call(reads, outputs[0], Arguments(op), op.name)
        except TypeError as error:  # too many or too few operands
            raise PlanError(
                f"op {op.name!r}: an op of type {op.type} does not read {len(reads)} tensors"
            ) from error
        except PlanError:
            raise
        except BaseError as error:
            raise PlanError(f"op {op.name!r}: {error}") from error
        self._written.add(op.write_tensors[0].buffer.id)


def _check_owner(op: OpEntry, entry: TensorEntry, plan: TaskPlan, owners: dict[int, int]) -> None:
    """Raises PlanError unless a buffer is always on the same rank, which is one of the plan's.

    owners: the rank of each buffer so far.
    """
    buffer = entry.buffer
    owner = buffer.rank if task_messages.is_far(buffer, plan.rank) else plan.rank
    if owner >= plan.world_size or owners.setdefault(buffer.id, owner) != owner:
        raise PlanError(
            f"tensor {entry.id} of op {op.name!r} lies in buffer {buffer.id} of Rank {owner}; it "
            f"must be of one of the plan's {plan.world_size} ranks, numbered from 0, and of "
            "the same rank in the whole plan"
        )


def _check_layout(op: OpEntry, entry: TensorEntry) -> None:
    sizes = (entry.shape, entry.strides, entry.offsets, entry.padded_shape)
    try:
        ir.check_layout(*(tuple(dims) for dims in sizes))
        _dtype(entry)
    except BaseError as error:
        raise PlanError(f"tensor {entry.id} of op {op.name!r}: {error}") from error


def _dtype(entry: TensorEntry) -> dtypes.DataType:
    return dtypes.by_name(entry.data_type.lower())
