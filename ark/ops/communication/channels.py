"""Channels between two ranks, with which a model defines its own pattern of communication.

A channel has put, get, reduce, signal, wait and flush on symmetric memory, and send and recv of
whole messages.

    received = ark.comm.symmetric([1024])      # every rank has one, and peers can access it
    to = ark.comm.channel(peer=1)
    to.put(x, received)                        # on rank 0: copies to `received` of rank 1
    to.signal()
    (arrived,) = ark.comm.channel(peer=0).wait(received)  # on rank 1

A signal takes effect after all earlier puts, gets and reductions of its channel (a relaxed signal
only after those before the last flush). After `wait`, all uses of the tensors that it returns and
all later operations on the channel run after the peer's signal. Other accesses to a peer's memory
are not ordered. The verifier rejects a plan whose result depends on the order of such accesses.
docs/channels.md has examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ChannelAttributes
from ark.ir.dtype import DataType, fp32, uint32
from ark.ir.values import Buffer
from ark.ir.values import Tensor as IrTensor
from ark.lower.engines import AUTO
from ark.lower.ops.communication.channels import (
    lower_channel_put,
    lower_channel_recv,
    lower_channel_reduce,
    lower_channel_send,
    lower_flag,
)
from ark.lower.registry import register
from ark.ops.base import check_dims, result
from ark.ops.views import refer
from ark.tasks.combine import OPS

PREFIX = "symmetric."
CUSTOM = "channel_custom"  # custom ops that access a peer's memory, wait or signal


def symmetric(shape: Sequence[int], dtype: DataType = fp32, name: str = "") -> Tensor:
    """A tensor in symmetric memory: every rank has it, and peers can access it by channels.

    Its contents are undefined until they are written. All ranks must call this with equal
    arguments. name: the tensor's name on all ranks, by default the number of the call. Raises
    InvalidUsageError for a name that is taken.

    Examples:
        >>> ark.comm.symmetric([4, 8], ark.fp16).shape()
        [4, 8]
    """
    dims = check_dims("symmetric", shape)
    if not isinstance(dtype, DataType):
        raise InvalidUsageError(
            f"symmetric: {dtype!r} is not a data type; pass for example ark.fp16"
        )
    model = Model.get_model()
    taken = [b.name for b in model.graph.buffers if b.arena == "symmetric" and b.rank < 0]
    label = PREFIX + (name or str(len(taken)))
    if label in taken:
        raise InvalidUsageError(
            f"symmetric: memory named {name!r} already exists; choose another name"
        )
    return Tensor(model.graph.tensor(dims, dtype, arena="symmetric", name=label), model)


class Channel:
    """This rank's end of a channel to rank `peer`. The peer's end has the same tag.

    engine: how bytes are transferred (docs/channels.md); by default the planner chooses by machine
    and size. Raises InvalidUsageError unless the peer is another rank of the model.

    Examples:
        >>> with ark.use_model(ark.Model(rank=0, world_size=2)):
        ...     received = ark.comm.symmetric([16])
        ...     channel = ark.comm.channel(1)
        ...     channel.put(ark.tensor([16]), received, signal=True)
        >>> channel.peer
        1
    """

    def __init__(self, peer: int, tag: int = 0, engine: str = AUTO) -> None:
        self._model = Model.get_model()
        graph = self._model.graph
        if not 0 <= peer < graph.world_size or peer == graph.rank:
            raise InvalidUsageError(
                f"channel: the peer is {peer}, but this is rank {graph.rank} of "
                f"{graph.world_size}; a channel leads to another rank"
            )
        self.peer, self.tag, self.engine = int(peer), int(tag), engine
        self._arrived: tuple[
            IrTensor, ...
        ] = ()  # tensors for whose writes later operations must wait
        self._moved: tuple[IrTensor, ...] = ()  # tensors written since the last signal or flush
        self._seen = len(graph.nodes)  # custom ops before this node are covered by a signal

    def put(self, source: TensorLike, target: TensorLike, signal: bool = False) -> None:
        """Copies `source` to the peer's `target`, a symmetric tensor or a view of one.

        signal: if True, signals after the copy, as `signal` does. Raises ModelError if the shapes
        or types differ or the target is not symmetric.
        """
        x, place = as_tensor(source), self._symmetric("put", target)
        _check_same("put", x.ir, place.ir)
        there = self._at_peer(place)
        self._add("channel_put", [x.ir], there)
        self._moved += (there,)
        if signal:
            self.signal()

    def get(self, source: TensorLike, target: Output = None) -> Tensor:
        """Copies the peer's `source` to `target`, or to a new tensor, and returns the copy.

        source: a symmetric tensor or a view of one. The peer must write it and signal before; call
        `wait` first.
        """
        place = self._symmetric("get", source)
        there = self._at_peer(place)
        copied = result("channel_get", [Tensor(there, self._model)], there.shape, there.dtype,
                      target, self._attrs(), f"get{self.peer}")  # fmt: skip
        self._moved += (copied.ir,)
        return copied

    def reduce(self, source: TensorLike, target: TensorLike, op: str = "sum") -> None:
        """Combines `source` with the peer's `target` in place. op: sum, product, max or min.

        Other ranks must not write the target concurrently; the verifier rejects plans in which
        they can.
        """
        if op not in OPS:
            raise InvalidUsageError(
                f"reduce: {op!r} is not a reduction; choose one of {', '.join(OPS)}"
            )
        x, place = as_tensor(source), self._symmetric("reduce", target)
        _check_same("reduce", x.ir, place.ir)
        there = self._at_peer(place)
        self._add("channel_reduce", [x.ir], there, op)
        self._moved += (there,)

    def there(self, target: TensorLike) -> Tensor:
        """The peer's copy of `target`, a symmetric tensor or a view of one, for custom ops.

        A custom op may write it (as put does), update it in place (as reduce does) or read it (as
        get does). Later signals and flushes of the channel also cover the transfers of such ops.
        """
        return Tensor(self._at_peer(self._symmetric("there", target)), self._model)

    def signal(self, after: Sequence[TensorLike] = (), relaxed: bool = False) -> None:
        """Signals the peer. The peer's n-th `wait` on the channel ends with the n-th signal.

        The signal is sent after all earlier transfers on this channel are complete, and after the
        tensors in `after` are written (for example results that are computed from memory which the
        peer may overwrite after the signal). relaxed: if True, the signal does not wait for
        transfers since the last flush.
        """
        self._flag("channel_signal", () if relaxed else self._take_moved(), after)

    def wait(self, *tensors: TensorLike) -> tuple[Tensor, ...]:
        """Waits for the peer's next signal. Returns views of `tensors`; ops that use the views run
        after the signal.
        """
        token = self._flag("channel_wait", (), ())
        self._arrived = (token,)
        return tuple(self._behind(t, token) for t in tensors)

    def flush(self, *tensors: TensorLike) -> tuple[Tensor, ...]:
        """Waits until all earlier transfers on this channel are complete.

        Later operations on the channel, including relaxed signals, and ops that use the returned
        views of `tensors` run after the flush. A flush is not needed before the source of a put is
        overwritten, because the plan orders that.
        """
        token = self._flag("channel_flush", self._take_moved(), ())
        self._arrived = (*self._arrived, token)
        return tuple(self._behind(t, token) for t in tensors)

    def send(self, source: TensorLike) -> None:
        """Sends a message to the peer, which gets it by its next `recv`. A message is a put, a
        signal and a wait in one.

        Small tensors are sent as packets, which need no signal.
        """
        tensor = as_tensor(source)
        self._model.graph.add("channel_send", [tensor.ir], [], self._attrs())

    def recv(self, output: TensorLike) -> Tensor:
        """Receives the peer's next message into `output`, whose shape and type must match."""
        tensor = as_tensor(output)
        return result("channel_recv", [], tensor.ir.shape, tensor.ir.dtype, tensor, self._attrs())

    def after(self, tensors: Sequence[IrTensor]) -> None:
        """Orders later operations on the channel after the writes of `tensors`. Called by
        ark.ops.custom for the results of a custom op that waits on the channel.
        """
        self._arrived = (*self._arrived, *tensors)

    def _take_moved(self) -> tuple[IrTensor, ...]:
        """Returns the tensors that operations of this channel have transferred since the last
        signal or flush, and forgets them, so that the next call returns only later ones.
        """
        nodes = self._model.graph.nodes
        by_ops = [
            out
            for node in nodes[self._seen :]
            if node.type == CUSTOM
            and any(t.buffer.rank == self.peer for t in (*node.inputs, *node.outputs))
            for out in node.outputs
        ]
        moved, self._moved, self._seen = (*self._moved, *by_ops), (), len(nodes)
        return moved

    def _attrs(self, op: str = "") -> dict[str, Any]:
        return ChannelAttributes(peer=self.peer, tag=self.tag, engine=self.engine, op=op).to_node()

    def _add(self, type: str, inputs: Sequence[IrTensor], output: IrTensor, op: str = "") -> None:
        name = f"{type.removeprefix('channel_')}{self.peer}"
        self._model.graph.add(type, inputs, [output], self._attrs(op), name)

    def _flag(self, type: str, moved: Sequence[IrTensor], after: Sequence[TensorLike]) -> IrTensor:
        graph = self._model.graph
        name = f"channel{self.tag}.{self.peer}.token.{len(graph.tensors)}"
        token = graph.tensor((1,), uint32, name=name)
        graph.depend(token, [*self._arrived, *moved, *(as_tensor(t).ir for t in after)])
        self._add(type, [], token)
        return token

    def _behind(self, given: TensorLike, token: IrTensor) -> Tensor:
        tensor = as_tensor(given)
        view = refer(tensor, tensor.ir.shape, [0] * len(tensor.ir.shape))
        self._model.graph.depend(view.ir, [token])
        return view

    def _symmetric(self, op: str, given: TensorLike) -> Tensor:
        tensor = as_tensor(given)
        if tensor.ir.buffer.arena != "symmetric":
            raise ModelError(
                f"{op}: {tensor.ir.name or 'the tensor'!r} is memory of this rank only; peers "
                "can access only tensors that ark.comm.symmetric creates"
            )
        return tensor

    def _at_peer(self, place: Tensor) -> IrTensor:
        """The peer's copy of a symmetric tensor. place: this rank's copy. Ops that use the result
        are ordered like ops that use `place`: they run after the same earlier writes.
        """
        graph, own = self._model.graph, place.ir
        buffer = _buffer_at(self._model, own.buffer, self.peer)
        remote = graph.tensor(
            own.shape,
            own.dtype,
            buffer=buffer,
            extents=own.extents,
            offsets=own.offsets,
            padded=own.padded,
            name=f"{own.name}@{self.peer}",
        )
        graph.depend(remote, [*self._arrived, *graph.depends(own)])
        return remote


channel = Channel


def _buffer_at(model: Model, own: Buffer, peer: int) -> Buffer:
    for buffer in model.graph.buffers:
        if (buffer.arena, buffer.rank, buffer.name) == ("symmetric", peer, own.name):
            return buffer
    return model.graph.buffer("symmetric", own.nbytes, peer, own.name)


def _check_same(op: str, source: IrTensor, target: IrTensor) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ModelError(
            f"{op}: the source is {source.dtype.name}{list(source.shape)}, the peer's memory "
            f"{target.dtype.name}{list(target.shape)}; they must have one dtype and one shape"
        )


# The lowerings.


for _type, _lower in (
    ("put", lower_channel_put),
    ("get", lower_channel_put),
    ("reduce", lower_channel_reduce),
    ("signal", lower_flag),
    ("wait", lower_flag),
    ("flush", lower_flag),
    ("send", lower_channel_send),
    ("recv", lower_channel_recv),
):
    register(f"channel_{_type}", None, _lower, names_ranks=True, iteration_barrier=True)
