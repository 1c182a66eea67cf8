"""A group of ranks and its collectives on memory that the caller holds.

Each collective is a plan of one op (ark.distributed.calls), made the first time that a size is
asked for and kept. All ranks of a group call the same collectives in the same order with equal
sizes; a send and its receive are called by their two ranks alone. On a CPU, calls return when the
result is there; on a GPU they are queued on the caller's stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.collective import Collective
from ark.distributed.arrays import Array, wrap
from ark.distributed.calls import LARGEST, Call, Key
from ark.distributed.members import Members
from ark.errors import BaseError, InvalidUsageError, UnsupportedError
from ark.ir.values import whole
from ark.runtime import tuned_collectives as tuned
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S
from ark.runtime.hosts import hosts_of

REDUCTIONS = ("sum", "product", "min", "max", "mean")
KEPT = 64  # calls that a group keeps loaded, and as many for each pair that sends
Lane = tuple[int, int, str]  # from whom, to whom, which of the ways between these
EVERYBODY: Lane = (-1, -1, "")


class Group:
    """Ranks that call collectives together. A context manager; `close` frees everything.

    ranks: the job, which the group does not close. budget_s: how long a rank waits for another
    within a call.
    """

    def __init__(
        self, ranks: Bootstrap, backend: Backend, device: Device, budget_s: float = BUDGET_S
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._job = ranks
        self._backend, self._device = backend, device
        self.budget_s = budget_s
        self._calls: defaultdict[Lane, OrderedDict[Key, Call]] = defaultdict(OrderedDict)
        self._tuned: tuned.Table | None = None
        self._locks: defaultdict[Lane, threading.Lock] = defaultdict(threading.Lock)

    # Collectives. Arrays are NumPy's or torch's, contiguous, on the group's device.

    def all_reduce(self, input: Any, op: str = "sum", out: Any = None) -> Any:
        """`input` reduced over all ranks, the same bits on each. out: may be `input`.

        op: sum, product, min, max, mean (of floats); floats below 32 bits are reduced in fp32 and rounded once.
        Shapes, types and `op` are the same on all ranks. Returns `out`, or a new array.
        """
        x = wrap(input)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_REDUCE, x, y, reduction=_reduction(op))
        return y.given

    def all_gather(self, input: Any, out: Any = None) -> Any:
        """The ranks' arrays one behind the other along the first dimension: [n, ...] becomes
        [world_size * n, ...].
        """
        x = wrap(input)
        first, *others = x.shape or (1,)
        y = x.like(out, (first * self.world_size, *others))
        self._run(Collective.ALL_GATHER, x, y)
        return y.given

    def reduce_scatter(self, input: Any, op: str = "sum", out: Any = None) -> Any:
        """This rank's part, along the first dimension, of `input` reduced over all ranks."""
        x = wrap(input)
        y = x.like(out, self._dealt("reduce_scatter", x))
        self._run(Collective.REDUCE_SCATTER, x, y, reduction=_reduction(op))
        return y.given

    def all_to_all(self, input: Any, out: Any = None) -> Any:
        """Part s of the result is part `rank` of rank s's input, along the first dimension."""
        x = wrap(input)
        self._dealt("all_to_all", x)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_TO_ALL, x, y)
        return y.given

    def all_to_all_v(
        self, input: Any, send: Sequence[int], receive: Sequence[int], out: Any = None
    ) -> Any:
        """The same with parts of unequal length.

        send[s]: elements of the first dimension that go to rank s, one part behind the other;
        receive[s]: those that come from rank s. What s sends here must be what is expected.
        """
        x = wrap(input)
        first, *others = x.shape or (1,)
        send, receive = _lengths("send", send), _lengths("receive", receive)
        if len(send) != self.world_size or len(receive) != self.world_size:
            raise InvalidUsageError(
                f"all_to_all_v: {len(send)} and {len(receive)} lengths were given for "
                f"{self.world_size} ranks; give one for each"
            )
        if sum(send) != first:
            raise InvalidUsageError(
                f"all_to_all_v: the parts have {sum(send)} rows together, the input {first}"
            )
        y = x.like(out, (sum(receive), *others))
        longest = wrap(x.numbers([max([*send, *receive])]))
        self._run(Collective.ALL_REDUCE, longest, longest, reduction="max")
        width = longest.first()
        if width == 0:
            return y.given
        packed = wrap(x.blank((self.world_size * width, *others)))
        at = 0
        for peer, rows in enumerate(send):
            packed.rows(peer * width, rows).copy_from(x.rows(at, rows))
            at += rows
        moved = wrap(x.blank(packed.shape))
        self._run(Collective.ALL_TO_ALL, packed, moved)
        at = 0
        for peer, rows in enumerate(receive):
            y.rows(at, rows).copy_from(moved.rows(peer * width, rows))
            at += rows
        return y.given

    def broadcast(self, input: Any, root: int = 0, out: Any = None) -> Any:
        """The array of rank `root`, on all ranks; the others' input gives shape and type."""
        x = wrap(input)
        root = self._peer("broadcast", root)
        y = x.like(out, x.shape)
        self._run(Collective.BROADCAST, x, y, root=root)
        return y.given

    def send(self, input: Any, peer: int, way: str = "") -> None:
        """Sends to the rank `peer`, which receives as many bytes; in the order of the calls.

        way: a word that both name; messages of different ways do not wait for each other.
        """
        x = wrap(input)
        peer = self._peer("send", peer)
        self._pair((self.rank, peer, way), x, None)

    def recv(self, out: Any, peer: int, way: str = "") -> Any:
        """Receives into `out` what the rank `peer` sends."""
        y = wrap(out)
        y.check_writable()
        peer = self._peer("recv", peer)
        self._pair((peer, self.rank, way), y, y)
        return y.given

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world_size > 1:
            self._job.barrier("a barrier of the group")

    # How they run.

    def _dealt(self, what: str, x: Array) -> tuple[int, ...]:
        first, *others = x.shape or (1,)
        if first % self.world_size:
            raise InvalidUsageError(
                f"{what}: the first dimension of {list(x.shape)} is dealt to {self.world_size} "
                "ranks; it must be a multiple of that"
            )
        return (first // self.world_size, *others)

    def _peer(self, what: str, rank: int) -> int:
        rank = whole(f"{what}: the rank", rank)
        if not 0 <= rank < self.world_size:
            raise InvalidUsageError(
                f"{what}: rank {rank} was named, but there are {self.world_size} ranks, numbered "
                "from 0"
            )
        return rank

    def _run(
        self,
        collective: Collective,
        x: Array,
        y: Array,
        reduction: str | None = None,
        root: int | None = None,
    ) -> None:
        if x.elements == 0:
            return
        if self.world_size == 1:
            y.copy_from(x)
            return
        if reduction == "mean" and "int" in x.element:
            raise InvalidUsageError(
                f"a mean of {x.element} is not built, since the sum of all ranks may be more than "
                "the type holds; convert the array to a floating-point type, or reduce by sum and "
                "divide"
            )
        if reduction is not None:
            key = Key(collective.value, x.element, x.itemsize, x.elements, reduction, root)
        else:
            parts = self.world_size if collective is Collective.ALL_TO_ALL else 1
            key = _moved(collective, x, parts, root)
        with self._locks[EVERYBODY]:
            self._execute(self._call(EVERYBODY, key), x, y)

    def _pair(self, lane: Lane, x: Array, y: Array | None) -> None:
        source, target, _ = lane
        if source == target:
            raise InvalidUsageError(f"rank {source} sends to itself; copy the array instead")
        if x.elements == 0:
            return
        key = _moved(Collective.BROADCAST, x, 1, 0)
        with self._locks[lane]:
            self._execute(self._call(lane, key), x if y is None else None, y)

    def _call(self, lane: Lane, key: Key) -> Call:
        """The loaded call; the one that was longest not used makes room, on all its ranks alike."""
        calls = self._calls[lane]
        if key in calls:
            calls.move_to_end(key)
            return calls[key]
        _check_size(key, self.world_size if lane == EVERYBODY else 2)
        if len(calls) >= KEPT:
            calls.popitem(last=False)[1].close(together=True)
        if lane == EVERYBODY:
            members: Any = self._job
            rank, world = self.rank, self.world_size
            chosen = self._chosen(key)
        else:
            source, target, way = lane
            members = Members(self._job, (source, target), f"a send {way} between")
            rank, world, chosen = members.rank, 2, key
        hosts = hosts_of(members)
        made = Call(chosen, members, rank, world, self._backend, self._device, self.budget_s, hosts)
        calls[key] = made
        return made

    def _chosen(self, key: Key) -> Key:
        """The key with what was measured to be fastest, if anything was."""
        if self._tuned is None:
            self._tuned = tuned.of_rank_0(self._device.machine, self._job)
        nbytes = max(key.nbytes, key.out_bytes(self.world_size))
        found = tuned.pick(self._tuned, key.collective, self.world_size, nbytes)
        if found is None:
            return key
        return dataclasses.replace(key, algorithm=found.algorithm, engine=found.engine)

    def _execute(self, call: Call, x: Array | None, y: Array | None) -> None:
        some = x or y
        assert some is not None
        stream = some.stream()
        if x is not None:
            x.write_to(call.view(x, call.source))
        call.run(stream)
        if y is not None:
            y.read_from(call.view(y, call.target))

    def close(self, together: bool = True) -> None:
        """Frees what the calls hold; together: all ranks do so, and nothing has failed."""
        for lane, calls in list(self._calls.items()):
            while calls:
                _, call = calls.popitem(last=False)
                ok = together and self._job.failure() is None
                with contextlib.suppress(BaseError):
                    call.close(together=ok and lane == EVERYBODY)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(together=kind is None)


def _lengths(what: str, given: Sequence[int]) -> list[int]:
    """Rows of parts; InvalidUsageError for what are none."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InvalidUsageError(f"all_to_all_v: {what} is {given!r:.60}; give a length for each")
    made = [whole(f"all_to_all_v: a length of {what}", rows) for rows in given]
    if any(rows < 0 for rows in made):
        raise InvalidUsageError(f"all_to_all_v: {what} is {made}; no length may be below 0")
    return made


def _reduction(op: str) -> str:
    if op not in REDUCTIONS:
        raise InvalidUsageError(
            f"there is no reduction {op!r} of arrays; there are {', '.join(REDUCTIONS)}"
        )
    return op


def _moved(collective: Collective, x: Array, parts: int, root: int | None) -> Key:
    """The key of a call that only moves bytes: the same for all types, so that kernels are few."""
    word = 4 if x.nbytes // parts % 4 == 0 else 1
    return Key(collective.value, f"uint{8 * word}", word, x.nbytes // word, None, root)


def _check_size(key: Key, world: int) -> None:
    most = max(key.nbytes, key.out_bytes(world))
    if most > LARGEST:
        raise UnsupportedError(
            f"{key.collective} of {most} bytes on a rank; one call moves at most {LARGEST}: cut "
            "the array and call for each part"
        )
