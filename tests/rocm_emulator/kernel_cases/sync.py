"""Cases of sync.hip: workgroups that wait for one another, compared with the same steps in
NumPy.
"""

from __future__ import annotations

import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "sync.hip"


@kernel(FILE, 5, 64, cooperative=True)
def ring_exchange(rng: np.random.Generator, target: Target) -> Work:
    blocks, threads, rounds = 5, 64, 6
    value = np.arange(blocks)[:, None] * 1000 + np.arange(threads)
    for _ in range(rounds):
        value = np.roll(value + np.arange(blocks)[:, None], 1, axis=0)
    rows = Out((2, blocks, threads), np.int32)
    flags = np.zeros(2 * blocks, np.uint32)
    args = (rows, flags, Out(value.shape, np.int32), np.int32(rounds))
    return Work(args, {2: value.astype(np.int32)})


@kernel(FILE, 6, 64, cooperative=True)
def barrier_stencil(rng: np.random.Generator, target: Target) -> Work:
    n, steps = 384, 5
    line = (rng.integers(-64, 64, n) * 16).astype(np.float32)
    lines = np.stack([line, np.zeros_like(line)])
    last = line
    for _ in range(steps):
        before, last = last, 0.5 * last + 0.25 * (np.roll(last, 1) + np.roll(last, -1))
    expected = np.stack([before, last] if steps % 2 else [last, before])
    sizes = np.int32(n), np.int32(steps)
    return Work((lines, np.zeros(1, np.uint32), *sizes), {0: expected.astype(np.float32)})


@kernel(FILE, 10, 64, cooperative=True)
def hierarchical_barrier(rng: np.random.Generator, target: Target) -> Work:
    steps = 4
    own = np.arange(10) * steps
    expected = np.concatenate([own, np.full(10, own.sum())]).astype(np.int32)
    counters = np.zeros(3, np.uint32), np.zeros(2, np.uint32), np.zeros(3, np.uint32)
    return Work((*counters, np.zeros(20, np.int32), np.int32(steps)), {3: expected})


@kernel(FILE, 6, 64, cooperative=True)
def single_queues(rng: np.random.Generator, target: Target) -> Work:
    pairs, count, threads = 3, 9, 64
    x = rng.integers(-100, 100, (pairs, count, threads)).astype(np.int32)
    expected = (x * np.arange(1, count + 1)[:, None]).sum(1).astype(np.int32)
    slots = Out((pairs, 4, threads), np.int32)
    counters = np.zeros(pairs, np.uint32), np.zeros(pairs, np.uint32)
    out = Out((pairs, threads), np.int32)
    return Work((x, slots, *counters, out, np.int32(count)), {4: expected})


@kernel(FILE, 5, 64)
def task_tickets(rng: np.random.Generator, target: Target) -> Work:
    tasks = 23
    x = rng.integers(-100, 100, (tasks, 64)).astype(np.int32)
    expected = x * 3 + np.arange(tasks)[:, None]
    zero, done = np.zeros(1, np.uint32), np.zeros(5, np.uint32)
    args = (zero, x, Out(x.shape, np.int32), done, np.int32(tasks))
    return Work(args, {2: expected.astype(np.int32), 3: lambda got: int(got.sum()) == tasks})


@kernel(FILE, 6, 64, cooperative=True)
def spin_lock(rng: np.random.Generator, target: Target) -> Work:
    rounds = 4
    expected = np.array([rounds * 21, rounds * 6], np.int32)
    args = (np.zeros(1, np.uint32), np.zeros(2, np.int32), np.int32(rounds))
    return Work(args, {1: expected})


@kernel(FILE, 6, 64, cooperative=True)
def wavefront(rng: np.random.Generator, target: Target) -> Work:
    cost = rng.integers(0, 100, (6, 8)).astype(np.int32)
    best = np.zeros_like(cost)
    for row in range(6):
        for column in range(8):
            near = [best[row - 1, column]] if row else []
            near += [best[row, column - 1]] if column else []
            best[row, column] = cost[row, column] + min(near, default=0)
    ready = np.zeros(6, np.uint32)
    return Work((cost, Out(cost.shape, np.int32), ready, np.int32(8)), {1: best})


@kernel(FILE, 4, 64, cooperative=True)
def epoch_packets(rng: np.random.Generator, target: Target) -> Work:
    rounds = 6
    value = np.arange(4)[:, None] * 100 + np.arange(64)
    for _ in range(rounds):
        value = np.roll(value + 1, 1, axis=0)
    packets = np.zeros((rounds + 1, 4, 64), np.uint64)
    args = (packets, Out(value.shape, np.int32), np.int32(rounds))
    return Work(args, {1: value.astype(np.int32)})


@kernel(FILE, 3, 128)
def lds_flags(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-100, 100, (3, 5, 64)).astype(np.int32)
    expected = x.sum(1)[:, ::-1].astype(np.int32)
    return Work((x, Out((3, 64), np.int32), np.int32(5)), {1: expected})


@kernel(FILE, 1, 64)
def clocks(rng: np.random.Generator, target: Target) -> Work:
    return Work((Out((1,), np.int32),), {0: np.ones(1, np.int32)})
