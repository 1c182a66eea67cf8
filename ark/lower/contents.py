"""Numbers the ops and tensors of a plan, and assigns their buffers to arenas. An arena is one
allocation for buffers of the same purpose (activations, parameters, state, ...), in which each
buffer has an offset. Called by ark.lower.pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.plan import memory
from ark.plan.groups import Group
from ark.plan.signature import packet_bytes
from ark.plan.types import INITIAL, PlanBuffer, PlanOp, PlanTensor


class Contents:
    """The tensors and buffers that the groups of tasks use, with their numbers in the plan, and the
    offset of each buffer in its arena.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[Group],
        packets: set[int],
        external: frozenset[int],
        reordered: bool,
        limit: int | None = None,
        lag: int = 0,
        little: bool = False,
    ) -> None:
        """limit: the largest number of bytes of activations; None for no limit. lag: the number of
        ops after the last reader of an activation that do not use its memory again. little: True to
        give small activations memory of their own, if there is no limit.
        """
        self.rank = graph.rank
        self.packets = packets
        self._external = external
        self.buffers: list[PlanBuffer] = []
        self.tensors: list[PlanTensor] = []
        self.ops: list[PlanOp] = []
        self.arenas: dict[str, int] = {}
        self._tensor_ids: dict[tuple[Any, ...], int] = {}
        self._buffer_ids: dict[int, int] = {}
        self._lifetimes: dict[int, tuple[int, int]] = {}
        for i, group in enumerate(groups):
            operands = tuple(self._tensor(t, i) for t in group.operands)
            after = tuple(self._tensor(t, i) for t in group.after)
            self.ops.append(
                PlanOp(i, group.name, group.kind, group.params.to_plan(), operands, after)
            )
        self._place(reordered, limit, lag, little)

    def _tensor(self, tensor: Tensor, op: int) -> int:
        packet = tensor.id in self.packets
        key = (tensor.buffer.id, tensor.dtype.name, tensor.shape, tensor.extents, tensor.offsets)
        number = self._tensor_ids.get(key)
        buffer = self._buffer(tensor, packet)
        first, last = self._lifetimes.get(buffer, (op, op))
        self._lifetimes[buffer] = (min(first, op), max(last, op))
        if number is None:
            number = len(self.tensors)
            self._tensor_ids[key] = number
            self.tensors.append(
                PlanTensor(
                    number,
                    tensor.name or f"t{number}",
                    tensor.dtype.name,
                    tensor.shape,
                    tensor.extents,
                    tensor.offsets,
                    buffer,
                    packet,
                )
            )
        return number

    def _buffer(self, tensor: Tensor, packet: bool) -> int:
        source = tensor.buffer
        number = self._buffer_ids.get(source.id)
        if number is None:
            number = len(self.buffers)
            self._buffer_ids[source.id] = number
            rank = self.rank if source.rank < 0 else source.rank
            arena = "external" if source.id in self._external else source.arena
            self.buffers.append(
                PlanBuffer(
                    id=number,
                    name=source.name or tensor.name or f"b{source.id}",
                    arena="packet" if packet and arena != "symmetric" else arena,
                    nbytes=source.nbytes // tensor.dtype.itemsize * packet_bytes(tensor.dtype.name)
                    if packet
                    else source.nbytes,
                    rank=rank,
                    initial=arena in INITIAL,
                )
            )
        return number

    def _place(self, reordered: bool, limit: int | None, lag: int, little: bool) -> None:
        """Sets the buffers' offsets. Activations share memory if they are never alive at the same
        time. All other buffers are placed one after the other.

        Sharing memory has a cost: an op must wait until earlier ops have read the memory that it
        overwrites. This wait would delay ops that were reordered so that they run at the same time.
        It would also delay ops that exchange data as packets and otherwise need no waits. If the
        plan has such ops and its activations are small in total, no activations share memory. If
        they are large in total, small activations (`little`) do not share memory on machines whose
        tasks have many threads: an op on them takes no longer than a wait.
        """
        local = [b for b in self.buffers if b.rank == self.rank]
        sharing = [b for b in local if b.arena == "activation"]
        apart = reordered or any(b.arena == "packet" for b in local)
        little = little and limit is None
        most = memory.MAX_UNSHARED_BYTES if limit is None else min(memory.MAX_UNSHARED_BYTES, limit)
        own = sharing if apart else []
        if sum(map(_aligned, sharing)) > most:
            own = [b for b in sharing if little and b.nbytes <= memory.MAX_LITTLE_BYTES]
        last = len(self.ops)
        if sum(map(_aligned, own)) <= most:
            self._lifetimes.update(dict.fromkeys((b.id for b in own), (0, last)))
        lifetimes = {
            i: (begin, min(end + lag, last)) for i, (begin, end) in self._lifetimes.items()
        }
        offsets, total = memory.share(
            {b.id: b.nbytes for b in sharing}, {b.id: lifetimes[b.id] for b in sharing}
        )
        self.arenas["activation"] = total
        for arena in ("parameter", "state", "symmetric", "host", "packet"):
            members = [(b.id, b.nbytes) for b in local if b.arena == arena]
            placed, size = memory.lay_out(members)
            offsets.update(placed)
            self.arenas[arena] = size
        self.buffers = [
            dataclasses.replace(
                b,
                offset=offsets.get(b.id, -1 if b.rank != self.rank else 0),
            )
            for b in self.buffers
        ]


def _aligned(buffer: PlanBuffer) -> int:
    return memory.align(buffer.nbytes)
