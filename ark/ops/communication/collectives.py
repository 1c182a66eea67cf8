"""The collectives all_reduce, all_gather, reduce_scatter, broadcast and all_to_all.

A call chooses a collective program (ark.collective) by the name of an algorithm and checks it;
ark.lower.ops.communication.programs lowers the program to tasks. The synthesis of programs is
imported by the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ark.collective.programs import Collective, CollectiveProgram, Kind, check
from ark.collective.programs.attributes import CollectiveAttributes
from ark.collective.programs.routed import routed
from ark.collective.programs.types import no_algorithm
from ark.collective.programs.values import coarsened
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import FLOATS, INTEGERS, SMALL_FLOATS, DataType, byte
from ark.lower.engines import AUTO, ONE_SHOT, SWITCH
from ark.ops.base import result
from ark.ops.communication.whole import WHOLE, check_whole, combine
from ark.ops.views import reshape
from ark.tasks.combine import OPS

if TYPE_CHECKING:
    from ark.collective.topology import Topology

# Types of tensors that reductions over ranks support. Sums are computed in the tensor's type, or in
# fp32 and rounded once at the end.
SUMMABLE = tuple(t for t in (*FLOATS, *SMALL_FLOATS, *INTEGERS) if t != byte)


@lru_cache(maxsize=64)
def _synthesized(
    topology: Topology, collective: str, algorithm: str, root: int | None, reduction: str | None
) -> CollectiveProgram:
    from ark.collective.synthesis import synthesize

    return synthesize(topology, collective, algorithm, root=root, reduction=reduction)


def choose_program(
    collective: str,
    world: int,
    algorithm: str | CollectiveProgram,
    topology: Topology | str | None,
    root: int | None,
    reduction: str | None,
) -> CollectiveProgram:
    """The collective program for a call's arguments: synthesised, or the given one after `check`.
    Raises the errors of `ark.comm.synthesize` and `check`.
    """
    if isinstance(algorithm, CollectiveProgram):
        asked = (Collective(collective), world, root)
        if (algorithm.collective, algorithm.ranks, algorithm.root) != asked:
            raise InvalidUsageError(
                f"{collective} over {world} ranks cannot use the program {algorithm}; pass a "
                "program for this collective, root and number of ranks"
            )
        if algorithm.counts is not None and not algorithm.permutes:
            raise UnsupportedError(
                f"the program {algorithm} has parts of unequal length, but a tensor is "
                "divided equally; call ark.distributed.all_to_all_v for parts of other lengths"
            )
        check(algorithm)
        program = algorithm
    else:
        from ark.collective.synthesis import algorithms
        from ark.collective.topology import full_mesh, load

        network = load(topology) if isinstance(topology, str) else topology
        network = network or full_mesh(world)
        if len(network.ranks) != world:
            raise InvalidUsageError(
                f"{collective} over {world} ranks was given the topology {network.name}, which has "
                f"{len(network.ranks)} ranks; both numbers must be equal"
            )
        known = algorithms(network, collective, reduction)
        if algorithm not in known:
            task = f"{collective} over the {world} ranks of {network.name}"
            raise no_algorithm(algorithm, known, task)
        program = _synthesized(network, collective, algorithm, root, reduction)
    for op in (op for ops in program.operations for op in ops):
        if op.kind in (Kind.DOT, Kind.BLEND) or op.reduce not in (None, *OPS):
            raise UnsupportedError(
                f"the program {program} reduces by {program.reduction}; a plan reduces element by "
                f"element, so pass one of {', '.join(OPS)} or mean"
            )
    return coarsened(routed(program))


def placed(op: str, input: Any, rank: int, world_size: int) -> Tensor:
    """`input` as a tensor. Raises ModelError unless rank and world_size are those of the model."""
    tensor = as_tensor(input)
    graph = tensor.model.graph
    if (rank, world_size) != (graph.rank, graph.world_size):
        raise ModelError(
            f"{op}: rank {rank} of {world_size} was given, but the model is rank "
            f"{graph.rank} of {graph.world_size}; call ark.set_rank and ark.set_world_size before, "
            "and after ark.init, which forgets both"
        )
    return tensor


def summable(op: str, tensor: Tensor) -> DataType:
    """The tensor's type; raises ModelError for a type that ranks cannot sum."""
    if tensor.ir.dtype not in SUMMABLE:
        raise ModelError(
            f"{op} needs one of {', '.join(t.name for t in SUMMABLE)}, but the input is "
            f"{tensor.ir.dtype.name}; use ark.cast"
        )
    return tensor.ir.dtype


