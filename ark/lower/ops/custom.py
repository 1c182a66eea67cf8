"""Lowering of custom ops, whose device function a user wrote (ark.custom_op)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from ark.errors import UnsupportedError
from ark.ir.attributes import CustomAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.machine.capability import Capability
from ark.plan.groups import Group, RemoteSemaphore
from ark.tasks import custom_form
from ark.tasks.custom import CustomParams
from ark.tasks.custom_form import Form


def lower_custom(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a custom op: one for every tile of the axes that the user's declaration
    names.
    """
    _emit(lowering, node)


def _emit(lowering: Lowering, node: Node) -> Group:
    given = node.read(CustomAttributes)
    form = custom_form.get(given.name, given.digest)
    tensors = dict(zip((o.name for o in form.operands if o.read), node.inputs, strict=True))
    tensors |= zip(form.results, node.outputs, strict=True)
    operands = [tensors[o.name] for o in form.operands]
    sizes = form.sizes({o.name: tensors[o.name].shape for o in form.operands})
    tile = dict(_tiles(form, sizes, lowering.machine.processors))
    params = CustomParams(given.name, given.digest, tile, given.constants)
    places = [range(0, sizes[axis], n) for axis, n in tile.items()] or [range(1)]
    group = lowering.emit("custom", params, operands, list(itertools.product(*places)))
    group.received = _received(lowering, form, tensors)
    return group


def lower_channel_custom(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a custom op that accesses peers. Each task waits for and signals the
    channels that the call names.
    """
    _pair(lowering, node, _emit(lowering, node))


def _received(lowering: Lowering, form: Form, tensors: Mapping[str, Tensor]) -> frozenset[int]:
    """The ids of receive buffers between ranks that hold packets (data with an epoch, which the
    receiver polls). Raises UnsupportedError if the op requests packets for an operand that cannot
    be sent as packets.
    """
    named = [(name, tensors[name]) for name in form.packets]
    symmetric = [(name, t) for name, t in named if t.buffer.arena == "symmetric"]
    for name, tensor in symmetric:
        if tensor.dtype != fp32 or not lowering.machine.has(Capability.PEER_PACKETS):
            raise UnsupportedError(
                f"{form.name}: {name} cannot be sent as packets, which must be fp32 on a machine "
                f"that supports packets; it is {tensor.dtype.name} on {lowering.machine.name}: "
                "remove it from packets= and use waits= and signals="
            )
    return frozenset(t.buffer.id for _, t in symmetric)


def _pair(lowering: Lowering, node: Node, group: Group) -> None:
    """Adds waits and signals between ranks to the tasks of a custom op. Each tile has a counter of
    its own, for each custom op on the channel.
    """
    rank, given = lowering.graph.rank, node.read(CustomAttributes)
    waits, signals = given.waits or [], given.signals or []
    peers = {t.buffer.rank for t in (*node.inputs, *node.outputs)}
    peers |= {peer for peer, _ in (*waits, *signals)}
    if lowering.far(*peers):
        raise UnsupportedError(
            f"op {node.name!r}: custom ops reach peers on this host only; use a channel's send or "
            "put for other hosts"
        )

    def tiles(source: int, target: int, tag: int) -> list[RemoteSemaphore]:
        key = f"channel{tag}.{source}.{target}.custom"
        name = f"{key}.{lowering.number(key)}"
        return [lowering.semaphore(target, f"{name}.tile{i}") for i in range(len(group.coords))]

    signalled = [tiles(rank, peer, tag) for peer, tag in signals]
    awaited = [tiles(peer, rank, tag) for peer, tag in waits]
    group.sends = list(zip(*signalled, strict=True)) if signalled else []
    group.awaits = [tuple((c, 1) for c in each) for each in zip(*awaited, strict=True)]


def _tiles(form: Form, sizes: Mapping[str, int], processors: int) -> Iterator[tuple[str, int]]:
    """Yields each axis of a custom op with its tile size. If the user's declaration does not set
    the size, the axis is divided so that all processors get equal shares.
    """
    tasks = 1
    for axis, n in form.tile.items():
        tasks *= -(-sizes[axis] // n) if n else 1
    for axis, n in form.tile.items():
        if n:
            yield axis, min(n, sizes[axis])
            continue
        parts = min(sizes[axis], max(1, processors // tasks))
        tasks *= parts
        yield axis, -(-sizes[axis] // parts)
