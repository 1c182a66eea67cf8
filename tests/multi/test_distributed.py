"""Collectives on arrays, outside of a model: compared with NumPy, and as torch.distributed's
backend with Gloo, between processes. One of the processes is also killed.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ark
from ark.distributed.arrivals import ASK, BEGUN, COUNT, Arrivals
from ark.distributed.matching import Message, TagMatcher
from tests.slow import SLOW, slow

COUNTS = (1, 3, 4099)


def reductions_of(world: int) -> dict[str, Any]:
    return {
        "sum": lambda xs: np.sum(xs, axis=0),
        "max": lambda xs: np.max(xs, axis=0),
        "min": lambda xs: np.min(xs, axis=0),
        "product": lambda xs: np.prod(xs, axis=0),
        "mean": lambda xs: np.sum(xs, axis=0) / world,
    }


def arrays_in_processes() -> None:
    ark.init(backend="cpu")
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    random = np.random.default_rng(7)
    with pytest.raises(ark.InvalidUsageError, match="a mean of int32 is not supported"):
        ark.distributed.all_reduce(np.full(3, 2 * 10**9, np.int32), "mean")
    for dtype, op in (
        (np.float32, "sum"),
        (ml_dtypes.bfloat16, "mean"),
        (np.float64, "product"),
        (np.int64, "min"),
    ):
        for count in COUNTS:
            all_ranks = random.integers(-5, 6, (world, count)).astype(dtype)
            got = ark.distributed.all_reduce(all_ranks[rank], op)
            wide = all_ranks.astype(np.float64 if np.dtype(dtype).kind != "i" else dtype)
            want = reductions_of(world)[op](wide)
            np.testing.assert_array_equal(got, want.astype(np.float32).astype(dtype), f"{op}")
            assert got.dtype == dtype
    for count in COUNTS:
        xs = random.standard_normal((world, world * count, 2)).astype(np.float32)
        mine = xs[rank]
        np.testing.assert_array_equal(ark.distributed.all_gather(mine), np.concatenate(xs))
        np.testing.assert_array_equal(
            ark.distributed.all_to_all(mine), np.concatenate([np.split(x, world)[rank] for x in xs])
        )
        np.testing.assert_array_equal(ark.distributed.broadcast(mine, root=world - 1), xs[-1])
        total = np.zeros_like(mine)
        for x in xs:
            total = total + x
        np.testing.assert_array_equal(
            ark.distributed.reduce_scatter(mine), np.split(total, world)[rank]
        )
        own = mine.copy()
        ark.distributed.all_reduce(own, out=own)
        np.testing.assert_array_equal(own, total)
    lengths = [[(s + 2 * t) % 3 for t in range(world)] for s in range(world)]
    parts = [[np.full((n, 3), 10 * s + t, np.int32) for t, n in enumerate(row)]
             for s, row in enumerate(lengths)]  # fmt: skip
    got = ark.distributed.all_to_all_v(
        np.concatenate(parts[rank]), lengths[rank], [row[rank] for row in lengths]
    )
    np.testing.assert_array_equal(got, np.concatenate([row[rank] for row in parts]))
    ring = np.array([rank], np.int64)
    if rank == 0:
        ark.distributed.send(ring, 1)
        ark.distributed.recv(ring, world - 1)
        assert ring[0] == world - 1
    else:
        before = np.zeros(1, np.int64)
        ark.distributed.recv(before, rank - 1)
        assert before[0] == rank - 1
        ark.distributed.send(ring, (rank + 1) % world)
    with pytest.raises(ark.InvalidUsageError, match="a multiple"):
        ark.distributed.reduce_scatter(np.zeros(world + 1))
    with pytest.raises(ark.InvalidUsageError, match="not contiguous"):
        ark.distributed.all_reduce(np.zeros((4, 4))[:, 1:])
    ark.distributed.barrier()


@slow
def test_arrays_between_three_processes() -> None:
    assert ark.launch(3, arrays_in_processes) == 0


def every_byte_of_an_fp8_type() -> None:
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.random.default_rng(3).permutation(np.repeat(codes, 16))
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        operands = np.repeat(codes, 16).view(dtype), pairs.view(dtype)
        got = ark.distributed.all_reduce(np.ascontiguousarray(operands[rank]))
        with np.errstate(all="ignore"):
            want = (operands[0].astype(np.float32) + operands[1].astype(np.float32)).astype(dtype)
        nans = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nans)
        np.testing.assert_array_equal(got.view(np.uint8)[~nans], want.view(np.uint8)[~nans])


def test_sums_of_fp8_are_rounded_as_ml_dtypes_does() -> None:
    assert ark.launch(2, every_byte_of_an_fp8_type) == 0


def with_tags(rank: int) -> None:
    """Receives messages in another order than they were sent, with messages that have no tag in
    between.
    """
    import torch
    import torch.distributed as dist

    sizes = {3: 5, 1: 70_000, 2: 1}
    messages = [(3, 0), (1, 0), (0, 0), (3, 1), (2, 0), (0, 1)]  # tag, which of that tag
    result = {(t, i): torch.arange(sizes.get(t, 4)) + 100 * t + i for t, i in messages}
    if rank == 0:
        for work in [dist.isend(result[key], 1, tag=key[0]) for key in messages]:
            work.wait()
        dist.send(torch.zeros(3), 1, tag=9)
        return
    late = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    waiting = [dist.irecv(each, 0, tag=3) for each in late]
    for key in [(0, 0), (2, 0), (0, 1), (1, 0)]:
        actual = torch.zeros_like(result[key])
        dist.recv(actual, 0, tag=key[0])
        assert torch.equal(actual, result[key])
    for work, each, number in zip(waiting, late, (0, 1), strict=True):
        work.wait()
        assert torch.equal(each, result[3, number])
    with pytest.raises(
        ark.InvalidUsageError, match="sent 12 bytes with the tag 9, but the receiving tensor has 16"
    ):
        dist.recv(torch.zeros(4), 0, tag=9)


def beside_gloo() -> None:
    import torch
    import torch.distributed as dist

    import ark.distributed.torch

    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    assert dist.get_backend() == "ark"
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(rank)

    def compared(call: Any, *shapes: int, dtype: Any = torch.float32) -> None:
        """Runs a collective call on equal inputs in the group of ark and in that of Gloo, and
        compares all tensors afterwards.
        """
        ours = [torch.randint(-9, 10, (n,)).to(dtype) for n in shapes]
        theirs = [t.clone() for t in ours]
        call(None, *ours)
        call(gloo, *theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (call, shapes, a, b)

    for count in COUNTS if SLOW else COUNTS[1:]:
        for dtype in (torch.float32, torch.bfloat16):
            compared(lambda g, x: dist.all_reduce(x, group=g), count, dtype=dtype)
        compared(lambda g, x: dist.all_reduce(x, dist.ReduceOp.MAX, group=g), count)
        compared(lambda g, x: dist.broadcast(x, 1, group=g), count)
        compared(lambda g, x: dist.reduce(x, 1, group=g) if rank == 1 else
             dist.reduce(x.clone(), 1, group=g), count)  # fmt: skip
        compared(lambda g, x, y, z: dist.all_gather([y, z], x, group=g), count, count, count)
        compared(lambda g, x, y: dist.all_gather_into_tensor(y, x, group=g), count, 2 * count)
        compared(lambda g, x, y: dist.all_to_all_single(y, x, group=g), 2 * count, 2 * count)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            compared(
                lambda g, x, y, op=op: dist.reduce_scatter_tensor(y, x, op, group=g),
                2 * count, count,
            )  # fmt: skip
        compared(
            lambda g, x, y: dist.reduce_scatter(y, list(x.chunk(2)), group=g), 2 * count, count
        )
        compared(
            lambda g, x, y, z: dist.gather(x, [y, z] if rank == 0 else None, 0, group=g),
            count, count, count,
        )  # fmt: skip
        compared(
            lambda g, x, y, z: dist.scatter(x, [y, z] if rank == 0 else None, 0, group=g),
            count, count, count,
        )  # fmt: skip
    splits = ([3, 1], [2, 5])
    sent = torch.arange(sum(splits[rank])) + 100 * rank
    result = torch.zeros(sum(row[rank] for row in splits), dtype=torch.int64)
    dist.all_to_all_single(result, sent, [row[rank] for row in splits], splits[rank])
    want = [(torch.arange(sum(row)) + 100 * s).split(row)[rank] for s, row in enumerate(splits)]
    assert torch.equal(result, torch.cat(want))
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(mean, torch.full((3,), 0.5))
    strided = torch.full((4, 6), float(rank + 1))[:, ::2]
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.full((4, 3), 3.0))
    negative = torch.full((4,), float(rank + 1))._neg_view()
    dist.all_reduce(negative, dist.ReduceOp.MAX)
    assert torch.equal(negative, torch.full((4,), -1.0))
    peer = 1 - rank
    for given, received in (
        (torch.full((7,), float(rank)), torch.zeros(7)),
        (torch.full((7,), -float(rank))._neg_view(), torch.zeros(7)._neg_view()),
    ):
        for each in [dist.isend(given, peer), dist.irecv(received, peer)]:
            each.wait()
        assert torch.equal(received, torch.full((7,), float(peer)))
    with_tags(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((1, 4), float(rank + 1))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and torch.equal(gradient, torch.full((2, 4), 1.5))
    with pytest.raises(ark.UnsupportedError, match="reduces by"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int64), dist.ReduceOp.BXOR)
    dist.barrier()
    dist.destroy_process_group()


def test_receive_takes_the_first_message_that_fits() -> None:
    """A receive gets the first message that matches it. When the peer is gone, all waiting receives
    get the error.
    """
    sent: queue.Queue[Message] = queue.Queue()

    def next_message() -> Message:
        message = sent.get(timeout=60)
        if message.tag < 0:
            raise ark.SystemError("the peer is gone")
        return message

    def take(source: int, content: str) -> None:
        results.append(f"{content} of {source}")

    results: list[str] = []
    matcher = TagMatcher(next_message, "test")
    named = [matcher.receive(1, 1, take) for _ in range(2)]
    any_source = matcher.receive(None, 1, take)
    for source, tag, content in ((1, 2, "c"), (1, 1, "a"), (2, 1, "d"), (2, 2, "e"), (1, 1, "b")):
        sent.put(Message(source, tag, content))
    for each in (*named, any_source):
        assert each.result(60) is None
    assert results == ["a of 1", "d of 2", "b of 1"]
    assert matcher.receive(2, 2, take).done() and matcher.receive(None, 2, take).done()
    assert results[3:] == ["e of 2", "c of 1"]
    lost = [matcher.receive(source, tag, take) for source, tag in ((1, 1), (None, 2))]
    sent.put(Message(1, -1, ""))
    for each in lost:
        with pytest.raises(ark.SystemError, match="the peer is gone"):
            each.result(60)
    sent.put(Message(1, -1, ""))
    matcher.close()


class ScriptedJob:
    """Replaces the connections of a job of three ranks: the test itself sends the messages of the
    other two ranks.
    """

    rank, world_size = 0, 3

    def __init__(self) -> None:
        self.posted: list[tuple[int, str]] = []
        self.heard: dict[str, Any] = {}

    def post(self, rank: int, label: str, payload: bytes) -> None:
        self.posted.append((rank, label))

    def hear(self, label: str, heard: Any) -> None:
        self.heard[label] = heard

    def begun(self, rank: int, count: int) -> None:
        self.heard[BEGUN](rank, COUNT.pack(count))


def test_receive_from_any_rank_keeps_the_order_of_receives() -> None:
    job = ScriptedJob()
    taken: list[tuple[str, int]] = []
    arrivals = Arrivals(job)  # type: ignore[arg-type]

    def receive(name: str, source: int | None) -> None:
        arrivals.receive(source, lambda message: taken.append((name, message)))

    receive("a", 1)
    assert taken == [("a", 1)] and not job.posted  # a receive from a named rank posts nothing
    receive("b", None)
    receive("c", 1)  # must not overtake b
    receive("d", 2)
    assert job.posted == [(1, ASK), (2, ASK)]
    job.begun(1, 1)  # the message of a
    assert taken == [("a", 1)]
    job.begun(1, 2)
    assert taken[1:] == [("b", 1), ("c", 1), ("d", 2)]
    receive("e", None)
    job.begun(1, 3)  # the message of c
    job.begun(2, 1)  # the message of d
    assert len(taken) == 4
    job.begun(2, 3)
    receive("f", None)
    assert taken[4:] == [("e", 2), ("f", 2)]
    arrivals.send(2)
    job.heard[ASK](2, b"")
    arrivals.send(1)
    arrivals.send(2)
    assert job.posted[2:] == [(2, BEGUN)] * 2
    receive("g", None)
    arrivals.close()
    job.begun(1, 9)
    assert len(taken) == 6


def from_any_rank(folder: str) -> None:
    """Receives from any rank get the messages of all other ranks, with and without a tag, whether
    they were sent before or after the receive was called. Then two such receives wait, and one
    message ends one of them.
    """
    import torch
    import torch.distributed as dist

    import ark.distributed.torch

    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(5)
    for turn in range(3):
        for receiver in range(world):
            if rank != receiver:
                dist.send(torch.full((5,), 10.0 * rank + turn), receiver, tag=turn % 2)
                continue
            named = (rank + 1) % world
            dist.recv(got, named, tag=turn % 2)
            assert torch.equal(got, torch.full((5,), 10.0 * named + turn))
            others = {rank, named}
            for _ in range(world - 2):
                source = dist.recv(got, tag=turn % 2)
                assert torch.equal(got, torch.full((5,), 10.0 * source + turn))
                others.add(source)
            assert others == set(range(world))
        dist.barrier()
    pair = dist.new_group([0, 2])
    if rank == 2:
        dist.send(torch.full((5,), 7.0), 0, group=pair)
    elif rank == 0:
        assert dist.recv(got, group=pair) == 2 and got[0] == 7
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)  # the others have passed the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ark.SystemError, match="rank 1"):
        dist.recv(got)
    Path(folder, str(rank)).touch()


def test_receives_from_any_rank_between_three_processes(tmp_path: Path) -> None:
    assert ark.launch(3, from_any_rank, str(tmp_path)) != 0  # because one rank was killed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


def test_torch_backend_equals_gloo() -> None:
    pytest.importorskip("torch.distributed")
    assert ark.launch(2, beside_gloo) == 0


def sharded_training() -> None:
    """torch's sharded training (FSDP) on the backend, compared with the whole model on both ranks'
    data.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import ark.distributed.torch  # noqa: F401 (registers the backend)

    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def small_net() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    whole, sharded = small_net(), small_net()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    data = torch.randn(2, 6, 8)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (whole, sharded)]
    for _ in range(3):
        sum(whole(part).square().mean() / 2 for part in data).backward()
        sharded(data[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for want, got in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
    dist.destroy_process_group()


@slow
def test_torch_shards_a_model_on_the_backend() -> None:
    pytest.importorskip("torch.distributed.fsdp")
    assert ark.launch(2, sharded_training) == 0


def until_one_is_killed(folder: str, victim: int, calls: int) -> None:
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    x = np.ones(3000, np.float32)
    began = time.monotonic()
    try:
        for number in range(10_000):
            if rank == victim and number == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == calls:
                began = time.monotonic()
            ark.distributed.all_reduce(x, "max")
    except ark.BaseError as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - began} {error}")
        raise


@pytest.mark.parametrize("victim", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow)])
def test_peer_of_a_killed_rank_ends_and_names_it(victim: int, tmp_path: Path) -> None:
    calls = random.Random(victim).randrange(1, 40)
    assert ark.launch(3, until_one_is_killed, str(tmp_path), victim, calls) != 0
    left = {int(p.name): p.read_text() for p in tmp_path.iterdir()}
    assert sorted(left) == [r for r in range(3) if r != victim]
    for text in left.values():
        seconds, message = text.split(" ", 1)
        assert float(seconds) < 30.0
        assert f"rank {victim}" in message
