"""Communication between ranks as tile tasks over symmetric memory: send, recv, and the all_reduce
that puts every share to every peer. ark.ops.collectives has the algorithms that pass shares on.

A put is a copy whose output lies on a peer; the counter that it signals there has the same name on
both ranks, tile by tile, so a tile is used as soon as it has arrived. Receive buffers belong to one
op each. Where ranks begin iterations by themselves, a message's put waits until the receiver has
read the one of the iteration before; that of a collective waits until the receiver has ended that
iteration (ark.plan.schedule). Elsewhere the barrier between iterations sees to both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ark.errors import InvalidUsageError, PlanError, UnsupportedError
from ark.frontend.tensor import NullTensor, Tensor, as_tensor
from ark.ir.dtype import uint32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.engines import BULK, PACKET, Engine, joined_tiles, tile_bytes
from ark.lower.merge import bytes_of
from ark.lower.registry import register
from ark.lower.rewrite.normed import SUM_AND_NORM
from ark.lower.tiling import box_coords, box_tile, split
from ark.ops.base import result
from ark.ops.logits import gives_logits
from ark.plan.groups import Group
from ark.plan.types import MAX_OPERANDS
from ark.tasks.combine import moved, tiles, words
from ark.tasks.pointwise import copy_params


def copy_box(lowering: Lowering, source: IrTensor, target: IrTensor, suffix: str) -> Group:
    """Copies in tiles that follow from the shape alone, so that both ends of a channel agree."""
    source, target = bytes_of(source), bytes_of(target)
    tile = box_tile(target.shape, lowering.machine)
    params = copy_params(tile)
    return lowering.emit(
        "pointwise", params, [source, target], box_coords(target.shape, tile), suffix
    )


def dense(lowering: Lowering, tensor: IrTensor, suffix: str, fill: bool) -> IrTensor:
    """The tensor, or where it is strided, a dense one in its place (filled with its elements)."""
    if tensor.dense:
        return tensor
    made = lowering.temp(tensor.shape, tensor.dtype, f"{tensor.name}{suffix}")
    if fill:
        copy_box(lowering, tensor, made, suffix)
    return made


def move(
    lowering: Lowering,
    engine: Engine,
    source: IrTensor,
    target: IrTensor,
    coords: Sequence[tuple[int, int]],
    suffix: str = "",
) -> Group:
    """Tasks that copy a dense tensor to or from a peer's memory by an engine."""
    flat = [lowering.flat(bytes_of(source)), lowering.flat(bytes_of(target))]
    if engine.proxied or lowering.far(source.buffer.rank, target.buffer.rank):
        return lowering.emit("transfer", {}, flat, coords, suffix)
    kind = "bulk" if engine.name == BULK else "combine"
    return lowering.emit(kind, {"element": moved(source.dtype)}, flat, coords, suffix)


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """All ranks' shares, the rank's own first, then the next rank's and so on round; the tiles that
    they are worked on in, `joined` of which came as one put; the buffers that hold packets, for
    which no counter is waited.
    """

    shares: list[IrTensor]
    coords: list[tuple[int, int]]
    joined: int
    received: frozenset[int]

    @property
    def puts(self) -> list[tuple[int, int]]:
        """The tiles that they came in."""
        parts = [self.coords[i : i + self.joined] for i in range(0, len(self.coords), self.joined)]
        return [(part[0][0], part[-1][1]) for part in parts]


def _exchange(
    lowering: Lowering,
    share: IrTensor,
    name: str,
    counter: Callable[[int, int], str],
    row: int = 0,
) -> _Exchanged:
    """Every rank puts its dense share into a receive buffer on each peer. counter(step, i): what
    put i to the peer `step` ranks on signals. row: elements that a tile holds whole rows of.

    Peers are counted from the rank itself, in names too (`from+1` is the next rank's share): all
    ranks' tasks are the same but for that, and no receiver is everybody's first.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    engine = lowering.engine(share.nbytes)
    packets = engine.name == PACKET
    size = share.dtype.itemsize
    nbytes = tile_bytes(engine, lowering.machine, share.nbytes)
    coords = tiles(share.elements, size, nbytes)
    if row:
        parts = split(share.elements // row, lowering.machine.processors)
        coords = [(begin * row, end * row) for begin, end in parts]
        nbytes = (coords[-1][1] - coords[-1][0]) * size
    joined = joined_tiles(lowering.machine, len(coords), nbytes, world - 1)
    got = _Exchanged([lowering.flat(share)], coords, joined, frozenset())
    received = set()

    def buffer(step: int, owner: int) -> IrTensor:
        label = f"{name}.from+{step}"
        count, dtype = (words(share.nbytes), uint32) if packets else (share.elements, share.dtype)
        made = lowering.graph.tensor((count,), dtype, arena="symmetric", rank=owner, name=label)
        if packets:
            received.add(made.buffer.id)
        return made

    for step in range(1, world):
        peer = (rank + step) % world
        got.shares.append(buffer(step, -1))
        target = buffer(world - step, peer)
        group = move(lowering, engine, got.shares[0], target, got.puts, f".put+{step}")
        group.received = frozenset({target.buffer.id} & received)
        if not packets:
            group.sends = [
                (lowering.semaphore(peer, counter(step, i)),) for i in range(len(got.puts))
            ]
    return dataclasses.replace(got, received=frozenset(received))


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
    name = f"all_reduce.{lowering.number('all_reduce')}"
    got = _exchange(lowering, share, name, lambda step, i: f"{name}.{i}")
    shares = [*got.shares, *(lowering.flat(residual) for residual in node.inputs[1:])]
    order = [(other - rank) % world for other in range(world)]
    group = lowering.emit(
        "combine",
        {"element": share.dtype.name, "op": "sum", "order": order},
        [*shares, lowering.flat(out)],
        got.coords,
    )
    group.received = got.received
    if world > 1 and not got.received:
        group.awaits = [
            ((lowering.semaphore(rank, f"{name}.{i // got.joined}"), world - 1),)
            for i in range(len(got.coords))
        ]
    if out is not node.outputs[0]:
        copy_box(lowering, out, node.outputs[0], ".out")


def _lower_sum_and_norm(lowering: Lowering, node: Node) -> None:
    """The same, and whoever adds a row norms it: share, residual if there is one, weight; the sum
    and the normed rows.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    if world + 4 > MAX_OPERANDS:
        raise UnsupportedError(
            f"all_reduce among {world} ranks is not built; at most {MAX_OPERANDS - 4} take part"
        )
    given, *residuals, weight = node.inputs
    share = dense(lowering, given, ".dense", fill=True)
    name = f"all_reduce.{lowering.number('all_reduce')}"
    columns = node.attrs["columns"]
    got = _exchange(lowering, share, name, lambda step, i: f"{name}.{i}", columns)
    shares = [*got.shares, *(lowering.flat(residual) for residual in residuals)]
    order = [(other - rank) % world for other in range(world)]
    params = {
        "element": share.dtype.name,
        "columns": columns,
        "eps": node.attrs["eps"],
        "order": order,
    }
    outs = [lowering.flat(out) for out in node.outputs]
    group = lowering.emit("combine_norm", params, [*shares, weight, *outs], got.coords)
    group.received = got.received
    if not got.received:
        group.awaits = [
            ((lowering.semaphore(rank, f"{name}.{i // got.joined}"), world - 1),)
            for i in range(len(got.coords))
        ]


