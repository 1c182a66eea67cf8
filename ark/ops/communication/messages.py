"""Messages between two ranks: send and recv. Sends and receives of the same tag are paired in
program order.

The sender puts the data into a receive buffer in the receiver's memory, and the receiver copies
them from there. Before the sender overwrites the buffer, the receiver must have read the previous
iteration's message. The barrier between iterations ensures this. If ranks begin iterations
independently, the put waits until the receiver has read the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import MessageAttributes
from ark.ir.dtype import byte
from ark.ir.values import whole
from ark.lower.ops.communication.messages import lower_recv, lower_send
from ark.lower.registry import register
from ark.ops.base import result
from ark.ops.views import as_bytes, identity

# The type of arguments that are ranks, tags or numbers of bytes. ark.ops.checked does not check
# this type, because send and recv check these arguments themselves.
Number: TypeAlias = "int | None"


register("send", None, lower_send, names_ranks=True)
register("recv", None, lower_recv, names_ranks=True)


def _peer(op: str, tensor: Tensor, remote_rank: Number) -> int:
    world = tensor.model.graph.world_size
    if remote_rank is None or not 0 <= remote_rank < world:
        raise InvalidUsageError(
            f"{op}: the remote rank is {remote_rank}, but there are {world} ranks, numbered from "
            "0; call ark.set_world_size first, but after ark.init, which resets it"
        )
    return int(remote_rank)


def _attributes(op: str, tensor: Tensor, remote_rank: Number, tag: int) -> dict[str, Any]:
    return MessageAttributes(remote_rank=_peer(op, tensor, remote_rank), tag=tag).to_node()


def send(
    input: TensorLike,
    remote_rank: Number = None,
    tag: Number = None,
    output: Output = None,
    name: str = "",
    **named: int | TensorLike,
) -> Tensor:
    """Sends `input` to rank `remote_rank`, where a recv of the same tag receives it.

    Sends and receives of one tag are paired in program order, and their tensors must have the same
    shape and type. Returns `output` if it is given, otherwise `input`. `output` is not written.

    The form of ARK 0.5, send(input, id, dst_rank, bytes), is also accepted: the first `bytes` bytes
    (0: all) are sent to a recv of that form.

    Examples:
        >>> with ark.use_model(ark.Model(0, 2)):
        ...     shape = ark.send(ark.tensor([4]), remote_rank=1, tag=0).shape()
        ...
        >>> shape
        [4]
    """
    tensor = as_tensor(input)
    if named or isinstance(output, int):
        given = (remote_rank, tag, 0 if output is None else output)
        tag, rank, nbytes = _older("send", ("id", "dst_rank", "bytes"), given, named)
        return _message_of("send", tensor, rank, tag, nbytes)
    attrs = _attributes("send", tensor, remote_rank, _whole("send", tag))
    tensor.model.graph.add("send", [tensor.ir], [], attrs, name)
    return tensor if output is None else as_tensor(output)


def send_done(
    input: TensorLike,
    name: str | Number = "",
    dst_rank: Number = None,
    *,
    id: Number = None,
    sid: Number = None,
) -> Tensor:
    """Does nothing and returns `input`, because a send is complete when its task ends.

    Any type. It exists for compatibility with ARK; the form of ARK 0.5, send_done(input, id,
    dst_rank), is also accepted.

    Examples:
        >>> with ark.use_model(ark.Model(0, 2)):
        ...     shape = ark.send_done(ark.send(ark.tensor([4]), remote_rank=1, tag=0)).shape()
        ...
        >>> shape
        [4]
    """
    numbers = (id, sid, dst_rank, None if isinstance(name, str) else name)
    for number in (n for n in numbers if n is not None):
        _whole("send_done", number)
    return as_tensor(input)


def recv(
    output: Output = None,
    remote_rank: Number = None,
    tag: Number = None,
    name: str | Number = "",
    **named: int | TensorLike,
) -> Tensor:
    """Receives a tensor that `remote_rank` sends with the same tag; returns the received tensor.

    output: the tensor to receive into; it must have the shape and type of the sent tensor.

    The form of ARK 0.5, recv(id, src_rank, bytes, output), is also accepted, for a send of that
    form. If it has no output, a new tensor of `bytes` elements of type byte is returned, which
    ark.cast can view as another type. Raises InvalidUsageError if there is neither an output nor a
    number of bytes.

    Examples:
        >>> with ark.use_model(ark.Model(1, 2)):
        ...     shape = ark.recv(ark.tensor([4]), remote_rank=0, tag=0).shape()
        ...
        >>> shape
        [4]
    """
    if named or isinstance(output, int):
        target = named.pop("output", None)
        if isinstance(name, Tensor):
            target, name = name, ""
        first = output if isinstance(output, int) else None
        if isinstance(output, Tensor):
            target = output
        given = (first, remote_rank, 0 if tag is None else tag)
        tag, rank, nbytes = _older("recv", ("id", "src_rank", "bytes"), given, named)
        if target is None:
            if nbytes < 1:
                raise InvalidUsageError("recv: without an output, give the number of bytes")
            model = Model.get_model()
            target = Tensor(model.new_tensor([nbytes], byte), model)
        return _message_of("recv", as_tensor(target), rank, tag, nbytes)
    tensor = as_tensor(output)
    attrs = _attributes("recv", tensor, remote_rank, _whole("recv", tag))
    return result("recv", [], tensor.ir.shape, tensor.ir.dtype, tensor, attrs, str(name))


def _whole(op: str, value: Any) -> int:
    return int(whole(f"{op}: its tag", value))


def _older(
    op: str, names: Sequence[str], given: Sequence[Any], named: dict[str, Any]
) -> tuple[int, int, int]:
    """Returns (tag, rank, number of bytes) of a call in the form of ARK 0.5. names: the parameters
    of that form; given: their positional values; named: the keyword arguments.
    """
    values = dict(zip(names, given, strict=True))
    for word, value in named.items():
        key = "id" if word == "sid" else word
        if key not in values:
            raise InvalidUsageError(f"{op} has no argument {word!r}")
        values[key] = value
    tag, rank, nbytes = (whole(f"{op}: {n}", values[n]) for n in names)
    if nbytes < 0:
        raise InvalidUsageError(f"{op}: the size is {nbytes} bytes; give 0 for all, or more")
    return int(tag), int(rank), int(nbytes)


def _message_of(op: str, tensor: Tensor, rank: int, tag: int, nbytes: int) -> Tensor:
    """Adds a message that sends or receives the first `nbytes` bytes of a tensor (0: all). Returns
    the tensor; ops that use the result run after the message.
    """
    own = tensor.ir
    if not own.dense:
        raise ModelError(f"{op}: {own.name!r} is not contiguous; ark.copy it first")
    if nbytes > own.nbytes:
        raise ModelError(
            f"{op}: cannot transfer {nbytes} bytes of {own.name!r}, which has only {own.nbytes}"
        )
    flat = as_bytes(tensor, nbytes or own.nbytes)
    attrs = _attributes(op, tensor, rank, tag)
    if op == "send":
        tensor.model.graph.add("send", [flat.ir], [], attrs)
        return tensor
    received = result("recv", [], flat.ir.shape, byte, flat, attrs)
    return identity(tensor, [received])
