"""Communication between ranks as tile tasks over symmetric memory: send, recv, and the all_reduce
that puts every share to every peer. ark.ops.collectives has the algorithms that pass shares on.

A put is a copy whose output lies on a peer; the counter that it signals there is named alike on
both ranks, tile by tile, so a tile is used as soon as it has arrived. Receive buffers belong to one
op each: the barrier between iterations keeps the next put from overtaking the last read.
"""

from __future__ import annotations

from typing import Any

from ark.codegen.layout import MAX_OPERANDS
from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.frontend.tensor import NullTensor, Tensor, as_tensor
from ark.ir.dtype import uint32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.engines import PACKET, choose_engine, tile_bytes
from ark.lower.registry import register
from ark.lower.tiling import box_coords, box_tile
from ark.ops.base import result
from ark.tasks.combine import tiles, words
from ark.tasks.pointwise import copy_params


def copy_box(lowering: Lowering, source: IrTensor, target: IrTensor, suffix: str) -> Any:
    """Copies in tiles that follow from the shape alone, so that both ends of a channel agree."""
    shape = (1,) * (4 - len(target.shape)) + target.shape
    tile = box_tile(shape, lowering.machine)
    params = copy_params(tile)
    return lowering.emit("pointwise", params, [source, target], box_coords(shape, tile), suffix)


def dense(lowering: Lowering, tensor: IrTensor, suffix: str, fill: bool) -> IrTensor:
    """The tensor, or where it is strided, a dense one in its place (filled with its elements)."""
    if tensor.dense:
        return tensor
    made = lowering.temp(tensor.shape, tensor.dtype, f"{tensor.name}{suffix}")
    if fill:
        copy_box(lowering, tensor, made, suffix)
    return made


def _lower_all_reduce(lowering: Lowering, node: Node) -> None:
    """Every rank puts its share into a receive buffer on each peer and adds all shares in rank
    order, and then the second input, a residual, if fusion gave it one.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    if world + 1 > MAX_OPERANDS:
        raise UnsupportedError(
            f"all_reduce among {world} ranks is not built; at most {MAX_OPERANDS - 1} take part"
        )
    share = dense(lowering, node.inputs[0], ".dense", fill=True)
    out = dense(lowering, node.outputs[0], ".sum", fill=False)
    count, dtype = share.elements, share.dtype
    name = f"all_reduce.{lowering.number('all_reduce')}"
    engine = choose_engine(lowering.machine, share.nbytes)
    packets = engine.name == PACKET
    coords = tiles(count, dtype.itemsize, tile_bytes(engine, lowering.machine, share.nbytes))

    def receive_buffer(source: int, owner: int) -> IrTensor:
        label = f"{name}.from{source}"
        size, kind = (words(share.nbytes), uint32) if packets else (count, dtype)
        arena = "inbox" if packets else "symmetric"
        return lowering.graph.tensor((size,), kind, arena=arena, rank=owner, name=label)

    flat, params = lowering.flat(share), {"element": dtype.name}
    shares = []
    for peer in range(world):
        if peer == rank:
            shares.append(flat)
            continue
        shares.append(receive_buffer(peer, -1))
        target = receive_buffer(rank, peer)
        group = lowering.emit("combine", params, [flat, target], coords, f".put{peer}")
        if not packets:
            group.sends = [(lowering.semaphore(peer, f"{name}.{i}"),) for i in range(len(coords))]
    shares += [lowering.flat(residual) for residual in node.inputs[1:]]
    group = lowering.emit("combine", {**params, "op": "sum"}, [*shares, lowering.flat(out)], coords)
    if not packets and world > 1:
        group.awaits = [
            ((lowering.semaphore(rank, f"{name}.{i}"), world - 1),) for i in range(len(coords))
        ]
    if out is not node.outputs[0]:
        copy_box(lowering, out, node.outputs[0], ".out")


def _channel(lowering: Lowering, source: int, target: int, tag: int) -> str:
    """The name that both ends give to the next message of a tag."""
    if source == target:
        raise PlanError(f"rank {source} sends to itself under tag {tag}; use ark.copy")
    key = f"send.{source}.{target}.{tag}"
    return f"{key}.{lowering.number(key)}"


def _lower_send(lowering: Lowering, node: Node) -> None:
    peer, tag = node.attrs["remote_rank"], node.attrs["tag"]
    name = _channel(lowering, lowering.graph.rank, peer, tag)
    source = node.inputs[0]
    target = lowering.graph.tensor(
        source.shape, source.dtype, arena="symmetric", rank=peer, name=name
    )
    group = copy_box(lowering, source, target, "")
    group.sends = [(lowering.semaphore(peer, f"{name}.{i}"),) for i in range(len(group.coords))]


def _lower_recv(lowering: Lowering, node: Node) -> None:
    peer, tag = node.attrs["remote_rank"], node.attrs["tag"]
    rank = lowering.graph.rank
    name = _channel(lowering, peer, rank, tag)
    target = node.outputs[0]
    received = lowering.graph.tensor(target.shape, target.dtype, arena="symmetric", name=name)
    group = copy_box(lowering, received, target, "")
    group.awaits = [
        ((lowering.semaphore(rank, f"{name}.{i}"), 1),) for i in range(len(group.coords))
    ]


register("all_reduce", None, _lower_all_reduce)
register("send", None, _lower_send)
register("recv", None, _lower_recv)


def _peer(what: str, tensor: Tensor, remote_rank: int) -> int:
    world = tensor.model.graph.world_size
    if not 0 <= remote_rank < world:
        raise InvalidUsageError(
            f"{what}: the remote rank is {remote_rank}, but there are {world} ranks, numbered from "
            "0; call ark.set_world_size first"
        )
    return int(remote_rank)


def send(
    input: Any, remote_rank: int, tag: int, output: Any = NullTensor, name: str = ""
) -> Tensor:
    """Sends `input` to the recv of the same tag on `remote_rank`; returns the sent tensor.

    Sends and receives of one tag pair up in program order; both sides must have the same shape and
    type. `output` may name the tensor whose memory the result shares; it is not written here.
    """
    tensor = as_tensor(input)
    attrs = {"remote_rank": _peer("send", tensor, remote_rank), "tag": int(tag)}
    tensor.model.graph.add("send", [tensor.ir], [], attrs, name)
    return tensor if output is NullTensor or output is None else as_tensor(output)


def send_done(input: Any, name: str = "") -> Tensor:
    """Marks the end of a send. A put has ended with its task: nothing is left to wait for."""
    return as_tensor(input)


def recv(output: Any, remote_rank: int, tag: int, name: str = "") -> Tensor:
    """Receives into `output` what `remote_rank` sends under `tag`; returns the new tensor on it."""
    tensor = as_tensor(output)
    attrs = {"remote_rank": _peer("recv", tensor, remote_rank), "tag": int(tag)}
    return result("recv", [], tensor.ir.shape, tensor.ir.dtype, tensor, attrs, name)
