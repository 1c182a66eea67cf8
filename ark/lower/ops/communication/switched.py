"""Lowering of an all-reduce whose sums the switch between devices computes (engine `switch`, as in
NVLink SHARP). Each rank owns a part of the elements. For this part, it requests the sum of all
ranks' shares from the switch and stores the sum on all ranks. Used only if a call selects this
engine.
"""

from __future__ import annotations

from ark.errors import UnsupportedError
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense
from ark.lower.engines import SWITCH, choose_engine, tile_bytes
from ark.lower.merge import part
from ark.lower.registry import register
from ark.plan.params import Params
from ark.plan.types import MAX_OPERANDS
from ark.tasks.combine import ACCESS_BYTES, CombineParams, moved, tiles

NODE = "all_reduce_switch"
TYPES = ("fp32", "bf16", "fp16")


def _lower_all_reduce_switch(lowering: Lowering, node: Node) -> None:
    graph, machine = lowering.graph, lowering.machine
    rank, world = graph.rank, graph.world_size
    share = dense(lowering, node.inputs[0], ".dense", fill=True)
    out = dense(lowering, node.outputs[0], ".sum", fill=False)
    engine = choose_engine(machine, share.nbytes, SWITCH, (SWITCH,))
    if 2 * world > MAX_OPERANDS or share.dtype.name not in TYPES:
        raise UnsupportedError(
            f"a switch adds tensors of {', '.join(TYPES)} on at most {MAX_OPERANDS // 2} ranks, "
            f"but this all_reduce is of {share.dtype.name} on {world} ranks: select another engine"
        )
    name = f"switch.{lowering.number('switch')}"
    size, elements = share.dtype.itemsize, share.elements
    peers = [(rank + step) % world for step in range(1, world)]

    def everywhere(role: str) -> list[IrTensor]:
        """The tensors that have the name `role` on all ranks, beginning with this rank's own."""
        return [
            graph.tensor(
                (elements,), share.dtype, arena="symmetric", rank=owner, name=f"{name}.{role}"
            )
            for owner in (-1, *peers)
        ]

    given, sums = everywhere("given"), everywhere("sum")
    nbytes = tile_bytes(engine, machine, share.nbytes)

    def owned(owner: int) -> list[tuple[str, int, list[tuple[int, int]]]]:
        """The tasks for the elements that rank `owner` owns. There are two task kinds: by one the
        switch adds whole chunks, by the other a task loads the remaining elements from peers and
        adds them. Returns, for each of the two, the task kind, the first element and the tiles.
        """
        whole = elements * size // ACCESS_BYTES * ACCESS_BYTES // size
        lines = -(-whole * size // 128)
        begin, end = (min(lines * r // world * 128 // size, whole) for r in (owner, owner + 1))
        pieces = [("switch", begin, tiles(end - begin, size, nbytes))]
        if owner == world - 1 and whole < elements:
            pieces.append(("combine", whole, [(0, elements - whole)]))
        return [(kind, first, cut) for kind, first, cut in pieces if cut]

    moves = CombineParams(moved(share.dtype))
    coords = tiles(elements, size, nbytes)
    group = lowering.emit("combine", moves, [lowering.flat(share), given[0]], coords, ".given")
    adding = [p for p in peers if owned(p)]
    group.sends = [tuple(lowering.semaphore(p, f"{name}.given") for p in adding)] * len(coords)
    awaited = ((lowering.semaphore(rank, f"{name}.given"), len(peers) * len(coords)),)

    order = tuple((other - rank) % world for other in range(world))
    params = CombineParams(share.dtype.name, order=order, outputs=world)
    for kind, first, cut in owned(rank):
        operands = [part(t, 0, first, cut[-1][1]) for t in (*given, *sums)]
        group = lowering.emit(kind, params, operands, cut, f".{kind}")
        group.awaits = [awaited] * len(cut)
        signals = tuple(lowering.semaphore(p, f"{name}.sum.{rank}") for p in peers)
        group.sends = [signals] * len(cut)
    for owner in peers:
        cuts = owned(owner)
        if not cuts:
            continue
        begin, count = cuts[0][1], sum(cut[-1][1] for *_, cut in cuts)
        place = part(sums[0], 0, begin, count)
        group = lowering.emit("arrival", Params(), [place], [(0, count)], f".from{owner}")
        tasks = sum(len(cut) for *_, cut in cuts)
        group.awaits = [((lowering.semaphore(rank, f"{name}.sum.{owner}"), tasks),)]
    lowering.emit("combine", moves, [sums[0], lowering.flat(out)], coords, ".out")
    if out is not node.outputs[0]:
        copy_box(lowering, out, node.outputs[0], ".strided")


register(NODE, None, _lower_all_reduce_switch, aliasing="none", all_ranks=True)
