"""Collectives on NumPy arrays and torch tensors, over the job's ranks.

`ark.distributed.all_reduce(x)` and its like use one group for the process: the job that the
launcher's environment describes (ark.launch, torchrun, mpirun, srun), on the backend and device of
ark.init.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from ark.api.init import init
from ark.distributed.group import Group
from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.runtime import session
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S, MOST_BUDGET_S

_group: Group | None = None


def group(timeout_s: float | None = None) -> Group:
    """The process's group, joined on first use.

    timeout_s: how long a rank waits for another within a call, by default 10 s; set by the first
    use. A rank that ends is noticed earlier; the timeout ends calls that some ranks do not make.
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
        _group.close(together=False)
        _group = None


def all_reduce(input: Any, op: str = "sum", out: Any = None) -> Any:
    """See Group.all_reduce: `input` reduced over all ranks (sum, product, min, max, mean)."""
    return group().all_reduce(input, op, out)


def all_gather(input: Any, out: Any = None) -> Any:
    """See Group.all_gather: the ranks' arrays, concatenated."""
    return group().all_gather(input, out)


def reduce_scatter(input: Any, op: str = "sum", out: Any = None) -> Any:
    """See Group.reduce_scatter: this rank's part of the reduced array."""
    return group().reduce_scatter(input, op, out)


def all_to_all(input: Any, out: Any = None) -> Any:
    """See Group.all_to_all: part s comes from rank s."""
    return group().all_to_all(input, out)


def all_to_all_v(input: Any, send: Sequence[int], receive: Sequence[int], out: Any = None) -> Any:
    """See Group.all_to_all_v: the same with parts of unequal length."""
    return group().all_to_all_v(input, send, receive, out)


def broadcast(input: Any, root: int = 0, out: Any = None) -> Any:
    """See Group.broadcast: the array of rank `root`, on all ranks."""
    return group().broadcast(input, root, out)


def run_program(program: Any, input: Any, out: Any = None) -> Any:
    """See Group.run_program: the collective of a plan file on an array."""
    return group().run_program(program, input, out)


def register(array: Any) -> Any:
    """See Group.register: calls access the array's memory in place, without a copy."""
    return group().register(array)


def unregister(array: Any) -> None:
    """See Group.unregister: ends `register`."""
    group().unregister(array)


def send(input: Any, peer: int) -> None:
    """See Group.send: to the rank `peer`, which receives it."""
    group().send(input, peer)


def recv(out: Any, peer: int) -> Any:
    """See Group.recv: receives into `out` from the rank `peer`."""
    return group().recv(out, peer)


def barrier() -> None:
    """Returns when every rank has called it."""
    group().barrier()
