"""Collectives on arrays with invalid arguments: every rank gets an error without a timeout, and the
next call works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark


def wrong(rank: int) -> dict[str, Callable[[], Any]]:
    x = np.ones(8, np.float32)
    comm = ark.distributed
    return {
        "nothing": lambda: comm.all_reduce(None),
        "a list": lambda: comm.all_reduce([1.0]),
        "complex numbers": lambda: comm.all_reduce(x.astype(np.complex64)),
        "objects": lambda: comm.all_reduce(np.array([None])),
        "a reduction": lambda: comm.all_reduce(x, op="median"),
        "a short result": lambda: comm.all_reduce(x, out=x[:4]),
        "a result of doubles": lambda: comm.all_reduce(x, out=np.ones(8)),
        "a root beyond": lambda: comm.broadcast(x, root=9),
        "a root that is a word": lambda: comm.broadcast(x, root="0"),
        "half a root": lambda: comm.broadcast(x, root=0.5),
        "a peer that is a word": lambda: comm.send(x, "1"),
        "itself": lambda: comm.send(x, rank),
        "seven rows": lambda: comm.all_to_all(x[:7]),
        "lengths that are words": lambda: comm.all_to_all_v(x, "ab", "cd"),
        "no lengths": lambda: comm.all_to_all_v(x, None, None),
        "lengths below 0": lambda: comm.all_to_all_v(x, [-1, 9], [-1, 9]),
        "halves of rows": lambda: comm.all_to_all_v(x, [4.5, 3.5], [4, 4]),
        "three lengths": lambda: comm.all_to_all_v(x, [1, 2, 5], [4, 4]),
    }


def refuse_all() -> None:
    import ark.distributed

    ark.init(backend="cpu")
    for name, call in wrong(ark.Model.get_rank()).items():
        try:
            call()
        except ark.InvalidUsageError:
            continue
        raise AssertionError(f"{name} was taken")
    assert list(ark.distributed.all_reduce(np.ones(8, np.float32))) == [2.0] * 8


def test_invalid_operands_are_refused_by_all_collectives() -> None:
    assert ark.launch(2, refuse_all) == 0


def meet_late(timeout_s: float, late_s: float) -> None:
    import ark.distributed

    ark.init(backend="cpu")
    ark.distributed.group(timeout_s=timeout_s)
    assert ark.distributed.group(timeout_s) is ark.distributed.group()
    with pytest.raises(ark.InvalidUsageError, match=r"exists already, with .* s; pass"):
        ark.distributed.group(timeout_s + 1.0)
    ark.distributed.all_reduce(np.ones(8, np.float32))
    if ark.Model.get_rank() == 1:
        time.sleep(late_s)
    assert list(ark.distributed.all_reduce(np.ones(8, np.float32))) == [2.0] * 8


def test_rank_that_comes_late_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that calls a collective late is waited for until the timeout of the process group,
    whether it is longer or shorter than the default of 10 s.
    """
    assert ark.launch(2, meet_late, 120.0, 13.0) == 0
    assert ark.launch(2, meet_late, 1.0, 60.0) == 2
    errors = " ".join(capfd.readouterr().err.split())
    assert (
        "rank 0 called all_reduce(fp32[8], op='sum') and waited for 1 s; rank 1 did not" in errors
    )


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_timeout_of_zero_is_refused(timeout_s: float) -> None:
    import ark.distributed

    with pytest.raises(ark.InvalidUsageError, match="timeout_s="):
        ark.distributed.group(timeout_s)
