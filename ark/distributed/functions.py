"""Collectives on NumPy arrays and torch tensors, over the job's ranks.

`ark.distributed.all_reduce(x)` and its like use one group for the process: the job that the
launcher's environment describes (ark.launch, torchrun, mpirun, srun), on the backend and device of
ark.init.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ark.api.init import init
from ark.collective.programs import CollectiveProgram
from ark.distributed.group import Group
from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.runtime import session
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S, MOST_BUDGET_S

_group: Group | None = None


class SupportsDLPack(Protocol):
    """A NumPy array, a torch tensor, or another array that tells its memory by DLPack."""

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any:
        """The array's memory."""
        ...


ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)
"""The same kind of array in and out."""


def group(timeout_s: float | None = None) -> Group:
    """The process's group, joined on first use.

    timeout_s: how long a rank waits for another within a call, by default 10 s; set by the first
    use. A rank that ends is noticed earlier; the timeout ends calls that some ranks do not make.

    Examples:
        >>> ark.distributed.group().world_size
        1
    """
    global _group
    if timeout_s is not None and not 0 < timeout_s <= MOST_BUDGET_S:
        raise InvalidUsageError(
            f"group: timeout_s={timeout_s} is out of range; it must be above 0 and at most "
            f"{MOST_BUDGET_S:g}"
        )
    if _group is None:
        if not Model.has_world_size():
            init()
        job = session.ranks() or Bootstrap.connect(0, 1, "127.0.0.1", 0)
        budget = BUDGET_S if timeout_s is None else timeout_s
        _group = Group(job, session.backend(), session.device(), budget)
        atexit.register(_close)
    elif timeout_s is not None and timeout_s != _group.budget_s:
        raise InvalidUsageError(
            f"group: the timeout is already {_group.budget_s:g} s; pass {timeout_s:g} s before "
            "the first call"
        )
    return _group


def _close() -> None:
    global _group
    if _group is not None:
        _group.close(collective=False)
        _group = None


def all_reduce(input: ArrayT, op: str = "sum", out: ArrayT | None = None) -> ArrayT:
    """`input` reduced over all ranks; the same bits on each. op: sum, product, min, max or mean.

    input: a contiguous NumPy array or torch tensor of any shape, of equal shape and type on all
    ranks. out: for the result, else a new array like `input`. InvalidUsageError where ranks make
    different calls.

    Examples:
        >>> ark.distributed.all_reduce(np.ones(3, np.float32), op="max")
        array([1., 1., 1.], dtype=float32)
    """
    result: ArrayT = group().all_reduce(input, op, out)
    return result


def all_gather(input: ArrayT, out: ArrayT | None = None) -> ArrayT:
    """The ranks' arrays, concatenated along the first dimension; input and out as of all_reduce.

    Examples:
        >>> ark.distributed.all_gather(np.arange(3))
        array([0, 1, 2])
    """
    result: ArrayT = group().all_gather(input, out)
    return result


def reduce_scatter(input: ArrayT, op: str = "sum", out: ArrayT | None = None) -> ArrayT:
    """This rank's equal part, along the first dimension, of the reduced array; as all_reduce.

    Examples:
        >>> ark.distributed.reduce_scatter(np.arange(4.0))
        array([0., 1., 2., 3.])
    """
    result: ArrayT = group().reduce_scatter(input, op, out)
    return result


def all_to_all(input: ArrayT, out: ArrayT | None = None) -> ArrayT:
    """Equal parts along the first dimension, of which part s goes to rank s and comes from it.

    Examples:
        >>> ark.distributed.all_to_all(np.arange(4))
        array([0, 1, 2, 3])
    """
    result: ArrayT = group().all_to_all(input, out)
    return result


def all_to_all_v(
    input: ArrayT, send: Sequence[int], receive: Sequence[int], out: ArrayT | None = None
) -> ArrayT:
    """all_to_all with parts of unequal length: elements of the first dimension for each rank.

    send: to each rank, which add up to all of `input`. receive: from each rank.

    Examples:
        >>> ark.distributed.all_to_all_v(np.arange(3), [3], [3])
        array([0, 1, 2])
    """
    result: ArrayT = group().all_to_all_v(input, send, receive, out)
    return result


def broadcast(input: ArrayT, root: int = 0, out: ArrayT | None = None) -> ArrayT:
    """The array of rank `root`, on all ranks; input and out as of all_reduce.

    Examples:
        >>> ark.distributed.broadcast(np.arange(2))
        array([0, 1])
    """
    result: ArrayT = group().broadcast(input, root, out)
    return result


def run_program(
    program: str | os.PathLike[str] | CollectiveProgram, input: ArrayT, out: ArrayT | None = None
) -> ArrayT:
    """The collective of a program on this rank's array.

    program: of `ark.comm.program`, or a file: ark's JSON, MSCCL XML, an MSCCL++ execution plan. It
    is of as many ranks as the group, else InvalidUsageError.

    Examples:
        >>> ring = ark.comm.synthesize("ring2", "all_reduce", "ring")
        >>> if ark.distributed.group().world_size == 2:
        ...     total = ark.distributed.run_program(ring, np.arange(2.0))
    """
    result: ArrayT = group().run_program(program, input, out)
    return result


def register(array: ArrayT) -> ArrayT:
    """Lets calls access this array, or parts of it, in place; returns it.

    array: contiguous, at a multiple of 16 bytes, on the group's device. It is kept until
    `unregister`.

    Examples:
        >>> memory = ark.distributed.register(np.zeros(8))
        >>> ark.distributed.unregister(memory)
    """
    result: ArrayT = group().register(array)
    return result


def unregister(array: SupportsDLPack) -> None:
    """Ends `register`, once queued calls of the array have ended.

    Examples:
        >>> memory = ark.distributed.register(np.zeros(8))
        >>> ark.distributed.unregister(memory)
    """
    group().unregister(array)


def send(input: SupportsDLPack, peer: int) -> None:
    """Sends to the rank `peer`, which calls `recv` with an array of equal shape and type.

    Examples:
        >>> if ark.distributed.group().world_size > 1:
        ...     ark.distributed.send(np.ones(2), peer=1)
    """
    group().send(input, peer)


def recv(out: ArrayT, peer: int) -> ArrayT:
    """Receives into `out` from the rank `peer`, which calls `send`, and returns `out`.

    Examples:
        >>> if ark.distributed.group().world_size > 1:
        ...     ark.distributed.recv(np.empty(2), peer=0)
    """
    result: ArrayT = group().recv(out, peer)
    return result


def barrier() -> None:
    """Returns when every rank has called it.

    Examples:
        >>> ark.distributed.barrier()
    """
    group().barrier()
