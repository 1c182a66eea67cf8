"""A group of ranks and its collectives on memory that the caller holds.

Each collective is a plan of one op (ark.distributed.calls), made the first time that a size is
asked for and kept. All ranks of a group call the same collectives in the same order with equal
types and sizes, which ark.distributed.lane checks; a send and its receive are called by their two
ranks alone. On a CPU, calls return when the result is there and all ranks have made the call; on a
GPU they are queued on the caller's stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.collective import Collective
from ark.distributed.arrays import Array, wrap
from ark.distributed.board import fingerprint
from ark.distributed.calls import LARGEST, Call, Key
from ark.distributed.lane import Lane, Talk
from ark.errors import BaseError, InvalidUsageError, UnsupportedError
from ark.ir.values import whole
from ark.runtime import tuned_collectives as tuned
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S
from ark.runtime.hosts import numbered

REDUCTIONS = ("sum", "product", "min", "max", "mean")
KEPT = 64  # calls that a group keeps loaded, and as many for each pair that sends


class Group:
    """Ranks that call collectives together. A context manager; `close` frees everything.

    ranks: the job, which the group does not close. budget_s: how long a rank waits for another to
    make a call, or within one; time in which the others prepare the same call does not count.
    """

    def __init__(
        self, ranks: Bootstrap, backend: Backend, device: Device, budget_s: float = BUDGET_S
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._job = ranks
        self._backend, self._device = backend, device
        self.budget_s = budget_s
        self._talk = Talk(ranks, f"{backend.name} arrays", budget_s)
        self._everybody = self._talk.lane("all", range(ranks.world_size))
        self._calls: defaultdict[Lane, OrderedDict[str, Call]] = defaultdict(OrderedDict)
        self._tuned: tuned.Table | None = None

    # Collectives. Arrays are NumPy's or torch's, contiguous, on the group's device.

    # called: what errors call it where the caller's name for it is another.

    def all_reduce(
        self, input: Any, op: str = "sum", out: Any = None, *, called: str = "all_reduce"
    ) -> Any:
        """`input` reduced over all ranks, the same bits on each. out: may be `input`.

        op: sum, product, min, max, mean (of floats); floats below 32 bits are reduced in fp32 and
        rounded once.
        Shapes, types and `op` are the same on all ranks. Returns `out`, or a new array.
        """
        x = wrap(input)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_REDUCE, x, y, called, reduction=_reduction(op))
        return y.given

    def all_gather(self, input: Any, out: Any = None, *, called: str = "all_gather") -> Any:
        """The ranks' arrays one behind the other along the first dimension: [n, ...] becomes
        [world_size * n, ...].
        """
        x = wrap(input)
        first, *others = x.shape or (1,)
        y = x.like(out, (first * self.world_size, *others))
        self._run(Collective.ALL_GATHER, x, y, called)
        return y.given

    def reduce_scatter(self, input: Any, op: str = "sum", out: Any = None) -> Any:
        """This rank's part, along the first dimension, of `input` reduced over all ranks."""
        x = wrap(input)
        y = x.like(out, self._dealt("reduce_scatter", x))
        self._run(Collective.REDUCE_SCATTER, x, y, "reduce_scatter", reduction=_reduction(op))
        return y.given

    def all_to_all(self, input: Any, out: Any = None) -> Any:
        """Part s of the result is part `rank` of rank s's input, along the first dimension."""
        x = wrap(input)
        self._dealt("all_to_all", x)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_TO_ALL, x, y, "all_to_all")
        return y.given

    def all_to_all_v(
        self, input: Any, send: Sequence[int], receive: Sequence[int], out: Any = None
    ) -> Any:
        """The same with parts of unequal length.

        send[s]: elements of the first dimension that go to rank s, one part behind the other;
        receive[s]: those that come from rank s. InvalidUsageError on all ranks where some rank
        sends another number of rows than its peer receives.
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
        width = self._width(f"all_to_all_v of {x.element}{list(others)}", x, send, receive)
        if width == 0:
            return y.given
        packed = wrap(x.blank((self.world_size * width, *others)))
        at = 0
        for peer, rows in enumerate(send):
            packed.rows(peer * width, rows).copy_from(x.rows(at, rows))
            at += rows
        moved = wrap(x.blank(packed.shape))
        self._run(Collective.ALL_TO_ALL, packed, moved, "all_to_all_v")
        at = 0
        for peer, rows in enumerate(receive):
            y.rows(at, rows).copy_from(moved.rows(peer * width, rows))
            at += rows
        return y.given

    def broadcast(
        self, input: Any, root: int = 0, out: Any = None, *, called: str = "broadcast"
    ) -> Any:
        """The array of rank `root`, on all ranks; the others' input gives shape and type."""
        x = wrap(input)
        root = self._peer("broadcast", root)
        y = x.like(out, x.shape)
        self._run(Collective.BROADCAST, x, y, called, root=root)
        return y.given

    def send(self, input: Any, peer: int, way: str = "") -> None:
        """Sends to the rank `peer`, which receives as many elements of the same type; in the order
        of the calls.

        way: a word that both name; messages of different ways do not wait for each other.
        """
        x = wrap(input)
        peer = self._peer("send", peer)
        self._pair(self.rank, peer, way, x, None)

    def recv(self, out: Any, peer: int, way: str = "") -> Any:
        """Receives into `out` what the rank `peer` sends."""
        y = wrap(out)
        y.check_writable()
        peer = self._peer("recv", peer)
        self._pair(peer, self.rank, way, y, y)
        return y.given

    def barrier(self, what: str = "barrier()") -> None:
        """Returns when every rank has called it. what: its name in errors."""
        if self.world_size > 1:
            lane = self._everybody
            lane.make(what, fingerprint(what), True, lambda: self._arrive(lane))

    # How they run.

    def _width(self, called: str, x: Array, send: list[int], receive: list[int]) -> int:
        """The longest part of any two ranks of an all_to_all_v."""
        world = self.world_size
        own = wrap(x.numbers([*send, *receive]))
        table = wrap(x.numbers([0] * (2 * world * world)))
        self._run(Collective.ALL_GATHER, own, table, called)
        rows = np.array(table.listed(), np.int64).reshape(world, 2, world)
        sent, received = rows[:, 0], rows[:, 1].T
        for source, target in np.argwhere(sent != received).tolist():
            raise InvalidUsageError(
                f"all_to_all_v: rank {source} sends {sent[source, target]} rows to rank {target}, "
                f"which receives {received[source, target]}; both lengths must be the same"
            )
        return int(sent.max())

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
        called: str,
        reduction: str | None = None,
        root: int | None = None,
    ) -> None:
        if self.world_size == 1:
            if x.elements:
                y.copy_from(x)
            return
        if reduction == "mean" and "int" in x.element:
            raise InvalidUsageError(
                f"a mean of {x.element} is not built, since the sum of all ranks may be more than "
                "the type holds; convert the array to a floating-point type, or reduce by sum and "
                "divide"
            )
        options = [f"op={reduction!r}"] if reduction is not None else []
        options += [f"root={root}"] if root is not None else []
        text = x.called(called, *options)
        if reduction is not None:
            key = Key(collective.value, x.element, x.itemsize, x.elements, reduction, root)
        else:
            parts = self.world_size if collective is Collective.ALL_TO_ALL else 1
            key = _moved(collective, x, parts, root)
        self._execute(self._everybody, text, text, key, x, y)

    def _pair(self, source: int, target: int, way: str, x: Array, y: Array | None) -> None:
        if source == target:
            raise InvalidUsageError(f"rank {source} sends to itself; copy the array instead")
        lane = self._talk.lane(f"{source} to {target} {way}", (source, target))
        peer = f"peer={target if y is None else source}"
        text = x.called("send" if y is None else "recv", peer)
        key = _moved(Collective.BROADCAST, x, 1, 0)
        self._execute(lane, text, x.called("message"), key, x if y is None else None, y)

    def _execute(
        self, lane: Lane, text: str, same: str, key: Key, x: Array | None, y: Array | None
    ) -> None:
        """Makes the call of a lane. text: names it in errors; same: equal for calls that fit."""
        some = x or y
        assert some is not None
        stream = some.stream()

        def run() -> None:
            if some.elements == 0:
                return
            call = self._call(lane, same, key)
            if x is not None:
                x.write_to(call.view(x, call.source))
            call.run(stream)
            if y is not None:
                y.read_from(call.view(y, call.target))

        lane.make(text, fingerprint(same), stream is None, run)

    def _call(self, lane: Lane, same: str, key: Key) -> Call:
        """The loaded call; the one that was longest not used makes room, on all its ranks alike."""
        calls = self._calls[lane]
        if same in calls and not lane.fresh:
            calls.move_to_end(same)
            return calls[same]
        _check_size(key, lane.world_size)
        hosts = self._arrive(lane)
        if same in calls:
            calls.move_to_end(same)
            return calls[same]
        if len(calls) >= KEPT:
            calls.popitem(last=False)[1].close(together=True)
        chosen = self._chosen(key) if lane is self._everybody else key
        made = Call(
            chosen, lane, lane.rank, lane.world_size, self._backend, self._device, self.budget_s,
            hosts,
        )  # fmt: skip
        calls[same] = made
        return made

    def _arrive(self, lane: Lane) -> Sequence[int]:
        """Meets the lane's ranks; the number of each one's host. Where the lane began anew, calls
        that all have loaded begin anew too, and the others are dropped.
        """
        calls, fresh = self._calls[lane], lane.fresh
        machine = self._device.machine
        mine = tuned.KEPT.encoded(machine, tuned.KEPT.load(machine)) if self.rank == 0 else b""
        arrivals = lane.arrive(list(calls), mine)
        if self._tuned is None and lane is self._everybody:
            self._tuned = tuned.KEPT.decoded(arrivals[0].more, "rank 0")
        if fresh:
            everywhere = set.intersection(*(set(each.kept) for each in arrivals))
            for name in [name for name in calls if name not in everywhere]:
                calls.pop(name).close(together=False)
            for name in [name for name in arrivals[0].kept if name in everywhere]:
                calls.move_to_end(name)
                calls[name].restart()
        return numbered(each.host for each in arrivals)

    def _chosen(self, key: Key) -> Key:
        """The key with what was measured to be fastest, if anything was."""
        assert self._tuned is not None
        nbytes = max(key.nbytes, key.out_bytes(self.world_size))
        found = tuned.pick(self._tuned, key.collective, self.world_size, nbytes)
        if found is None:
            return key
        return dataclasses.replace(key, algorithm=found.algorithm, engine=found.engine)

    def close(self, together: bool = True) -> None:
        """Frees what the calls hold; together: all ranks do so, and nothing has failed."""
        for lane in self._talk.lanes():
            calls = self._calls.pop(lane, OrderedDict())
            ok = together and lane is self._everybody and self._job.failure() is None
            ok = ok and not lane.fresh and lane.meet()
            while calls:
                _, call = calls.popitem(last=False)
                with contextlib.suppress(BaseError):
                    call.close(together=ok)
            lane.close()

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
