"""Collectives on NumPy arrays and torch tensors, over the job's ranks.

The functions of `ark.distributed`, such as `all_reduce(x)`, use one group per process. Its ranks
are the job that the launcher's environment describes (ark.launch, torchrun, mpirun, srun); its
backend and device are those of ark.init.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ark.collective.programs import CollectiveProgram
from ark.distributed.group import Group
from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.runtime import session
from ark.runtime.api.init import init
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S, MOST_BUDGET_S

_group: Group | None = None


class SupportsDLPack(Protocol):
    """A NumPy array, a torch tensor, or another array that supports DLPack."""

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any:
        """The array's memory as a DLPack capsule."""
        ...


ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)
"""The type of the array argument, which is also that of the result."""


def group(timeout_s: float | None = None) -> Group:
    """The process's group, which is created on first use.

    timeout_s: how long a rank waits for another within a call, 10 s by default. Only the first call
    of this function can set it. The end of a rank's process is noticed earlier; the timeout is for
    calls that some ranks do not make. Raises InvalidUsageError if timeout_s is out of range, or
    differs from that of the first call.

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
            f"group: the group exists already, with a timeout of {_group.budget_s:g} s; pass "
            f"timeout_s={timeout_s:g} in the first call"
        )
    return _group


def _close() -> None:
    global _group
    if _group is not None:
        _group.close(collective=False)
        _group = None


def all_reduce(input: ArrayT, op: str = "sum", out: ArrayT | None = None) -> ArrayT:
    """Reduces `input` over all ranks; the result has the same bits on each.

    input: a contiguous NumPy array or torch tensor, of equal shape and type on all ranks. op: sum,
    product, min, max or mean. out: the array for the result; by default a new one. Raises
    InvalidUsageError if the ranks make different calls.

    Examples:
        >>> ark.distributed.all_reduce(np.ones(3, np.float32), op="max")
        array([1., 1., 1.], dtype=float32)
    """
    result: ArrayT = group().all_reduce(input, op, out)
    return result


def all_gather(input: ArrayT, out: ArrayT | None = None) -> ArrayT:
    """Concatenates the ranks' arrays along the first dimension. input, out: see all_reduce.

    Examples:
        >>> ark.distributed.all_gather(np.arange(3))
        array([0, 1, 2])
    """
    result: ArrayT = group().all_gather(input, out)
    return result


def reduce_scatter(input: ArrayT, op: str = "sum", out: ArrayT | None = None) -> ArrayT:
    """Reduces `input` over all ranks; each rank gets an equal part, along the first dimension.

    input, op, out: see all_reduce.

    Examples:
        >>> ark.distributed.reduce_scatter(np.arange(4.0))
        array([0., 1., 2., 3.])
    """
    result: ArrayT = group().reduce_scatter(input, op, out)
    return result


def all_to_all(input: ArrayT, out: ArrayT | None = None) -> ArrayT:
    """Exchanges equal parts, along the first dimension, between all ranks.

    Part s of `input` goes to rank s, and part s of the result comes from rank s.

    Examples:
        >>> ark.distributed.all_to_all(np.arange(4))
        array([0, 1, 2, 3])
    """
    result: ArrayT = group().all_to_all(input, out)
    return result


def all_to_all_v(
    input: ArrayT, send: Sequence[int], receive: Sequence[int], out: ArrayT | None = None
) -> ArrayT:
    """Like all_to_all with parts of unequal length.

    send: for each rank, how many rows (elements of the first dimension) go to it; their sum is the
    length of `input`. receive: how many rows come from each rank.

    Examples:
        >>> ark.distributed.all_to_all_v(np.arange(3), [3], [3])
        array([0, 1, 2])
    """
    result: ArrayT = group().all_to_all_v(input, send, receive, out)
    return result


def broadcast(input: ArrayT, root: int = 0, out: ArrayT | None = None) -> ArrayT:
    """Returns the array of rank `root` on all ranks. input, out: see all_reduce.

    Examples:
        >>> ark.distributed.broadcast(np.arange(2))
        array([0, 1])
    """
    result: ArrayT = group().broadcast(input, root, out)
    return result


def run_program(
    program: str | os.PathLike[str] | CollectiveProgram, input: ArrayT, out: ArrayT | None = None
) -> ArrayT:
    """Runs the collective of a program on this rank's array.

    program: a result of `ark.comm.program`, or the path of a file with ark's JSON, MSCCL XML or an
    MSCCL++ execution plan. Raises InvalidUsageError if the program is for another number of ranks
    than the group has.

    Examples:
        >>> ring = ark.comm.synthesize("ring2", "all_reduce", "ring")
        >>> if ark.distributed.group().world_size == 2:
        ...     total = ark.distributed.run_program(ring, np.arange(2.0))
    """
    result: ArrayT = group().run_program(program, input, out)
    return result


def register(array: ArrayT) -> ArrayT:
    """Registers an array and returns it.

    Later calls read and write the array, or parts of it, in place. array: contiguous, on the
    group's device, at an address that is a multiple of 16 bytes. It is kept alive until
    `unregister`.

    Examples:
        >>> memory = ark.distributed.register(np.zeros(8))
        >>> ark.distributed.unregister(memory)
    """
    result: ArrayT = group().register(array)
    return result


def unregister(array: SupportsDLPack) -> None:
    """Ends the registration of an array. Call it after queued calls that use the array have ended.

    Examples:
        >>> memory = ark.distributed.register(np.zeros(8))
        >>> ark.distributed.unregister(memory)
    """
    group().unregister(array)


def send(input: SupportsDLPack, peer: int) -> None:
    """Sends an array to the rank `peer`, which must call `recv` with equal shape and type.

    Examples:
        >>> if ark.distributed.group().world_size > 1:
        ...     ark.distributed.send(np.ones(2), peer=1)
    """
    group().send(input, peer)


def recv(out: ArrayT, peer: int) -> ArrayT:
    """Receives into `out` from the rank `peer`, which must call `send`; returns `out`.

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
