"""Classic algorithms in the language of ark.comm.program, for any number of ranks that they allow.

python examples/collectives.py prints what each one costs on eight GPUs behind a switch.
"""

from __future__ import annotations

from collections.abc import Callable

import ark.comm
from ark.collective import CollectiveProgram
from ark.collective.language import Program


def ring_all_gather(n: int) -> CollectiveProgram:
    """Each shard goes round: n - 1 steps, every link busy in each."""

    @ark.comm.program("all_gather", n)
    def ring(p: Program) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.output(rank, rank))
        for hop in range(n - 1):
            for rank in p.ranks:
                shard = (rank - hop) % n
                p.output(rank, shard).to(p.output((rank + 1) % n, shard))

    return ring


def recursive_doubling_all_gather(n: int) -> CollectiveProgram:
    """Pairs at distance 1, 2, 4, ... exchange all that they have; n is a power of two."""

    @ark.comm.program("all_gather", n)
    def recursive_doubling(p: Program) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.output(rank, rank))
        distance = 1
        while distance < n:
            for rank in p.ranks:
                first = rank // distance * distance
                p.output(rank, first, distance).to(p.output(rank ^ distance, first, distance))
            distance *= 2

    return recursive_doubling


def direct_all_gather(n: int) -> CollectiveProgram:
    """Everybody puts to everybody: one step."""

    @ark.comm.program("all_gather", n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                p.input(rank).to(p.output((rank + step) % n, rank))

    return direct


def ring_reduce_scatter(n: int) -> CollectiveProgram:
    """Partial sums go round and end with the shard's owner."""

    @ark.comm.program("reduce_scatter", n, scratch=n)
    def ring(p: Program) -> None:
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop - 1) % n, (rank + 1) % n
                carried = p.input(rank, shard) if hop == 0 else p.scratch(rank, shard)
                carried.to(p.scratch(peer, shard))
            for rank in p.ranks:
                shard, last = (rank - hop - 2) % n, hop == n - 2
                into = p.output(rank) if last else p.scratch(rank, shard)
                p.reduce(p.scratch(rank, shard), p.input(rank, shard), into=into)

    return ring


def direct_reduce_scatter(n: int) -> CollectiveProgram:
    """Everybody puts each peer its shard, which the peer adds up in rank order."""

    @ark.comm.program("reduce_scatter", n, scratch=n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for shard in p.ranks:
                p.input(rank, shard).to(p.scratch(shard, rank))
        for rank in p.ranks:
            p.reduce(*p.scratch(rank, 0, n), into=p.output(rank))

    return direct


def one_shot_all_reduce(n: int) -> CollectiveProgram:
    """Everybody puts all to everybody and adds: one step, n times the bytes."""

    @ark.comm.program("all_reduce", n, chunks=1, scratch=n)
    def one_shot(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                p.input(rank).to(p.scratch((rank + step) % n, rank))
        for rank in p.ranks:
            p.reduce(*p.scratch(rank, 0, n), into=p.output(rank))

    return one_shot


def two_shot_all_reduce(n: int) -> CollectiveProgram:
    """A direct reduce-scatter, then each owner puts its sum to everybody."""

    @ark.comm.program("all_reduce", n, scratch=n)
    def two_shot(p: Program) -> None:
        for rank in p.ranks:
            for shard in p.ranks:
                p.input(rank, shard).to(p.scratch(shard, rank))
        for rank in p.ranks:
            total = p.reduce(*p.scratch(rank, 0, n), into=p.output(rank, rank))
            for step in range(1, n):
                total.to(p.output((rank + step) % n, rank))

    return two_shot


def ring_all_reduce(n: int) -> CollectiveProgram:
    """A ring's reduce-scatter, then its all-gather: the least bytes on a ring."""

    @ark.comm.program("all_reduce", n, scratch=n)
    def ring(p: Program) -> None:
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop - 1) % n, (rank + 1) % n
                carried = p.input(rank, shard) if hop == 0 else p.scratch(rank, shard)
                carried.to(p.scratch(peer, shard))
            for rank in p.ranks:
                shard, last = (rank - hop - 2) % n, hop == n - 2
                into = p.output(rank, rank) if last else p.scratch(rank, shard)
                p.reduce(p.scratch(rank, shard), p.input(rank, shard), into=into)
        for hop in range(n - 1):
            for rank in p.ranks:
                shard = (rank - hop) % n
                p.output(rank, shard).to(p.output((rank + 1) % n, shard))

    return ring


def binomial_broadcast(n: int) -> CollectiveProgram:
    """Who has the data doubles in each step: log2 n steps."""

    @ark.comm.program("broadcast", n, chunks=1, root=0)
    def binomial(p: Program) -> None:
        p.input(0).to(p.output(0))
        distance = 1
        while distance < n:
            for rank in range(min(distance, n - distance)):
                p.output(rank).to(p.output(rank + distance))
            distance *= 2

    return binomial


def scatter_all_gather_broadcast(n: int) -> CollectiveProgram:
    """The root deals shards, which go round a ring: van de Geijn's, for large data."""

    @ark.comm.program("broadcast", n, root=0)
    def scatter_all_gather(p: Program) -> None:
        for rank in p.ranks:
            p.input(0, rank).to(p.output(rank, rank))
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop) % n, (rank + 1) % n
                p.output(rank, shard).to(p.output(peer, shard))

    return scatter_all_gather


def binomial_reduce(n: int) -> CollectiveProgram:
    """Halves send to halves and add, towards rank 0; n is a power of two."""

    @ark.comm.program("reduce", n, chunks=1, scratch=2, root=0)
    def binomial(p: Program) -> None:
        held = {rank: p.input(rank) for rank in p.ranks}
        half = n // 2
        while half:
            for rank in range(half):
                held[rank + half].to(p.scratch(rank))
                into = p.output(rank) if half == 1 else p.scratch(rank, 1)
                held[rank] = p.reduce(held[rank], p.scratch(rank), into=into)
            half //= 2

    return binomial


def direct_all_to_all(n: int) -> CollectiveProgram:
    """Each part goes straight to its rank, nobody's first receiver the same."""

    @ark.comm.program("all_to_all", n, chunks=n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                peer = (rank + step) % n
                p.input(rank, peer).to(p.output(peer, rank))

    return direct


ALGORITHMS: tuple[Callable[[int], CollectiveProgram], ...] = (
    ring_all_gather,
    recursive_doubling_all_gather,
    direct_all_gather,
    ring_reduce_scatter,
    direct_reduce_scatter,
    one_shot_all_reduce,
    two_shot_all_reduce,
    ring_all_reduce,
    binomial_broadcast,
    scatter_all_gather_broadcast,
    binomial_reduce,
    direct_all_to_all,
)

if __name__ == "__main__":
    from ark.comm.simulate import simulate
    from ark.comm.topology import load

    network = load("h100:gpus=8")
    for algorithm in ALGORITHMS:
        found = simulate(algorithm(8), network, 16 << 20)
        print(f"{algorithm.__name__:32} {found.time_us:8.1f} us for 16 MB")
