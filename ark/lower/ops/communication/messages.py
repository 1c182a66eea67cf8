"""Lowering of send and recv. A send is a copy into a receive buffer (memory of the peer into which
only this rank writes). A recv is a copy from the receive buffer to its destination.
"""

from __future__ import annotations

from ark.errors import PlanError
from ark.ir.attributes import MessageAttributes
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense, move
from ark.lower.engines import tile_bytes
from ark.lower.merge import bytes_of
from ark.plan.groups import Group
from ark.tasks.combine import tiles


def _channel(lowering: Lowering, source: int, target: int, tag: int) -> str:
    """A name for the next message from `source` to `target` with this tag. The name contains the
    number of earlier messages, which sender and receiver count alike, so both use the same name.
    """
    if source == target:
        raise PlanError(f"rank {source} sends to itself under tag {tag}; use ark.copy")
    key = f"send.{source}.{target}.{tag}"
    return f"{key}.{lowering.number(key)}"


def _message(lowering: Lowering, peer: int, source: IrTensor, target: IrTensor) -> Group:
    """Emits the copy of a message into a receive buffer on the sender, or out of it on the
    receiver. Both ranks divide the message into the same tiles.
    """
    if not lowering.far(peer):
        return copy_box(lowering, source, target, "")
    engine = lowering.engine(source.nbytes, peers=(peer,))
    source, target = bytes_of(source), bytes_of(target)
    nbytes = tile_bytes(engine, lowering.machine, source.nbytes)
    coords = tiles(source.elements, source.dtype.itemsize, nbytes)
    return move(lowering, engine, source, target, coords)


def lower_send(lowering: Lowering, node: Node) -> None:
    given = node.read(MessageAttributes)
    peer, tag = given.remote_rank, given.tag
    name = _channel(lowering, lowering.graph.rank, peer, tag)
    source = node.inputs[0]
    if lowering.far(peer):
        source = dense(lowering, source, ".dense", fill=True)
    target = lowering.graph.tensor(
        source.shape, source.dtype, arena="symmetric", rank=peer, name=name
    )
    group = _message(lowering, peer, source, target)
    tiles = range(len(group.coords))
    group.sends = [(lowering.semaphore(peer, f"{name}.{i}"),) for i in tiles]
    if lowering.alone:  # the put must wait until the previous iteration's tile has been read
        read = (lowering.semaphore(lowering.graph.rank, f"{name}.{i}.read") for i in tiles)
        group.awaits = [((counter, 0),) for counter in read]


def lower_recv(lowering: Lowering, node: Node) -> None:
    given = node.read(MessageAttributes)
    peer, tag = given.remote_rank, given.tag
    rank = lowering.graph.rank
    name = _channel(lowering, peer, rank, tag)
    out = node.outputs[0]
    target = dense(lowering, out, ".dense", fill=False) if lowering.far(peer) else out
    received = lowering.graph.tensor(target.shape, target.dtype, arena="symmetric", name=name)
    group = _message(lowering, peer, received, target)
    tiles = range(len(group.coords))
    group.awaits = [((lowering.semaphore(rank, f"{name}.{i}"), 1),) for i in tiles]
    if lowering.alone:
        group.sends = [(lowering.semaphore(peer, f"{name}.{i}.read"),) for i in tiles]
    if target is not out:
        copy_box(lowering, target, out, ".out")
