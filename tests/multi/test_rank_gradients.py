"""Gradients through collectives: the gradients of the sum of both ranks' losses, compared with
values that were computed by hand.
"""

from __future__ import annotations

import numpy as np

import ark

WORLD_SIZE = 2


def differentiate() -> None:
    """The body of each rank: computes gradients of a loss. The loss is a sum of each collective's
    result times numbers that differ between ranks.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    shares = np.arange(WORLD_SIZE * 4, dtype=np.float32).reshape(WORLD_SIZE, 4)
    weights = {n: np.random.default_rng(n).normal(size=(WORLD_SIZE, n)) for n in (2, 4, 8)}
    x = ark.tensor([4])
    calls = {
        "all_reduce": ark.all_reduce(x, rank, WORLD_SIZE),
        "mean": ark.all_reduce(x, rank, WORLD_SIZE, reduction="mean"),
        "all_gather": ark.all_gather(x, rank, WORLD_SIZE),
        "reduce_scatter": ark.reduce_scatter(x, rank, WORLD_SIZE),
        "all_to_all": ark.all_to_all(x, rank, WORLD_SIZE),
        "broadcast": ark.broadcast(x, rank, WORLD_SIZE, root=1),
    }
    given = {name: ark.tensor(result.shape()) for name, result in calls.items()}
    gradients = {name: ark.grad(result, x, given[name]) for name, result in calls.items()}
    four, eight, two = weights[4], weights[8], weights[2]
    want = {
        "all_reduce": four.sum(0),
        "mean": four.sum(0) / WORLD_SIZE,
        "all_gather": eight.sum(0).reshape(WORLD_SIZE, 4)[rank],
        "reduce_scatter": two.reshape(-1),
        "all_to_all": four.reshape(WORLD_SIZE, WORLD_SIZE, 2)[:, rank].reshape(-1),
        "broadcast": four.sum(0) if rank == 1 else np.zeros(4),
    }
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(shares[rank])
        for tensor in given.values():
            tensor.from_numpy(weights[tensor.shape()[0]][rank])
        runtime.barrier()
        runtime.run()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient.to_numpy(), want[name], rtol=1e-5, err_msg=name)
        runtime.barrier()


def test_gradients_of_collectives() -> None:
    assert ark.launch(WORLD_SIZE, differentiate) == 0
