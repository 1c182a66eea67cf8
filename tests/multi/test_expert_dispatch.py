"""examples/experts: tokens reach the ranks of their experts, and sums return, on CPU ranks and two
emulated devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from examples.experts import dispatch
from examples.experts.dispatch import Split
from tests.cases.collectives import build, devices, keep
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import slow

TOKENS, WIDTH, INNER, SLOTS = 6, 256, 16, 2
UNSENT_BYTE = 7  # the bytes of receive buffers before the first iteration


def given(world: int, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a rank, their experts and scores. The first two tokens of every rank choose
    experts of rank 0 only.
    """
    random = np.random.default_rng(rank)
    x = random.normal(size=(TOKENS, WIDTH)).astype(ml_dtypes.bfloat16)
    x[0] = 0
    experts = np.array([random.permutation(2 * world)[:SLOTS] for _ in range(TOKENS)], np.int32)
    experts[:2] = 0, 1  # of rank 0
    return x, experts, random.uniform(size=(TOKENS, SLOTS)).astype(np.float32)


def weights(world: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(99)
    shapes = (2 * world, INNER, WIDTH), (2 * world, WIDTH, INNER)
    up, down = (random.normal(size=s).astype(np.float32) / WIDTH**0.5 for s in shapes)
    return up, down


def dispatched(split: Split, x: ark.Tensor, experts: ark.Tensor, every: ark.Tensor) -> ark.Tensor:
    return dispatch.dispatch(x, experts, every, split)


def combined(split: Split, x: ark.Tensor, experts: ark.Tensor, every: ark.Tensor) -> ark.Tensor:
    """Tests the op that sends the experts' sums back (combine) without experts: in place of a sum
    for each token, rank r sends the token times r + 1.
    """
    sums = [ark.mul(x, rank + 1.0) for rank in range(split.world)]
    return dispatch.combine(sums, experts, every, split)


def mixed(split: Split, x: ark.Tensor, experts: ark.Tensor, every: ark.Tensor) -> ark.Tensor:
    shapes = (("up", [2, INNER, WIDTH]), ("down", [2, WIDTH, INNER]))
    up, down = (ark.tensor(shape, ark.bf16, name=name) for name, shape in shapes)
    scores = ark.tensor([TOKENS, SLOTS], ark.bf16, name="scores")
    return dispatch.mixture(x, experts, scores, up, down, split)


def sending(plan: Plan) -> set[int]:
    """Returns the processors with tasks that store to other ranks."""
    puts = {
        op.id
        for op in plan.ops
        if op.kind == "custom"
        and any(plan.buffers[plan.tensors[t].buffer].rank != plan.rank for t in op.operands)
    }
    lists = plan.phases[0].processors
    return {number for number, tasks in enumerate(lists) if any(t.op in puts for t in tasks)}


def run(
    name: str, world: int, op: Callable[..., ark.Tensor], senders: int = 0
) -> list[list[np.ndarray]]:
    """Runs an op three times. Returns for each rank its result, and for each other rank a mask of
    the rows that it did not write to this rank's memory. senders: processors that only send.
    """

    def body(rank: int) -> None:
        x = ark.tensor([TOKENS, WIDTH], ark.bf16, name="x0")
        experts = ark.tensor([TOKENS, SLOTS], ark.int32, name="experts")
        every = ark.all_gather(experts, rank, world)
        split = Split(2 * world, rank, world, 2, senders, processors)
        keep(op(split, x, experts, every), "result")

    with devices(name, world) as (opened, machine):
        if name == "cpu" and senders:
            machine = dataclasses.replace(machine, processors=3)
        processors = machine.processors
        plans = build(world, body, machine)
        verify(plans)
        assert not senders or sending(plans[0]) == set(range(senders))

        def work(ranks: ThreadRanks) -> list[np.ndarray]:
            plan, device, rank = plans[ranks.rank], opened[ranks.rank], ranks.rank
            x, experts, scores = given(world, rank)
            values = {"x0": x, "experts": experts, "scores": scores.astype(x.dtype)}
            for part, matrix in zip(("up", "down"), weights(world), strict=True):
                values[part] = matrix[2 * rank : 2 * rank + 2].astype(x.dtype)
            own = {b.name: b for b in plan.buffers if b.rank == rank}
            each = 2 if op is dispatched else 1  # codes and scales, or sums
            with Executor(plan, registry.get(name), device, ranks=ranks) as executor:
                for buffer in {t.name for t in plan.tensors} & set(values):
                    executor.write(buffer, values[buffer])
                places = []
                for source in (other for other in range(world) if other != rank):
                    buffer = own[f"symmetric.{each * source}"]
                    places.append((executor.buffer_address(buffer.id), buffer.nbytes))
                for address, nbytes in places:
                    device.write(address, np.full(nbytes, UNSENT_BYTE, np.uint8))
                ranks.barrier()
                executor.start(3).wait(120.0)
                actual = np.reshape(executor.read("result"), (-1, WIDTH)).astype(np.float32)
                got = [device.read(*place).reshape(TOKENS, -1) for place in places]
                ranks.barrier()
                return [actual, *((rows == UNSENT_BYTE).all(1) for rows in got)]

        return run_ranks(world, work)


ON = pytest.mark.parametrize(
    ("name", "world"),
    [("cpu", 2), ("cpu", 3), ("cuda", 2), ("rocm", 2), pytest.param("cpu", 4, marks=slow)],
)


@pytest.mark.parametrize("senders", [0, 1])
@ON
def test_tokens_go_to_the_ranks_of_their_experts(name: str, world: int, senders: int) -> None:
    """The received tokens equal the tokens that NumPy rounds to 8 bits. Each rank receives only the
    tokens for its experts. With a sender, no other processor stores to another rank.
    """
    for rank, (rows, *unsent) in enumerate(run(name, world, dispatched, senders)):
        masks = iter(unsent)
        for source, got in enumerate(rows.reshape(world, TOKENS, WIDTH)):
            x, experts, _ = given(world, source)
            here = (experts // 2 == rank).any(1)
            want = dispatch.rounded(x).astype(x.dtype) * here[:, None]
            np.testing.assert_array_equal(got, want.astype(np.float32))
            if source != rank:
                np.testing.assert_array_equal(next(masks), ~here)


@ON
def test_sums_return_to_the_ranks_of_their_tokens(name: str, world: int) -> None:
    """Each rank receives the sums for its own tokens from the other ranks and adds them in fp32,
    beginning with its own sum. No other sums are sent.
    """
    for rank, (sums, *unsent) in enumerate(run(name, world, combined)):
        experts, total = given(world, rank)[1], np.zeros((TOKENS, WIDTH), np.float32)
        chosen = [(experts // 2 == owner).any(1) for owner in range(world)]
        for owner in ((rank + step) % world for step in range(world)):
            x = given(world, owner)[0]
            share = (x.astype(np.float32) * (rank + 1.0)).astype(x.dtype).astype(np.float32)
            total += share * chosen[owner][:, None]
        np.testing.assert_array_equal(sums, total.astype(x.dtype).astype(np.float32))
        others = [mask for owner, mask in enumerate(chosen) if owner != rank]
        np.testing.assert_array_equal(unsent, [~mask for mask in others])


@ON
def test_mixture_over_ranks_equals_one_of_all_experts(name: str, world: int) -> None:
    up, down = (w.astype(ml_dtypes.bfloat16).astype(np.float32) for w in weights(world))
    for rank, (actual, *_) in enumerate(run(name, world, mixed)):
        x, experts, scores = given(world, rank)
        rows = dispatch.rounded(x).astype(x.dtype).astype(np.float32)
        hidden = np.maximum(np.einsum("mh,msih->msi", rows, up[experts]), 0)
        factors = scores.astype(x.dtype).astype(np.float32)
        want = np.einsum("msi,mshi,ms->mh", hidden, down[experts], factors)
        assert np.abs(actual - want).max() < 0.02 * np.abs(want).max()
