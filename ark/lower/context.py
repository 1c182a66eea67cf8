"""The context of lowering. The lowering function of an op emits groups of tile tasks into it. A
group has a task kind, its static parameters, its operands and one coordinate per task. The
processor, the waits and the addresses of a task are decided later by ark.lower.pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ark.errors import PlanError
from ark.ir.dtype import DataType
from ark.ir.fold import MAX_FOLDED_DIMS, is_block
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.engines import AUTO, FAR, MESSAGES, NIC, Engine, choose_engine, measured
from ark.lower.tiling import hinted_tile
from ark.machine import Machine
from ark.plan.groups import Group, RemoteSemaphore
from ark.plan.params import Params


class Lowering:
    """Collects groups of tasks in program order. `graph` is a private copy, to which temporary
    tensors may be added.
    """

    def __init__(
        self, graph: Graph, machine: Machine, options: Mapping[str, Any], alone: bool = False
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.options = options
        self.alone = alone  # True if ranks begin iterations independently
        self.groups: list[Group] = []
        self.node: Node | None = None  # the node that is being lowered
        self.share = 1.0  # the part of the processors that the node's tasks should use
        self.cut = False  # True if the node's tasks have the tile of its hints
        self._numbers: dict[str, int] = {}

    def emit(
        self,
        kind: str,
        params: Params,
        operands: Sequence[Tensor],
        coords: Sequence[tuple[int, ...]],
        suffix: str = "",
    ) -> Group:
        """Adds a group of tasks for the node being lowered. Raises PlanError outside of a node's
        lowering.
        """
        node = self.node
        if node is None:
            raise PlanError(
                "tasks were emitted outside of the lowering of a node; report this as a fault of "
                "ark"
            )
        group = Group(
            node.name + suffix,
            kind,
            params,
            tuple(operands),
            [tuple(int(v) for v in c) for c in coords],
            node.after,
            node.phase,
            node.processors,
            node.hints.granularity if node.hints else None,
            node.context,
        )
        self.groups.append(group)
        return group

    def tile(
        self, shape: Sequence[int], fixed: Sequence[int] = (), shown: Sequence[int] | None = None
    ) -> list[int] | None:
        """The tile that the user's hints request for a result of this shape; None without such a
        hint.

        fixed: the dimensions in which a tile must have size 1. shown: the sizes that an error
        message quotes; by default those of the hints. Raises PlanError for a tile that is not
        possible.
        """
        node = self.node
        if node is None or node.hints is None:
            return None
        dims = len(node.outputs[0].shape)
        if node.hints.tile is not None and any(n != 1 for n in node.hints.tile[:-dims]):
            raise PlanError(
                f"op {node.name!r}: the tile {list(node.hints.tile)} has more dimensions than its "
                f"result {list(node.outputs[0].shape)}"
            )
        sizes = hinted_tile(node.name, shape, node.hints, shown)
        full = node.outputs[0].shape
        if sizes is not None and dims > MAX_FOLDED_DIMS and not is_block(full, sizes[0]):
            raise PlanError(
                f"op {node.name!r}: the leading dimensions of {list(full)} cannot be divided into "
                f"tiles of {sizes[0]} indices, because such tiles would not be boxes; give a "
                "divisor"
            )
        if sizes is not None and any(sizes[d] != 1 for d in fixed):
            raise PlanError(
                f"op {node.name!r}: a tile {sizes} spans several indices of the result's dimension "
                f"{next(d for d in fixed if sizes[d] != 1) - len(shape)}, which tasks of "
                f"{node.type} compute one by one; set that tile size to 1"
            )
        self.cut = self.cut or sizes is not None
        return sizes

    def far(self, *peers: int) -> bool:
        """True if one of these ranks is on another host than this rank, according to the option
        `hosts`. The number -1 stands for this rank.
        """
        hosts = self.options.get("hosts") or ()
        here = self.graph.rank
        return bool(hosts) and any(hosts[p] != hosts[here] for p in peers if p >= 0)

    def engine(
        self, nbytes: int, asked: str = AUTO, peers: Sequence[int] = (), among: Sequence[str] = ()
    ) -> Engine:
        """The engine (way of moving bytes to a peer) for a transfer of `nbytes` bytes to these
        peers, by default to all ranks; see choose_engine.
        """
        if self.far(*(peers or range(self.graph.world_size))):
            return choose_engine(self.machine, nbytes, NIC if asked == AUTO else asked, FAR)
        return choose_engine(self.machine, nbytes, asked, among or MESSAGES)

    def measured(self, collective: str, algorithm: str, nbytes: int) -> str:
        """The engine (way of moving bytes to a peer) that was measured as fastest for a collective
        whose call does not select one; see `measured` in ark.lower.engines. nbytes: bytes of a
        rank's input or output, whichever is larger.
        """
        if self.far(*range(self.graph.world_size)):
            return AUTO
        return measured(self.options, self.machine, collective, algorithm, nbytes)

    def semaphore(self, rank: int, name: str) -> RemoteSemaphore:
        """The counter `name` on `rank`."""
        return RemoteSemaphore(rank, name)

    def peer_counters(self, name: str) -> tuple[RemoteSemaphore, ...]:
        """For each peer, the counter in the peer's memory that counts the data which this rank
        sends to it. This rank signals these counters.
        """
        rank, world = self.graph.rank, self.graph.world_size
        steps = range(1, world)
        return tuple(self.semaphore((rank + s) % world, f"{name}.from+{world - s}") for s in steps)

    def own_counters(self, name: str) -> tuple[RemoteSemaphore, ...]:
        """The counters that this rank waits for: for each peer, the counter in this rank's memory
        that counts the data sent by that peer. The peer gets the same counter from its
        `peer_counters`.
        """
        rank, world = self.graph.rank, self.graph.world_size
        return tuple(self.semaphore(rank, f"{name}.from+{world - s}") for s in range(1, world))

    def number(self, key: str) -> int:
        """Returns how often this function was called with this key before. Such a number makes the
        name of a counter or buffer unique. All ranks lower matching ops in the same order, so
        matching ops get the same name on all ranks.
        """
        count = self._numbers.get(key, 0)
        self._numbers[key] = count + 1
        return count

    def temp(
        self, shape: Sequence[int], dtype: DataType, name: str, arena: str = "activation"
    ) -> Tensor:
        """A new temporary tensor for the op that is being lowered."""
        return self.graph.tensor(shape, dtype, arena=arena, name=name)

    def flat(self, tensor: Tensor) -> Tensor:
        """A dense tensor viewed in one dimension."""
        return self.view(tensor, (tensor.elements,))

    def part(self, tensor: Tensor, parts: int, number: int) -> Tensor:
        """One of `parts` equal parts of a tensor's first dimension."""
        if parts == 1:
            return tensor
        size, *rest = tensor.shape
        shape = (size // parts, *rest)
        offsets = (tensor.offsets[0] + number * shape[0], *tensor.offsets[1:])
        name = f"{tensor.name}.{number}" if tensor.name else ""
        return dataclasses.replace(tensor, shape=shape, offsets=offsets, padded=shape, name=name)

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A dense tensor viewed in another shape with the same number of elements. Raises PlanError
        if that is not possible.
        """
        layout = dense_view(tensor, shape)
        if layout is None:
            raise PlanError(f"tensor {tensor.name!r} cannot be viewed as {list(shape)}")
        extents, offsets = layout
        dims = tuple(shape)
        return dataclasses.replace(
            tensor, shape=dims, extents=extents, offsets=offsets, padded=dims
        )
