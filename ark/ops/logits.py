"""Who makes logits and finds the best of its own.

One rank's output layer, or that of each rank that makes a share of them. Called by the lowerings of
what draws tokens (ark.ops.tokens, ark.ops.sequences) and of the gather of shares
(ark.ops.communication.direct).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from ark.codegen.layout import RECORD_OPERANDS
from ark.ir import values as ir
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.plan.groups import Group
from ark.tasks.linear_params import LinearParams
from ark.tasks.tokens import SampleParams


@dataclass(frozen=True)
class Drawing:
    """What drawing a token needs beside logits."""

    settings: ir.Tensor
    position: ir.Tensor
    tokens: ir.Tensor
    output: ir.Tensor
    stops: ir.Tensor

    def choose(
        self,
        lowering: Lowering,
        params: SampleParams,
        logits: ir.Tensor,
        candidates: ir.Tensor,
    ) -> Group:
        """The task that chooses among candidates."""
        state = (self.settings, self.position, candidates, self.tokens, self.output, self.stops)
        return lowering.emit("choose", params, [logits, *state], [(0,)], ".choose")


def makes_logits(lowering: Lowering, node: Node) -> Group | None:
    """The last group if it is the linear layer that makes the node's logits, else None.

    It may find the best of its own. A layer that makes logits asks for the position before
    it waits.
    """
    moved = any(g.kind == "advance" and g.phase == node.phase for g in lowering.groups)
    product = lowering.groups[-1] if lowering.groups else None
    return product if product is not None and not moved and _makes(product, node) else None


def draws(product: Group, tiles: int, shares: int = 1, share: int = 0) -> None:
    """Makes a linear layer find the best of its logits, which are one of equal shares."""
    assert isinstance(product.params, LinearParams)
    product.params = replace(
        product.params, epilogue="sample", tiles=tiles, shares=shares, share=share
    )


def _makes(product: Group, node: Node) -> bool:
    return (
        isinstance(product.params, LinearParams)
        and product.params.epilogue == "store"
        and product.operands[2].id == node.inputs[0].id
        and product.phase == node.phase
        and product.processors == node.processors
        and not node.after
    )


def gives_logits(lowering: Lowering, node: Node) -> bool:
    """True where the layer that makes a share of logits may give them to every rank by itself.

    node: the gather of the shares. The layer also finds the best of its own.

    It can where no other host takes part, all begin iterations together and the drawing comes next;
    a record has room for the places of few peers.
    """
    share, world = node.inputs[0], lowering.graph.world_size
    uses = sum(share.buffer.id in {t.buffer.id for t in n.inputs} for n in lowering.graph.nodes)
    product = makes_logits(lowering, node)
    return (
        product is not None
        and lowering.next is not None
        and lowering.next.type == "sample"
        and not lowering.alone
        and not lowering.far(*range(world))
        and share.shape[0] == 1
        and share.dtype == fp32
        and share.buffer.arena == "activation"
        and share.buffer.id not in lowering.options.get("external", ())
        and uses == 1
        and len(product.operands) + 3 + 2 * (world - 1) <= RECORD_OPERANDS
    )


def give_logits(lowering: Lowering, share: ir.Tensor, drawing: Drawing) -> None:
    """The layer that makes a share of the logits gives each rank its logits and candidates.

    A counter there says so; one task chooses. Both begin with the rank's own.
    """
    rank, world = lowering.graph.rank, lowering.graph.world_size
    product = lowering.groups[-1]
    tiles, name = len(product.coords), f"logits.{lowering.number('logits')}"

    def places(size: tuple[int, int], axis: int, what: str) -> list[ir.Tensor]:
        """This rank's part of all, on itself and then on each peer."""
        found = []
        for step in range(world):
            peer = (rank + step) % world if step else -1
            whole = tuple(n * world if d == axis else n for d, n in enumerate(size))
            made = lowering.graph.tensor(
                whole, fp32, arena="symmetric", rank=peer, name=f"{name}.{what}"
            )
            at = tuple((world - step) % world * n if d == axis else 0 for d, n in enumerate(size))
            found.append(dataclasses.replace(made, shape=size, offsets=at, padded=size))
        return found

    logits = places((1, share.shape[1]), 1, "all")
    logits[0] = dataclasses.replace(logits[0], name=share.name)
    candidates = places((tiles, 2), 0, "best")
    x, weight, _, *norm = product.operands
    peers = (t for pair in zip(logits[1:], candidates[1:], strict=True) for t in pair)
    own = (logits[0], *norm, drawing.settings, drawing.position, candidates[0])
    product.operands = (x, weight, *own, *peers)
    draws(product, tiles, world, rank)
    counters = [(step, f"{name}.from+{world - step}") for step in range(1, world)]
    told = tuple(lowering.semaphore((rank + step) % world, label) for step, label in counters)
    product.sends = [told] * tiles

    def everybodys(part: ir.Tensor) -> ir.Tensor:
        whole = part.extents
        return dataclasses.replace(
            part, shape=whole, offsets=(0, 0), padded=whole, name=part.buffer.name
        )

    params = SampleParams(tiles * world, world, rank)
    group = drawing.choose(lowering, params, everybodys(logits[0]), everybodys(candidates[0]))
    group.awaits = [tuple((lowering.semaphore(rank, label), tiles) for _, label in counters)]
