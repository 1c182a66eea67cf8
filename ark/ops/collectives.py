"""Collectives by any algorithm of ark.comm: all_reduce, all_gather, reduce_scatter, broadcast,
all_to_all.

A checked collective program becomes tile tasks: a put is a copy into a peer's inbox and a counter
there for each tile, a reduction is a sum, a copy is nothing at all. Every put has an inbox of its
own, so within an iteration nothing that a peer may read is overwritten, and the only waits between
ranks are for data. All ranks lower the same program, so they name inboxes and counters alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ark.codegen.layout import MAX_OPERANDS
from ark.comm.program import Collective, CollectiveProgram, Kind, check
from ark.comm.program.values import Origin, Value, flow
from ark.comm.synthesis import algorithms, synthesize
from ark.comm.topology import Topology, full_mesh
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.ir.dtype import FLOATS, DataType, fp32, int32
from ark.ir.model import Node
from ark.ir.tensor import Tensor as IrTensor
from ark.ops.base import result
from ark.ops.communication import MIN_PUT, copy_box, dense
from ark.ops.registry import register
from ark.tensor import NullTensor, Tensor, as_tensor

if TYPE_CHECKING:
    from ark.plan.lowering import Group, Lowering, Mail

ONE_SHOT = "one_shot"


class _Writer:
    """Writes one rank's part of a collective."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering, self.rank = lowering, lowering.graph.rank
        self.program: CollectiveProgram = node.attrs["program"]
        self.flow = flow(self.program)
        self.name = f"collective.{lowering.number('collective')}"
        self.share = lowering.flat(dense(lowering, node.inputs[0], ".dense", fill=True))
        self.result = dense(lowering, node.outputs[0], ".out", fill=False)
        self.out = lowering.flat(self.result)
        shares = self.program.buffer_by_name["in"].slots // self.flow.parts
        self.elements = self.share.elements // shares
        self.homes: dict[int, int] = {}  # by value that is made here and stays: its slot of `out`
        for (rank, slot), value in self.flow.final.items():
            if rank == self.rank and value.origin is Origin.REDUCE:
                self.homes.setdefault(value.number, slot)
        self.places: dict[tuple[int, int], IrTensor] = {}

    def write(self) -> None:
        """Emits the rank's operations in the order of its list, then what is missing in `out`."""
        pieces = range(self.program.pieces)
        for value in self.flow.values.values():
            if value.writer != self.rank or value.origin is Origin.INPUT:
                continue
            for piece in pieces:
                if value.origin is Origin.PUT:
                    self._put(value, piece)
                else:
                    self._sum(value, piece)
        for slot in range(self.program.buffer_by_name["out"].slots):
            value = self.flow.final[self.rank, slot]
            if self.homes.get(value.number) != slot:
                for piece in pieces:
                    self._copy(value, piece, self._slice(self.out, slot, piece), f".out{slot}")

    def _bounds(self, part: int, piece: int) -> tuple[int, int]:
        """First and last+1 element of a share that a piece of its part holds; may be none."""
        cuts = self.flow.parts * self.program.pieces
        at = part * self.program.pieces + piece
        return self.elements * at // cuts, self.elements * (at + 1) // cuts

    def _slice(self, tensor: IrTensor, slot: int, piece: int) -> IrTensor:
        share, part = divmod(slot, self.flow.parts)
        begin, end = self._bounds(part, piece)
        offset = tensor.offsets[0] + share * self.elements + begin
        size = (end - begin,)
        name = f"{tensor.name}[{offset}:{offset + size[0]}]"
        return dataclasses.replace(tensor, shape=size, offsets=(offset,), padded=size, name=name)

    def _place(self, value: Value, piece: int) -> IrTensor:
        """Where a piece of a value lies: in the caller's tensors, an inbox or a temporary."""
        key = (value.number, piece)
        if key not in self.places:
            self.places[key] = self._new_place(value, piece)
        return self.places[key]

    def _new_place(self, value: Value, piece: int) -> IrTensor:
        begin, end = self._bounds(value.part, piece)
        size, name = (end - begin,), f"{self.name}.{value.number}.{piece}"
        if value.origin is Origin.INPUT:
            return self._slice(self.share, value.slot, piece)
        if value.origin is Origin.PUT:
            owner = -1 if value.rank == self.rank else value.rank
            return self.lowering.graph.tensor(
                size, self.share.dtype, arena="symmetric", rank=owner, name=name
            )
        if value.number in self.homes:
            return self._slice(self.out, self.homes[value.number], piece)
        return self.lowering.temp(size, self.share.dtype, name)

    def _mails(self, value: Value, piece: int, tiles: int) -> list[Mail]:
        """The counters of a put, one for each tile."""
        name = f"{self.name}.{value.number}.{piece}"
        return [self.lowering.mail(value.rank, f"{name}.{i}") for i in range(tiles)]

    def _tiles(self, elements: int) -> tuple[int, range]:
        """Tile size and first elements: by the size alone, so that both ends of a put agree."""
        tile = max(MIN_PUT, -(-elements // self.lowering.machine.processors))
        return tile, range(0, elements, tile)

    def _await(self, group: Group, sources: Sequence[Value], piece: int) -> None:
        arriving = [
            self._mails(value, piece, len(group.coords))
            for value in sources
            if value.origin is Origin.PUT
        ]
        if arriving:
            group.awaits = [tuple((m, 1) for m in mails) for mails in zip(*arriving, strict=True)]

    def _copy(self, value: Value, piece: int, target: IrTensor, suffix: str) -> Group | None:
        if not target.elements:
            return None
        tile, starts = self._tiles(target.elements)
        params = {"function": "copy", "scalar": None, "tile": [1, 1, 1, tile]}
        group = self.lowering.emit(
            "elementwise",
            params,
            [self._place(value, piece), target],
            [(0, 0, 0, at) for at in starts],
            suffix,
        )
        self._await(group, [value], piece)
        return group

    def _put(self, value: Value, piece: int) -> None:
        source = self.flow.values[value.sources[0]]
        begin, end = self._bounds(value.part, piece)
        if begin == end:
            return
        group = self._copy(source, piece, self._place(value, piece), f".put{value.rank}")
        assert group is not None
        group.sends = [(mail,) for mail in self._mails(value, piece, len(group.coords))]

    def _sum(self, value: Value, piece: int) -> None:
        """Adds the sources from left to right, through fp32 where a task cannot take all."""
        begin, end = self._bounds(value.part, piece)
        if begin == end:
            return
        tile, starts = self._tiles(end - begin)
        coords = [(at,) for at in starts]
        dtype = fp32 if self.share.dtype in FLOATS else self.share.dtype
        rest = [self.flow.values[number] for number in value.sources]
        partial: list[IrTensor] = []
        while rest:
            taken = rest[: MAX_OPERANDS - 1 - len(partial)]
            rest = rest[len(taken) :]
            target = (
                self.lowering.temp((end - begin,), dtype, f"{self.name}.partial")
                if rest
                else self._place(value, piece)
            )
            operands = [*partial, *(self._place(v, piece) for v in taken), target]
            group = self.lowering.emit("sum_ranks", {"tile": tile}, operands, coords, ".sum")
            self._await(group, taken, piece)
            partial = [target]


def _lower(lowering: Lowering, node: Node) -> None:
    writer = _Writer(lowering, node)
    writer.write()
    if writer.result is not node.outputs[0]:
        copy_box(lowering, writer.result, node.outputs[0], ".out")


register("collective", None, _lower, apart=False)


@lru_cache(maxsize=64)
def _synthesized(
    topology: Topology, collective: str, algorithm: str, root: int | None
) -> CollectiveProgram:
    return synthesize(topology, collective, algorithm, root=root)


def _program(
    collective: str,
    world: int,
    algorithm: str | CollectiveProgram,
    topology: Topology | str | None,
    root: int | None,
) -> CollectiveProgram:
    """A checked program for these ranks; errors as `ark.comm.synthesize` and `check` raise them."""
    if isinstance(algorithm, CollectiveProgram):
        asked = (Collective(collective), world, root)
        if (algorithm.collective, algorithm.ranks, algorithm.root) != asked:
            raise InvalidUsageError(
                f"{collective} over {world} ranks was given the program {algorithm}; pass one that "
                "is made for this collective, this root and as many ranks"
            )
        check(algorithm)
        program = algorithm
    else:
        network = Topology.load(topology) if isinstance(topology, str) else topology
        network = network or full_mesh(world)
        if len(network.ranks) != world:
            raise InvalidUsageError(
                f"{collective} over {world} ranks was given the topology {network.name}, which has "
                f"{len(network.ranks)}; pass one of as many ranks as the model"
            )
        known = algorithms(network, collective)
        if algorithm not in known:
            raise InvalidUsageError(
                f"there is no algorithm {algorithm!r} for {collective} over the {world} ranks of "
                f"{network.name}; there are {', '.join(known)}"
            )
        program = _synthesized(network, collective, algorithm, root)
    for op in (op for ops in program.operations for op in ops):
        if op.kind in (Kind.DOT, Kind.BLEND) or op.reduce not in (None, "sum") or op.divide != 1:
            raise UnsupportedError(
                f"the program {program} reduces by {program.reduction}; the plan adds only, so "
                "pass one that sums"
            )
    return program


def _check_place(what: str, tensor: Tensor, rank: int, world_size: int) -> None:
    graph = tensor.model.graph
    if (rank, world_size) != (graph.rank, graph.world_size):
        raise ModelError(
            f"{what}: rank {rank} of {world_size} was given, but the model is rank "
            f"{graph.rank} of {graph.world_size}; call ark.set_rank and ark.set_world_size first"
        )


def _summable(what: str, tensor: Tensor) -> DataType:
    if tensor.ir.dtype not in (*FLOATS, int32):
        raise ModelError(
            f"{what} needs fp32, fp16, bf16 or int32, but the input is {tensor.ir.dtype.name}; use "
            "ark.cast"
        )
    return tensor.ir.dtype


def _dealt(what: str, tensor: Tensor, world: int) -> tuple[int, ...]:
    """The shape of one rank's share of a tensor whose first dimension is dealt to the ranks."""
    first, *others = tensor.ir.shape
    if first % world:
        raise ModelError(
            f"{what}: the first dimension of {list(tensor.ir.shape)} is dealt to {world} ranks; it "
            "must be a multiple of that"
        )
    return (first // world, *others)


def _collective(
    what: str,
    tensor: Tensor,
    shape: Sequence[int],
    output: Any,
    name: str,
    algorithm: str | CollectiveProgram,
    topology: Topology | str | None,
    root: int | None = None,
) -> Tensor:
    dtype, world = tensor.ir.dtype, tensor.model.graph.world_size
    if world == 1:
        return result("copy", [tensor], shape, dtype, output, name=name or what)
    program = _program(what, world, algorithm, topology, root)
    return result("collective", [tensor], shape, dtype, output, {"program": program}, name or what)


def all_reduce(
    input: Any,
    rank: int,
    world_size: int,
    output: Any = NullTensor,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
) -> Tensor:
    """The sum of `input` over all ranks, the same bits on each; fp32, fp16, bf16, int32 (wrapping).

    All ranks must call it in the same order, with equal arguments. By default every rank adds all
    shares in rank order in fp32; other algorithms pass on sums in the tensor's own type.

    Args:
        rank, world_size: those of the model.
        algorithm: a name of `ark.comm.algorithms(topology, "all_reduce")`, or a program.
        topology: a network of as many ranks, a name or a file of one; a full mesh by default.

    Raises:
        ModelError: rank or world_size contradict the model's, or the type cannot be added.
        InvalidUsageError: no such algorithm, or a topology or program of other ranks. SystemError:
        ForestColl or TACCL are asked for without the packages that they need.
    """
    tensor = as_tensor(input)
    _check_place("all_reduce", tensor, rank, world_size)
    dtype = _summable("all_reduce", tensor)
    if algorithm == ONE_SHOT:
        return result("all_reduce", [tensor], tensor.ir.shape, dtype, output, name=name)
    return _collective("all_reduce", tensor, tensor.ir.shape, output, name, algorithm, topology)


def all_reduce_packet(
    input: Any, rank: int, world_size: int, output: Any = NullTensor, name: str = ""
) -> Tensor:
    """The same sum as all_reduce; how shares travel is the plan's choice, not the caller's."""
    return all_reduce(input, rank, world_size, output, name)


def all_gather(
    input: Any,
    rank: int,
    world_size: int,
    output: Any = NullTensor,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
) -> Tensor:
    """The ranks' tensors one behind the other along the first dimension; any type.

    Shape [n, ...] becomes [world_size * n, ...]. Arguments and errors as for all_reduce.
    """
    tensor = as_tensor(input)
    _check_place("all_gather", tensor, rank, world_size)
    shape = (world_size * tensor.ir.shape[0], *tensor.ir.shape[1:])
    return _collective("all_gather", tensor, shape, output, name, algorithm, topology)


def reduce_scatter(
    input: Any,
    rank: int,
    world_size: int,
    output: Any = NullTensor,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
) -> Tensor:
    """This rank's part, along the first dimension, of the sum of `input` over all ranks.

    Shape [world_size * n, ...] becomes [n, ...]; ModelError if it cannot. Types, arguments and
    errors as for all_reduce.
    """
    tensor = as_tensor(input)
    _check_place("reduce_scatter", tensor, rank, world_size)
    _summable("reduce_scatter", tensor)
    shape = _dealt("reduce_scatter", tensor, world_size)
    return _collective("reduce_scatter", tensor, shape, output, name, algorithm, topology)


def broadcast(
    input: Any,
    rank: int,
    world_size: int,
    output: Any = NullTensor,
    name: str = "",
    *,
    root: int = 0,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
) -> Tensor:
    """The tensor of the rank `root`, on all ranks; any type. The others' input gives the shape.

    Arguments and errors as for all_reduce.
    """
    tensor = as_tensor(input)
    _check_place("broadcast", tensor, rank, world_size)
    if not 0 <= root < world_size:
        raise InvalidUsageError(
            f"broadcast: the root is {root}, but there are {world_size} ranks, numbered from 0"
        )
    shape = tensor.ir.shape
    return _collective("broadcast", tensor, shape, output, name, algorithm, topology, root)


def all_to_all(
    input: Any,
    rank: int,
    world_size: int,
    output: Any = NullTensor,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
) -> Tensor:
    """Part s of the result is part `rank` of the input of rank s, along the first dimension.

    The first dimension must be a multiple of world_size (ModelError); any type. Arguments and
    errors as for all_reduce.
    """
    tensor = as_tensor(input)
    _check_place("all_to_all", tensor, rank, world_size)
    _dealt("all_to_all", tensor, world_size)
    shape = tensor.ir.shape
    return _collective("all_to_all", tensor, shape, output, name, algorithm, topology)