def _lower_gather(lowering: Lowering, node: Node) -> None:
    """Every rank's share, the rank's own first, then the next rank's, and so on round."""
    if gives_logits(lowering, node):
        lowering.shares[node.outputs[0].buffer.id] = node.inputs[0]
        return
    rank, world = lowering.graph.rank, lowering.graph.world_size
    share = dense(lowering, node.inputs[0], ".dense", fill=True)
    name = f"gather.{lowering.number('gather')}"

    def counter(step: int, tile: int) -> str:
        return f"{name}.from+{world - step}.{tile}"

    out = lowering.flat(node.outputs[0])
    got = _exchange(lowering, share, name, counter)
    for step, source in enumerate(got.shares):
        size, offset = (share.elements,), out.offsets[0] + step * share.elements
        place = dataclasses.replace(
            out, shape=size, offsets=(offset,), padded=size, name=f"{out.name}.from+{step}"
        )
        params = {"element": moved(share.dtype)}
        group = lowering.emit("combine", params, [source, place], got.puts, f".out+{step}")
        group.received = frozenset({source.buffer.id}) & got.received
        if step and not got.received:
            names = (counter(world - step, i) for i in range(len(got.puts)))
            group.awaits = [((lowering.semaphore(rank, label), 1),) for label in names]


def _channel(lowering: Lowering, source: int, target: int, tag: int) -> str:
    """The name that both ends give to the next message of a tag."""
    if source == target:
        raise PlanError(f"rank {source} sends to itself under tag {tag}; use ark.copy")
    key = f"send.{source}.{target}.{tag}"
    return f"{key}.{lowering.number(key)}"


def _message(lowering: Lowering, peer: int, source: IrTensor, target: IrTensor) -> Group:
    """A copy into a receive buffer, or out of it, in the same tiles at both ends."""
    if not lowering.far(peer):
        return copy_box(lowering, source, target, "")
    engine = lowering.engine(source.nbytes, peers=(peer,))
    source, target = bytes_of(source), bytes_of(target)
    nbytes = tile_bytes(engine, lowering.machine, source.nbytes)
    coords = tiles(source.elements, source.dtype.itemsize, nbytes)
    return move(lowering, engine, source, target, coords)


def _lower_send(lowering: Lowering, node: Node) -> None:
    peer, tag = node.attrs["remote_rank"], node.attrs["tag"]
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
    if lowering.alone:  # not before the tile of the iteration before has been read
        read = (lowering.semaphore(lowering.graph.rank, f"{name}.{i}.read") for i in tiles)
        group.awaits = [((counter, 0),) for counter in read]


def _lower_recv(lowering: Lowering, node: Node) -> None:
    peer, tag = node.attrs["remote_rank"], node.attrs["tag"]
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


register("all_reduce", None, _lower_all_reduce, all_ranks=True)
register(SUM_AND_NORM, None, _lower_sum_and_norm, all_ranks=True)
register("gather_own_first", None, _lower_gather, aliasing="none", all_ranks=True)
register("send", None, _lower_send, names_ranks=True)
register("recv", None, _lower_recv, names_ranks=True)


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
    """Receives into `output` what `remote_rank` sends under `tag`; returns the new tensor on it.

    Shape and type, any, are those of what is sent.
    """
    tensor = as_tensor(output)
    attrs = {"remote_rank": _peer("recv", tensor, remote_rank), "tag": int(tag)}
    return result("recv", [], tensor.ir.shape, tensor.ir.dtype, tensor, attrs, name)
