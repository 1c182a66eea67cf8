"""Lowering of collectives in which each rank sends its share directly to every peer. Other
algorithms are lowered by ark.lower.ops.communication.programs.

A put is a copy task whose output is in a peer's memory. At its end it signals a counter in the
peer's memory, for which the peer's tasks wait. The counter has the same name on both ranks. Each
tile has a counter of its own, so a tile can be used as soon as it has arrived.

Each receive buffer (memory into which one peer puts) belongs to one op. A put must not overwrite
data of the previous iteration that the receiver still reads. If all ranks begin iterations
together, the barrier between iterations ensures this. If ranks begin iterations independently, a
collective's put waits until the receiver has ended the previous iteration (ark.plan.schedule), and
a message's put waits until the receiver has read the previous message
(ark.lower.ops.communication.messages).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.attributes import SumNormAttributes
from ark.ir.dtype import uint32
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense, move
from ark.lower.engines import ONE_SHOT, PACKET, joined_tiles, tile_bytes
from ark.lower.registry import register
from ark.lower.rewrite.fuse_all_reduce_norm import ALL_REDUCE_NORM
from ark.plan.groups import Group
from ark.plan.types import MAX_OPERANDS
from ark.tasks.combine import CombineParams, moved, tiles, words
from ark.tasks.combine_norm import CombineNormParams


@dataclass(frozen=True)
class _Exchanged:
    """The result of exchanging shares, which are the ranks' contributions. shares: tensors with the
    shares of all ranks, in cyclic order beginning with this rank's own.

    coords: the tiles in which the shares are processed. joined: the number of tiles that arrive as
    one put. received: ids of the receive buffers that hold packets, which need no counter.
    """

    shares: list[IrTensor]
    coords: list[tuple[int, int]]
    joined: int
    received: frozenset[int]

    @property
    def puts(self) -> list[tuple[int, int]]:
        """The range of elements of each put, which contains `joined` tiles."""
        parts = [self.coords[i : i + self.joined] for i in range(0, len(self.coords), self.joined)]
        return [(part[0][0], part[-1][1]) for part in parts]


def _exchange(
    lowering: Lowering,
    share: IrTensor,
    name: str,
    counter: Callable[[int, int], str],
    row: int = 0,
    collective: str = "all_reduce",
) -> _Exchanged:
    """Emits the puts of this rank's dense share into a receive buffer on each peer.

    counter(step, i): returns the name of the counter that put i signals, on the peer that is `step`
    ranks after this one. row: if not 0, tiles consist of whole rows, and a row has this number of
    elements. collective: the collective's name in `ark tune --collectives`.

    Peers are numbered relative to this rank, also in names (`from+1` is the share of the next
    rank). So the tasks of all ranks are equal except for the peers, and no two ranks send to the
    same peer first.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    moved_bytes = share.nbytes * (world if collective == "all_gather" else 1)
    asked = lowering.measured(collective, ONE_SHOT, moved_bytes)
    engine = lowering.engine(share.nbytes, asked)
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
        tensor = lowering.graph.tensor((count,), dtype, arena="symmetric", rank=owner, name=label)
        if packets:
            received.add(tensor.buffer.id)
        return tensor

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
    """Emits an all-reduce: every rank puts its share into a receive buffer on each peer and adds
    all shares.

    The shares are added in rank order. If a pass has fused a residual into the node, it is the
    second input and is added last.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    if world + 1 > MAX_OPERANDS:
        raise UnsupportedError(
            f"all_reduce among {world} ranks is not supported; use at most {MAX_OPERANDS - 1} ranks"
        )
    share = dense(lowering, node.inputs[0], ".dense", fill=True)
    out = dense(lowering, node.outputs[0], ".sum", fill=False)
    name = f"all_reduce.{lowering.number('all_reduce')}"
    got = _exchange(lowering, share, name, lambda step, i: f"{name}.{i}")
    shares = [*got.shares, *(lowering.flat(residual) for residual in node.inputs[1:])]
    order = tuple((other - rank) % world for other in range(world))
    group = lowering.emit(
        "combine",
        CombineParams(share.dtype.name, order=order),
        [*shares, lowering.flat(out)],
        got.coords,
    )
    _await_all(lowering, group, got, name)
    if out is not node.outputs[0]:
        copy_box(lowering, out, node.outputs[0], ".out")


def _await_all(lowering: Lowering, group: Group, got: _Exchanged, name: str) -> None:
    """Lets each task of the group wait for the shares of all peers that it adds."""
    rank, world = lowering.graph.rank, lowering.graph.world_size
    group.received = got.received
    if world > 1 and not got.received:
        group.awaits = [
            ((lowering.semaphore(rank, f"{name}.{i // got.joined}"), world - 1),)
            for i in range(len(got.coords))
        ]


def _lower_all_reduce_norm(lowering: Lowering, node: Node) -> None:
    """Emits an all-reduce that is fused with a norm. It is an all-reduce as in _lower_all_reduce,
    in which the task that adds a row also normalises the row. Operands: the share, a residual if
    there is one, the weight. Results: the sum and the normalised rows.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    if world + 4 > MAX_OPERANDS:
        raise UnsupportedError(
            f"all_reduce among {world} ranks is not supported; use at most {MAX_OPERANDS - 4} ranks"
        )
    given, *residuals, weight = node.inputs
    share = dense(lowering, given, ".dense", fill=True)
    name = f"all_reduce.{lowering.number('all_reduce')}"
    norm = node.read(SumNormAttributes)
    columns = norm.columns
    got = _exchange(lowering, share, name, lambda step, i: f"{name}.{i}", columns)
    shares = [*got.shares, *(lowering.flat(residual) for residual in residuals)]
    order = tuple((other - rank) % world for other in range(world))
    params = CombineNormParams(share.dtype.name, columns, norm.eps, order)
    outs = [lowering.flat(out) for out in node.outputs]
    group = lowering.emit("combine_norm", params, [*shares, weight, *outs], got.coords)
    _await_all(lowering, group, got, name)


def _lower_all_gather_rotated(lowering: Lowering, node: Node) -> None:
    """Emits an all-gather with a rotated result: this rank's own share comes first, then the shares
    of the following ranks in cyclic order.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    share = dense(lowering, node.inputs[0], ".dense", fill=True)
    name = f"gather.{lowering.number('gather')}"

    def counter(step: int, tile: int) -> str:
        return f"{name}.from+{world - step}.{tile}"

    out = lowering.flat(node.outputs[0])
    got = _exchange(lowering, share, name, counter, collective="all_gather")
    for step, source in enumerate(got.shares):
        size, offset = (share.elements,), out.offsets[0] + step * share.elements
        place = dataclasses.replace(
            out, shape=size, offsets=(offset,), padded=size, name=f"{out.name}.from+{step}"
        )
        params = CombineParams(moved(share.dtype))
        group = lowering.emit("combine", params, [source, place], got.puts, f".out+{step}")
        group.received = frozenset({source.buffer.id}) & got.received
        if step and not got.received:
            names = (counter(world - step, i) for i in range(len(got.puts)))
            group.awaits = [((lowering.semaphore(rank, label), 1),) for label in names]


register("all_reduce", None, _lower_all_reduce, all_ranks=True)
register(ALL_REDUCE_NORM, None, _lower_all_reduce_norm, all_ranks=True)
register("all_gather_rotated", None, _lower_all_gather_rotated, aliasing="none", all_ranks=True)
