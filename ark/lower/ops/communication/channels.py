"""Lowering of ops on channels: puts, gets, reductions, signals, waits and messages between two
ranks.
"""

from __future__ import annotations

from ark.errors import UnsupportedError
from ark.ir.attributes import ChannelAttributes
from ark.ir.dtype import uint32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense, move
from ark.lower.engines import (
    PACKET,
    TRANSFERS,
    Engine,
    choose_engine,
    tile_bytes,
)
from ark.machine.capability import Capability
from ark.plan.params import Params
from ark.tasks.combine import CombineParams, moved, tiles, words


def _transfer(lowering: Lowering, source: IrTensor, target: IrTensor, asked: str) -> None:
    """Emits tasks that move a tensor to or from a peer's memory."""
    machine = lowering.machine
    peers = [t.buffer.rank for t in (source, target) if t.buffer.rank >= 0]
    engine = lowering.engine(source.nbytes, asked, peers, TRANSFERS)
    far = lowering.far(*peers)
    if far and not target.dense:
        raise UnsupportedError(
            f"writing a strided part of {target.name!r} on another host is not supported; write "
            "whole rows"
        )
    if far:
        source = dense(lowering, source, ".dense", fill=True)
    if source.dtype.packed or not (source.dense and target.dense):
        copy_box(lowering, source, target, "")
        return
    coords = tiles(
        source.elements, source.dtype.itemsize, tile_bytes(engine, machine, source.nbytes)
    )
    # Caches of this device may hold old contents of memory that a copy engine has written. In this
    # case the copy engine writes to symmetric memory, which is not cached, and tasks copy the data
    # from there.
    cached = target.buffer.rank < 0 and target.buffer.arena != "symmetric"
    landing = cached and engine.proxied and machine.has(Capability.UNCACHED_COPIES)
    into = _landing(lowering, target) if landing else target
    move(lowering, engine, source, into, coords)
    if landing:
        copy_box(lowering, into, target, ".out")


def _landing(lowering: Lowering, like: IrTensor) -> IrTensor:
    """A new tensor in symmetric memory of this rank with the shape of `like`. A copy engine writes
    it first, because symmetric memory is not cached; tasks then copy it to the destination.
    """
    name = f"{like.name}.{lowering.number('landing')}.landing"
    return lowering.graph.tensor(like.shape, like.dtype, arena="symmetric", name=name)


def lower_channel_put(lowering: Lowering, node: Node) -> None:
    _transfer(lowering, node.inputs[0], node.outputs[0], node.read(ChannelAttributes).engine)


def lower_channel_reduce(lowering: Lowering, node: Node) -> None:
    given = node.read(ChannelAttributes)
    source = lowering.flat(dense(lowering, node.inputs[0], ".dense", fill=True))
    target = node.outputs[0]
    if not target.dense:
        raise UnsupportedError(
            f"reduce into a strided part of {target.name!r} is not supported; reduce into whole "
            "rows"
        )
    there = lowering.flat(target)
    if lowering.far(given.peer):
        raise UnsupportedError(
            f"reduce into {target.name!r} on another host is not supported; put the data there "
            "and add on that rank"
        )
    engine = choose_engine(lowering.machine, source.nbytes, given.engine, TRANSFERS)
    nbytes = tile_bytes(engine, lowering.machine, source.nbytes)
    params = CombineParams(source.dtype.name, given.op)
    coords = tiles(source.elements, source.dtype.itemsize, nbytes)
    lowering.emit("combine", params, [there, source, there], coords)


def _name(lowering: Lowering, node: Node, source: int, target: int, role: str) -> str:
    """A name for an op on the channel from rank `source` to rank `target`. Each of the two ranks
    counts the channel's ops of the same role (such as signals), so matching ops get the same name
    on both.
    """
    key = f"channel{node.read(ChannelAttributes).tag}.{source}.{target}.{role}"
    return f"{key}.{lowering.number(key)}"


def lower_flag(lowering: Lowering, node: Node) -> None:
    """Emits a signal, a wait or a flush. Each of these is one task that moves no data."""
    group = lowering.emit("flag", Params(), [node.outputs[0]], [(0,)])
    rank, peer = lowering.graph.rank, node.read(ChannelAttributes).peer
    if node.type == "channel_signal":
        name = _name(lowering, node, rank, peer, "signal")
        group.sends = [(lowering.semaphore(peer, name),)]
    elif node.type == "channel_wait":
        name = _name(lowering, node, peer, rank, "signal")
        group.awaits = [((lowering.semaphore(rank, name), 1),)]


def _message(
    lowering: Lowering, node: Node, tensor: IrTensor, owner: int, name: str
) -> tuple[IrTensor, list[tuple[int, int]], Engine]:
    """The parts by which a message is lowered on both ranks: the receive buffer, the tiles in which
    the message is sent, and the engine that moves it.
    """
    given = node.read(ChannelAttributes)
    engine = lowering.engine(tensor.nbytes, given.engine, (given.peer,))
    packets = engine.name == PACKET
    count, dtype = (words(tensor.nbytes), uint32) if packets else (tensor.elements, tensor.dtype)
    receive_buffer = lowering.graph.tensor(
        (count,), dtype, arena="symmetric", rank=owner, name=name
    )
    nbytes = tile_bytes(engine, lowering.machine, tensor.nbytes)
    return receive_buffer, tiles(tensor.elements, tensor.dtype.itemsize, nbytes), engine


def lower_channel_send(lowering: Lowering, node: Node) -> None:
    source = lowering.flat(dense(lowering, node.inputs[0], ".dense", fill=True))
    peer = node.read(ChannelAttributes).peer
    name = _name(lowering, node, lowering.graph.rank, peer, "message")
    target, coords, engine = _message(lowering, node, source, peer, name)
    group = move(lowering, engine, source, target, coords)
    if engine.name == PACKET:
        group.received = frozenset({target.buffer.id})
    else:
        group.sends = [(lowering.semaphore(peer, f"{name}.{i}"),) for i in range(len(coords))]


def lower_channel_recv(lowering: Lowering, node: Node) -> None:
    out = dense(lowering, node.outputs[0], ".dense", fill=False)
    target = lowering.flat(out)
    rank = lowering.graph.rank
    name = _name(lowering, node, node.read(ChannelAttributes).peer, rank, "message")
    source, coords, engine = _message(lowering, node, target, -1, name)
    params = CombineParams(moved(target.dtype))
    group = lowering.emit("combine", params, [source, target], coords)
    if engine.name == PACKET:
        group.received = frozenset({source.buffer.id})
    else:
        counters = [lowering.semaphore(rank, f"{name}.{i}") for i in range(len(coords))]
        group.awaits = [((counter, 1),) for counter in counters]
    if out is not node.outputs[0]:
        copy_box(lowering, out, node.outputs[0], ".out")