def _dealt(op: str, tensor: Tensor, world: int) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor whose first dimension is divided equally among the
    ranks. Raises ModelError if the number of ranks does not divide the first dimension.
    """
    first, *others = tensor.ir.shape
    if first % world:
        raise ModelError(
            f"{op}: the first dimension of {list(tensor.ir.shape)} is divided among {world} ranks; "
            f"it must be a multiple of {world}"
        )
    return (first // world, *others)


def _collective(
    op: str,
    tensor: Tensor,
    shape: Sequence[int],
    output: Any,
    name: str,
    algorithm: str | CollectiveProgram,
    topology: Topology | str | None,
    root: int | None = None,
    reduction: str | None = None,
    engine: str = AUTO,
) -> Tensor:
    dtype, world = tensor.ir.dtype, tensor.model.graph.world_size
    if world == 1:
        return result("copy", [tensor], shape, dtype, output, name=name or op)
    program = choose_program(op, world, algorithm, topology, root, reduction)
    if program.reduction == "mean" and dtype in INTEGERS:
        raise ModelError(
            f"{op}: a mean of {dtype.name} is not supported, since the sum of all ranks may be "
            "more than the type holds; ark.cast to fp32, or reduce by sum and divide"
        )
    attrs = CollectiveAttributes(program=program, engine=engine).to_node()
    return result("collective", [tensor], shape, dtype, output, attrs, name or op)


def all_reduce(
    input: TensorLike,
    rank: int,
    world_size: int,
    output: Output = None,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
    reduction: str = "sum",
    engine: str = AUTO,
) -> Tensor:
    """The sum of `input` over all ranks. All ranks get the same bits.

    Types: floating point of 8 to 32 bits, or integers of 8 to 64 bits, which wrap.

    All ranks must call their collectives in the same order, with equal arguments. By default every
    rank gets the inputs of all ranks and adds them in rank order, floats in fp32 with one rounding
    at the end. Other algorithms transfer partial sums in the tensor's type.

    Args:
        input: this rank's tensor, of the same shape and type on all ranks.
        rank: the model's rank.
        world_size: the model's number of ranks.
        algorithm: a name of `ark.comm.algorithms(topology, "all_reduce")`, or a program.
        topology: a network of world_size ranks, or its name or file; by default a full mesh.
        output: a tensor to write the result to; by default a new one.
        name: the op's name in plans and errors.
        reduction: sum, product, max, min, or for floats mean. With the algorithm one_shot floats
            also have adasum and combiner, which combine whole tensors in fp32.
        engine: how bytes are transferred (docs/channels.md): packet, threads, auto, or with
            one_shot also switch. A switch adds in an order of its own.

    Raises:
        ModelError: rank or world_size differ from the model's, or the type cannot be added.
        InvalidUsageError: an unknown algorithm, or a topology or program for other ranks.
        SystemError: the packages that ForestColl or TACCL need are missing.

    Examples:
        >>> ark.all_reduce(torch.ones(2), rank=0, world_size=1).eval()
        tensor([1., 1.])
    """
    tensor = placed("all_reduce", input, rank, world_size)
    summable("all_reduce", tensor)
    if algorithm == ONE_SHOT and reduction in WHOLE:
        check_whole(tensor, reduction)
        whole = reshape(tensor, [1, tensor.ir.elements])
        every = all_gather(whole, rank, world_size, engine=engine)
        return combine(every, tensor, reduction, output, name)
    if algorithm == ONE_SHOT and reduction == "sum" and engine == AUTO:
        return one_shot(tensor, output, name, packet=False)
    if (algorithm, reduction, engine) == (ONE_SHOT, "sum", SWITCH):
        dims, dtype = tensor.ir.shape, tensor.ir.dtype
        return result("all_reduce_switch", [tensor], dims, dtype, output, {}, name)
    return _collective(
        "all_reduce",
        tensor,
        tensor.ir.shape,
        output,
        name,
        algorithm,
        topology,
        reduction=reduction,
        engine=engine,
    )


def one_shot(tensor: Tensor, output: Any, name: str, packet: bool) -> Tensor:
    """Adds an all_reduce in which every rank sends its input to all ranks, and each rank adds the
    inputs in rank order. packet: True if the exported graph (ark.ir.export) represents the
    all_reduce by a single node, as in ARK.
    """
    shape, dtype = tensor.ir.shape, tensor.ir.dtype
    return result("all_reduce", [tensor], shape, dtype, output, {"packet": packet}, name)


def all_gather(
    input: TensorLike,
    rank: int,
    world_size: int,
    output: Output = None,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
    engine: str = AUTO,
) -> Tensor:
    """Concatenates the inputs of all ranks along the first dimension, in rank order; any type.

    input: [n, ...]; result: [world_size * n, ...]. Arguments and errors as for all_reduce.

    Examples:
        >>> with ark.use_model(ark.Model(0, 4)):
        ...     shape = ark.all_gather(ark.tensor([2, 3]), rank=0, world_size=4).shape()
        ...
        >>> shape
        [8, 3]
    """
    tensor = placed("all_gather", input, rank, world_size)
    shape = (world_size * tensor.ir.shape[0], *tensor.ir.shape[1:])
    return _collective(
        "all_gather", tensor, shape, output, name, algorithm, topology, engine=engine
    )


def reduce_scatter(
    input: TensorLike,
    rank: int,
    world_size: int,
    output: Output = None,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
    reduction: str = "sum",
    engine: str = AUTO,
) -> Tensor:
    """Sums `input` over all ranks and returns this rank's part along the first dimension.

    input: [world_size * n, ...]; result: [n, ...], part number `rank` of the sum. Raises ModelError
    if the first dimension is not divisible by world_size. Types, arguments and errors as for
    all_reduce.

    Examples:
        >>> with ark.use_model(ark.Model(0, 4)):
        ...     shape = ark.reduce_scatter(ark.tensor([8, 3]), rank=0, world_size=4).shape()
        ...
        >>> shape
        [2, 3]
    """
    tensor = placed("reduce_scatter", input, rank, world_size)
    summable("reduce_scatter", tensor)
    shape = _dealt("reduce_scatter", tensor, world_size)
    return _collective(
        "reduce_scatter",
        tensor,
        shape,
        output,
        name,
        algorithm,
        topology,
        reduction=reduction,
        engine=engine,
    )


def broadcast(
    input: TensorLike,
    rank: int,
    world_size: int,
    output: Output = None,
    name: str = "",
    *,
    root: int = 0,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
    engine: str = AUTO,
) -> Tensor:
    """Copies the input of rank `root` to all ranks; any type.

    On other ranks only the shape and type of the input are used. Arguments and errors as for
    all_reduce.

    Examples:
        >>> with ark.use_model(ark.Model(0, 4)):
        ...     shape = ark.broadcast(ark.tensor([8, 3]), rank=0, world_size=4).shape()
        ...
        >>> shape
        [8, 3]
    """
    tensor = placed("broadcast", input, rank, world_size)
    if not 0 <= root < world_size:
        raise InvalidUsageError(
            f"broadcast: the root is {root}, but there are {world_size} ranks, numbered from 0"
        )
    shape = tensor.ir.shape
    return _collective(
        "broadcast", tensor, shape, output, name, algorithm, topology, root, engine=engine
    )


def all_to_all(
    input: TensorLike,
    rank: int,
    world_size: int,
    output: Output = None,
    name: str = "",
    *,
    algorithm: str | CollectiveProgram = ONE_SHOT,
    topology: Topology | str | None = None,
    engine: str = AUTO,
) -> Tensor:
    """Exchanges parts along the first dimension: rank r sends part s of its input to rank s.

    Part s of rank r's result is the part that rank s sent. Any type. Raises ModelError unless the
    first dimension is a multiple of world_size. Arguments and other errors as for all_reduce.

    Examples:
        >>> with ark.use_model(ark.Model(0, 4)):
        ...     shape = ark.all_to_all(ark.tensor([8, 3]), rank=0, world_size=4).shape()
        ...
        >>> shape
        [8, 3]
    """
    tensor = placed("all_to_all", input, rank, world_size)
    _dealt("all_to_all", tensor, world_size)
    shape = tensor.ir.shape
    return _collective(
        "all_to_all", tensor, shape, output, name, algorithm, topology, engine=engine
    )
