"""ARK scripts with several ranks: processes started by ark.launch, on the CPU."""

from __future__ import annotations

import numpy as np

import ark

WORLD_SIZE = 2


def reduce_and_pass_on() -> None:
    """The body of each rank: an all-reduce in a loop, and a message to the other rank."""
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    x = ark.tensor([2, 900])
    total = ark.all_reduce(x, rank, WORLD_SIZE)
    ark.send_done(ark.send(ark.mul(total, rank + 1.0), 1 - rank, tag=3))
    received = ark.recv(ark.tensor([2, 900]), 1 - rank, tag=3)
    for loop_mode in (True, False):
        with ark.Runtime() as runtime:
            runtime.launch(loop_mode=loop_mode)
            x.from_numpy(np.full((2, 900), rank + 1.0))
            runtime.barrier()
            runtime.run(3)
            assert (total.to_numpy() == 3.0).all(), total.to_numpy()
            assert (received.to_numpy() == 3.0 * (2 - rank)).all(), received.to_numpy()
            runtime.barrier()


def reduce_a_prompt_in_place() -> None:
    """The body of each rank: all_reduce_prefill into its own input."""
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    x = ark.tensor([2048, 4096], ark.fp16)
    total = ark.all_reduce_prefill(x, rank, WORLD_SIZE, output=x)
    share = (np.arange(2048 * 4096) % 100).reshape(2048, 4096)
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(share * (rank + 1))
        runtime.barrier()
        runtime.run()
        assert total.data_ptr() == x.data_ptr()
        np.testing.assert_array_equal(total.to_numpy(), 3 * share)
        runtime.barrier()


def disagree() -> None:
    """The body of each rank: rank 1 calls an all-reduce with another shape than the other ranks, so
    every rank must raise an error.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    x = ark.tensor([8 + rank])
    y = ark.all_reduce(x, rank, WORLD_SIZE)
    try:
        with ark.Runtime() as runtime:
            runtime.launch()
    except ark.PlanError:
        return
    raise AssertionError(f"{y} was launched")


def one_after_the_other() -> None:
    """The body of each rank: runs the bodies above one after another, because starting a rank takes
    longer than most of them.
    """
    for body in (reduce_and_pass_on, reduce_a_prompt_in_place, disagree):
        body()


def test_ranks_as_processes() -> None:
    assert ark.launch(WORLD_SIZE, one_after_the_other) == 0
